/* The parametric minimum cut; `solver/mincut.py` describes the method, `solver/network.py` the network. */
#ifndef MINCUT_H
#define MINCUT_H

#include "arrays.h"

/* A project network: arcs with convex costs, from `source` to `sink`. Each arc has two residual arcs, one from its tail
 * (raises its flow) and one from its head (lowers it), kept node by node: those that leave node v are `start[v]` to
 * `start[v + 1]`. */
typedef struct {
    int64_t source;
    int64_t sink;
    Integers tail;         /* (arcs,) node */
    Integers head;         /* (arcs,) node */
    Integers first;        /* (arcs,) index of the slowest vertex of the arc's curve */
    Integers last;         /* (arcs,) index of the fastest vertex */
    Integers vertex_time;  /* (vertices,) ticks */
    Integers vertex_slope; /* (vertices,) power units */
    Integers start;        /* (nodes + 1,) */
    Integers residual;     /* (2 * arcs,) `arc` where it leaves the tail, `~arc` where it leaves the head */
    Integers other;        /* (2 * arcs,) the node at its far end */
    Integers raising;      /* (arcs,) where the residual arc from the tail stands */
    Integers lowering;     /* (arcs,) where the one from the head stands */
} Network;

/* A spanning tree of a network, and the event times that it says. */
typedef struct {
    Integers event; /* (nodes,) ticks; the source's time need not be 0 */
    Indices parent; /* (nodes,) the residual arc to each node from the next one on the way to the root, the sink */
    Indices far;    /* (2 * arcs,) of each residual arc: twice the node at its far end, and 1 if it is in the tree */
} Tree;

/* What the walk changes beside the tree and the flow. */
typedef struct {
    Integers level;       /* (arcs,) vertex of each arc in the tree; of others, the end of its segment */
    Indices taken_in;     /* (nodes,) the round in which the source's side last took in each node */
    Indices side;         /* (nodes,) the nodes of the source's side, in the order it took them in */
    Integers piece;       /* (nodes + 1,) where each piece that it took in begins there, */
    Integers piece_moved; /* (nodes + 1,) and how far the sink's side had moved */
    Indices across;       /* (2 * arcs,) scratch space: residual arcs that may be across the cut */
    Integers heap_moved;  /* (2 * arcs,) a binary heap: how far the sink's side moves until each such arc is at a vertex */
    Indices heap_arc;     /* (2 * arcs,) the residual arcs there */
    Integers kept;        /* (6,) number of the round; whether a part of it is left, and then: nodes in `side`, arcs in the
                             heap, how far the sink's side has moved, and pieces */
} Walker;

/* Fill the tree of the slow end.
 *
 * waiting: (nodes,) how many arcs lead to each node; counted down.
 * ready: (nodes,) begins with the source; scratch space behind it. */
KERNEL void grow_tree(const Network *network, Tree *tree, int64_t *waiting, int64_t *ready);

/* Move tree and flow along the frontier from `times[0]` down to `target`, to its fast end, or until `times` is full.
 *
 * flow: (arcs,) power units.
 * times: (most_times,) gets the total times at which the walk arrives, falling, ticks.
 * powers: (most_times,) gets the power just below each; its first one is the flow so far. The frontier's slope between
 *     one time and the next is minus that power. Below a time with UNLIMITED power nothing is feasible.
 * Returns how many times there are. */
KERNEL int64_t advance(const Network *network, Tree *tree, int64_t *flow, Walker *walker, int64_t target,
                       int64_t *times, int64_t *powers, int64_t most_times);

#endif
