#include "clock_search.h"

#include <math.h>
#include <stddef.h>

#include "random.h"

static const double OF_MODES = 0.25; /* part of the moves that are of modes, where they are chosen */
static const double TOGETHER = 0.4;  /* part of the moves that are of many ranks at once */

/* The price of being late at the end of a search is this power of two of the first price. */
static const double DEARER_BITS = 3.0;

KERNEL int64_t max_changes(const int64_t *rank_start, const int64_t *clock, int64_t first_rank, int64_t last_rank,
                           int64_t mode_bits)
{
    int64_t largest = 0;
    for (int64_t rank = first_rank; rank <= last_rank; rank++) {
        const int64_t first = rank_start[rank];
        const int64_t stop = rank_start[rank + 1];
        int64_t count = 0;
        for (int64_t i = first; i < stop; i++) {
            const int64_t before = clock[i > first ? i - 1 : stop - 1];
            count += clock[i] >> mode_bits != before >> mode_bits;
        }
        largest = most(largest, count);
    }
    return largest;
}

/* Draw a whole number of at least 1, on average a bit less than 1 + `mean`. */
static int64_t random_count(double mean, Random *random)
{
    return 1 + (int64_t)(-log(1.0 - draw(random)) * mean);
}

/* A rank's program, the computations from `first` to before `stop`; the next iteration follows it. */
typedef struct {
    int64_t first;
    int64_t stop;
} Program;

/* Return the computation that stands at i if the program is repeated on both sides. */
static int64_t around(Program program, int64_t i)
{
    const int64_t count = program.stop - program.first;
    const int64_t place = (i - program.first) % count;
    return program.first + (place < 0 ? place + count : place);
}

/* A stretch of a program, from `begin` to before `end`, which may go around its end. */
typedef struct {
    int64_t begin;
    int64_t end;
} Segment;

/* Return the segment of one clock around computation i. */
static Segment segment_around(const int64_t *clock, int64_t bits, Program program, int64_t i)
{
    const int64_t count = program.stop - program.first;
    const int64_t at = clock[i] >> bits;
    Segment segment = {i, i + 1};
    while (segment.end - segment.begin < count && clock[around(program, segment.begin - 1)] >> bits == at) {
        segment.begin--;
    }
    while (segment.end - segment.begin < count && clock[around(program, segment.end)] >> bits == at) {
        segment.end++;
    }
    return segment;
}

/* Return the first computation from `first` to before `stop` that runs at that wave or later, or `stop`. */
static int64_t first_at_wave(const double *wave, int64_t first, int64_t stop, double at)
{
    while (first < stop) {
        const int64_t middle = (first + stop) / 2;
        if (wave[middle] < at) {
            first = middle + 1;
        } else {
            stop = middle;
        }
    }
    return first;
}

/* Give a computation another clock; return the effective energy added, joules: infinite where its rank may not have it
 * in that mode. */
static double set_clock(const ClockProblem *problem, ClockState *state, int64_t i, int64_t new)
{
    const int64_t old = state->clock.at[i];
    if (new == old) {
        return 0.0;
    }
    const int64_t clocks = problem->time_s.width;
    /* With modes a rank lacks some options; `usable` lists those that it has. */
    if (problem->mode_bits > 0) {
        const int64_t row = problem->rank.at[i] * clocks;
        const int64_t place = problem->place.at[row + new];
        if (place < 0 || problem->usable.at[row + place] != new) {
            return INFINITY;
        }
    }
    const int64_t row = problem->member.at[i] * clocks;
    const int64_t node = problem->node.at[i];
    state->clock.at[i] = new;
    state->duration_s.at[node] = problem->time_s.at[row + new];
    state->touched.at[0] = least(state->touched.at[0], node);
    return problem->cost_j.at[row + new] - problem->cost_j.at[row + old];
}

/* A random change, the same for all ranks that make it. */
typedef struct {
    double kind;   /* from 0 to 1: what is changed, as `change_rank` says */
    double how;    /* from 0 to 1: which part of the iteration */
    bool is_ahead; /* whether it is about what comes after the segment, or what comes before it */
    int64_t steps; /* by how many clocks */
    int64_t far;   /* by how many computations a border moves */
    double length; /* of a part of the iteration */
    int64_t sign;  /* 1 for later clocks in the list and longer segments, -1 for earlier and shorter ones */
    const int64_t *model; /* (m,) the clocks of another plan */
    int64_t mode;  /* the new mode; -1 where clocks change */
} Change;

