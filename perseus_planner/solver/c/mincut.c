/* The walk along the frontier, a parametric network simplex; `solver/mincut.py` says why it is right.
 *
 * A round of `advance`:
 *
 *  1. See by how much the flow can rise along the tree's path from source to sink; the first arc that is full then,
 *     from the source, is `leaving`. If no arc is ever full, this is the fast end.
 *  2. Raise the flow: below this time the frontier is that much steeper.
 *  3. `leaving` leaves the tree. What is on its source's side joins S, the source's side of the cut, a node at a time;
 *     arcs out of S go into the heap, by how far the sink's side moves (earlier) until they are at a vertex.
 *  4. Take arcs within S off the top of the heap. Move the sink's side as far as the arc on top says; that is a time
 *     of the walk. Stop at the target, or when the record is full; the next call goes on here.
 *  5. The arc on top, `entering`, joins the tree. If the path from it to the sink has a full arc, that is `leaving`,
 *     and the round goes on with 3, from `entry`. Else update the event times of S, turn its path, and begin anew.
 *
 * The heap has a top whenever steps 4 and 5 read `heap_arc[0]`: an arc from S to a node outside. For S has the source,
 * from which its first piece is taken in, and not the sink: each piece is what the removal of an arc on a path of the
 * tree to the sink cuts off from the sink. The sink is the head of a path of arcs from the source (`make_network` is
 * called with networks of pipelines, where each node that waits for nothing follows the source and each for which
 * nobody waits leads to the sink; `grow_tree` follows such a path back). So an arc of it has its tail in S and its head
 * outside. No arc of the tree crosses the cut, so step 3 listed it when its tail joined S, and pushed it: only arcs
 * from S against their direction may be left out, those at their slowest vertex. It is taken off only once its head is
 * in S too. A call that goes on in a round finds the heap as the last call left it. The heap's arrays suffice, as each
 * residual arc is pushed at most once a round, when the node that it leaves joins S. */

#include "mincut.h"

KERNEL void grow_tree(const Network *network, Tree *tree, int64_t *waiting, int64_t *ready)
{
    const int64_t nodes = tree->event.count;
    const int64_t source = network->source;
    const int64_t *tail = network->tail.at;
    const int64_t *head = network->head.at;
    const int64_t *residual = network->residual.at;
    const int64_t *raising = network->raising.at;
    const int64_t *lowering = network->lowering.at;
    int64_t *event = tree->event.at;
    int32_t *parent = tree->parent.at;
    int32_t *far = tree->far.at;

    /* Longest paths in topological order: a node is ready when all arcs to it have been looked at. */
    int64_t taken = 0;
    int64_t reached = 1;
    while (taken < reached) {
        const int64_t node = ready[taken];
        taken++;
        for (int64_t i = network->start.at[node]; i < network->start.at[node + 1]; i++) {
            const int64_t arc = residual[i];
            /* It leads into this node, and was looked at from its tail. */
            if (arc < 0) {
                continue;
            }
            const int64_t to = head[arc];
            const int64_t end = event[node] + network->vertex_time.at[network->first.at[arc]];
            if (end >= event[to]) {
                event[to] = end;
                parent[to] = (int32_t)i;
            }
            waiting[to]--;
            if (waiting[to] == 0) {
                ready[reached] = to;
                reached++;
            }
        }
    }

    /* The last arc of the longest path to each node is in the tree. */
    for (int64_t node = 0; node < nodes; node++) {
        if (node != source) {
            const int64_t arc = residual[parent[node]];
            far[raising[arc]] |= 1;
            far[lowering[arc]] |= 1;
        }
    }

    /* The root is the source so far: turn the path from there to the sink. */
    int64_t node = network->sink;
    int64_t turned = 0;
    while (node != source) {
        const int64_t arc = residual[parent[node]];
        parent[node] = (int32_t)turned;
        turned = lowering[arc];
        node = tail[arc];
    }
    parent[source] = (int32_t)turned;
}

/* Put a residual arc into the heap of `waiting` arcs. */
static void push(int64_t *heap_moved, int32_t *heap_arc, int64_t waiting, int64_t moved, int32_t arc)
{
    int64_t child = waiting;
    while (child > 0 && heap_moved[(child - 1) / 2] > moved) {
        const int64_t above = (child - 1) / 2;
        heap_moved[child] = heap_moved[above];
        heap_arc[child] = heap_arc[above];
        child = above;
    }
    heap_moved[child] = moved;
    heap_arc[child] = arc;
}

