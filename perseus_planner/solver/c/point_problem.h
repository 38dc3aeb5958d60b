/* The discrete problem of a plan; `solver/point_problem.py` says what its fields are. */
#ifndef POINT_PROBLEM_H
#define POINT_PROBLEM_H

#include "arrays.h"

typedef struct {
    Integers member;       /* (n,) class of each node, in topological order */
    Integers point_start;  /* (classes + 1,) where the points of each class begin, fastest first */
    Floats time_s;         /* (points,) */
    Floats cost_j;         /* (points,) effective energy, falling within a class */
    Floats gain_w;         /* (points,) the most that any slower point saves per second */
    Floats loss_w;         /* (points,) the least that any faster point costs per second */
    Integers kind;         /* (classes,) number of the kind of each class */
    Integers before_start; /* (n + 1,) where the predecessors of each node begin in `before` */
    Integers before;
    Floats before_lag_s;  /* aligned with `before`: least seconds from their end to the node's start */
    Integers after_start; /* (n + 1,) where the successors of each node begin in `after` */
    Integers after;
    Floats after_lag_s; /* aligned with `after`: least seconds from the node's end to their start */
} PointProblem;

/* Fill `end_s` with the end of each node under the `chosen` points; return the makespan, seconds. */
KERNEL double compute_ends(const PointProblem *problem, const int64_t *chosen, double *end_s);

#endif
