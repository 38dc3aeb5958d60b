#include "drawn_replay.h"

enum { TOGETHER = 4 }; /* draws that a loop takes at once: with a number that it knows, the compiler makes vectors */

/* Let a place that starts at `own_s` start after `other_s` and a lag, if that is later. */
static inline void wait_for(double *restrict own_s, const double *restrict other_s, double lag_s, int64_t draws)
{
    int64_t d = 0;
    for (; d + TOGETHER <= draws; d += TOGETHER) {
        for (int64_t i = 0; i < TOGETHER; i++) {
            own_s[d + i] = most_of(own_s[d + i], other_s[d + i] + lag_s);
        }
    }
    for (; d < draws; d++) {
        own_s[d] = most_of(own_s[d], other_s[d] + lag_s);
    }
}

/* Turn the starts of a place into ends, and let all have ended no earlier. */
static inline void run_for(double *restrict own_s, const double *restrict taken_s, double *restrict latest_s,
                           int64_t draws)
{
    int64_t d = 0;
    for (; d + TOGETHER <= draws; d += TOGETHER) {
        for (int64_t i = 0; i < TOGETHER; i++) {
            own_s[d + i] += taken_s[d + i];
            latest_s[d + i] = most_of(latest_s[d + i], own_s[d + i]);
        }
    }
    for (; d < draws; d++) {
        own_s[d] += taken_s[d];
        latest_s[d] = most_of(latest_s[d], own_s[d]);
    }
}

KERNEL void replay_all(const Waits *waits, const double *row_s, const int64_t *row, int64_t draws, double *end_s,
                       int64_t width, double *latest_s)
{
    for (int64_t d = 0; d < draws; d++) {
        latest_s[d] = 0.0;
    }
    /* A few draws at a time stay in the processor's cache. */
    for (int64_t at = 0; at < draws; at += width) {
        const int64_t count = least(width, draws - at);
        for (int64_t k = 0; k < waits->order.count; k++) {
            const int64_t place = waits->order.at[k];
            double *own_s = end_s + place * width;
            /* A place that waits for nothing starts at 0, and no place starts before. */
            for (int64_t d = 0; d < count; d++) {
                own_s[d] = 0.0;
            }
            for (int64_t i = waits->before_start.at[place]; i < waits->before_start.at[place + 1]; i++) {
                wait_for(own_s, end_s + waits->before.at[i] * width, waits->before_lag_s.at[i], count);
            }
            run_for(own_s, row_s + row[place] * draws + at, latest_s + at, count);
        }
    }
}

KERNEL void mark_longest(const Waits *waits, const double *end_s, const double *latest_s, int64_t draws,
                         double *on_path)
{
    for (int64_t k = waits->order.count - 1; k >= 0; k--) {
        const int64_t place = waits->order.at[k];
        const int64_t first = waits->before_start.at[place];
        const int64_t last = waits->before_start.at[place + 1];
        for (int64_t d = 0; d < draws; d++) {
            const double own_s = end_s[place * draws + d];
            /* What ends last is on the path; so is what a place on it has waited for. */
            if (own_s > 0.0 && own_s >= latest_s[d]) {
                on_path[place * draws + d] = 1.0;
            }
            if (on_path[place * draws + d] == 0.0) {
                continue;
            }
            double start_s = 0.0;
            for (int64_t i = first; i < last; i++) {
                start_s = most_of(start_s, end_s[waits->before.at[i] * draws + d] + waits->before_lag_s.at[i]);
            }
            for (int64_t i = first; i < last; i++) {
                const int64_t other = waits->before.at[i] * draws + d;
                if (end_s[other] + waits->before_lag_s.at[i] >= start_s) {
                    on_path[other] = 1.0;
                }
            }
        }
    }
}