/* Take the first arc out of the heap, which then has `waiting` ones. */
static void pop(int64_t *heap_moved, int32_t *heap_arc, int64_t waiting)
{
    const int64_t moved = heap_moved[waiting];
    const int32_t arc = heap_arc[waiting];
    int64_t above = 0;
    int64_t child = 1;
    while (child < waiting) {
        if (child + 1 < waiting && heap_moved[child + 1] < heap_moved[child]) {
            child++;
        }
        if (moved <= heap_moved[child]) {
            break;
        }
        heap_moved[above] = heap_moved[child];
        heap_arc[above] = heap_arc[child];
        above = child;
        child = 2 * child + 1;
    }
    heap_moved[above] = moved;
    heap_arc[above] = arc;
}

KERNEL int64_t advance(const Network *network, Tree *tree, int64_t *flow, Walker *walker, int64_t target,
                       int64_t *times, int64_t *powers, int64_t most_times)
{
    const int64_t source = network->source;
    const int64_t sink = network->sink;
    const int64_t *tail = network->tail.at;
    const int64_t *head = network->head.at;
    const int64_t *first = network->first.at;
    const int64_t *last = network->last.at;
    const int64_t *vertex_time = network->vertex_time.at;
    const int64_t *vertex_slope = network->vertex_slope.at;
    const int64_t *start = network->start.at;
    const int64_t *residual = network->residual.at;
    const int64_t *raising = network->raising.at;
    const int64_t *lowering = network->lowering.at;
    int64_t *event = tree->event.at;
    int32_t *parent = tree->parent.at;
    int32_t *far = tree->far.at;
    int64_t *level = walker->level.at;
    int32_t *taken_in = walker->taken_in.at;
    int32_t *side = walker->side.at;
    int64_t *piece = walker->piece.at;
    int64_t *piece_moved = walker->piece_moved.at;
    int32_t *across = walker->across.at;
    int64_t *heap_moved = walker->heap_moved.at;
    int32_t *heap_arc = walker->heap_arc.at;
    int64_t *kept = walker->kept.at;

    int64_t time = times[0];
    int64_t power = powers[0];
    int64_t count = 1;
    int32_t mark = (int32_t)kept[0];
    bool is_within = kept[1] != 0;
    int64_t reached = kept[2];
    int64_t waiting = kept[3];
    int64_t moved = kept[4];
    int64_t pieces = kept[5];
    int64_t begin = time + moved; /* the time at which this round began */
    while (true) {
        int64_t leaving = -1;
        int64_t entry = source;
        if (!is_within) {
            /* Raise the flow along the tree: first see by how much, and which arc is full then. */
            int64_t smallest = UNLIMITED;
            int64_t node = source;
            while (node != sink) {
                const int64_t arc = residual[parent[node]];
                int64_t room = UNLIMITED;
                /* Against the path's direction the flow of an arc falls, down to the slope at its vertex; along
                   it, it rises to the next slope, and past the fastest vertex without end. */
                if (arc >= 0) {
                    room = flow[arc] - vertex_slope[level[arc]];
                } else if (level[~arc] < last[~arc]) {
                    room = vertex_slope[level[~arc] + 1] - flow[~arc];
                }
                /* Strictly: of several full arcs the one nearest to the source leaves, so the tree stays
                   strongly feasible. */
                if (room < smallest) {
                    smallest = room;
                    leaving = parent[node];
                }
                node = arc >= 0 ? tail[arc] : head[~arc];
            }
            /* Nothing on the path is ever full: this is the fast end, below which nothing is feasible. */
            if (smallest == UNLIMITED) {
                powers[count - 1] = UNLIMITED;
                kept[1] = 0;
                kept[4] = 0;
                return count;
            }
            node = source;
            while (node != sink) {
                const int64_t arc = residual[parent[node]];
                if (arc >= 0) {
                    flow[arc] -= smallest;
                    node = tail[arc];
                } else {
                    flow[~arc] += smallest;
                    node = head[~arc];
                }
            }
            /* A new round, with a steeper frontier below `time`: the source's side is empty so far. */
            power += smallest;
            powers[count - 1] = power;
            /* Rounds are counted, so that `taken_in` need not be cleared. */
            mark++;
            reached = 0;
            waiting = 0;
            moved = 0;
            pieces = 0;
            begin = time;
        }
        int64_t entering;
        int64_t node;
        while (true) {
            if (leaving >= 0) {
                /* The full arc leaves the tree, and what is before it joins the source's side. */
                int64_t arc = residual[leaving];
                if (arc < 0) {
                    arc = ~arc;
                    level[arc]++;
                }
                /* The last bit says whether an arc is in the tree, for both of its residual arcs. */
                far[raising[arc]] ^= 1;
                far[lowering[arc]] ^= 1;
                piece[pieces] = reached;
                piece_moved[pieces] = moved;
                pieces++;
                int64_t looked = reached;
                int64_t listed = 0;
                side[reached] = (int32_t)entry;
                taken_in[entry] = mark;
                reached++;
                while (looked < reached) {
                    const int64_t from = side[looked];
                    looked++;
                    for (int64_t i = start[from]; i < start[from + 1]; i++) {
                        const int32_t other = far[i] >> 1;
                        if (taken_in[other] == mark) {
                            continue;
                        }
                        if (far[i] & 1) {
                            taken_in[other] = mark;
                            parent[other] = (int32_t)i;
                            side[reached] = other;
                            reached++;
                        } else {
                            across[listed] = (int32_t)i;
                            listed++;
                        }
                    }
                }
                for (int64_t place = 0; place < listed; place++) {
                    const int32_t i = across[place];
                    /* It was across the cut only until its other end was taken in as well. */
                    if (taken_in[far[i] >> 1] == mark) {
                        continue;
                    }
                    /* How far the sink's side moves until this arc is at a vertex. */
                    int64_t further;
                    arc = residual[i];
                    if (arc >= 0) {
                        further = event[head[arc]] - event[tail[arc]] - vertex_time[level[arc]];
                    } else {
                        arc = ~arc;
                        if (level[arc] == first[arc]) {
                            continue; /* it may have any time, at no saving */
                        }
                        further = vertex_time[level[arc] - 1] - event[head[arc]] + event[tail[arc]];
                    }
                    /* Counted from the begin of the round, so that it need not change as the side moves on. */
                    push(heap_moved, heap_arc, waiting, further + moved, i);
                    waiting++;
                }
            }
            /* Arcs in the heap are no longer across the cut if the source's side took in both ends. */
            while (taken_in[far[heap_arc[0]] >> 1] == mark) {
                waiting--;
                pop(heap_moved, heap_arc, waiting);
            }
            if (heap_moved[0] > moved) {
                /* One time for each round is enough: the power is the same. */
                const bool is_first = count == 1 || times[count - 1] == begin;
                if (time <= target || (is_first && count == most_times)) {
                    kept[0] = mark;
                    kept[1] = 1;
                    kept[2] = reached;
                    kept[3] = waiting;
                    kept[4] = moved;
                    kept[5] = pieces;
                    return count;
                }
                const bool is_short = begin - heap_moved[0] < target;
                /* Either the target comes first, in the middle of a segment, or the next vertex does. */
                moved = is_short ? begin - target : heap_moved[0];
                time = begin - moved;
                if (is_first) {
                    count++;
                }
                times[count - 1] = time;
                powers[count - 1] = power;
                if (is_short) {
                    leaving = -1;
                    continue;
                }
            }
            /* The nearest arc enters the tree: from `node` on the source's side to `entry`. */
            entering = heap_arc[0];
            int64_t arc = residual[entering];
            if (arc >= 0) {
                node = tail[arc];
                entry = head[arc];
            } else {
                arc = ~arc;
                node = head[arc];
                entry = tail[arc];
                level[arc]--;
            }
            far[raising[arc]] ^= 1;
            far[lowering[arc]] ^= 1;
            /* The first full arc from there to the sink, if there is one, leaves. */
            leaving = -1;
            int64_t above = entry;
            while (above != sink && leaving < 0) {
                const int64_t i = parent[above];
                bool is_full;
                arc = residual[i];
                if (arc >= 0) {
                    is_full = flow[arc] == vertex_slope[level[arc]];
                    above = tail[arc];
                } else {
                    arc = ~arc;
                    is_full = level[arc] < last[arc] && flow[arc] == vertex_slope[level[arc] + 1];
                    above = head[arc];
                }
                if (is_full) {
                    leaving = i;
                }
            }
            if (leaving < 0) {
                break;
            }
            parent[entry] = (int32_t)entering;
        }
        is_within = false;
        /* Nodes that were taken in late moved with the sink's side before. The sink stays where it is, so all others
         * move the other way. */
        piece[pieces] = reached;
        for (int64_t number = 0; number < pieces; number++) {
            const int64_t later = moved - piece_moved[number];
            if (later > 0) {
                for (int64_t place = piece[number]; place < piece[number + 1]; place++) {
                    event[side[place]] += later;
                }
            }
        }
        moved = 0;
        /* The source's side has the source as its root: turn the path from there to the arc. */
        int64_t turned = entering;
        while (true) {
            int64_t arc = residual[turned];
            turned = arc >= 0 ? lowering[arc] : raising[~arc];
            const int32_t old = parent[node];
            parent[node] = (int32_t)turned;
            if (node == source) {
                break;
            }
            turned = old;
            arc = residual[old];
            node = arc >= 0 ? tail[arc] : head[~arc];
        }
    }
}
