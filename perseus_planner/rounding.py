"""From a relaxed point of the frontier to one measured clock per computation, within the deadline.

A relaxed duration lies between measured ones, and choosing for each computation is the discrete time-cost trade-off
problem, NP-hard (De et al. 1997). The relaxed solution is a good guide to it, with two kinds of numbers:
where each computation should end, and the price (watts) of its time, the flow of the minimum cut.

1. *Dispatch.* Computations are taken in topological order; each takes the option for which energy, price * time and
   price * (distance of its end from where it should end) together are least. Ends that miss make up for one another
   from computation to computation, as errors do in error diffusion. No option is taken that leaves too little time for
   what follows at its fastest, so a deadline that can be met is met. Then, backwards, slack is filled.
2. *Mixing.* Where options are far apart, one deadline is much easier to meet well than another: pipelines run in
   lockstep, and at most deadlines a whole row of stages would want a duration that none of them has. So plans are made
   at deadlines around the one asked for, and two of them, a slower and a faster one, are run one after the other within
   one iteration. What that costs lies on the straight line between both, and the frontier is nearly straight there.
3. *Improvement.* The best of these is its own guide from here on: ends and prices of random groups of computations are
   moved, and what costs no more is kept. The number of tries is fixed and so is the seed: equal input, equal plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from perseus_planner.dag import PipelineDag
from perseus_planner.mincut import Integers

Floats = NDArray[np.float64]

_ROUNDING_ROOM = 1e-11  #: part of the deadline kept back for the rounding of floats: 1e5 additions' worth
_ANCHORS = 33  #: deadlines around the one asked for at which plans are made
_ANCHOR_SPAN = 0.06  #: how far they reach, as a part of the deadline
_ANCHOR_TRIES = 100
_PAIRS = 8  #: how many pairs of anchors are mixed
_COMPUTATIONS_TRIED = 4_000_000  #: effort of the improvement: tries times computations
_LEAST_TRIES = 1500
_MOST_TRIES = 20_000


class Choices(NamedTuple):
    """The discrete problem: n computations in topological order, each of a class that has measured options."""

    member: Integers  #: (n,) class of each computation
    option_start: Integers  #: (classes + 1,) where the options of a class begin, fastest first
    time_s: Floats  #: (options,)
    cost_j: Floats  #: (options,) effective energy, falling within a class
    gain_w: Floats  #: (options,) the most that any slower option saves per second
    loss_w: Floats  #: (options,) the least that any faster option costs per second
    before_start: Integers  #: (n + 1,)
    before: Integers  #: computations that each one waits for
    after_start: Integers  #: (n + 1,)
    after: Integers  #: computations that wait for it


class Guide(NamedTuple):
    """What a dispatch follows. The kernels change it in place."""

    end_s: Floats  #: (n,) where each computation should end
    price_w: Floats  #: (n,)
    stiffness: Floats  #: (2,) how dear it is to end early, and late, in prices


class Anchor(NamedTuple):
    """A relaxed point near the deadline."""

    deadline_s: float
    end_s: Floats  #: (n,)
    price_w: Floats  #: (n,)


def choices_of(dag: PipelineDag) -> Choices:
    """Lay out the computations of `dag`, in `dag.order`, for the kernels."""
    keys = list(dag.options)
    number = {key: i for i, key in enumerate(keys)}
    member = [number[dag.computations[place][:2]] for place in dag.order]
    start = np.cumsum([0, *(len(dag.options[key]) for key in keys)])
    time_s = np.array([option.time_s for key in keys for option in dag.options[key]])
    cost_j = np.array([option.effective_j for key in keys for option in dag.options[key]])
    gain_w, loss_w = np.zeros_like(time_s), np.full_like(time_s, np.inf)
    for first, stop in pairwise(start.tolist()):
        for i in range(first, stop):
            gain_w[i] = max((cost_j[i] - cost_j[i + 1 : stop]) / (time_s[i + 1 : stop] - time_s[i]), default=0.0)
            loss_w[i] = min((cost_j[first:i] - cost_j[i]) / (time_s[i] - time_s[first:i]), default=np.inf)
    rank = {place: k for k, place in enumerate(dag.order)}
    before = [[rank[other] for other in dag.predecessors[place]] for place in dag.order]
    after: list[list[int]] = [[] for _ in before]
    for k, others in enumerate(before):
        for other in others:
            after[other].append(k)
    return Choices(np.array(member), start, time_s, cost_j, gain_w, loss_w, *_flat(before), *_flat(after))


def _flat(lists: Sequence[Sequence[int]]) -> tuple[Integers, Integers]:
    start = np.cumsum([0, *(len(entries) for entries in lists)], dtype=np.int64)
    return start, np.array([entry for entries in lists for entry in entries], dtype=np.int64)


@njit(cache=True)
def ends(choices: Choices, choice: Integers, end_s: Floats) -> float:
    """Fill `end_s` with when each computation ends under `choice`; the makespan, seconds."""
    before_start, before, time_s = choices.before_start, choices.before, choices.time_s
    makespan_s = 0.0
    for k in range(len(choice)):
        start_s = 0.0
        for i in range(before_start[k], before_start[k + 1]):
            start_s = max(start_s, end_s[before[i]])
        end_s[k] = start_s + time_s[choice[k]]
        makespan_s = max(makespan_s, end_s[k])
    return makespan_s


@njit(cache=True)
def _limits(choices: Choices, deadline_s: float) -> Floats:
    """The latest end of each computation that leaves time for all that follows at its fastest."""
    after_start, after, time_s = choices.after_start, choices.after, choices.time_s
    fastest = choices.option_start
    limit_s = np.full(len(choices.member), deadline_s)
    for k in range(len(limit_s) - 1, -1, -1):
        for i in range(after_start[k], after_start[k + 1]):
            limit_s[k] = min(limit_s[k], limit_s[after[i]] - time_s[fastest[choices.member[after[i]]]])
    return limit_s


@njit(cache=True)
def _dispatch(choices: Choices, guide: Guide, limit_s: Floats, choice: Integers, end_s: Floats) -> None:
    """Choose for each computation in turn; `choice` comes with any options, where the search for better ones begins."""
    member, option_start, time_s, cost_j = choices.member, choices.option_start, choices.time_s, choices.cost_j
    gain_w, loss_w, before_start, before = choices.gain_w, choices.loss_w, choices.before_start, choices.before
    wanted_s, price_w, early, late = guide.end_s, guide.price_w, guide.stiffness[0], guide.stiffness[1]
    for k in range(len(choice)):
        start_s = 0.0
        for i in range(before_start[k], before_start[k + 1]):
            start_s = max(start_s, end_s[before[i]])
        first, stop, price = option_start[member[k]], option_start[member[k] + 1], price_w[k]
        wanted, limit = wanted_s[k] - start_s, limit_s[k] - start_s
        middle = choice[k]
        while middle + 1 < stop and time_s[middle] < wanted:
            middle += 1
        while middle > first and (time_s[middle - 1] >= wanted or time_s[middle] > limit):
            middle -= 1
        best, least = first, np.inf
        option = middle
        while option < stop and (time_s[option] <= limit or option == first):
            cost = cost_j[option] + price * (time_s[option] + late * max(0.0, time_s[option] - wanted))
            cost += price * early * max(0.0, wanted - time_s[option])
            if cost < least:
                best, least = option, cost
            if time_s[option] >= wanted and gain_w[option] <= price * (1.0 + late):
                break  # no slower one can be better
            option += 1
        option = middle
        while option > first and loss_w[option] <= price * (1.0 - early):  # else no faster one can be better
            option -= 1
            cost = cost_j[option] + price * (time_s[option] + early * (wanted - time_s[option]))
            if cost < least:
                best, least = option, cost
        choice[k] = best
        end_s[k] = start_s + time_s[best]


@njit(cache=True)
def _fill(choices: Choices, deadline_s: float, choice: Integers, end_s: Floats) -> float:
    """Slow computations into the slack behind them, last ones first; the effective energy then, joules."""
    option_start, time_s, cost_j = choices.option_start, choices.time_s, choices.cost_j
    after_start, after = choices.after_start, choices.after
    latest_start_s = np.empty_like(end_s)
    total_j = 0.0
    for k in range(len(choice) - 1, -1, -1):
        latest_s = deadline_s
        for i in range(after_start[k], after_start[k + 1]):
            latest_s = min(latest_s, latest_start_s[after[i]])
        option, slowest = choice[k], option_start[choices.member[k] + 1] - 1
        room_s = latest_s - (end_s[k] - time_s[option])
        while option < slowest and time_s[option + 1] <= room_s:
            option += 1
        choice[k] = option
        latest_start_s[k] = latest_s - time_s[option]
        total_j += cost_j[option]
    return total_j


@njit(cache=True)
def _mixed(
    choices: Choices,
    deadline_s: float,
    early: Integers,
    late: Integers,
    order: Integers,
    choice: Integers,
    end_s: Floats,
) -> float:
    """`early` for the first computations in `order`, `late` for the rest, and as much of the slower one as fits.

    Fills `choice`; its effective energy, joules, or infinity where not even the faster one fits.
    """
    slow_first = choices.time_s[early].sum() > choices.time_s[late].sum()
    fits, misses = (0, len(order)) if slow_first else (len(order), 0)
    while True:
        part = (fits + misses) // 2 if abs(fits - misses) > 1 else fits
        choice[order[:part]] = early[order[:part]]
        choice[order[part:]] = late[order[part:]]
        in_time = ends(choices, choice, end_s) <= deadline_s
        if part == fits:
            return _fill(choices, deadline_s, choice, end_s) if in_time else np.inf
        if in_time:
            fits = part
        else:
            misses = part


@njit(cache=True)
def _improve(
    choices: Choices,
    deadline_s: float,
    guide: Guide,
    choice: Integers,
    cost_j: float,
    tries: int,
    step_s: float,
    group: bool,
) -> float:
    """Follow `guide` and changes of it, `tries` times; keep what costs no more than `cost_j` in `guide` and `choice`.

    Changes all ends or the stiffness alone, or, if `group`, mostly ends or prices of a random part. Returns the cost.
    """
    np.random.seed(1)
    count, classes = len(choice), len(choices.option_start) - 1
    limit_s = _limits(choices, deadline_s)
    end_s, trial = np.empty(count), choice.copy()
    best = Guide(guide.end_s.copy(), guide.price_w.copy(), guide.stiffness.copy())
    for attempt in range(tries):
        if attempt > 0:
            size = np.random.normal()
            if not group or np.random.random() < 0.25:
                what = np.random.randint(3)
                if what < 2:
                    guide.stiffness[what] *= np.exp(0.5 * size)
                else:
                    guide.end_s[:] += 0.3 * step_s * size
            else:
                first = np.random.randint(count)
                stop = min(count, first + int(count ** np.random.random()))
                if np.random.random() < 0.2:
                    stop = count
                which, what = np.random.randint(classes), np.random.randint(4)
                reach = np.exp(-3.0 * np.random.random())
                change_price = np.random.random() < 0.25
                for k in range(first, stop):
                    kind = choices.member[k]
                    # one class; one kind (classes alternate between them); all stages up to one; all
                    if (kind == which, kind % 2 == which % 2, kind <= which, True)[what]:
                        if change_price:
                            guide.price_w[k] *= np.exp(0.2 * size)
                        else:
                            guide.end_s[k] += 2.0 * step_s * size * reach
        _dispatch(choices, guide, limit_s, trial, end_s)
        trial_j = _fill(choices, deadline_s, trial, end_s)
        if trial_j <= cost_j:
            cost_j = trial_j
            choice[:] = trial
            best.end_s[:], best.price_w[:], best.stiffness[:] = guide.end_s, guide.price_w, guide.stiffness
        else:
            guide.end_s[:], guide.price_w[:], guide.stiffness[:] = best.end_s, best.price_w, best.stiffness
    return cost_j


def anchor_deadlines(deadline_s: float, least_s: float, most_s: float) -> list[float]:
    """Deadlines around `deadline_s`, itself among them, denser near it, between the frontier's ends; falling."""
    part = np.linspace(-1, 1, _ANCHORS)
    around = deadline_s * (1 + _ANCHOR_SPAN * np.sign(part) * np.abs(part) ** 1.5)
    return sorted({float(t) for t in np.clip(around, least_s, most_s)} | {deadline_s}, reverse=True)


