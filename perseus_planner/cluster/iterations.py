"""Replayed iterations of one pipeline, rank by rank, while the pipeline or some of its stages
are slow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.plans.clock_replay import Task
from perseus_planner.plans.replay import end_times, replay_changes
from perseus_planner.profiles.measurement import Measurement

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.cluster.stragglers import Condition
    from perseus_planner.profiles.measurement import ClockChange
    from perseus_planner.schedules.dag import PipelineDag

Clocks = tuple[int, ...]  #: the clock of each of `dag.computations`, MHz
Table = Mapping[int, Measurement]


class ReplayedIteration(NamedTuple):
    """One replayed iteration of one pipeline."""

    time_s: float  #: iteration time with the calibrated overhead, seconds
    busy_s: NDArray[np.float64]  #: (ranks,) time for which the GPUs of each rank work, seconds
    busy_j: NDArray[np.float64]  #: (ranks,) energy of that work over all GPUs of the rank, joules


class IterationReplays:
    """Replays iterations of one pipeline, each combination of clocks and slow stages once.

    The slowdown of a stage applies to its computations. The slowdown of a pipeline applies to
    everything: computations, fixed operations, transfers and overhead. The power of a GPU does not
    change, so energies grow as times do.
    """

    def __init__(self, dag: PipelineDag) -> None:
        self.dag = dag
        keys = dag.iteration.keys
        self._tables_of = {
            key: {m.clock_mhz: m for m in dag.profile.measurements[key]} for key in set(keys)
        }
        self._tables = [self._tables_of[key] for key in keys]
        self._slow_tables: dict[tuple[tuple[int, float], ...], dict[tuple[int, str], Table]] = {}
        self._rank_of = np.array(dag.iteration.rank_of)
        self._replays: dict[tuple[Clocks, tuple[tuple[int, float], ...]], ReplayedIteration] = {}

    def replay(self, clocks: Clocks, condition: Condition) -> ReplayedIteration:
        """Return an iteration at `clocks` of a pipeline in `condition`.

        Complexity: one replay for each new pair of clocks and slow stages, and a look-up after
        that.
        """
        key = clocks, condition.stages
        if key not in self._replays:
            self._replays[key] = self._replay(clocks, dict(condition.stages))
        found, slowdown = self._replays[key], condition.slowdown
        return (
            found
            if slowdown == 1
            else ReplayedIteration(
                found.time_s * slowdown, found.busy_s * slowdown, found.busy_j * slowdown
            )
        )

    def _replay(self, clocks: Clocks, slow: Mapping[int, float]) -> ReplayedIteration:
        iteration, waiting_w = self.dag.iteration, self.dag.rank_waiting_w
        if self.dag.profile.clock_change is not None:
            return self._replay_with_changes(clocks, slow, self.dag.profile.clock_change)
        points = [table[clock] for table, clock in zip(self._tables, clocks, strict=True)]
        slowdowns = [slow.get(stage, 1.0) for stage, _ in iteration.keys]
        times_s = [
            point.time_s * slowdown for point, slowdown in zip(points, slowdowns, strict=True)
        ]
        energies_j = [
            point.energy_j * slowdown for point, slowdown in zip(points, slowdowns, strict=True)
        ]
        time_s = max(end_times(self.dag, times_s)) + self.dag.profile.overhead_s
        for each in iteration.operations:
            times_s.append(each.time_s)
            energies_j.append(
                waiting_w[each.rank] * each.time_s if each.energy_j is None else each.energy_j
            )
        return ReplayedIteration(time_s, self._per_rank(times_s), self._per_rank(energies_j))

    def _replay_with_changes(
        self, clocks: Clocks, slow: Mapping[int, float], change: ClockChange
    ) -> ReplayedIteration:
        """Replay with the time that clock changes take, which no slowdown applies to."""
        key = tuple(sorted(slow.items()))
        if key not in self._slow_tables:
            tables = {
                of: _slow_down(table, slow.get(of[0], 1.0)) for of, table in self._tables_of.items()
            }
            self._slow_tables[key] = tables
        tables = self._slow_tables[key]
        tasks = [
            Task(tables[of], mhz) for of, mhz in zip(self.dag.iteration.keys, clocks, strict=True)
        ]
        waiting_w, gpus = self.dag.rank_waiting_w, self.dag.profile.gpus_per_stage
        replayed = replay_changes(self.dag.iteration, tasks, change, waiting_w, gpus)
        time_s = max(replayed.ends_s) + self.dag.profile.overhead_s
        return ReplayedIteration(
            time_s, self._per_rank(replayed.durations_s), self._per_rank(replayed.energies_j)
        )

    def _per_rank(self, values: Sequence[float]) -> NDArray[np.float64]:
        ranks, per_node = len(self.dag.schedule.ranks), np.array(values)
        return np.array([math.fsum(per_node[self._rank_of == rank]) for rank in range(ranks)])


def _slow_down(table: Table, slowdown: float) -> Table:
    return {
        mhz: Measurement(mhz, m.time_s * slowdown, m.energy_j * slowdown)
        for mhz, m in table.items()
    }
