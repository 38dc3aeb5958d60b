"""Replay an iteration under many joint draws of what its computations take, at a choice of clocks
after the other.

A repaired plan is replayed a hundred times, so what all replays share is laid out once, and the
kernels replay many draws at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.solver.kernels import kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.profiles.estimation import Draws
    from perseus_planner.profiles.smoothing import Floats
    from perseus_planner.schedules.dag import PipelineDag
    from perseus_planner.schedules.iteration import Iteration
    from perseus_planner.solver.network import Integers

#: draws that are replayed at a time where ends are not kept, so that caches hold them: of 16, 32,
#: 64, 100 and 500 the fastest with 4,096 places (measured on one AMD EPYC core)
_AT_A_TIME = 64


class _Points(NamedTuple):
    """The operating points that a choice of clocks uses, by their numbers."""

    number: Integers  #: (points,) of each, in the order in which computations have them first
    times: Integers  #: (points,) how many computations have it
    place: Integers  #: (computations,) which of these points each computation has


class _Durations(NamedTuple):
    """How long each place takes in some cases; few of the rows differ."""

    row_s: Floats  #: (rows, cases) seconds
    row: Integers  #: (places,) which of the rows each place is


class LongestPaths(NamedTuple):
    """Iterations of some cases, and what decided how long they took."""

    time_s: Floats  #: (cases,) without the profile's overhead
    on_path: Floats  #: (places, cases) 1 where a place is on the longest path of a case, else 0


class DrawnReplay:
    """Replays one iteration under draws, as if clock changes took no time.

    Args:
        dag: the iteration.
        draws: of the profile's computations.
        jitter: (computations, m) how many times as long they take in m iterations of a run; None
            without jitter.
    """

    def __init__(self, dag: PipelineDag, draws: Draws, jitter: Floats | None = None) -> None:
        self.dag = dag
        iteration = dag.iteration
        self._draws = draws
        self._jitter = jitter
        self._waits = _waits_of(iteration)
        #: The number of a point is that of its key here, times the clocks, plus that of its clock.
        self.keys = list(dict.fromkeys(iteration.keys))
        number = {key: i for i, key in enumerate(self.keys)}
        self._key = np.array([number[key] for key in iteration.keys], dtype=np.int64)
        self._falling_mhz = np.array(draws.clocks_mhz, dtype=np.int64)
        self._time_s = [draws.time_s[key] for key in self.keys]
        self._energy_j = [draws.energy_j[key] for key in self.keys]
        self._effective_j: dict[int, Floats] = {}  # number of a point -> (draws,)
        #: how many draws there are
        self.count = max((table.shape[-1] for table in self._time_s), default=1)

    def numbers(self, clocks_mhz: Sequence[int]) -> Integers:
        """Return the number of the point of each computation, given its clock."""
        mhz = np.array(clocks_mhz, dtype=np.int64)
        # Clocks fall, so it is their negatives that are sorted.
        clock = np.searchsorted(-self._falling_mhz, -mhz)
        assert np.array_equal(self._falling_mhz[clock], mhz), "a clock that was not drawn"
        numbers: Integers = self._key * len(self._falling_mhz) + clock
        return numbers

    @property
    def most_numbers(self) -> int:
        """How many numbers points can have."""
        return len(self.keys) * len(self._falling_mhz)

    def replay(self, clocks_mhz: Sequence[int]) -> tuple[Floats, Floats]:
        """Return the (draws,) seconds of an iteration, and its joules over all GPUs, waiting
        included.

        With jitter the seconds are the mean of iterations that have it.

        Args:
            clocks_mhz: the clock of each computation, by its place in `dag.computations`.
        """
        points = self._points(clocks_mhz)
        effective_j = self._energies_j(points)
        time_s = self._latest_s(self._durations(points))
        if self._jitter is not None:
            # Jitter has fewer iterations than there are draws, so it enters as one factor: the
            # mean with it over the mean without it, both of the same draws.
            some = np.arange(min(self.count, self._jitter.shape[1]))
            with_s = self._latest_s(self._jittered(points))
            time_s *= np.mean(with_s) / np.mean(time_s[some])
        time_s += self.dag.profile.overhead_s
        return time_s, effective_j + self.dag.waiting_w * time_s

    @property
    def jittered_draws(self) -> Integers:
        """The draw of each iteration with jitter: the draws in turn."""
        assert self._jitter is not None
        numbers: Integers = np.arange(self._jitter.shape[1]) % self.count
        return numbers

    def jittered_s(self, clocks_mhz: Sequence[int]) -> Floats:
        """Return the seconds of each iteration with jitter, without the overhead."""
        return self._latest_s(self._jittered(self._points(clocks_mhz)))

    def longest_paths(
        self, clocks_mhz: Sequence[int], draws: Integers | None = None
    ) -> LongestPaths:
        """Return the longest paths of some draws, or of the iterations with jitter."""
        points = self._points(clocks_mhz)
        durations = self._jittered(points) if draws is None else self._durations(points, draws)
        count = durations.row_s.shape[1]
        end_s = np.empty((len(durations.row), count))
        latest_s = np.empty(count)
        replay_all(self._waits, *durations, count, end_s, count, latest_s)
        on_path = np.zeros_like(end_s)
        mark_longest(self._waits, end_s, latest_s, count, on_path)
        return LongestPaths(latest_s, on_path)

    def _points(self, clocks_mhz: Sequence[int]) -> _Points:
        numbers = self.numbers(clocks_mhz)
        first = np.full(self.most_numbers, len(numbers))
        # Of equal numbers the last one that is written stays, so they are written backwards.
        first[numbers[::-1]] = np.arange(len(numbers))[::-1]
        used = np.flatnonzero(first < len(numbers))
        used = used[np.argsort(first[used])]
        row = np.empty(self.most_numbers, dtype=np.int64)
        row[used] = np.arange(len(used))
        counts = np.bincount(numbers, minlength=self.most_numbers)
        return _Points(used, counts[used], row[numbers])

    def _energies_j(self, points: _Points) -> Floats:
        """Return the (draws,) effective joules of all computations and operations."""
        # Energy is a sum over rows, so equal ones are counted, not repeated.
        rows_j = np.stack([self._effective_row_j(number) for number in points.number.tolist()])
        effective_j: Floats = np.add.reduce(points.times[:, None] * rows_j, axis=0)
        for operation in self.dag.iteration.operations:
            if operation.energy_j is not None:
                # An operation without energies of its own draws what waiting draws, which is in
                # the total.
                effective_j += (
                    operation.energy_j - self.dag.rank_waiting_w[operation.rank] * operation.time_s
                )
        return effective_j

    def _effective_row_j(self, number: int) -> Floats:
        """Return the (draws,) effective joules of a point."""
        if number not in self._effective_j:
            key, clock = divmod(number, len(self._falling_mhz))
            waiting_w = self.dag.profile.blocking_w(self.keys[key].stage)
            waiting_j = waiting_w * self._time_s[key][clock]
            self._effective_j[number] = self._energy_j[key][clock] - waiting_j
        return self._effective_j[number]

    def _durations(self, points: _Points, cases: Integers | None = None) -> _Durations:
        """Return how long each computation and operation takes in some draws, or in all."""
        operations = self.dag.iteration.operations
        count = len(points.number)
        row_s = np.empty((count + len(operations), self.count if cases is None else len(cases)))
        keys, clocks = np.divmod(points.number, len(self._falling_mhz))
        for i, (key, clock) in enumerate(zip(keys.tolist(), clocks.tolist(), strict=True)):
            row = self._time_s[key][clock]
            # Exact rows have one draw that holds for all cases.
            row_s[i] = row if cases is None or len(row) == 1 else row[cases]
        for i, operation in enumerate(operations, count):
            row_s[i] = operation.time_s
        row_of_place = np.concatenate([points.place, np.arange(count, len(row_s))])
        return _Durations(row_s, row_of_place)

    def _jittered(self, points: _Points) -> _Durations:
        """Return how long they take in the iterations with jitter, of the draws in turn."""
        assert self._jitter is not None
        durations = self._durations(points, self.jittered_draws)
        # With jitter every computation takes its own time.
        each_s = durations.row_s[durations.row]
        each_s[: len(self._jitter)] *= self._jitter
        return _Durations(each_s, np.arange(len(each_s)))

    def _latest_s(self, durations: _Durations) -> Floats:
        """Return the (cases,) seconds until all places have ended."""
        count = durations.row_s.shape[1]
        width = min(count, _AT_A_TIME)
        end_s = np.empty((len(durations.row), width))
        latest_s = np.empty(count)
        replay_all(self._waits, *durations, count, end_s, width, latest_s)
        return latest_s


class _Waits(NamedTuple):
    """What each place of an iteration waits for, as its kernels take it."""

    order: Integers  #: (n,) the places, each after all that it waits for
    before_start: Integers  #: (n + 1,) where those of each place begin in `before`
    before: Integers  #: the places that are waited for
    before_lag_s: Floats  #: how long after these have ended, seconds


def _waits_of(iteration: Iteration) -> _Waits:
    """Return what each place waits for."""
    counts = [len(waited) for waited in iteration.waits]
    pairs = [pair for waited in iteration.waits for pair in waited]
    return _Waits(
        np.array(iteration.order, dtype=np.int64),
        np.array([0, *np.cumsum(counts)], dtype=np.int64),
        np.array([place for place, _ in pairs], dtype=np.int64),
        np.array([lag_s for _, lag_s in pairs], dtype=np.float64),
    )


@kernel("end_s", "latest_s")
def replay_all(
    waits: _Waits,
    row_s: Floats,
    row: Integers,
    draws: int,
    end_s: Floats,
    width: int,
    latest_s: Floats,
) -> None:
    """Write when all places have ended in each draw to `latest_s`, (draws,), and when each of them
    has to `end_s`, (places, width), given `_Durations`. With a width below the number of draws, so
    many are replayed at a time, and `end_s` is scratch space.
    """
    raise NotImplementedError


@kernel("on_path")
def mark_longest(
    waits: _Waits, end_s: Floats, latest_s: Floats, draws: int, on_path: Floats
) -> None:
    """Write to `on_path`, which holds zeros, 1 where a place is on the longest path of a draw,
    given what `replay_all` wrote about all draws.
    """
    raise NotImplementedError