/* Draw a change of clocks or of modes. */
static Change random_change(const ClockProblem *problem, int64_t sign, const int64_t *library, int64_t plans,
                            Random *random)
{
    Change change;
    change.sign = sign;
    change.kind = draw(random);
    change.how = draw(random);
    change.is_ahead = draw(random) < 0.5;
    const double mean_steps = draw(random) < 0.7 ? 0.5 : 4.0;
    change.steps = sign * random_count(mean_steps, random);
    const double mean_far = draw(random) < 0.5 ? 1.0 : 8.0;
    change.far = random_count(mean_far, random);
    change.length = exp(-6.0 * draw(random));
    change.model = library + draw_below(random, plans) * problem->member.count;
    change.mode = -1;
    if (problem->mode_bits > 0 && draw(random) < OF_MODES) {
        change.mode = draw_below(random, (int64_t)1 << problem->mode_bits);
    }
    return change;
}

/* Make a change on one rank, and add the effective energy of it to `added_j`, joules.
 *
 * at: the computation that is changed, or that runs when others are. */
static void change_rank(const ClockProblem *problem, ClockState *state, int64_t rank, int64_t at, const Change *change,
                        double *added_j)
{
    const int64_t clocks = problem->time_s.width;
    const int64_t bits = problem->mode_bits;
    const int64_t mask = ((int64_t)1 << bits) - 1;
    const int64_t *member = problem->member.at;
    const int64_t *tied = problem->tied.at;
    const double *wave = problem->wave.at;
    const int64_t *usable = problem->usable.at + rank * clocks;
    const int64_t *place_of = problem->place.at + rank * clocks;
    int64_t *state_clock = state->clock.at;
    const Program program = {problem->rank_start.at[rank], problem->rank_start.at[rank + 1]};
    int64_t i = at;
    if (problem->rank.at[at] != rank) {
        i = least(first_at_wave(wave, program.first, program.stop, wave[at]), program.stop - 1);
    }

    /* Below .3, the segment gets another clock. */
    const Segment segment = segment_around(state_clock, bits, program, i);
    int64_t begin = segment.begin;
    int64_t end = segment.end;
    int64_t place = place_of[state_clock[i]] + change->steps * ((int64_t)1 << bits);
    place = least(most(place, 0), problem->usable_count.at[rank] - 1);
    int64_t clock = usable[place];
    if (change->kind >= 0.3 && change->kind < 0.7) {
        const int64_t neighbour = state_clock[around(program, change->is_ahead ? end : begin - 1)];
        if (change->kind >= 0.62) { /* it joins the one before or after it */
            clock = neighbour;
        } else if (change->sign > 0) { /* it takes from that one */
            clock = state_clock[i];
            if (change->is_ahead) {
                begin = segment.end;
                end = segment.end + change->far;
            } else {
                begin = segment.begin - change->far;
                end = segment.begin;
            }
        } else { /* that one takes from it */
            clock = neighbour;
            if (change->is_ahead) {
                begin = most(segment.begin, segment.end - change->far);
            } else {
                end = least(segment.end, segment.begin + change->far);
            }
        }
    } else if (change->kind >= 0.7) { /* a part of the iteration: some time, a part of the segment, or all on one side */
        if (change->how < 0.5) {
            begin = i;
            end = first_at_wave(wave, i, program.stop, wave[at] + change->length);
        } else if (change->how < 0.75) {
            if (change->is_ahead) {
                begin = i;
            } else {
                end = i + 1;
            }
        } else if (change->is_ahead) {
            begin = i;
            end = program.stop;
        } else {
            begin = program.first;
            end = i + 1;
        }
    }

    /* Not more than once around. */
    end = least(end, begin + program.stop - program.first);
    for (int64_t j = begin; j < end; j++) {
        const int64_t k = around(program, j);
        if (change->mode < 0) {
            const int64_t new = change->kind >= 0.85 ? change->model[k] : clock;
            *added_j += set_clock(problem, state, k, (new & ~mask) | (state_clock[k] & mask));
            continue;
        }
        /* A mode goes to all computations of the class, each with those that share it. */
        if (member[k] != member[i]) {
            continue;
        }
        int64_t other = k;
        do {
            *added_j += set_clock(problem, state, other, (state_clock[other] & ~mask) | change->mode);
            other = tied[other];
        } while (other != k);
    }
}

/* Copy clocks and durations from `source` to `target`, for the computations from `first` to before `stop`. */
static void restore(const int64_t *node, const ClockState *source, ClockState *target, int64_t first, int64_t stop)
{
    for (int64_t i = first; i < stop; i++) {
        if (target->clock.at[i] != source->clock.at[i]) {
            target->clock.at[i] = source->clock.at[i];
            target->duration_s.at[node[i]] = source->duration_s.at[node[i]];
        }
    }
}

