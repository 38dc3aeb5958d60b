#include "rounding.h"

#include <math.h>

#include "random.h"

/* Relative; more than the rounding error of a sum of 1e4 floats. */
static const double ROUNDING = 1e-11;

/* Part of the changes of a guide that are of a group, where groups are changed. */
static const double OF_GROUPS = 0.75;

/* How guides are changed, all by hand. `size` is drawn from the normal distribution, and `step_s` is the caller's. */
static const double STIFFER = 0.5;      /* of `size`: a change of the logarithm of a stiffness */
static const double ALL_STEPS = 0.3;    /* of `step_s * size`: a move of all ends */
static const double TO_THE_LAST = 0.2;  /* part of the groups that go on to the last computation */
static const double GROUP_STEPS = 2.0;  /* of `step_s * size`: the longest move of the ends of a group */
static const double GROUP_RANGE = 3.0;  /* moves are shorter than that by a factor of up to exp(3), about 20 */
static const double OF_PRICES = 0.25;   /* part of the changes of a group that are of prices, not of ends */
static const double DEARER = 0.2;       /* of `size`: a change of the logarithm of the prices of a group */

/* Fill `limit_s` with the latest end of each computation that leaves time for all successors at their fastest. */
static void set_limits(const PointProblem *problem, double deadline_s, double *limit_s)
{
    const int64_t nodes = problem->member.count;
    const int64_t *member = problem->member.at;
    const int64_t *fastest = problem->point_start.at;
    const int64_t *after_start = problem->after_start.at;
    const int64_t *after = problem->after.at;
    const double *lag_s = problem->after_lag_s.at;
    const double *time_s = problem->time_s.at;
    for (int64_t k = nodes - 1; k >= 0; k--) {
        double latest_s = deadline_s;
        for (int64_t i = after_start[k]; i < after_start[k + 1]; i++) {
            const double fastest_s = time_s[fastest[member[after[i]]]];
            latest_s = least_of(latest_s, limit_s[after[i]] - fastest_s - lag_s[i]);
        }
        limit_s[k] = latest_s;
    }
}

/* Choose a point for each computation from `from` on in turn, given those before; where the search for it begins, at
 * the one that `chosen` holds, makes no difference to what is found. */
static void dispatch(const PointProblem *problem, const Guide *guide, const double *limit_s, int64_t from,
                     int64_t *chosen, double *end_s)
{
    const int64_t nodes = problem->member.count;
    const int64_t *member = problem->member.at;
    const int64_t *point_start = problem->point_start.at;
    const double *time_s = problem->time_s.at;
    const double *cost_j = problem->cost_j.at;
    const double *gain_w = problem->gain_w.at;
    const double *loss_w = problem->loss_w.at;
    const int64_t *before_start = problem->before_start.at;
    const int64_t *before = problem->before.at;
    const double *lag_s = problem->before_lag_s.at;
    const double *wanted_s = guide->end_s.at;
    const double *price_w = guide->price_w.at;
    const double early = guide->stiffness.at[0];
    const double late = guide->stiffness.at[1];
    for (int64_t k = from; k < nodes; k++) {
        double start_s = 0.0;
        for (int64_t i = before_start[k]; i < before_start[k + 1]; i++) {
            start_s = most_of(start_s, end_s[before[i]] + lag_s[i]);
        }
        const int64_t first = point_start[member[k]];
        const int64_t stop = point_start[member[k] + 1];
        const double price = price_w[k];
        const double wanted = wanted_s[k] - start_s;
        const double limit = limit_s[k] - start_s;
        /* The fastest point that is as slow as wanted, or the slowest that is in time. */
        int64_t middle = chosen[k];
        while (middle + 1 < stop && time_s[middle] < wanted) {
            middle++;
        }
        while (middle > first && (time_s[middle - 1] >= wanted || time_s[middle] > limit)) {
            middle--;
        }
        int64_t best = first;
        double smallest = INFINITY;
        /* From there to slower ones, until none can be better. */
        for (int64_t point = middle; point < stop && (time_s[point] <= limit || point == first); point++) {
            /* Energy, time at its price, and the distance from the wanted end at a multiple of it. */
            double cost = cost_j[point] + price * (time_s[point] + late * most_of(0.0, time_s[point] - wanted));
            cost += price * early * most_of(0.0, wanted - time_s[point]);
            if (cost < smallest) {
                best = point;
                smallest = cost;
            }
            if (time_s[point] >= wanted && gain_w[point] <= price * (1.0 + late)) {
                break;
            }
        }
        /* And to faster ones, likewise. */
        int64_t point = middle;
        while (point > first && loss_w[point] <= price * (1.0 - early)) {
            point--;
            const double cost = cost_j[point] + price * (time_s[point] + early * (wanted - time_s[point]));
            if (cost < smallest) {
                best = point;
                smallest = cost;
            }
        }
        chosen[k] = best;
        end_s[k] = start_s + time_s[best];
    }
}

