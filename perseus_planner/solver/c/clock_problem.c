#include "clock_problem.h"

#include <math.h>

KERNEL double replay(const ClockProblem *problem, ClockState *state)
{
    return bring_up_to_date(problem, state);
}

/* What happens next on a rank: a task starts or ends, a clock is in force, or a call begins. */
typedef enum { TASK, SETTLE, CALL } Event;

/* Return the slowest clock, `clock` or a faster one, at which a computation that starts now ends in time; the fastest
 * one if there is none. */
static int64_t clock_in_time(const Floats *latest_start_s, int64_t i, int64_t clock, double now_s)
{
    if (latest_start_s->count > 0) {
        const double *latest_s = latest_start_s->at + i * latest_start_s->width;
        while (clock > 0 && latest_s[clock] < now_s) {
            clock--;
        }
    }
    return clock;
}

KERNEL double replay_changes(const ClockProblem *problem, ClockState *state, ChangeCost *change, double *spent_j)
{
    const int64_t nodes = state->end_s.count;
    const int64_t ranks = change->lock.count;
    const int64_t clocks = problem->time_s.width;
    const int64_t *before_start = problem->before_start.at;
    const int64_t *before = problem->before.at;
    const double *lag_s = problem->before_lag_s.at;
    const double *time_s = problem->time_s.at;
    const double *cost_j = problem->cost_j.at;
    const int64_t *member = problem->member.at;
    const double *fixed_s = problem->fixed_s.at;
    const int64_t *clock = state->clock.at;
    double *end_s = state->end_s.at;
    const int64_t *queue = change->queue.at;
    const int64_t *queue_start = change->queue_start.at;
    const int64_t *computation = change->computation.at;
    const int64_t *lock = change->lock.at;
    const double hold_s = change->hold_s;
    const double settle_s = change->settle_s;
    /* Of each rank: */
    double *next_s = change->seconds.at;                  /* when its task starts or ends */
    double *since_s = change->seconds.at + ranks;         /* since when it runs at the clock in force, or waits */
    double *left = change->seconds.at + 2 * ranks;        /* the share that was left then */
    double *asked_s = change->seconds.at + 3 * ranks;     /* when the request was made that waits */
    double *settles_s = change->seconds.at + 4 * ranks;   /* when a clock settles */
    double *free_s = change->seconds.at + 5 * ranks;      /* of each lock: when it is free */
    double *late_s = change->seconds.at + 6 * ranks;      /* how late its first computation was */
    int64_t *position = change->numbers.at;               /* its task, in the queue */
    int64_t *running = change->numbers.at + ranks;        /* whether that runs */
    int64_t *in_force = change->numbers.at + 2 * ranks;   /* the clock in force, */
    int64_t *set_last = change->numbers.at + 3 * ranks;   /* the one that was set last, */
    int64_t *wanted = change->numbers.at + 4 * ranks;     /* and the one that is wanted */
    int64_t *call = change->numbers.at + 5 * ranks;       /* its next call, */
    int64_t *settled = change->numbers.at + 6 * ranks;    /* and the first one that has not settled */
    double *call_settles_s = change->call_settles_s.at;
    int64_t *call_clock = change->call_clock.at;
    const int64_t bits = problem->mode_bits;
    const int64_t mask = ((int64_t)1 << bits) - 1;
    const double never = INFINITY;

    double makespan_s = 0.0;
    bool has_ended = true;
    *spent_j = 0.0;
    for (int64_t k = 0; k < nodes; k++) {
        end_s[k] = never;
    }
    /* The iteration before was the same, so a rank begins at the clock of its last computation. */
    for (int64_t r = 0; r < ranks; r++) {
        position[r] = queue_start[r];
        running[r] = 0;
        next_s[r] = never;
        since_s[r] = 0.0;
        asked_s[r] = never;
        settles_s[r] = never;
        free_s[lock[r]] = -never;
        late_s[r] = never;
        wanted[r] = clock[change->final.at[r]] >> bits;
        set_last[r] = wanted[r];
        in_force[r] = wanted[r];
        call[r] = change->call_start.at[r];
        settled[r] = call[r];
        const int64_t i = computation[queue[queue_start[r]]];
        if (i >= 0 && clock[i] >> bits != wanted[r]) {
            wanted[r] = clock[i] >> bits;
            asked_s[r] = -change->tail_s.at[r];
        }
    }
    while (true) {
        /* The first event of all ranks. */
        double now_s = never;
        int64_t r = -1;
        Event event = TASK;
        for (int64_t o = 0; o < ranks; o++) {
            /* The end of a task may be what another one waits for. */
            if (has_ended && next_s[o] == never && position[o] < queue_start[o + 1]) {
                const int64_t k = queue[position[o]];
                next_s[o] = since_s[o];
                for (int64_t i = before_start[k]; i < before_start[k + 1]; i++) {
                    next_s[o] = most_of(next_s[o], end_s[before[i]] + lag_s[i]);
                }
            }
            if (next_s[o] < now_s) {
                now_s = next_s[o];
                r = o;
                event = TASK;
            }
            if (settles_s[o] <= now_s && settles_s[o] < never) {
                now_s = settles_s[o];
                r = o;
                event = SETTLE;
            }
        }
        /* A call that begins before all else, the first request first. */
        for (int64_t o = 0; o < ranks; o++) {
            const double begin_s = most_of(asked_s[o], free_s[lock[o]]);
            const bool is_earlier = event == CALL && begin_s == now_s && asked_s[o] < asked_s[r];
            if (begin_s < now_s || is_earlier) {
                now_s = begin_s;
                r = o;
                event = CALL;
            }
        }
        if (r < 0) {
            return makespan_s;
        }
        has_ended = event == TASK && running[r] == 1;

        if (event == CALL) {
            free_s[lock[r]] = now_s + hold_s;
            asked_s[r] = never;
            set_last[r] = wanted[r];
            call_settles_s[call[r]] = now_s + hold_s + settle_s;
            call_clock[call[r]] = wanted[r];
            settles_s[r] = call_settles_s[settled[r]];
            call[r]++;
            continue;
        }

        const int64_t k = position[r] < queue_start[r + 1] ? queue[position[r]] : -1;
        int64_t i = k >= 0 ? computation[k] : -1;
        const int64_t row = i >= 0 ? member[i] * clocks : 0;
        const int64_t mode = i >= 0 ? clock[i] & mask : 0;
        const int64_t option = row + (in_force[r] << bits | mode);

        if (event == SETTLE) {
            /* What is left of the task takes the time of the new clock. */
            const int64_t next_clock = call_clock[settled[r]];
            if (running[r] && i >= 0) {
                double done = left[r];
                if (time_s[option] > 0.0) {
                    done = least_of((now_s - since_s[r]) / time_s[option], done);
                }
                *spent_j += done * cost_j[option];
                left[r] = left[r] - done;
                since_s[r] = now_s;
                next_s[r] = now_s + left[r] * time_s[row + (next_clock << bits | mode)];
            }
            in_force[r] = next_clock;
            settled[r]++;
            settles_s[r] = settled[r] < call[r] ? call_settles_s[settled[r]] : never;
            continue;
        }

        if (running[r]) {
            if (i >= 0) {
                *spent_j += left[r] * cost_j[option];
            }
            end_s[k] = now_s;
            since_s[r] = now_s;
            makespan_s = most_of(makespan_s, now_s);
            running[r] = 0;
            next_s[r] = never;
            position[r]++;
            i = position[r] < queue_start[r + 1] ? computation[queue[position[r]]] : -1;
        } else {
            running[r] = 1;
            since_s[r] = now_s;
            left[r] = 1.0;
            next_s[r] = now_s + (i >= 0 ? time_s[option] : fixed_s[k]);
            if (i >= 0 && late_s[r] == never) {
                late_s[r] = now_s - change->first_start_s.at[r];
            }
        }
        /* A computation that starts, or comes next, asks for its clock. */
        if (i >= 0) {
            const int64_t next_clock =
                clock_in_time(&change->latest_start_s, i, clock[i] >> bits, now_s - late_s[r]);
            if (next_clock != wanted[r]) {
                wanted[r] = next_clock;
                asked_s[r] = wanted[r] == set_last[r] ? never : least_of(asked_s[r], now_s);
            }
        }
    }
}
