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

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.solver.choices import Choices, Floats, ends
from perseus_planner.solver.dispatch import Guide, cheapest, improve, mixed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from perseus_planner.solver.network import Integers

_ANCHORS = 33  #: deadlines around the one asked for at which plans are made
_ANCHOR_SPAN = 0.06  #: how far they reach, as a part of the deadline
_PAIRS = 8  #: how many pairs of anchors are mixed
_ANCHOR_EFFORT = (80_000, 50, 100)  #: of a plan at an anchor: tries times computations, least tries, most tries
_EFFORT = (3_000_000, 1500, 20_000)  #: of the improvement, likewise
_FEW = 2**15  #: choices in all that are tried one by one instead, so that the smallest problems are solved exactly
_STIFFNESS = (0.3, 0.6)  #: to begin with: early and late
_STIFF = (2.0, 2.0)  #: at which a plan that is followed is repeated


class Anchor(NamedTuple):
    """A relaxed point near the deadline."""

    deadline_s: float
    end_s: Floats  #: (n,)
    price_w: Floats  #: (n,)


def anchor_deadlines(deadline_s: float, least_s: float, most_s: float) -> list[float]:
    """Deadlines around `deadline_s`, itself among them, denser near it, between the frontier's ends; falling."""
    part = np.linspace(-1, 1, _ANCHORS)
    around = deadline_s * (1 + _ANCHOR_SPAN * np.sign(part) * np.abs(part) ** 1.5)
    return sorted({float(t) for t in np.clip(around, least_s, most_s)} | {deadline_s}, reverse=True)


def round_plan(choices: Choices, deadline_s: float, anchors: Iterable[Anchor], known: Integers) -> Integers:
    """One option per computation, all within the deadline, at little more than the relaxed cost.

    Args:
        choices: the problem.
        deadline_s: seconds; at least what the fastest options take.
        anchors: relaxed points of `anchor_deadlines`, one of them that of the deadline.
        known: (n,) some choice of options; the result costs no more where that one is within the deadline.

    Returns:
        (n,) index of the chosen option.
    """
    if math.prod(np.diff(choices.option_start)[choices.member].tolist()) <= _FEW:
        return cheapest(choices, deadline_s)
    step_s = _step_s(choices)
    plans: list[_Rounded] = []
    for anchor in anchors:
        plan = _Rounded(anchor.deadline_s, np.inf, choices.option_start[choices.member])
        guide = Guide(anchor.end_s.copy(), anchor.price_w.copy(), np.array(_STIFFNESS))
        cost_j = improve(
            choices, plan.deadline_s, guide, plan.choice, np.inf, _tries(_ANCHOR_EFFORT, choices), step_s, False
        )
        plans.append(plan._replace(cost_j=cost_j))
        if anchor.deadline_s == deadline_s:
            best, best_guide, asked = plans[-1], guide, anchor
    order = np.argsort(asked.end_s)
    as_known = _Rounded(deadline_s, np.inf, known)
    for first, second in [(as_known, as_known), *_mixtures(plans, best)]:
        choice, end_s = np.empty_like(best.choice), np.empty(len(best.choice))
        cost_j = mixed(choices, deadline_s, first.choice, second.choice, order, choice, end_s)
        if cost_j < best.cost_j:
            best = best._replace(cost_j=cost_j, choice=choice)
            ends(choices, choice, end_s)
            best_guide = Guide(end_s, asked.price_w.copy(), np.array(_STIFF))
    improve(choices, deadline_s, best_guide, best.choice, best.cost_j, _tries(_EFFORT, choices), step_s, True)
    return best.choice


class _Rounded(NamedTuple):
    deadline_s: float
    cost_j: float
    choice: Integers


def _tries(effort: tuple[int, int, int], choices: Choices) -> int:
    computed, least, most = effort
    return min(max(computed // len(choices.member), least), most)


def _step_s(choices: Choices) -> float:
    """How far options are apart: three times the mean distance within a class, over all classes that have several."""
    first, last = choices.option_start[:-1], choices.option_start[1:] - 1
    several = last > first
    if not several.any():
        return 0.0
    distance_s = (choices.time_s[last] - choices.time_s[first]) / np.diff(choices.option_start)
    return float(np.mean(3 * distance_s[several]))


def _mixtures(plans: Sequence[_Rounded], best: _Rounded) -> list[tuple[_Rounded, _Rounded]]:
    """Pairs of plans around the deadline of `best` whose mixture promises to cost less; either one first."""
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
