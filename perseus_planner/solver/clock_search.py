"""Search for the best clocks of an iteration within a limit on clock changes, by annealing.

A clock segment is a stretch of a rank's program at one clock. The next iteration follows this one,
so a segment can go around from the end of the program to its begin; a rank changes its clock as
often as it has segments, and never if it has one.

Moves are of one segment, its borders and clock, or of the same part of many ranks at once: the
ranks of a pipeline run in lockstep, so slowing one of them alone often costs time and saves little;
it pays if many do the same at the same time. `ClockProblem.wave` tells which computations of
different ranks belong together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.solver.clock_problem import (
    ChangeCost,
    ClockProblem,
    ClockState,
    load_state,
    replay,
    replay_changes,
)
from perseus_planner.solver.kernels import kernel

if TYPE_CHECKING:
    from perseus_planner.solver.network import Integers


class Goal(NamedTuple):
    """The goal of a search: the least effective energy within these limits."""

    deadline_s: float
    budget: int  #: most changes of each rank
    price_w: float  #: price of a second beyond the deadline when a search begins
    floor_j: float = -np.inf  #: plans that cost less count only if no other meets the deadline
    waiting_w: float = 0.0  #: what all ranks draw in a second more of the iteration


class Heat(NamedTuple):
    """The effort of a search: its first and last temperature, which falls exponentially."""

    tries: int
    first_j: float
    last_j: float
    slack_j: float = 0.0  #: how much a plan may cost too much by its clocks and still be replayed
    seed: int = 1


@kernel()
def max_changes(
    rank_start: Integers, clock: Integers, first_rank: int, last_rank: int, mode_bits: int
) -> int:
    """Return the most changes of the clock in an iteration of any of these ranks, including the
    change back.
    """
    raise NotImplementedError


def anneal(
    problem: ClockProblem,
    start: Integers,
    goal: Goal,
    heat: Heat,
    library: Integers,
    change: ChangeCost | None = None,
) -> Integers:
    """Return the best clocks found by simulated annealing (Kirkpatrick et al. 1983), which may be
    those of `start`.

    The search accepts plans beyond the deadline at a price, but they count only until one within it
    is found. `start` and the result are within budget. If the result costs less than
    `start`, the difference is larger than rounding errors of sums.

    Args:
        problem: the problem.
        start: (m,) clocks.
        goal: the limits.
        heat: effort and temperatures.
        library: (plans, m) clocks of plans, parts of which may be taken; at least one plan.
        change: what clock changes cost; None if nothing.
    """
    now, cost_j = load_state(problem, start)
    trial, _ = load_state(problem, start)
    best = start.copy()
    scale_j = np.cumsum(np.abs(problem.cost_j[problem.member, start]))[-1]
    time_s = replay(problem, now)
    # The kernel needs two equal states: it undoes a move in one by the other.
    replay(problem, trial)
    # With changes that take time, these say time and energy instead.
    if change is not None:
        time_s, cost_j = replay_changes(problem, trial, change)
    cost_j += goal.waiting_w * time_s
    # Sums of costs in another order may differ by so much, and that is no gain.
    margin_j = 1e-10 * scale_j
    _anneal_clocks(
        problem,
        now,
        trial,
        best,
        time_s,
        cost_j,
        margin_j,
        goal,
        heat,
        library,
        len(library),
        change,
    )
    return best


@kernel("now", "trial", "best", "change")
def _anneal_clocks(
    problem: ClockProblem,
    now: ClockState,
    trial: ClockState,
    best: Integers,
    time_s: float,
    cost_j: float,
    margin_j: float,
    goal: Goal,
    heat: Heat,
    library: Integers,
    plans: int,
    change: ChangeCost | None,
) -> None:
    """Do as `anneal` does, with two equal states of the start, replayed, whose clocks are `best`,
    its seconds and joules, and the rounding error of a sum of joules.
    """
    raise NotImplementedError
