"""Round a relaxed point of the frontier to one measured clock per computation, within the deadline.

A relaxed duration lies between measured ones, and choosing a clock for each computation is the
discrete time-cost trade-off problem, which is NP-hard (De et al. 1997). The relaxed solution is a
good guide to it, by two numbers for each computation: when it should end, and the price of its time
in watts, which is the flow of the minimum cut.

1. *Dispatch.* In topological order, each computation takes the operating point with the least sum
   of energy, price * time and price * (distance of its end from when it should end). Deviations of
   one computation are made up for by the next ones, as in error diffusion. A point that leaves too
   little time for the successors at their fastest is never taken, so a feasible deadline is met.
   Then slack is filled, backwards.
2. *Mixing.* If points are far apart, one deadline is much easier to meet well than another:
   pipelines run in lockstep, and at most deadlines a whole row of stages would need a duration that
   none of them has. So plans are made for deadlines around the requested one, and two of them, a
   slower and a faster one, run one after the other within one iteration. That costs what the
   straight line between both says, and the frontier is nearly straight there.
3. *Improvement.* The best of the mixed plans becomes a guide, beside that of the relaxed solution:
   ends and prices of random groups of computations are changed, and plans that cost no more are
   kept. The number of tries and the seed are fixed: equal input, equal plan.

The cheaper of both plans is then polished (`polish.py`).

Dispatching is serial schedule generation with a guide, as in resource-constrained scheduling
(Kolisch 1996).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.solver.kernels import kernel
from perseus_planner.solver.point_problem import PointProblem, compute_ends

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.solver.network import Floats, Integers


class Guide(NamedTuple):
    """The guide of a dispatch. The kernels change it in place."""

    end_s: Floats  #: (n,) when each computation should end
    price_w: Floats  #: (n,) price of each computation's time
    #: (2,) what a second too early, and too late, costs, as a multiple of the price
    stiffness: Floats


@kernel("chosen", "end_s", "before")
def _fill_exactly(
    problem: PointProblem,
    deadline_s: float,
    chosen: Integers,
    end_s: Floats,
    before: Integers,
    worth_j: float,
) -> float:
    """Slow computations into the slack behind them, last ones first: take what fits exactly, and
    not what misses by a rounding error. Return the effective energy then, joules; `end_s` then
    holds the latest starts.

    What misses is checked only if the effective energy is at most `worth_j`; otherwise the plan may
    be late. `before` is scratch space.
    """
    raise NotImplementedError


def mix(
    problem: PointProblem,
    deadline_s: float,
    early: Integers,
    late: Integers,
    order: Integers,
    chosen: Integers,
    end_s: Floats,
) -> float:
    """Fill `chosen` with `early` for the first computations in `order` and `late` for the rest.

    As much as fits is taken from the slower one of the two. Returns the effective energy, joules,
    or infinity if not even the faster one fits.
    """
    # Whether more of the early plan, or less of it, is slower.
    slow_first = problem.time_s[early].sum() > problem.time_s[late].sum()
    fits, misses = (0, len(order)) if slow_first else (len(order), 0)
    while True:
        # By halving. Where both are neighbours, the last try is the one that fits.
        part = (fits + misses) // 2 if abs(fits - misses) > 1 else fits
        chosen[order[:part]] = early[order[:part]]
        chosen[order[part:]] = late[order[part:]]
        in_time = compute_ends(problem, chosen, end_s) <= deadline_s
        if part == fits:
            return (
                # The moment of change leaves slack, as it is a whole number of computations.
                _fill_exactly(problem, deadline_s, chosen, end_s, order.copy(), np.inf)
                if in_time
                else np.inf
            )
        if in_time:
            fits = part
        else:
            misses = part


def improve(
    problem: PointProblem,
    deadline_s: float,
    guide: Guide,
    chosen: Integers,
    cost_j: float,
    tries: int,
    step_s: float,
    group: bool,
) -> float:
    """Dispatch by `guide` and by random changes of it; keep those that cost no more than `cost_j`.

    Args:
        problem: the problem.
        deadline_s: seconds.
        guide: the first guide; holds the best one in the end.
        chosen: (n,) any points; holds the best ones in the end.
        cost_j: effective energy of `chosen`, joules; infinity if it does not count yet.
        tries: number of plans to make.
        step_s: the size of a change of ends, seconds.
        group: whether to change parts of the guide too, not only all of it.

    Returns:
        The effective energy of the final `chosen`, joules.
    """
    best = Guide(guide.end_s.copy(), guide.price_w.copy(), guide.stiffness.copy())
    plans = np.array([chosen] * 4)
    times_s = np.empty((4, len(chosen)))
    cost_j = _improve_guide(
        problem, deadline_s, guide, best, plans, times_s, cost_j, tries, step_s, group
    )
    chosen[:] = plans[0]
    return cost_j


@kernel("guide", "best", "plans", "times_s")
def _improve_guide(
    problem: PointProblem,
    deadline_s: float,
    guide: Guide,
    best: Guide,
    plans: Integers,
    times_s: Floats,
    cost_j: float,
    tries: int,
    step_s: float,
    group: bool,
) -> float:
    """Do as `improve` does, with equal guides; the best plan is the first one of `plans`."""
    raise NotImplementedError


def try_all_points(problem: PointProblem, deadline_s: float) -> Integers:
    """Return the best combination of points by trying all of them."""
    best = problem.point_start[problem.member]
    _try_all(problem, deadline_s, best.copy(), best, np.empty(len(best)))
    return best


@kernel("trial", "best", "end_s")
def _try_all(
    problem: PointProblem, deadline_s: float, trial: Integers, best: Integers, end_s: Floats
) -> None:
    """Count `trial` up from the fastest points, and keep the `best` one."""
    raise NotImplementedError


ANCHOR_SPAN = 0.06  #: distance of the anchors from the deadline at most, as a part of it
_PAIRS = 8  #: number of pairs of anchors that are mixed
#: for a plan at an anchor: tries times computations, least tries, most tries
_ANCHOR_EFFORT = (80_000, 50, 100)
_EFFORT = (3_000_000, 1500, 20_000)  #: the same three for the improvement of the best plan
#: combinations up to which all are tried, so that the smallest problems are solved exactly
_FEW = 2**15
STIFFNESS = (0.3, 0.6)  #: at first: early and late
_STIFF = (2.0, 2.0)  #: so stiff that a plan that guides is repeated


class Anchor(NamedTuple):
    """A relaxed point near the deadline."""

    deadline_s: float
    end_s: NDArray[np.floating]  #: (n,)
    price_w: NDArray[np.floating]  #: (n,)


def round_plan(
    problem: PointProblem,
    deadline_s: float,
    anchors: Iterable[Anchor],
    known: Integers,
    effort: float = 1.0,
) -> Integers:
    """Choose an operating point for each computation, within the deadline, at little more than the
    relaxed cost.

    Args:
        problem: the problem.
        deadline_s: seconds; at least what the fastest points take.
        anchors: relaxed points near the deadline; the first one is for the deadline itself.
        known: (n,) points of a known plan; the result costs no more than this plan if it meets the
            deadline.
        effort: part of the tries of the improvement.

    Returns:
        (n,) index of the chosen point of each node.
    """
    if math.prod(np.diff(problem.point_start)[problem.member].tolist()) <= _FEW:
        return try_all_points(problem, deadline_s)
    step_s = point_step_s(problem)
    plans: list[_RoundedPlan] = []
    for anchor in anchors:
        # A quick plan at each anchor, by changes of its whole guide.
        plan = _RoundedPlan(anchor.deadline_s, np.inf, problem.point_start[problem.member])
        guide = _guide(anchor.end_s, anchor.price_w, STIFFNESS)
        cost_j = improve(
            problem,
            plan.deadline_s,
            guide,
            plan.chosen,
            np.inf,
            _tries(_ANCHOR_EFFORT, problem),
            step_s,
            False,
        )
        plans.append(plan._replace(cost_j=cost_j))
        # The first anchor is that of the deadline itself.
        if len(plans) == 1:
            best = plans[0]
            best_guide = guide
            target = anchor
    # A mixture changes plans at one moment of the iteration, so the relaxed ends say who comes
    # first.
    order = np.argsort(target.end_s)
    as_known = _RoundedPlan(deadline_s, np.inf, known)
    mixed = best._replace(cost_j=np.inf)
    # The known plan, mixed with itself, has its slack filled.
    for first, second in [(as_known, as_known), *_mixtures(plans, best)]:
        chosen = np.empty_like(best.chosen)
        end_s = np.empty(len(best.chosen))
        cost_j = mix(problem, deadline_s, first.chosen, second.chosen, order, chosen, end_s)
        if cost_j < mixed.cost_j:
            mixed = best._replace(cost_j=cost_j, chosen=chosen)
    starts = [(best, best_guide)]
    if mixed.cost_j < np.inf:
        # Its own ends are its guide, so stiff that dispatching begins by repeating it.
        compute_ends(problem, mixed.chosen, end_s)
        starts.append((mixed, _guide(end_s, target.price_w, _STIFF)))
    tries = round(effort * _tries(_EFFORT, problem))
    # Now parts of the guide change too. Each search changes its plan in place.
    costs_j = [
        improve(problem, deadline_s, guide, plan.chosen, plan.cost_j, tries, step_s, True)
        for plan, guide in starts
    ]
    return starts[int(np.argmin(costs_j))][0].chosen


def _guide(
    end_s: NDArray[np.floating], price_w: NDArray[np.floating], stiffness: tuple[float, float]
) -> Guide:
    return Guide(
        np.array(end_s, dtype=np.float64), np.array(price_w, dtype=np.float64), np.array(stiffness)
    )


class _RoundedPlan(NamedTuple):
    deadline_s: float
    cost_j: float
    chosen: Integers


def _tries(effort: tuple[int, int, int], problem: PointProblem) -> int:
    computed, least, most = effort
    return min(max(computed // len(problem.member), least), most)


def point_step_s(problem: PointProblem) -> float:
    """Return three times the mean distance between neighbouring points, over all classes that
    have several, seconds.
    """
    first = problem.point_start[:-1]
    last = problem.point_start[1:] - 1
    several = last > first
    if not several.any():
        return 0.0
    distance_s = (problem.time_s[last] - problem.time_s[first]) / np.diff(problem.point_start)
    return float(np.mean(3 * distance_s[several]))


def _mixtures(
    plans: Sequence[_RoundedPlan], best: _RoundedPlan
) -> list[tuple[_RoundedPlan, _RoundedPlan]]:
    """Return pairs of plans around the deadline of `best` whose mixture promises to cost less,
    in either order.
    """
    promising = []
    for slow in plans:
        for fast in plans:
            if fast.deadline_s < best.deadline_s < slow.deadline_s:
                share = (best.deadline_s - fast.deadline_s) / (slow.deadline_s - fast.deadline_s)
                promised_j = share * slow.cost_j + (1 - share) * fast.cost_j
                if promised_j < best.cost_j:
                    promising.append((promised_j, slow, fast))
    promising.sort(key=lambda entry: (entry[0], entry[1].deadline_s, entry[2].deadline_s))
    return [pair for _, slow, fast in promising[:_PAIRS] for pair in ((slow, fast), (fast, slow))]
