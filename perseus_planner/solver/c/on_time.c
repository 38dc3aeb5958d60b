#include "on_time.h"

KERNEL void replay_all(const Waits *waits, const double *row_s, const int64_t *row, int64_t draws, double *end_s,
                       double *latest_s)
{
    for (int64_t d = 0; d < draws; d++) {
        latest_s[d] = 0.0;
    }
    for (int64_t k = 0; k < waits->order.count; k++) {
        const int64_t place = waits->order.at[k];
        const int64_t first = waits->before_start.at[place];
        const int64_t last = waits->before_start.at[place + 1];
        const double *taken_s = row_s + row[place] * draws;
        double *own_s = end_s + place * draws;
        /* A place that waits for nothing starts at 0, and no place starts before. */
        for (int64_t d = 0; d < draws; d++) {
            own_s[d] = 0.0;
        }
        for (int64_t i = first; i < last; i++) {
            const double *other_s = end_s + waits->before.at[i] * draws;
            const double lag_s = waits->before_lag_s.at[i];
            for (int64_t d = 0; d < draws; d++) {
                own_s[d] = most_of(own_s[d], other_s[d] + lag_s);
            }
        }
        for (int64_t d = 0; d < draws; d++) {
            own_s[d] += taken_s[d];
            latest_s[d] = most_of(latest_s[d], own_s[d]);
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
