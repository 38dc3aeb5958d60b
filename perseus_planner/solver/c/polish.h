/* Annealing of start times; `solver/polish.py` describes the method. */
#ifndef POLISH_H
#define POLISH_H

#include "point_problem.h"

/* What a point problem takes, in ticks. */
typedef struct {
    int64_t deadline;
    Integers point; /* (points,) */
    Integers before_lag;
    Integers after_lag;
} Ticks;

/* Change `best` into the points of the best plan found from it.
 *
 * best: (n,) index of the point of each node.
 * start: (n,) when each node starts in that plan, ticks.
 * scratch: (6, n) scratch space, of zeros.
 * moves: number of moves.
 * hot_j: the first temperature.
 * cooling: the last temperature, as a part of the first. */
KERNEL void anneal_starts(const PointProblem *problem, const Ticks *ticks, int64_t *best, int64_t *start,
                          int64_t *scratch, int64_t moves, double hot_j, double cooling);

#endif
