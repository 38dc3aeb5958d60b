/* A search for clocks within a limit on their changes; `solver/clock_search.py` describes the method. */
#ifndef CLOCK_SEARCH_H
#define CLOCK_SEARCH_H

#include "clock_problem.h"

/* The goal of a search: the least effective energy within these limits. */
typedef struct {
    double deadline_s;
    int64_t budget;   /* most changes of each rank */
    double price_w;   /* price of a second beyond the deadline when a search begins */
    double floor_j;   /* plans that cost less count only if no other meets the deadline */
    double waiting_w; /* what all ranks draw in a second more of the iteration */
} Goal;

/* The effort of a search: its first and last temperature, which falls exponentially. */
typedef struct {
    int64_t tries;
    double first_j;
    double last_j;
    double slack_j; /* how much a plan may cost too much by its clocks and still be replayed */
    int64_t seed;
} Heat;

/* Return the most changes of the clock in an iteration of any of these ranks, including the change back. */
KERNEL int64_t max_changes(const int64_t *rank_start, const int64_t *clock, int64_t first_rank, int64_t last_rank,
                           int64_t mode_bits);

/* Change `best` into the best clocks found from it.
 *
 * now, trial: two equal states of the start, replayed, whose clocks are `best`.
 * best: (m,) clocks.
 * time_s, cost_j: of the start.
 * margin_j: the rounding error of a sum of joules.
 * library: (plans, m) clocks of plans, parts of which may be taken; at least one plan.
 * change: what clock changes cost; NULL if nothing. */
KERNEL void anneal_clocks(const ClockProblem *problem, ClockState *now, ClockState *trial, int64_t *best,
                          double time_s, double cost_j, double margin_j, const Goal *goal, const Heat *heat,
                          const int64_t *library, int64_t plans, ChangeCost *change);

#endif
