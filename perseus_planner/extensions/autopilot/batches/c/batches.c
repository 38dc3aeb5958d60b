#include "batches.h"

enum { LOOK = 4 }; /* lower clocks that are looked at for a cheaper one */

KERNEL void latest_ends(const ClockProblem *problem, const ClockState *state, double deadline_s, double *latest_s)
{
    const int64_t nodes = state->end_s.count;
    const int64_t *before_start = problem->before_start.at;
    const int64_t *before = problem->before.at;
    const double *lag_s = problem->before_lag_s.at;
    for (int64_t k = 0; k < nodes; k++) {
        latest_s[k] = deadline_s;
    }
    /* Backward, so that all that follow a node are known before what it waits for is. */
    for (int64_t k = nodes - 1; k >= 0; k--) {
        const double start_s = latest_s[k] - state->duration_s.at[k];
        for (int64_t i = before_start[k]; i < before_start[k + 1]; i++) {
            latest_s[before[i]] = least_of(latest_s[before[i]], start_s - lag_s[i]);
        }
    }
}

KERNEL void makespans(const ClockProblem *problem, ClockState *state, const double *computation_s, int64_t rows,
                      double *makespan_s)
{
    const int64_t computations = problem->node.count;
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t i = 0; i < computations; i++) {
            state->duration_s.at[problem->node.at[i]] = computation_s[row * computations + i];
        }
        state->touched.at[0] = 0;
        makespan_s[row] = bring_up_to_date(problem, state);
    }
}

/* Return the lowest clock found at which no computation from `first` to before `stop` takes longer than now; -1 if
 * there is none. `added_j` gets what that costs, joules. */
static int64_t raised_to(const ClockProblem *problem, const double *scale, const int64_t *column, int64_t first,
                         int64_t stop, double *added_j)
{
    const int64_t clocks = problem->time_s.width;
    const int64_t *member = problem->member.at;
    const double *time_s = problem->time_s.at;
    const double *cost_j = problem->cost_j.at;
    /* Columns count downward from the highest clock, so the smallest one is the fastest clock in use. */
    int64_t clock = column[first];
    for (int64_t i = first; i < stop; i++) {
        clock = least(clock, column[i]);
    }
    int64_t i = first;
    *added_j = 0.0;
    /* A class takes infinitely long at a clock at which it was not measured, so the next higher one is tried for all. */
    while (i < stop && clock >= 0) {
        const int64_t row = member[i] * clocks;
        if (time_s[row + clock] > time_s[row + column[i]]) {
            clock--;
            i = first;
            *added_j = 0.0;
        } else {
            *added_j += scale[i] * (cost_j[row + clock] - cost_j[row + column[i]]);
            i++;
        }
    }
    return clock;
}

KERNEL bool merge(const ClockProblem *problem, const double *scale, int64_t most_segments, int64_t *column,
                  int64_t *begin, int64_t *raised, double *added_j)
{
    const int64_t ranks = problem->rank_start.count - 1;
    const int64_t *rank_start = problem->rank_start.at;
    for (int64_t rank = 0; rank < ranks; rank++) {
        const int64_t first = rank_start[rank];
        const int64_t stop = rank_start[rank + 1];
        /* Where each segment of the rank begins. */
        int64_t count = 0;
        for (int64_t i = first; i < stop; i++) {
            if (i == first || column[i] != column[i - 1]) {
                begin[count] = i;
                count++;
            }
        }
        begin[count] = stop;
        /* The cost of merging each segment with the one before it, which the loop keeps up to date. */
        for (int64_t s = 1; s < count; s++) {
            raised[s] = raised_to(problem, scale, column, begin[s - 1], begin[s + 1], &added_j[s]);
        }
        while (count > most_segments) {
            /* The cheapest merge first, of those that have a clock in common. */
            int64_t best = 0;
            for (int64_t s = 1; s < count; s++) {
                if (raised[s] >= 0 && (best == 0 || added_j[s] < added_j[best])) {
                    best = s;
                }
            }
            /* Classes may have no clock in common at which none takes longer. */
            if (best == 0) {
                return false;
            }
            for (int64_t i = begin[best - 1]; i < begin[best + 1]; i++) {
                column[i] = raised[best];
            }
            count--;
            for (int64_t s = best; s <= count; s++) {
                begin[s] = begin[s + 1];
                raised[s] = raised[s + 1];
                added_j[s] = added_j[s + 1];
            }
            /* Only merges with the new segment cost something else now. */
            for (int64_t s = most(best - 1, 1); s < least(best + 1, count); s++) {
                raised[s] = raised_to(problem, scale, column, begin[s - 1], begin[s + 1], &added_j[s]);
            }
        }
    }
    return true;
}

KERNEL void lower(const ClockProblem *problem, const double *scale, double deadline_s, ClockState *state)
{
    const int64_t ranks = problem->rank_start.count - 1;
    const int64_t clocks = problem->time_s.width;
    const int64_t *rank_start = problem->rank_start.at;
    const int64_t *member = problem->member.at;
    const int64_t *node = problem->node.at;
    const double *time_s = problem->time_s.at;
    const double *cost_j = problem->cost_j.at;
    int64_t *column = state->clock.at;
    double *duration_s = state->duration_s.at;
    /* Each lowering may leave room for another, so it goes on until a whole round finds none. */
    bool has_lowered = true;
    while (has_lowered) {
        has_lowered = false;
        for (int64_t rank = 0; rank < ranks; rank++) {
            int64_t first = rank_start[rank];
            while (first < rank_start[rank + 1]) {
                /* A whole segment is lowered at once, so that the number of changes never grows. */
                const int64_t now = column[first];
                int64_t stop = first + 1;
                while (stop < rank_start[rank + 1] && column[stop] == now) {
                    stop++;
                }
                /* Only a few lower clocks are looked at, as each costs a replay. */
                for (int64_t clock = now + 1; clock < least(now + 1 + LOOK, clocks); clock++) {
                    double saved_j = 0.0;
                    for (int64_t i = first; i < stop; i++) {
                        const int64_t row = member[i] * clocks;
                        saved_j += scale[i] * (cost_j[row + now] - cost_j[row + clock]);
                    }
                    /* A lower clock may cost more energy, so the next one is looked at as well. */
                    if (!(saved_j > 0.0)) {
                        continue;
                    }
                    for (int64_t i = first; i < stop; i++) {
                        duration_s[node[i]] = scale[i] * time_s[member[i] * clocks + clock];
                    }
                    /* A replay resumes at the first node that changed, which may be any here, so it begins anew. */
                    state->touched.at[0] = 0;
                    if (bring_up_to_date(problem, state) <= deadline_s) {
                        for (int64_t i = first; i < stop; i++) {
                            column[i] = clock;
                        }
                        has_lowered = true;
                        break;
                    }
                    /* Too late, so the durations go back before the next clock is tried. */
                    for (int64_t i = first; i < stop; i++) {
                        duration_s[node[i]] = scale[i] * time_s[member[i] * clocks + now];
                    }
                }
                first = stop;
            }
        }
    }
}