KERNEL void anneal_clocks(const ClockProblem *problem, ClockState *now, ClockState *trial, int64_t *best,
                          double time_s, double cost_j, double margin_j, const Goal *goal, const Heat *heat,
                          const int64_t *library, int64_t plans, ChangeCost *change)
{
    const int64_t computations = problem->member.count;
    const int64_t nodes = now->end_s.count;
    const int64_t ranks = problem->rank_start.count - 1;
    const int64_t *node = problem->node.at;
    const int64_t *rank = problem->rank.at;
    const int64_t *rank_start = problem->rank_start.at;
    Random random;
    seed_random(&random, (uint32_t)heat->seed);
    double best_s = time_s;
    double best_j = cost_j;
    int64_t stale = nodes; /* the first node whose end in `trial` differs from `now` */
    for (int64_t attempt = 0; attempt < heat->tries; attempt++) {
        /* A plan counts as what it costs and how late it is; it is taken if that is at most `most_j`. */
        const double part = (double)attempt / (double)heat->tries;
        const double heat_j = heat->first_j * pow(heat->last_j / heat->first_j, part);
        /* Lateness gets dearer as the search cools down, so that it ends in time. */
        const double price_w = goal->price_w * exp2(DEARER_BITS * part);
        const double worth_j = cost_j + price_w * most_of(0.0, time_s - goal->deadline_s);
        /* Metropolis, but drawn before the trial: what costs too much by its clocks is then never replayed. */
        const double most_j = worth_j - heat_j * log(1.0 - draw(&random));

        /* One change or two, the second one the other way. */
        int64_t sign = draw(&random) < 0.5 ? 1 : -1;
        const int64_t turns = draw(&random) < 0.4 ? 2 : 1;
        int64_t at = draw_below(&random, computations);
        int64_t first = rank[at];
        int64_t last = first;
        /* Pipelines run in lockstep, so one rank alone seldom gains: half of these moves are of all ranks, half
           of some. */
        if (draw(&random) < TOGETHER) {
            first = 0;
            last = ranks - 1;
            if (draw(&random) < 0.5) {
                first = draw_below(&random, ranks);
                last = least(ranks - 1, first + draw_below(&random, ranks));
            }
        }
        int64_t low = first;
        int64_t high = last;
        double trial_j = cost_j;
        for (int64_t turn = 0; turn < turns; turn++) {
            if (turn == 1) { /* something else, on the same ranks or on any */
                const int64_t begin = rank_start[first];
                at = begin + draw_below(&random, rank_start[last + 1] - begin);
                if (first == last && draw(&random) < 0.5) {
                    at = draw_below(&random, computations);
                    first = rank[at];
                    last = first;
                }
            }
            const Change change_of_all = random_change(problem, sign, library, plans, &random);
            double added_j = 0.0;
            for (int64_t each = first; each <= last; each++) {
                change_rank(problem, trial, each, at, &change_of_all, &added_j);
            }
            trial_j += added_j;
            sign = -sign;
        }
        low = least(low, first);
        high = most(high, last);

        /* The cheap checks come first: what the clocks cost, then how often they change, then the replay. */
        bool is_good = trial->touched.at[0] < nodes && trial_j <= most_j + heat->slack_j;
        is_good = is_good && max_changes(rank_start, trial->clock.at, low, high, problem->mode_bits) <= goal->budget;
        double trial_s = time_s;
        if (is_good) {
            /* The replay goes on from the first node whose end may differ. */
            if (change == NULL) {
                stale = least(trial->touched.at[0], stale);
                trial->touched.at[0] = stale;
                trial_s = replay(problem, trial);
            } else {
                trial_s = replay_changes(problem, trial, change, &trial_j);
                trial_j += goal->waiting_w * trial_s;
            }
            is_good = trial_j + price_w * most_of(0.0, trial_s - goal->deadline_s) <= most_j;
        }
        trial->touched.at[0] = nodes;
        if (!is_good) {
            restore(node, now, trial, rank_start[low], rank_start[high + 1]);
            continue;
        }
        restore(node, trial, now, rank_start[low], rank_start[high + 1]);
        cost_j = trial_j;
        time_s = trial_s;
        stale = nodes;

        /* Late plans are better the earlier they are, others the cheaper. */
        const bool is_late = time_s > goal->deadline_s;
        const bool best_is_late = best_s > goal->deadline_s;
        bool is_better;
        if (is_late) {
            is_better = time_s < best_s;
        } else {
            is_better = best_is_late || (cost_j < best_j - margin_j && cost_j >= goal->floor_j - margin_j);
        }
        if (is_better) {
            best_s = time_s;
            best_j = cost_j;
            for (int64_t i = 0; i < computations; i++) {
                best[i] = now->clock.at[i];
            }
        }
    }
}
