/* The clocks of an iteration; `solver/clock_problem.py` says what its fields are. */
#ifndef CLOCK_PROBLEM_H
#define CLOCK_PROBLEM_H

#include "arrays.h"

/* n nodes in topological order; m of them are computations: the programs of all ranks, one after the other. */
typedef struct {
    Integers before_start; /* (n + 1,) where the predecessors of each node begin in `before` */
    Integers before;
    Floats before_lag_s;   /* aligned with `before`: least seconds from their end to the node's start */
    Floats fixed_s;        /* (n,) durations of fixed operations */
    Floats time_s;         /* (classes, clocks), infinite if not measured */
    Floats cost_j;         /* (classes, clocks) effective energy, infinite if not measured */
    Integers node;         /* (m,) node of each computation, in the order of the programs */
    Integers member;       /* (m,) its class */
    Integers rank;         /* (m,) its rank */
    Integers rank_start;   /* (ranks + 1,) where the program of each rank begins */
    Integers usable;       /* (ranks, clocks) the clocks that any class of the rank has, rising numbers first */
    Integers usable_count; /* (ranks,) how many clocks that are */
    Integers place;        /* (ranks, clocks) the index of each clock in `usable` */
    Floats wave;           /* (m,) when each computation runs, as a part of the iteration; never falls along a program */
    Integers last;         /* nodes without successors */
    int64_t mode_bits;     /* how many last bits of a clock's number are that of a mode */
    Integers tied;         /* (m,) the next computation that has one mode with it, around; itself where none has */
} ClockProblem;

/* The clocks, and the durations and ends that follow from them. The kernels change it in place. */
typedef struct {
    Integers clock;    /* (m,) */
    Floats duration_s; /* (n,) */
    Floats end_s;      /* (n,) as of the last replay */
    Integers touched;  /* (1,) the first node whose duration changed since then; n if nothing changed */
} ClockState;

/* What a clock change costs in time; ranks of one lock change their clocks one by one. */
typedef struct {
    Integers lock;         /* (ranks,) numbered from 0 */
    double hold_s;         /* for which a change holds the lock */
    double settle_s;       /* from then on until the clock is in force */
    Floats tail_s;         /* (ranks,) from the end of a rank's last node to that of the iteration before */
    Integers queue;        /* (n,) the nodes of all ranks, operations as well, in the order they run */
    Integers queue_start;  /* (ranks + 1,) where those of each rank begin */
    Integers computation;  /* (n,) which computation each node is, -1 for an operation */
    Integers final;        /* (ranks,) the last computation of each rank */
    Floats seconds;        /* (7, ranks) for the replay to write on */
    Integers numbers;      /* (7, ranks) likewise */
    Floats call_settles_s; /* (calls,) likewise, of the calls of each rank, which begin at `call_start` */
    Integers call_clock;   /* (calls,) */
    Integers call_start;   /* (ranks,) */
    Floats latest_start_s; /* (m, clocks) when each computation must start at the latest to end in time at each clock; no
                              rows for ranks that keep to their clocks */
    Floats first_start_s;  /* (ranks,) when its first computation starts, which counts as in time */
} ChangeCost;

/* Do as `replay` does; here for kernels of other libraries. */
static inline double bring_up_to_date(const ClockProblem *problem, ClockState *state)
{
    const int64_t nodes = state->end_s.count;
    const int64_t *before_start = problem->before_start.at;
    const int64_t *before = problem->before.at;
    const double *lag_s = problem->before_lag_s.at;
    const double *duration_s = state->duration_s.at;
    double *end_s = state->end_s.at;
    /* What ran before the first change ends as before. */
    for (int64_t k = state->touched.at[0]; k < nodes; k++) {
        double latest_s = 0.0;
        for (int64_t i = before_start[k]; i < before_start[k + 1]; i++) {
            latest_s = most_of(latest_s, end_s[before[i]] + lag_s[i]);
        }
        end_s[k] = latest_s + duration_s[k];
    }
    state->touched.at[0] = nodes;
    double makespan_s = 0.0;
    for (int64_t i = 0; i < problem->last.count; i++) {
        makespan_s = most_of(makespan_s, end_s[problem->last.at[i]]);
    }
    return makespan_s;
}

/* Bring `state.end_s` up to date if clock changes take no time; return the makespan, seconds. */
KERNEL double replay(const ClockProblem *problem, ClockState *state);

/* Fill `state.end_s` if clock changes take time; return the makespan, seconds.
 *
 * spent_j: (1,) gets the effective energy of all computations, joules. */
KERNEL double replay_changes(const ClockProblem *problem, ClockState *state, ChangeCost *change, double *spent_j);

#endif
