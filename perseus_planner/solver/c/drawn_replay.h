/* Iterations under many draws of the durations at once; `solver/drawn_replay.py` describes them.
 *
 * `on_path` has a row for each place and a column for each draw, as `end_s` has where it holds all of them. */
#ifndef DRAWN_REPLAY_H
#define DRAWN_REPLAY_H

#include "arrays.h"

/* What each place waits for. */
typedef struct {
    Integers order; /* (n,) the places, each after all that it waits for */
    Integers before_start;
    Integers before;
    Floats before_lag_s;
} Waits;

/* Write when all places have ended in each draw to `latest_s`, (draws,), and when each of them has to `end_s`.
 *
 * row_s: what takes how long in each draw, (rows, draws).
 * row: (n,) which of these rows each place is.
 * end_s: (n, width). With room for fewer draws than there are, so many are replayed at a time, and what it holds
 *     afterwards means nothing. */
KERNEL void replay_all(const Waits *waits, const double *row_s, const int64_t *row, int64_t draws, double *end_s,
                       int64_t width, double *latest_s);

/* Write to `on_path`, which holds zeros, 1 where a place is on the longest path of a draw, given what `replay_all`
 * wrote about all draws. */
KERNEL void mark_longest(const Waits *waits, const double *end_s, const double *latest_s, int64_t draws,
                         double *on_path);

#endif
