/* Plans of the batch; `batches/solver.py` describes the method. */
#ifndef BATCHES_H
#define BATCHES_H

#include "clock_problem.h"

/* Fill `latest_s` with the latest end of each node after which all others still end by `deadline_s`. */
KERNEL void latest_ends(const ClockProblem *problem, const ClockState *state, double deadline_s, double *latest_s);

/* Fill `makespan_s`, (rows,), with that of each row of `computation_s`: (rows, m). */
KERNEL void makespans(const ClockProblem *problem, ClockState *state, const double *computation_s, int64_t rows,
                      double *makespan_s);

/* Merge neighbouring segments of one clock, those first that cost least, until no rank has more than `most_segments`;
 * return whether that was possible.
 *
 * scale: (m,) how many times as long as measured each computation takes.
 * column: (m,) the clock of each.
 * begin, raised, added_j: (m + 1,) scratch space. */
KERNEL bool merge(const ClockProblem *problem, const double *scale, int64_t most_segments, int64_t *column,
                  int64_t *begin, int64_t *raised, double *added_j);

/* Lower the clock of one segment after the other, as long as that saves and all is in time.
 *
 * scale: (m,) as above. */
KERNEL void lower(const ClockProblem *problem, const double *scale, double deadline_s, ClockState *state);

#endif
