#include "polish.h"

#include <math.h>

#include "random.h"

enum {
    STEADY = 256, /* moves at one temperature */
    IDLE = 4,     /* the search ends after this part of the moves has found nothing: one in so many */
    LONGEST = 4,  /* most computations of a chain beside the first one */
};

static const double NEAR = 0.7;     /* part of the moves to a neighbouring operating point; the others are to any */
static const double CHAINS = 0.2;   /* part of the moves that take a chain along */
static const double MEETINGS = 0.5; /* part of the moves that take along what waits for the same computation */

/* What nodes wait for, or what waits for them. */
typedef struct {
    const int64_t *start; /* (n + 1,) where those of each node begin */
    const int64_t *other;
} Others;

/* Return how long node k may take, ticks: until the first of its successors starts. */
static int64_t window_of(int64_t deadline, const int64_t *start, const Others *after, const int64_t *lag, int64_t k)
{
    int64_t end = deadline;
    for (int64_t i = after->start[k]; i < after->start[k + 1]; i++) {
        end = least(end, start[after->other[i]] - lag[i]);
    }
    return end - start[k];
}

/* Add nodes to `moved` that move along with its first one; return how many they are in all.
 *
 * Chains go along `chain`, one of `before` and `after`. */
static int64_t take_along(const Others *before, const Others *after, const Others *chain, int64_t *moved,
                          int64_t *taken, int64_t move, Random *random)
{
    const bool meets = draw(random) < MEETINGS;
    const bool is_last = draw(random) < 0.5;
    int64_t links = 0;
    if (draw(random) < CHAINS) {
        links = draw_below(random, LONGEST) + 1;
    }
    int64_t count = 1;
    int64_t k = moved[0];
    taken[k] = move;
    while (true) {
        const int64_t befores = before->start[k + 1] - before->start[k];
        if (meets && befores > 0) {
            const int64_t awaited = before->other[before->start[k] + draw_below(random, befores)];
            for (int64_t i = after->start[awaited]; i < after->start[awaited + 1]; i++) {
                const int64_t other = after->other[i];
                if (taken[other] != move) {
                    taken[other] = move;
                    moved[count] = other;
                    count++;
                }
            }
        }
        const int64_t first = chain->start[k];
        const int64_t stop = chain->start[k + 1];
        if (links == 0 || first == stop) {
            return count;
        }
        k = chain->other[is_last ? stop - 1 : first];
        if (taken[k] == move) {
            return count;
        }
        taken[k] = move;
        moved[count] = k;
        count++;
        links--;
    }
}

KERNEL void anneal_starts(const PointProblem *problem, const Ticks *ticks, int64_t *best, int64_t *start,
                          int64_t *scratch, int64_t moves, double hot_j, double cooling)
{
    const int64_t count_of_nodes = problem->member.count;
    const int64_t *member = problem->member.at;
    const int64_t *point_start = problem->point_start.at;
    const double *cost_j = problem->cost_j.at;
    const int64_t *time = ticks->point.at;
    const int64_t *before_lag = ticks->before_lag.at;
    const int64_t *after_lag = ticks->after_lag.at;
    const int64_t deadline = ticks->deadline;
    const Others before = {problem->before_start.at, problem->before.at};
    const Others after = {problem->after_start.at, problem->after.at};
    int64_t *now = scratch;
    int64_t *seen = scratch + count_of_nodes; /* 1 + the move in which each node was last looked at */
    int64_t *moved = scratch + 2 * count_of_nodes;
    int64_t *nodes = scratch + 3 * count_of_nodes; /* that change, and */
    int64_t *points = scratch + 4 * count_of_nodes; /* their new points */
    int64_t *taken = scratch + 5 * count_of_nodes;

    Random random;
    seed_random(&random, 1);
    double cost = 0.0;
    double smallest = 0.0;
    double heat_j = hot_j;
    int64_t found = 0; /* the move that found the best plan */
    for (int64_t node = 0; node < count_of_nodes; node++) {
        now[node] = best[node];
    }
    for (int64_t move = 0; move < moves; move++) {
        if (move % STEADY == 0) {
            if (move - found > moves / IDLE) {
                break;
            }
            heat_j = hot_j * pow(cooling, (double)move / (double)moves);
        }

        /* The window that changes is that of k, or of a node before it. */
        const int64_t k = draw_below(&random, count_of_nodes);
        const int64_t befores = before.start[k + 1] - before.start[k];
        const bool is_own = befores == 0 || draw(&random) < 0.5;
        int64_t which = 0;
        int64_t node = k;
        if (!is_own) {
            which = before.start[k] + draw_below(&random, befores);
            node = before.other[which];
        }

        /* It becomes as long as another point of that node takes. */
        const int64_t first = point_start[member[node]];
        const int64_t stop = point_start[member[node] + 1];
        int64_t point = now[node] + (draw(&random) < 0.5 ? 1 : -1);
        if (draw(&random) >= NEAR) {
            point = first + draw_below(&random, stop - first);
        }
        if (point < first || point >= stop) {
            continue;
        }
        int64_t shift;
        if (is_own) {
            shift = window_of(deadline, start, &after, after_lag, k) - time[point];
        } else {
            shift = start[node] + time[point] + before_lag[which] - start[k];
        }
        if (shift == 0) {
            continue;
        }

        /* Others may move along, backward from a node that moves by itself, and forward from one that follows. */
        moved[0] = k;
        const Others *chain = is_own ? &before : &after;
        const int64_t count = take_along(&before, &after, chain, moved, taken, move + 1, &random);
        for (int64_t place = 0; place < count; place++) {
            start[moved[place]] += shift;
        }

        /* The windows of what moved, and of what it waits for, have changed: the cheapest point of each follows. */
        int64_t changed = 0;
        double added = 0.0;
        bool fits = true;
        for (int64_t place = 0; place < count; place++) {
            const int64_t mover = moved[place];
            fits = fits && start[mover] >= 0;
            for (int64_t i = before.start[mover] - 1; i < before.start[mover + 1]; i++) {
                node = i < before.start[mover] ? mover : before.other[i];
                if (!fits || seen[node] == move + 1) {
                    continue;
                }
                seen[node] = move + 1;
                const int64_t window = window_of(deadline, start, &after, after_lag, node);
                const int64_t fastest = point_start[member[node]];
                const int64_t behind = point_start[member[node] + 1];
                point = now[node];
                while (point + 1 < behind && time[point + 1] <= window) {
                    point++;
                }
                while (point > fastest && time[point] > window) {
                    point--;
                }
                fits = time[point] <= window;
                if (point != now[node]) {
                    added += cost_j[point] - cost_j[now[node]];
                    nodes[changed] = node;
                    points[changed] = point;
                    changed++;
                }
            }
        }

        /* Metropolis: what costs more is taken with a probability that falls as the search cools down. */
        if (fits && (added <= 0.0 || draw(&random) < exp(-added / heat_j))) {
            for (int64_t i = 0; i < changed; i++) {
                now[nodes[i]] = points[i];
            }
            cost += added;
            /* Not for a rounding error. */
            if (cost < smallest - 1e-9 * hot_j) {
                smallest = cost;
                found = move;
                for (int64_t i = 0; i < count_of_nodes; i++) {
                    best[i] = now[i];
                }
            }
        } else {
            for (int64_t place = 0; place < count; place++) {
                start[moved[place]] -= shift;
            }
        }
    }
}
