"""Repair plans that are late in too many draws: what is on the longest path of late draws gets
faster clocks.

Slack is the difference of two long paths, of which the uncertainty is a share of their whole
length, however short the computation is that uses the slack. A margin on that computation's time
alone would have to be many times as large. So the computations that are on the longest path in late
draws get the next faster of their operating points, those first that cost the least energy for the
time that they save, until the plan is on time. Within a switch budget whole clock segments do, so a
repair adds no change.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.solver.drawn_plans import SAME, clock_segments

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from perseus_planner.profiles.keys import Key
    from perseus_planner.profiles.smoothing import Floats
    from perseus_planner.solver.drawn_plans import Drawn, DrawnPlans, Lateness

# Rounds at most, in each of which what makes a plan late gets faster. It is a guard alone: each
# round sets some faster clock, so rounds end. With 60, GPT-3 at 2 % jitter, which needs more, had
# no plan on time but all clocks at maximum.
_REPAIRS = 2_000
_LATEST = 64  #: draws that a round looks at
_AT_ONCE = 0.1  #: of the computations that may get faster in a round
_LEAST_J = 1e-12  #: of what a faster operating point costs


class _Late(NamedTuple):
    """Cases in which a plan is late, of the draws and of iterations with jitter."""

    time_s: dict[Key, Floats]  #: (clocks, cases) seconds at each clock of the draws, without jitter
    #: (computations, cases) how late the case is, times the jitter there, where the computation is
    #: on its longest path; else 0
    weight: Floats


class _Move(NamedTuple):
    """A faster clock for one computation, or for places of one segment, in which a rank keeps its
    clock.
    """

    score: float  #: lateness that it takes away, for the effective energy that it costs
    places: tuple[int, ...]  #: the computations that get it; the first one breaks ties
    to_mhz: int  #: the faster clock
    owner: int  #: no two moves of one owner go together: the computation, or the segment's rank


class Repairs:
    """Repairs plans of one frontier.

    Args:
        plans: replays them under the draws.
    """

    def __init__(self, plans: DrawnPlans) -> None:
        self._plans = plans

    def repaired(
        self,
        drawn: Drawn,
        ratio: float,
        lateness: Lateness,
        most_j: float,
        *,
        in_segments: bool,
    ) -> Drawn:
        """Return the plan with faster clocks for what makes it late; as it is if it is on time.

        Args:
            drawn: the plan.
            ratio: over the baseline; draws count by how much later than this they are.
            lateness: how late a plan of such seconds is; at most 0 if it is on time.
            most_j: effective energy from which on a plan is not worth more repairs, joules.
            in_segments: whether whole clock segments get faster, which adds no clock change.
        """
        faster = self._faster_segments if in_segments else self._faster_points
        clocks = drawn.clocks_mhz
        for _ in range(_REPAIRS):
            if lateness(drawn.time_s) <= 0.0 or self._plans.effective_j(drawn) >= most_j:
                break
            moves = faster(clocks, self._late(drawn, ratio))
            if not moves:
                break
            clocks = _moved(clocks, moves)
            drawn = self._plans.replayed_with_changes(clocks, drawn.margin)
        return drawn

    def _faster_points(self, clocks: Sequence[int], late: _Late) -> list[_Move]:
        """Return the moves of a round, of single computations to their next faster operating
        point, as `_faster_segments` does.
        """
        numbers = self._plans.replay.numbers(clocks)
        scores = np.zeros(len(numbers))
        to_mhz = np.zeros(len(numbers), dtype=np.int64)
        # Computations at one point have one next faster point, so these are scored together.
        by_number = np.argsort(numbers, kind="stable")
        ends = np.flatnonzero(np.diff(numbers[by_number])) + 1
        for places in np.split(by_number, ends):
            key = self._plans.mean.dag.iteration.keys[places[0]]
            at_mhz = clocks[places[0]]
            # What is expected to be faster may be slower where the plan is late: such computations
            # are left for full clocks, from which lateness is counted.
            left = places
            for mhz in self._faster[key].get(at_mhz, ()):
                scores[left] = late.weight[left] @ self._saved_s(late, key, at_mhz, mhz)
                scores[left] /= self._added_j(key, at_mhz, mhz)
                to_mhz[left] = mhz
                left = left[scores[left] <= 0.0]
        count = _in_a_round(int((scores > 0.0).sum()))
        # Places rise, and break ties.
        best = np.argsort(-scores, kind="stable")[:count].tolist()
        return [_Move(float(scores[place]), (place,), int(to_mhz[place]), place) for place in best]

    def _saved_s(self, late: _Late, key: Key, at_mhz: int, to_mhz: int) -> Floats:
        """Return the (cases,) seconds that a faster clock saves a computation."""
        time_s = late.time_s[key]
        row = self._plans.draw_row
        saved_s: Floats = time_s[row[at_mhz]] - time_s[row[to_mhz]]
        return saved_s

    def _added_j(self, key: Key, at_mhz: int, to_mhz: int) -> float:
        """Return the effective joules that a faster clock costs, at least `_LEAST_J`."""
        costs_j = self._plans.costs_j[key]
        return max(costs_j[to_mhz] - costs_j[at_mhz], _LEAST_J)

    def _faster_segments(self, clocks: Sequence[int], late: _Late) -> list[_Move]:
        """Return the moves of a round: of those that take lateness away the part that cost the
        least energy for it, these first.

        What gets a faster clock is a whole segment, in which a rank keeps its clock, or the
        computation at one end of it, which joins the segment beside it. Two such moves of a rank
        could add a change: an end that joins a segment which gets another clock itself would be a
        segment of its own.

        Args:
            clocks: of each computation, MHz.
            late: when the plan of these clocks is late.
        """
        iteration = self._plans.mean.dag.iteration
        keys = iteration.keys
        moves = []
        for rank, program in enumerate(iteration.programs):
            # Fixed operations have no clock, and end no segment.
            own = [place for place in program if place < len(keys)]
            segments = clock_segments(own, clocks)
            for number, segment in enumerate(segments):
                at_mhz = clocks[segment[0]]
                of_keys = {keys[place] for place in segment}
                common = set.intersection(*(set(self._plans.costs_j[key]) for key in of_keys))
                tried = [(segment, sorted(common))]
                # The segments before and after it; iterations follow each other, so all have both.
                if len(segments) > 1:
                    before = clocks[segments[number - 1][0]]
                    after = clocks[segments[(number + 1) % len(segments)][0]]
                    tried += [([segment[0]], [before]), ([segment[-1]], [after])]
                # Of the clocks of the whole segment, the next one that is faster is enough.
                for places, clocks_mhz in tried:
                    faster = [mhz for mhz in clocks_mhz if mhz > at_mhz]
                    moves += self._first_move(places, at_mhz, faster, late, rank)
        return _in_order(moves)[: _in_a_round(len(moves))]

    def _first_move(
        self, places: Sequence[int], at_mhz: int, faster: Sequence[int], late: _Late, owner: int
    ) -> list[_Move]:
        """Return the move of places to the first of some faster clocks that takes lateness away, if
        there is one.
        """
        # Where a place is on no longest path, it takes none away.
        if not late.weight[places].any():
            return []
        by_key: dict[Key, list[int]] = {}
        for place in places:
            by_key.setdefault(self._plans.mean.dag.iteration.keys[place], []).append(place)
        row = self._plans.draw_row
        # Seconds at each clock, times lateness.
        late_s = sum(
            late.time_s[key] @ late.weight[of_key].sum(axis=0) for key, of_key in by_key.items()
        )
        for to_mhz in faster:
            costs = [(self._plans.costs_j[key], len(of_key)) for key, of_key in by_key.items()]
            if any(to_mhz not in costs_j for costs_j, _ in costs):
                continue
            cost_j = sum(count * (costs_j[to_mhz] - costs_j[at_mhz]) for costs_j, count in costs)
            gain = float(late_s[row[at_mhz]] - late_s[row[to_mhz]])
            if gain > 0.0:
                return [_Move(gain / max(cost_j, _LEAST_J), tuple(places), to_mhz, owner)]
        return []

    def _late(self, drawn: Drawn, ratio: float) -> _Late:
        """Return the cases in which a plan is later than `ratio` times the baseline, the worst ones
        of the draws and all with jitter.
        """
        clocks = drawn.clocks_mhz
        # How late each draw is; the worst ones stand for all, as each is replayed again.
        excess = np.maximum(0.0, drawn.time_s / self._plans.baseline.time_s - ratio)
        cases = np.argsort(-excess, kind="stable")[:_LATEST]
        cases = cases[excess[cases] > 0.0]
        on_path = self._plans.replay.longest_paths(clocks, cases).on_path[: len(clocks)]
        weight = on_path * excess[cases]
        if self._plans.jitter is not None:
            # What is late with jitter alone is late in iterations that have their own longest path,
            # and not in the draws that are the latest by their rows.
            paths = self._plans.replay.longest_paths(clocks)
            with_s = paths.time_s + self._plans.mean.profile.overhead_s
            excess = np.maximum(0.0, with_s / self._plans.jittered_baseline_s - ratio)
            jittered = paths.on_path[: len(clocks)] * excess * self._plans.jitter
            weight = np.concatenate([weight, jittered], axis=1)
            cases = np.concatenate([cases, self._plans.replay.jittered_draws])
        return _Late(
            {key: self._plans.case_s(key, cases) for key in self._plans.replay.keys}, weight
        )

    @cached_property
    def _faster(self) -> dict[Key, dict[int, tuple[int, ...]]]:
        """(stage, kind) -> clock below the top clock -> the next faster operating point, if there
        is one, and the top clock.
        """
        steps: dict[Key, dict[int, tuple[int, ...]]] = {}
        for key in set(self._plans.mean.dag.iteration.keys):
            top, *rows = self._plans.mean.profile.measurements[key]
            points = self._plans.mean.dag.points[key]
            steps[key] = {}
            for row in rows:
                quicker = [point for point in points if point.time_s < row.time_s * (1 - SAME)]
                # The slowest of the faster points is the smallest step. The top clock need not be
                # an operating point, but all clocks at maximum must stay in reach.
                step = [max(quicker, key=lambda point: point.time_s).clock_mhz] if quicker else []
                steps[key][row.clock_mhz] = (*step, top.clock_mhz)
        return steps


def _in_a_round(moves: int) -> int:
    """Return how many of some moves a round makes: a part of them at a time, as each faster clock
    may move the longest path elsewhere.
    """
    return math.ceil(moves * _AT_ONCE)


def _in_order(moves: list[_Move]) -> list[_Move]:
    """Return the moves, the best first; places break ties, so that equal input gives an equal
    plan.
    """
    return sorted(moves, key=lambda move: (-move.score, move.places))


def _moved(clocks: Sequence[int], moves: Iterable[_Move]) -> list[int]:
    """Return the clocks after the moves; of an owner's the first one alone."""
    after = list(clocks)
    moved = set[int]()
    for move in moves:
        if move.owner not in moved:
            moved.add(move.owner)
            for place in move.places:
                after[place] = move.to_mhz
    return after
