/* Iterations under many draws of the durations at once; `solver/on_time.py` describes them.
 *
 * `end_s` and `on_path` have a row for each place and a column for each draw. */
#ifndef ON_TIME_H
#define ON_TIME_H

#include "arrays.h"

/* What each place waits for. */
typedef struct {
    Integers order; /* (n,) the places, each after all that it waits for */
    Integers before_start;
    Integers before;
    Floats before_lag_s;
} Waits;

/* Write when each place ends in each draw to `end_s`, and when all have ended to `latest_s`, (draws,).
 *
 * row_s: what takes how long in each draw, (rows, draws).
 * row: (n,) which of these rows each place is. */
KERNEL void replay_all(const Waits *waits, const double *row_s, const int64_t *row, int64_t draws, double *end_s,
                       double *latest_s);

/* Write to `on_path`, which holds zeros, 1 where a place is on the longest path of a draw, given what `replay_all`
 * wrote. */
KERNEL void mark_longest(const Waits *waits, const double *end_s, const double *latest_s, int64_t draws,
                         double *on_path);

#endif