/* Do as `fill_exactly` does, with rounding errors. */
static double fill(const PointProblem *problem, double deadline_s, int64_t *chosen, double *end_s)
{
    const int64_t nodes = problem->member.count;
    const int64_t *member = problem->member.at;
    const int64_t *point_start = problem->point_start.at;
    const double *time_s = problem->time_s.at;
    const double *cost_j = problem->cost_j.at;
    const int64_t *after_start = problem->after_start.at;
    const int64_t *after = problem->after.at;
    const double *lag_s = problem->after_lag_s.at;
    double total_j = 0.0;
    for (int64_t k = nodes - 1; k >= 0; k--) {
        /* `end_s` has the latest starts of all that follow, as these were filled before. */
        double latest_s = deadline_s;
        for (int64_t i = after_start[k]; i < after_start[k + 1]; i++) {
            latest_s = least_of(latest_s, end_s[after[i]] - lag_s[i]);
        }
        int64_t point = chosen[k];
        const int64_t slowest = point_start[member[k] + 1] - 1;
        const double room_s = latest_s - (end_s[k] - time_s[point]);
        while (point < slowest && time_s[point + 1] <= room_s) {
            point++;
        }
        chosen[k] = point;
        end_s[k] = latest_s - time_s[point];
        total_j += cost_j[point];
    }
    return total_j;
}

KERNEL double fill_exactly(const PointProblem *problem, double deadline_s, int64_t *chosen, double *end_s,
                           int64_t *before, double worth_j)
{
    const int64_t nodes = problem->member.count;
    for (int64_t k = 0; k < nodes; k++) {
        before[k] = chosen[k];
    }
    /* A hair more than the deadline first: what fits exactly would often miss by a rounding error. */
    double total_j = fill(problem, deadline_s * (1 + ROUNDING), chosen, end_s);
    if (total_j <= worth_j && compute_ends(problem, chosen, end_s) > deadline_s) {
        for (int64_t k = 0; k < nodes; k++) {
            chosen[k] = before[k];
        }
        compute_ends(problem, chosen, end_s);
        total_j = fill(problem, deadline_s * (1 - ROUNDING), chosen, end_s);
    }
    return total_j;
}

/* Change one of the two stiffnesses, or move all ends. */
static void vary_all(Guide *guide, double step_s, double size, Random *random)
{
    const int64_t what = draw_below(random, 3);
    if (what < 2) {
        guide->stiffness.at[what] *= exp(STIFFER * size);
        return;
    }
    double *end_s = guide->end_s.at;
    const double moved_s = ALL_STEPS * step_s * size;
    for (int64_t k = 0; k < guide->end_s.count; k++) {
        end_s[k] += moved_s;
    }
}

/* Change the ends, or the prices, of a group: some classes, from one computation to a later one or to the last. Return
 * the first computation. */
static int64_t vary_group(const PointProblem *problem, Guide *guide, double step_s, double size, Random *random)
{
    const int64_t nodes = problem->member.count;
    const int64_t classes = problem->point_start.count - 1;
    const int64_t *kind = problem->kind.at;
    const int64_t first = draw_below(random, nodes);
    int64_t stop = nodes;
    if (draw(random) >= TO_THE_LAST) {
        stop = least(nodes, first + (int64_t)pow((double)nodes, draw(random)));
    }
    const int64_t which = draw_below(random, classes);
    const int64_t what = draw_below(random, 4);
    /* Evenly in the logarithm of their size: small moves matter as guides get better. */
    const double moved_s = GROUP_STEPS * step_s * size * exp(-GROUP_RANGE * draw(random));
    const bool is_of_prices = draw(random) < OF_PRICES;
    const double dearer = exp(DEARER * size);
    for (int64_t k = first; k < stop; k++) {
        const int64_t member = problem->member.at[k];
        bool is_changed = true; /* every class, */
        if (what == 0) {        /* or the class itself, */
            is_changed = member == which;
        } else if (what == 1) { /* or all classes of its kind, */
            is_changed = kind[member] == kind[which];
        } else if (what == 2) { /* or all classes up to it */
            is_changed = member <= which;
        }
        if (!is_changed) {
            continue;
        }
        if (is_of_prices) {
            guide->price_w.at[k] *= dearer;
        } else {
            guide->end_s.at[k] += moved_s;
        }
    }
    return first;
}

