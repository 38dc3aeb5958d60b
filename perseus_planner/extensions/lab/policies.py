"""Policies of a cluster: the clocks of each pipeline, given the stragglers that are known.

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

from perseus_planner import Frontier, PipelineDag, solve_dag
from perseus_planner.base.errors import UsageError, shown
from perseus_planner.extensions.lab import baselines
from perseus_planner.extensions.lab.stragglers import UNDISTURBED, Condition
from perseus_planner.plans.clock_replay import Task
from perseus_planner.plans.replay import all_maximum, replay_changes
from perseus_planner.profiles.groups import slowed
from perseus_planner.profiles.measurement import ClockChange

if TYPE_CHECKING:
    from numpy.typing import NDArray

Clocks = tuple[int, ...]  #: the clock of each of `dag.computations`, MHz


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
        self._rank_of = np.array(dag.iteration.rank_of)
        self._replayed = cache(self._replay)

    def replay(self, clocks: Clocks, condition: Condition) -> ReplayedIteration:
        """Return an iteration at `clocks` of a pipeline in `condition`.

        Complexity: one replay for each new pair of clocks and slow stages, and a look-up after
        that.
        """
        time_s, busy_s, busy_j = self._replayed(clocks, condition.stages)
        slowdown = condition.slowdown
        return ReplayedIteration(time_s * slowdown, busy_s * slowdown, busy_j * slowdown)

    def _replay(self, clocks: Clocks, stages: SlowStages) -> ReplayedIteration:
        """Replay with the time that clock changes take."""
        # Slow stages are in the rows, so that the replay itself knows nothing of stragglers.
        profile = slowed(self.dag.profile, dict(stages))
        iteration = self.dag.iteration
        tables = {
            key: {row.clock_mhz: row for row in profile.measurements[key]}
            for key in dict.fromkeys(iteration.keys)
        }
        tasks = [Task(tables[key], mhz) for key, mhz in zip(iteration.keys, clocks, strict=True)]
        # Without a measured cost, changes are free, as in the plan.
        change = profile.clock_change or ClockChange(0.0)
        waiting_w = self.dag.rank_waiting_w
        replayed = replay_changes(iteration, tasks, change, waiting_w, profile.gpus_per_stage)
        # The overhead of an iteration is on no rank's path, so it is added to the longest.
        time_s = max(replayed.ends_s) + profile.overhead_s
        return ReplayedIteration(
            time_s, self._per_rank(replayed.durations_s), self._per_rank(replayed.energies_j)
        )

    def _per_rank(self, values: Sequence[float]) -> NDArray[np.float64]:
        ranks = len(self.dag.schedule.ranks)
        per_node = np.array(values)
        return np.array([math.fsum(per_node[self._rank_of == rank]) for rank in range(ranks)])


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
    # Rules of other planners may be asked for any deadline, so they react to stragglers.
    if name in _RULES:
        # Few deadlines come again and again, and each takes a search.
        @cache
        def clocks_for(deadline_s: float) -> Clocks:
            return _checked_clocks(frontier, _RULES[name](frontier.dag, deadline_s))

        # A straggling pipeline keeps the clocks of the target.
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
            # Without a slow stage nothing is to be solved again.
            if not stages:
                return kept
            profile = slowed(frontier.profile, dict(stages))
            # Slow stages change the critical path, so the pipeline is solved again with their
            # times.
            again = solve_dag(frontier.dag.with_profile(profile))
            # If it cannot meet the target any more, its own time at full clocks is the best that it
            # can do.
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
        slowest_s = max(
            replays.replay(own_clocks, condition).time_s for condition, own_clocks in clocks.items()
        )
        if UNDISTURBED in clocks and slowest_s > target_s:
            clocks[UNDISTURBED] = clocks_for(slowest_s)
        return clocks

    return clocks_in


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