def round_plan(choices: Choices, deadline_s: float, anchors: Iterable[Anchor]) -> Integers:
    """One option per computation, all within the deadline, at little more than the relaxed cost.

    Args:
        choices: the problem.
        deadline_s: seconds; at least what the fastest options take.
        anchors: relaxed points of `anchor_deadlines`, one of them that of the deadline.

    Returns:
        (n,) index of the chosen option.
    """
    spans = choices.option_start[1:] - 1
    step_s = float(
        np.mean((choices.time_s[spans] - choices.time_s[choices.option_start[:-1]]) * 3 / np.diff(choices.option_start))
    )
    plans: list[tuple[float, float, Integers]] = []
    for anchor in anchors:
        within_s = anchor.deadline_s * (1 - _ROUNDING_ROOM)
        guide = Guide(anchor.end_s.copy(), anchor.price_w.copy(), np.array([0.3, 0.6]))
        choice = choices.option_start[choices.member]
        cost_j = _improve(choices, within_s, guide, choice, np.inf, _ANCHOR_TRIES, step_s, False)
        plans.append((anchor.deadline_s, cost_j, choice))
        if anchor.deadline_s == deadline_s:
            here, best_j, best, best_guide, relaxed = anchor, cost_j, choice, guide, np.argsort(anchor.end_s)
    within_s = deadline_s * (1 - _ROUNDING_ROOM)
    end_s = np.empty(len(best))
    for slow, fast in _pairs(plans, deadline_s, best_j):
        for early, late in ((slow, fast), (fast, slow)):
            choice = np.empty_like(best)
            cost_j = _mixed(choices, within_s, early, late, relaxed, choice, end_s)
            if cost_j < best_j:
                ends(choices, choice, end_s)
                best_j, best, best_guide = (
                    cost_j,
                    choice,
                    Guide(end_s.copy(), here.price_w.copy(), np.array([2.0, 2.0])),
                )
    tries = min(max(_COMPUTATIONS_TRIED // len(best), _LEAST_TRIES), _MOST_TRIES)
    _improve(choices, within_s, best_guide, best, best_j, tries, step_s, True)
    return best


def _pairs(
    plans: Sequence[tuple[float, float, Integers]], deadline_s: float, best_j: float
) -> list[tuple[Integers, Integers]]:
    """The pairs (slower, faster) of plans around the deadline whose mixture promises to cost least."""
    pairs = []
    for slow_s, slow_j, slow in plans:
        for fast_s, fast_j, fast in plans:
            if fast_s < deadline_s < slow_s:
                share = (deadline_s - fast_s) / (slow_s - fast_s)
                promised_j = share * slow_j + (1 - share) * fast_j
                if promised_j < best_j:
                    pairs.append((promised_j, slow_s, fast_s, slow, fast))
    pairs.sort(key=lambda pair: pair[:3])
    return [pair[3:] for pair in pairs[:_PAIRS]]