static void copy_guide(const Guide *source, Guide *target)
{
    for (int64_t k = 0; k < source->end_s.count; k++) {
        target->end_s.at[k] = source->end_s.at[k];
        target->price_w.at[k] = source->price_w.at[k];
    }
    for (int64_t what = 0; what < 2; what++) {
        target->stiffness.at[what] = source->stiffness.at[what];
    }
}

KERNEL double improve_guide(const PointProblem *problem, double deadline_s, Guide *guide, Guide *best, int64_t *plans,
                            double *times_s, double cost_j, int64_t tries, double step_s, bool group)
{
    const int64_t nodes = problem->member.count;
    int64_t *chosen = plans;
    int64_t *trial = plans + nodes;
    int64_t *before = plans + 2 * nodes;
    int64_t *best_dispatched = plans + 3 * nodes; /* what `best` gives, before slack is filled */
    double *limit_s = times_s;
    double *end_s = times_s + nodes;
    double *before_s = times_s + 2 * nodes;
    double *best_dispatched_s = times_s + 3 * nodes;
    Random random;
    seed_random(&random, 1);
    /* A hair less than the deadline, so that no rounding error makes a dispatched plan late. */
    set_limits(problem, deadline_s * (1 - ROUNDING), limit_s);
    for (int64_t attempt = 0; attempt < tries; attempt++) {
        /* The first plan is that of the guide itself. */
        int64_t from = 0;
        if (attempt > 0) {
            const double size = draw_normal(&random);
            if (group && draw(&random) < OF_GROUPS) {
                from = vary_group(problem, guide, step_s, size, &random);
            } else {
                vary_all(guide, step_s, size, &random);
            }
        }
        /* Before the first change the guide is the best one, and so is what is dispatched. */
        for (int64_t k = 0; k < from; k++) {
            trial[k] = best_dispatched[k];
            end_s[k] = best_dispatched_s[k];
        }
        dispatch(problem, guide, limit_s, from, trial, end_s);
        for (int64_t k = 0; k < nodes; k++) {
            before_s[k] = end_s[k];
        }
        const double trial_j = fill_exactly(problem, deadline_s, trial, end_s, before, cost_j);
        /* The first guide is the best one so far, whether or not its plan is. */
        if (attempt == 0 || trial_j <= cost_j) {
            for (int64_t k = 0; k < nodes; k++) {
                best_dispatched[k] = before[k];
                best_dispatched_s[k] = before_s[k];
            }
        }
        if (trial_j <= cost_j) {
            cost_j = trial_j;
            for (int64_t k = 0; k < nodes; k++) {
                chosen[k] = trial[k];
            }
            copy_guide(guide, best);
        } else {
            copy_guide(best, guide);
        }
    }
    return cost_j;
}

KERNEL void try_all(const PointProblem *problem, double deadline_s, int64_t *trial, int64_t *best, double *end_s)
{
    const int64_t nodes = problem->member.count;
    const int64_t *point_start = problem->point_start.at;
    const int64_t *member = problem->member.at;
    const double *cost_j = problem->cost_j.at;
    double best_j = INFINITY;
    int64_t k = 0;
    while (k < nodes) {
        double trial_j = 0.0;
        for (int64_t i = 0; i < nodes; i++) {
            trial_j += cost_j[trial[i]];
        }
        /* The cheap check comes first. */
        if (trial_j < best_j && compute_ends(problem, trial, end_s) <= deadline_s) {
            best_j = trial_j;
            for (int64_t i = 0; i < nodes; i++) {
                best[i] = trial[i];
            }
        }
        /* Count up: nodes at their slowest point go back to their fastest, and the next one goes on. */
        k = 0;
        while (k < nodes && trial[k] == point_start[member[k] + 1] - 1) {
            trial[k] = point_start[member[k]];
            k++;
        }
        if (k < nodes) {
            trial[k]++;
        }
    }
}
