"""Polish a plan of operating points: move the start times of its computations."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.solver.kernels import kernel
from perseus_planner.solver.point_problem import PointProblem, compute_ends

if TYPE_CHECKING:
    from perseus_planner.solver.network import Integers

_MOVES = (3000, 3_000_000)  #: moves of each computation, and of all of them at most
#: first and last temperature, as a part of the median step of energy between operating points
_HEAT = (0.1, 0.025)
_TICKS = 2**45  #: ticks in a deadline
_ROUNDING = 1e-10  #: part of a deadline, more than the rounding errors of 1e4 ticks


class _Ticks(NamedTuple):
    """What a point problem takes, in ticks."""

    deadline: int
    point: Integers  #: (points,)
    before_lag: Integers
    after_lag: Integers


def polish(problem: PointProblem, deadline_s: float, chosen: Integers) -> Integers:
    """Return the points of the best plan found from the plan `chosen`, which costs no more than it.

    It moves the start times of computations: annealing (Kirkpatrick et al. 1983) with local moves.

    A start time for each computation gives each a window, which ends when the first of its
    successors starts; the cheapest operating point that fits its window follows. A move gives one
    computation another start, such that some window becomes exactly as long as one of its operating
    points takes. Others move along: a chain of them, and those that wait for the same computation,
    as where ranks meet. It changes the points of those computations and of their predecessors
    alone, so a move costs no more in a long iteration than in a short one.

    All times are whole numbers of ticks.

    Args:
        problem: the problem.
        deadline_s: seconds.
        chosen: (n,) index of the point of each node, in time.
    """
    # Steps from one point to the next of the same class, not from class to class.
    inside = np.ones(len(problem.cost_j) - 1, dtype=np.bool_)
    inside[problem.point_start[1:-1] - 1] = False
    steps_j = -np.diff(problem.cost_j)[inside]
    moves = min(_MOVES[0] * len(chosen), _MOVES[1])
    if not len(steps_j):
        return chosen
    # Durations are rounded to ticks. First the deadline gets a little room, or a plan that fits
    # exactly would count as late. If the plan found is then late in seconds, the deadline is taken
    # a little earlier instead.
    for room in (_ROUNDING, -_ROUNDING):
        ticks = _in_ticks(problem, deadline_s, room)
        start = _starts(problem, ticks, chosen)
        # Rounding up to ticks made it late: there is no room for polishing.
        if not start:
            break
        # The scale of a temperature is what one move changes, typically.
        hot_j = _HEAT[0] * np.median(steps_j)
        best = chosen.copy()
        scratch = np.zeros((6, len(chosen)), np.int64)
        _anneal_starts(
            problem, ticks, best, np.array(start), scratch, moves, hot_j, _HEAT[1] / _HEAT[0]
        )
        if compute_ends(problem, best, np.empty(len(best))) <= deadline_s:
            return best
    return chosen


def _in_ticks(problem: PointProblem, deadline_s: float, room: float) -> _Ticks:
    """Round operating points and lags up to ticks; the deadline is longer by `room`, a part of
    it.
    """
    tick_s = deadline_s / _TICKS
    times_s = (problem.time_s, problem.before_lag_s, problem.after_lag_s)
    return _Ticks(
        math.floor(_TICKS * (1 + room)),
        *(np.ceil(each_s / tick_s).astype(np.int64) for each_s in times_s),
    )


def _starts(problem: PointProblem, ticks: _Ticks, chosen: Integers) -> list[int]:
    """Return the earliest start of each node, ticks; none if rounding makes the plan late."""
    first = problem.before_start.tolist()
    before = problem.before.tolist()
    lag = ticks.before_lag.tolist()
    start = list[int]()
    end = list[int]()
    for k, duration in enumerate(ticks.point[chosen].tolist()):
        start.append(
            max((end[before[i]] + lag[i] for i in range(first[k], first[k + 1])), default=0)
        )
        end.append(start[k] + duration)
    return start if max(end) <= ticks.deadline else []


@kernel("best", "start", "scratch")
def _anneal_starts(
    problem: PointProblem,
    ticks: _Ticks,
    best: Integers,
    start: Integers,
    scratch: Integers,
    moves: int,
    hot_j: float,
    cooling: float,
) -> None:
    """Change `best`, whose nodes start at `start`, into the points of the best plan found from
    it.

    Args:
        problem: the problem.
        ticks: its times.
        best: (n,) index of the point of each node.
        start: (n,) ticks; changes.
        scratch: (6, n) scratch space, of zeros.
        moves: number of moves.
        hot_j: the first temperature.
        cooling: the last temperature, as a part of the first.
    """
    raise NotImplementedError
