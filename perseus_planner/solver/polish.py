"""Polish a plan by moving the start times of its computations: annealing (Kirkpatrick et al. 1983)
with local moves.

A start time for each computation gives each a window, which ends when the first of its successors
starts; the cheapest operating point that fits its window follows. A move gives one computation
another start, such that some window becomes exactly as long as one of its operating points takes.
Others move along: a chain of them, and those that wait for the same computation, as where ranks
meet. It changes the points of those computations and of their predecessors alone, so a move costs
no more in a long iteration than in a short one.

All times are whole numbers of ticks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.solver.kernels import inner_kernel, kernel
from perseus_planner.solver.point_problem import compute_ends

if TYPE_CHECKING:
    from perseus_planner.solver.network import Integers
    from perseus_planner.solver.point_problem import PointProblem

_MOVES = (3000, 3_000_000)  #: moves of each computation, and of all of them at most
_HEAT = (
    0.1,
    0.025,
)  #: first and last temperature, as a part of the median step of energy between operating points
_STEADY = 256  #: moves at one temperature
_TICKS = 2**45  #: ticks in a deadline
_ROUNDING = 1e-10  #: part of a deadline, more than the rounding errors of 1e4 ticks
_CHAINS = 0.2  #: part of the moves that take a chain along
_LONGEST = 4  #: most computations of a chain beside the first one
_MEETINGS = 0.5  #: part of the moves that take along what waits for the same computation
_IDLE = 4  #: the search ends after this part of the moves has found nothing: one in so many
_NEAR = 0.7  #: part of the moves to a neighbouring operating point; the others are to any


class _Ticks(NamedTuple):
    """What a point problem takes, in ticks."""

    deadline: int
    point: Integers  #: (points,)
    before_lag: Integers
    after_lag: Integers


def polish(problem: PointProblem, deadline_s: float, chosen: Integers) -> Integers:
    """Return the points of the best plan found from the plan `chosen`, which costs no more than it.

    Args:
        problem: the problem.
        deadline_s: seconds.
        chosen: (n,) index of the point of each node, in time.
    """
    inside = np.ones(len(problem.cost_j) - 1, dtype=np.bool_)
    inside[problem.point_start[1:-1] - 1] = False
    steps_j = -np.diff(problem.cost_j)[inside]
    moves = min(_MOVES[0] * len(chosen), _MOVES[1])
    if not len(steps_j):
        return chosen
    for room in (
        _ROUNDING,
        -_ROUNDING,
    ):  # what fits exactly misses by a rounding error, and the other way around
        ticks = _in_ticks(problem, deadline_s, room)
        start = _starts(problem, ticks, chosen)
        if not start:
            break
        hot_j = _HEAT[0] * np.median(steps_j)
        best = chosen.copy()
        scratch = np.zeros((6, len(chosen)), np.int64)
        _anneal(problem, ticks, best, np.array(start), scratch, moves, hot_j, _HEAT[1] / _HEAT[0])
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
    first, before, lag = (
        problem.before_start.tolist(),
        problem.before.tolist(),
        ticks.before_lag.tolist(),
    )
    start, end = list[int](), list[int]()
    for k, duration in enumerate(ticks.point[chosen].tolist()):
        start.append(
            max((end[before[i]] + lag[i] for i in range(first[k], first[k + 1])), default=0)
        )
        end.append(start[k] + duration)
    return start if max(end) <= ticks.deadline else []


@inner_kernel
def _window(
    deadline: int, start: Integers, after_start: Integers, after: Integers, lag: Integers, k: int
) -> int:
    """Return how long node k may take, ticks."""
    end = deadline
    for i in range(after_start[k], after_start[k + 1]):
        end = min(end, start[after[i]] - lag[i])
    return end - start[k]  # type: ignore[no-any-return]


@inner_kernel
def _take_along(
    starts: tuple[Integers, Integers],
    others: tuple[Integers, Integers],
    chain: int,
    moved: Integers,
    taken: Integers,
    move: int,
) -> int:
    """Add nodes to `moved` that move along with its first one; return how many they are in all.

    `starts` and `others` are those of the predecessors and of the successors; `chain` tells along
    which of them a chain goes.
    """
    meets, last = np.random.random() < _MEETINGS, np.random.random() < 0.5
    links = np.random.randint(0, _LONGEST) + 1 if np.random.random() < _CHAINS else 0
    count, k = 1, moved[0]
    taken[k] = move
    while True:
        first, stop = starts[0][k], starts[0][k + 1]
        if meets and first < stop:
            before = others[0][np.random.randint(first, stop)]
            for i in range(starts[1][before], starts[1][before + 1]):
                other = others[1][i]
                if taken[other] != move:
                    taken[other] = move
                    moved[count] = other
                    count += 1
        first, stop = starts[chain][k], starts[chain][k + 1]
        if links == 0 or first == stop:
            return count
        k = others[chain][stop - 1 if last else first]
        if taken[k] == move:
            return count
        taken[k] = move
        moved[count] = k
        count += 1
        links -= 1


@kernel
def _anneal(
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
    """
    np.random.seed(1)
    # Local names: an array taken out of a tuple inside the loop costs more than the loop's own
    # work.
    member, point_start, cost_j, time = (
        problem.member,
        problem.point_start,
        problem.cost_j,
        ticks.point,
    )
    before_start, before, before_lag = problem.before_start, problem.before, ticks.before_lag
    deadline, after_start, after, after_lag = (
        ticks.deadline,
        problem.after_start,
        problem.after,
        ticks.after_lag,
    )
    now, cost, least, heat_j = scratch[0], 0.0, 0.0, hot_j
    seen = scratch[1]  # 1 + the move in which each node was last looked at
    moved, nodes, points, taken = scratch[2], scratch[3], scratch[4], scratch[5]
    found = 0
    for node in range(len(best)):
        now[node] = best[node]
    for move in range(moves):
        if move % _STEADY == 0:
            if move - found > moves // _IDLE:
                break
            heat_j = hot_j * cooling ** (move / moves)
        k = np.random.randint(0, len(start))
        befores = before_start[k + 1] - before_start[k]
        own = (
            befores == 0 or np.random.random() < 0.5
        )  # whether the window that changes is that of k or of one before
        which = 0 if own else before_start[k] + np.random.randint(0, befores)
        node = k if own else before[which]
        first, stop = point_start[member[node]], point_start[member[node] + 1]
        point = now[node] + (1 if np.random.random() < 0.5 else -1)
        if np.random.random() >= _NEAR:
            point = np.random.randint(first, stop)
        if point < first or point >= stop:
            continue
        if own:
            shift = _window(deadline, start, after_start, after, after_lag, k) - time[point]
        else:
            shift = start[node] + time[point] + before_lag[which] - start[k]
        if shift == 0:
            continue
        moved[0] = k
        count = _take_along(
            (before_start, after_start), (before, after), 0 if own else 1, moved, taken, move + 1
        )
        for k in moved[:count]:
            start[k] += shift
        changed, added, fits = 0, 0.0, True
        for k in moved[:count]:
            fits = fits and start[k] >= 0
            for i in range(before_start[k] - 1, before_start[k + 1]):
                node = k if i < before_start[k] else before[i]
                if not fits or seen[node] == move + 1:
                    continue
                seen[node] = move + 1
                window = _window(deadline, start, after_start, after, after_lag, node)
                point, first, stop = (
                    now[node],
                    point_start[member[node]],
                    point_start[member[node] + 1],
                )
                while point + 1 < stop and time[point + 1] <= window:
                    point += 1
                while point > first and time[point] > window:
                    point -= 1
                fits = time[point] <= window
                if point != now[node]:
                    added += cost_j[point] - cost_j[now[node]]
                    nodes[changed], points[changed] = node, point
                    changed += 1
        if fits and (added <= 0.0 or np.random.random() < np.exp(-added / heat_j)):
            for i in range(changed):
                now[nodes[i]] = points[i]
            cost += added
            if cost < least - 1e-9 * hot_j:
                least, found = cost, move
                for node in range(len(best)):
                    best[node] = now[node]
        else:
            for k in moved[:count]:
                start[k] -= shift
