/* Rounding a relaxed point of the frontier to measured clocks; `solver/rounding.py` describes the method. */
#ifndef ROUNDING_H
#define ROUNDING_H

#include "point_problem.h"

/* The guide of a dispatch. The kernels change it in place. */
typedef struct {
    Floats end_s;     /* (n,) when each computation should end */
    Floats price_w;   /* (n,) price of each computation's time */
    Floats stiffness; /* (2,) what a second too early, and too late, costs, as a multiple of the price */
} Guide;

/* Slow computations into the slack behind them, last ones first: take what fits exactly, and not what misses by a
 * rounding error. Return the effective energy then, joules; `end_s` then holds the latest starts.
 *
 * What misses is checked only if the effective energy is at most `worth_j`; otherwise the plan may be late.
 * before: (n,) scratch space. */
KERNEL double fill_exactly(const PointProblem *problem, double deadline_s, int64_t *chosen, double *end_s,
                           int64_t *before, double worth_j);

/* Dispatch by `guide` and by random changes of it; keep those that cost no more than `cost_j`.
 *
 * guide, best: the first guide, twice.
 * plans: (4, n) any points, four times; the first ones are the best ones in the end.
 * times_s: (4, n) scratch space.
 * cost_j: effective energy of these points, joules; infinity if it does not count yet.
 * tries: number of plans to make.
 * step_s: the size of a change of ends, seconds.
 * group: whether to change parts of the guide too, not only all of it.
 * Returns the effective energy of the final points, joules. */
KERNEL double improve_guide(const PointProblem *problem, double deadline_s, Guide *guide, Guide *best, int64_t *plans,
                            double *times_s, double cost_j, int64_t tries, double step_s, bool group);

/* Count `trial` up from the fastest points, and keep the `best` one.
 *
 * trial, best: (n,) the fastest points.
 * end_s: (n,) scratch space. */
KERNEL void try_all(const PointProblem *problem, double deadline_s, int64_t *trial, int64_t *best, double *end_s);

#endif
