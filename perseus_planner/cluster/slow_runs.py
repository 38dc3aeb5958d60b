"""What an iteration of one pipeline takes, rank by rank, while the pipeline or some of its stages are slow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.plans.simulate import end_times, run_with_changes
from perseus_planner.plans.tasks import Task
from perseus_planner.profiles.measurement import Measurement

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.cluster.stragglers import Condition
    from perseus_planner.profiles.clock_changes import ClockChange
    from perseus_planner.schedules.dag import PipelineDag

Clocks = tuple[int, ...]  #: MHz of each computation, by its place in `dag.computations`
Table = Mapping[int, Measurement]


class Run(NamedTuple):
    """One iteration of one pipeline.

    Attributes:
        time_s: until its last computation or operation ends, and the calibrated overhead, seconds.
        busy_s: (ranks,) seconds that the GPUs of each rank work.
        busy_j: (ranks,) joules of that over all GPUs of the rank.
    """

    time_s: float
    busy_s: NDArray[np.float64]
    busy_j: NDArray[np.float64]


class Runs:
    """Iterations of one pipeline, each replayed once.

    A slow stage takes its slowdown times as long for each computation; a slow pipeline for all that it does, fixed
    operations, transfers and overhead too. GPUs draw the power that they drew, so joules grow as seconds do.
    """

    def __init__(self, dag: PipelineDag) -> None:
        self.dag = dag
        keys = dag.iteration.keys
        self._tables_of = {key: {m.clock_mhz: m for m in dag.profile.measurements[key]} for key in set(keys)}
        self._tables = [self._tables_of[key] for key in keys]
        self._slow_tables: dict[tuple[tuple[int, float], ...], dict[tuple[int, str], Table]] = {}
        self._rank_of = np.array(dag.iteration.rank_of)
        self._runs: dict[tuple[Clocks, tuple[tuple[int, float], ...]], Run] = {}

    def run(self, clocks: Clocks, condition: Condition) -> Run:
        """An iteration at `clocks` of a pipeline in that condition.

        Complexity: a replay for each new pair of clocks and slow stages, else a look-up.
        """
        key = clocks, condition.stages
        if key not in self._runs:
            self._runs[key] = self._replayed(clocks, dict(condition.stages))
        run, slowdown = self._runs[key], condition.slowdown
        return run if slowdown == 1 else Run(run.time_s * slowdown, run.busy_s * slowdown, run.busy_j * slowdown)

    def _replayed(self, clocks: Clocks, slow: Mapping[int, float]) -> Run:
        iteration, waiting_w = self.dag.iteration, self.dag.rank_waiting_w
        if self.dag.profile.clock_change is not None:
            return self._with_changes(clocks, slow, self.dag.profile.clock_change)
        points = [table[clock] for table, clock in zip(self._tables, clocks, strict=True)]
        slowdowns = [slow.get(stage, 1.0) for stage, _ in iteration.keys]
        times_s = [point.time_s * slowdown for point, slowdown in zip(points, slowdowns, strict=True)]
        energies_j = [point.energy_j * slowdown for point, slowdown in zip(points, slowdowns, strict=True)]
        time_s = max(end_times(self.dag, times_s)) + self.dag.profile.overhead_s
        for each in iteration.operations:
            times_s.append(each.time_s)
            energies_j.append(waiting_w[each.rank] * each.time_s if each.energy_j is None else each.energy_j)
        return Run(time_s, self._per_rank(times_s), self._per_rank(energies_j))

    def _with_changes(self, clocks: Clocks, slow: Mapping[int, float], change: ClockChange) -> Run:
        """As `_replayed`, where changing a clock takes time, which no slowness changes."""
        key = tuple(sorted(slow.items()))
        if key not in self._slow_tables:
            tables = {of: _slower(table, slow.get(of[0], 1.0)) for of, table in self._tables_of.items()}
            self._slow_tables[key] = tables
        tables = self._slow_tables[key]
        tasks = [Task(tables[of], mhz) for of, mhz in zip(self.dag.iteration.keys, clocks, strict=True)]
        waiting_w, gpus = self.dag.rank_waiting_w, self.dag.profile.gpus_per_stage
        ran = run_with_changes(self.dag.iteration, tasks, change, waiting_w=waiting_w, gpus_per_stage=gpus)
        time_s = max(ran.end_s) + self.dag.profile.overhead_s
        return Run(time_s, self._per_rank(ran.durations_s), self._per_rank(ran.energies_j))

    def _per_rank(self, values: Sequence[float]) -> NDArray[np.float64]:
        ranks, per_node = len(self.dag.schedule.ranks), np.array(values)
        return np.array([math.fsum(per_node[self._rank_of == rank]) for rank in range(ranks)])


def _slower(table: Table, slowdown: float) -> Table:
    return {mhz: Measurement(mhz, m.time_s * slowdown, m.energy_j * slowdown) for mhz, m in table.items()}
