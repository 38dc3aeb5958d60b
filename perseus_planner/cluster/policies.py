"""Policies: which clocks each pipeline of a cluster runs, given the stragglers that are known; and
the replayed iterations that they know them by.

The target is a slowdown of the iteration time with all clocks at maximum. T' is the iteration time
of the slowest straggling pipeline, at the clocks that it keeps.

| policy          | clocks for the target | straggling pipeline | others, if T' is above it    |
|-----------------|-----------------------|---------------------|------------------------------|
| `max`           | all at maximum        | keeps them          | keep them                    |
| `one-clock`     | one for the whole job | keeps them          | one clock for T'             |
| `per-stage`     | one per stage (Zeus)  | keeps them          | one per stage for T'         |
| `envpipe`       | EnvPipe's; no target  | keeps them          | keep them: only one point    |
| `planner-fixed` | `Frontier.plan_until` | keeps them          | keep them                    |
| `planner`       | `Frontier.plan_for`   | solved again if a   | `plan_beside_straggler(T')`  |
|                 |                       | stage is slow       |                              |

Reacting to T' was published for Perseus (SOSP'24). Zeus chooses along a curve of time and energy,
so it can be asked for another time; one clock is treated the same way, so that only the plans
differ. A pipeline with a slow stage is solved again for the target if it can still meet it, and
otherwise for its own time with all clocks at maximum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.base.errors import UsageError, shown
from perseus_planner.cluster import baselines
from perseus_planner.cluster.stragglers import UNDISTURBED, Condition
from perseus_planner.plans.clock_replay import Task
from perseus_planner.plans.replay import all_maximum, end_times, replay_changes
from perseus_planner.profiles.groups import slowed
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.solver.frontier import solve_dag

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.profiles.measurement import ClockChange
    from perseus_planner.solver.frontier import Frontier

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
        iteration, slowdown = self._replays[key], condition.slowdown
        return (
            iteration
            if slowdown == 1
            else ReplayedIteration(
                iteration.time_s * slowdown,
                iteration.busy_s * slowdown,
                iteration.busy_j * slowdown,
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
        for operation in iteration.operations:
            times_s.append(operation.time_s)
            energies_j.append(
                waiting_w[operation.rank] * operation.time_s
                if operation.energy_j is None
                else operation.energy_j
            )
        return ReplayedIteration(time_s, self._per_rank(times_s), self._per_rank(energies_j))

    def _replay_with_changes(
        self, clocks: Clocks, slow: Mapping[int, float], change: ClockChange
    ) -> ReplayedIteration:
        """Replay with the time that clock changes take, which no slowdown applies to."""
        key = tuple(sorted(slow.items()))
        if key not in self._slow_tables:
            tables = {
                stage_kind: _slow_down(table, slow.get(stage_kind[0], 1.0))
                for stage_kind, table in self._tables_of.items()
            }
            self._slow_tables[key] = tables
        tables = self._slow_tables[key]
        tasks = [
            Task(tables[stage_kind], mhz)
            for stage_kind, mhz in zip(self.dag.iteration.keys, clocks, strict=True)
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


SlowStages = tuple[tuple[int, float], ...]
Policy = Callable[[frozenset[Condition]], Mapping[Condition, Clocks]]
"""Returns the clocks for each of the conditions that pipelines are known to be in."""
ClockRule = Callable[[PipelineDag, float], Mapping[str, int]]

#: In the order of the table above
POLICIES = ("max", "one-clock", "per-stage", "envpipe", "planner-fixed", "planner")


def make_policy(
    name: str, frontier: Frontier, slowdown: float, replays: IterationReplays
) -> Policy:
    """Make the policy called `name`.

    Args:
        name: one of `POLICIES`.
        frontier: the frontier of a pipeline without a straggler.
        slowdown: the target, as a multiple of the iteration time with all clocks at maximum.
        replays: the replayed iterations of `frontier.dag`.

    Raises:
        InfeasibleError: If no iteration is as fast as the target.
        UsageError: If there is no such policy, or it does not apply to this schedule or profile.
    """
    if name not in POLICIES:
        raise UsageError(f"policy {shown(name)} is unknown; choose from {', '.join(POLICIES)}")
    target_s = slowdown * frontier.baseline_time_s
    if name in _RULES:
        clocks_for = _BaselineClocks(_RULES[name], frontier, replays)
        kept = clocks_for(target_s)
        return _reacting(replays, target_s, clocks_for, lambda _: kept)
    if name == "planner-fixed":
        kept = _planned(frontier, target_s)
    elif name != "planner":
        rule = all_maximum if name == "max" else baselines.envpipe
        kept = _checked_clocks(frontier, rule(frontier.dag))
    else:
        kept = _planned(frontier, target_s)

        @cache
        def with_slow_stages(stages: SlowStages) -> Clocks:
            if not stages:
                return kept
            profile = slowed(frontier.profile, dict(stages))
            again = solve_dag(frontier.dag.with_profile(profile))
            return _planned(again, max(again.baseline_time_s, target_s))

        return _reacting(replays, target_s, partial(_planned, frontier), with_slow_stages)
    return lambda conditions: dict.fromkeys(conditions, kept)


def _reacting(
    replays: IterationReplays,
    target_s: float,
    clocks_for: Callable[[float], Clocks],
    straggler_clocks: Callable[[SlowStages], Clocks],
) -> Policy:
    """Return the policy that slows pipelines without a straggler down to the slowest with one.

    Args:
        replays: the replayed iterations of a pipeline.
        target_s: the iteration time to meet without stragglers, seconds.
        clocks_for: returns the clocks of a pipeline without a straggler for an iteration time,
            seconds.
        straggler_clocks: returns the clocks of a straggling pipeline for its slow stages; () if all
            of it is slow.
    """

    def clocks_in(conditions: frozenset[Condition]) -> Mapping[Condition, Clocks]:
        clocks = {condition: straggler_clocks(condition.stages) for condition in conditions}
        slowest_s = max(replays.replay(own, condition).time_s for condition, own in clocks.items())
        if UNDISTURBED in clocks and slowest_s > target_s:
            clocks[UNDISTURBED] = clocks_for(slowest_s)
        return clocks

    return clocks_in


class _BaselineClocks:
    """A baseline's clocks for an iteration time, with few calls of its rule.

    A rule takes the cheapest plan that meets a deadline. So its choice for one deadline is also its
    choice for every tighter deadline down to the time of that plan.
    """

    def __init__(self, rule: ClockRule, frontier: Frontier, replays: IterationReplays) -> None:
        self._rule, self._frontier, self._replays = rule, frontier, replays
        self._chosen: list[tuple[float, float, Clocks]] = []

    def __call__(self, deadline_s: float) -> Clocks:
        for least_s, most_s, clocks in self._chosen:
            if least_s <= deadline_s <= most_s:
                return clocks
        clocks = _checked_clocks(self._frontier, self._rule(self._frontier.dag, deadline_s))
        time_s = self._replays.replay(clocks, UNDISTURBED).time_s
        self._chosen.append((min(time_s, deadline_s), deadline_s, clocks))
        return clocks


def _planned(frontier: Frontier, deadline_s: float) -> Clocks:
    """Return the clocks of the plan for a deadline; all deadlines beyond `max_time_s` share one
    plan. The rows are what the simulated cluster runs by, so plans take them for the truth.
    """
    plan = frontier.plan_until(min(deadline_s, frontier.max_time_s), on_time=None)
    return tuple(plan.clocks.values())


def _checked_clocks(frontier: Frontier, clocks: Mapping[str, int]) -> Clocks:
    return tuple(frontier.plan_of(clocks).clocks.values())


_RULES: Mapping[str, ClockRule] = {
    "one-clock": baselines.one_clock,
    "per-stage": baselines.one_per_stage,
}
