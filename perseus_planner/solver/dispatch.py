"""Dispatching: the kernels that choose an option for every computation of an iteration, one after the other.

Serial schedule generation with a guide, as in resource-constrained scheduling (Kolisch 1996): each computation in
topological order takes the option that is best by its price and by where it should end. See `rounding.py` for the use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import njit

from perseus_planner.solver.choices import Choices, Floats, ends

if TYPE_CHECKING:
    from perseus_planner.solver.network import Integers

_ROUNDING = 1e-11  #: more than sums of 1e4 floats are off by, relative


class Guide(NamedTuple):
    """What a dispatch follows. The kernels change it in place."""

    end_s: Floats  #: (n,) where each computation should end
    price_w: Floats  #: (n,)
    stiffness: Floats  #: (2,) how dear it is to end early, and late, in prices


@njit(cache=True)
def _limits(choices: Choices, deadline_s: float) -> Floats:
    """The latest end of each computation that leaves time for all that follows at its fastest."""
    after_start, after, time_s = choices.after_start, choices.after, choices.time_s
    fastest, lag_s = choices.option_start, choices.after_lag_s
    limit_s = np.full(len(choices.member), deadline_s)
    for k in range(len(limit_s) - 1, -1, -1):
        for i in range(after_start[k], after_start[k + 1]):
            fastest_s = time_s[fastest[choices.member[after[i]]]]
            limit_s[k] = min(limit_s[k], limit_s[after[i]] - fastest_s - lag_s[i])
    return limit_s


@njit(cache=True)
def _dispatch(choices: Choices, guide: Guide, limit_s: Floats, choice: Integers, end_s: Floats) -> None:
    """Choose for each computation in turn; `choice` comes with any options, where the search for better ones begins."""
    member, option_start, time_s, cost_j = choices.member, choices.option_start, choices.time_s, choices.cost_j
    gain_w, loss_w, before_start, before = choices.gain_w, choices.loss_w, choices.before_start, choices.before
    lag_s = choices.before_lag_s
    wanted_s, price_w, early, late = guide.end_s, guide.price_w, guide.stiffness[0], guide.stiffness[1]
    for k in range(len(choice)):
        start_s = 0.0
        for i in range(before_start[k], before_start[k + 1]):
            start_s = max(start_s, end_s[before[i]] + lag_s[i])
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
    after_start, after, lag_s = choices.after_start, choices.after, choices.after_lag_s
    latest_start_s = np.empty_like(end_s)
    total_j = 0.0
    for k in range(len(choice) - 1, -1, -1):
        latest_s = deadline_s
        for i in range(after_start[k], after_start[k + 1]):
            latest_s = min(latest_s, latest_start_s[after[i]] - lag_s[i])
        option, slowest = choice[k], option_start[choices.member[k] + 1] - 1
        room_s = latest_s - (end_s[k] - time_s[option])
        while option < slowest and time_s[option + 1] <= room_s:
            option += 1
        choice[k] = option
        latest_start_s[k] = latest_s - time_s[option]
        total_j += cost_j[option]
    return total_j


@njit(cache=True)
def _fill_exactly(choices: Choices, deadline_s: float, choice: Integers, end_s: Floats, worth_j: float) -> float:
    """`_fill`, but what fits exactly is taken and what misses by a rounding error is not.

    Checked only where the effective energy is at most `worth_j`, so only then does the result hold.
    """
    before = choice.copy()
    total_j = _fill(choices, deadline_s * (1 + _ROUNDING), choice, end_s)
    if total_j <= worth_j and ends(choices, choice, np.empty_like(end_s)) > deadline_s:
        choice[:] = before
        total_j = _fill(choices, deadline_s * (1 - _ROUNDING), choice, end_s)
    return total_j


@njit(cache=True)
def mixed(
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
            return _fill_exactly(choices, deadline_s, choice, end_s, np.inf) if in_time else np.inf
        if in_time:
            fits = part
        else:
            misses = part


@njit(cache=True)
def _vary_all(guide: Guide, step_s: float, size: float) -> None:
    """Change one kind of stiffness, or move all ends."""
    what = np.random.randint(3)
    if what < 2:
        guide.stiffness[what] *= np.exp(0.5 * size)
    else:
        guide.end_s[:] += 0.3 * step_s * size


@njit(cache=True)
def _vary_group(choices: Choices, guide: Guide, step_s: float, size: float) -> None:
    """Move the ends, or the prices, of a group: some classes, from some computation to a later one or to the end."""
    count, classes = len(choices.member), len(choices.option_start) - 1
    first = np.random.randint(count)
    stop = count if np.random.random() < 0.2 else min(count, first + int(count ** np.random.random()))
    which, what = np.random.randint(classes), np.random.randint(4)
    moved_s = 2.0 * step_s * size * np.exp(-3.0 * np.random.random())
    prices = np.random.random() < 0.25
    for k in range(first, stop):
        member = choices.member[k]
        # that class; all of its kind; all classes up to it; every class
        if (member == which, choices.kind[member] == choices.kind[which], member <= which, True)[what]:
            if prices:
                guide.price_w[k] *= np.exp(0.2 * size)
            else:
                guide.end_s[k] += moved_s


@njit(cache=True)
def _copy(source: Guide, target: Guide) -> None:
    target.end_s[:], target.price_w[:], target.stiffness[:] = source.end_s, source.price_w, source.stiffness


@njit(cache=True)
def improve(
    choices: Choices,
    deadline_s: float,
    guide: Guide,
    choice: Integers,
    cost_j: float,
    tries: int,
    step_s: float,
    group: bool,
) -> float:
    """Follow `guide` and changes of it; keep in `guide` and `choice` what costs no more than `cost_j`.

    Args:
        choices: the problem.
        deadline_s: seconds.
        guide: where to begin; the best one in the end.
        choice: (n,) some option each; the best ones in the end.
        cost_j: what `choice` costs, effective joules; infinity where it does not count yet.
        tries: how many plans to make.
        step_s: the size of a change of ends, seconds.
        group: whether to change parts of the guide too, not only all of it.

    Returns:
        The effective energy of `choice` in the end, joules.
    """
    np.random.seed(1)
    limit_s = _limits(choices, deadline_s * (1 - _ROUNDING))
    end_s, trial = np.empty(len(choice)), choice.copy()
    best = Guide(guide.end_s.copy(), guide.price_w.copy(), guide.stiffness.copy())
    for attempt in range(tries):
        if attempt > 0:
            size = np.random.normal()
            if group and np.random.random() < 0.75:
                _vary_group(choices, guide, step_s, size)
            else:
                _vary_all(guide, step_s, size)
        _dispatch(choices, guide, limit_s, trial, end_s)
        trial_j = _fill_exactly(choices, deadline_s, trial, end_s, cost_j)
        if trial_j <= cost_j:
            cost_j = trial_j
            choice[:] = trial
            _copy(guide, best)
        else:
            _copy(best, guide)
    return cost_j


@njit(cache=True)
def cheapest(choices: Choices, deadline_s: float) -> Integers:
    """The best of all choices, by trying each."""
    fastest, slowest = choices.option_start[choices.member], choices.option_start[choices.member + 1] - 1
    trial, best, best_j, end_s = fastest.copy(), fastest.copy(), np.inf, np.empty(len(fastest))
    while True:
        trial_j = choices.cost_j[trial].sum()
        if trial_j < best_j and ends(choices, trial, end_s) <= deadline_s:
            best[:], best_j = trial, trial_j
        k = 0
        while k < len(trial) and trial[k] == slowest[k]:
            trial[k] = fastest[k]
            k += 1
        if k == len(trial):
            return best
        trial[k] += 1
