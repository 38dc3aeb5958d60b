"""Policies: which clocks each pipeline of a cluster runs, given the stragglers that are known.

The target is a slowdown of the iteration time with all clocks at maximum. T' is the iteration time
of the slowest straggling pipeline, at the clocks that it keeps.

| policy          | clocks for the target     | straggling pipeline     | the others, if T' is above
the target |
|-----------------|---------------------------|-------------------------|---------------------------------------|
| `max`           | all at maximum            | keeps them              | keep them
|
| `one-clock`     | one for the whole job     | keeps them              | one clock for T'
|
| `per-stage`     | one per stage (Zeus)      | keeps them              | one per stage for T'
|
| `envpipe`       | EnvPipe's; no target      | keeps them              | keep them: it has one
point only      |
| `planner-fixed` | `Frontier.plan_until`     | keeps them              | keep them
|
| `planner`       | `Frontier.plan_for`       | solved again if a stage |
`Frontier.plan_beside_straggler(T')`  |
|                 |                           | is slow, else keeps them|
|

Reacting to T' was published for Perseus (SOSP'24). Zeus chooses along a curve of time and energy,
so it can be asked for another time; one clock is treated the same way, so that only the plans
differ. A pipeline with a slow stage is solved again for the target if it can still meet it, and
otherwise for its own time with all clocks at maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from perseus_planner.base.errors import UsageError, shown
from perseus_planner.cluster import baselines
from perseus_planner.cluster.stragglers import UNDISTURBED, Condition
from perseus_planner.plans.replay import all_maximum
from perseus_planner.profiles.groups import slowed
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.solver.solve import solve_dag

if TYPE_CHECKING:
    from perseus_planner.cluster.iterations import Clocks, IterationReplays
    from perseus_planner.solver.frontier import Frontier

SlowStages = tuple[tuple[int, float], ...]
ClockRule = Callable[[PipelineDag, float], Mapping[str, int]]

#: In the order of the table above
POLICIES = ("max", "one-clock", "per-stage", "envpipe", "planner-fixed", "planner")


class Policy(Protocol):
    """Chooses clocks for each pipeline from its condition and the conditions of the others."""

    @property
    def name(self) -> str:
        """The name of the policy, one of `POLICIES`."""

    def clocks_in(self, known: frozenset[Condition]) -> Mapping[Condition, Clocks]:
        """Return the clocks for each of the conditions that pipelines are known to be in."""


class FixedPolicy:
    """Keeps the same clocks whatever happens."""

    def __init__(self, name: str, clocks: Clocks) -> None:
        self.name = name
        self._clocks = clocks

    def clocks_in(self, known: frozenset[Condition]) -> Mapping[Condition, Clocks]:
        """Return the same clocks for every condition."""
        return dict.fromkeys(known, self._clocks)


class ReactingPolicy:
    """Slows pipelines without a straggler down to the slowest pipeline with one.

    Args:
        name: one of `POLICIES`.
        replays: the replayed iterations of a pipeline.
        target_s: the iteration time to meet without stragglers, seconds.
        clocks_for: returns the clocks of a pipeline without a straggler for an iteration time,
            seconds.
        straggler_clocks: returns the clocks of a straggling pipeline for its slow stages; () if all
            of it is slow.
    """

    def __init__(
        self,
        name: str,
        replays: IterationReplays,
        target_s: float,
        clocks_for: Callable[[float], Clocks],
        straggler_clocks: Callable[[SlowStages], Clocks],
    ) -> None:
        self.name = name
        self._replays, self._target_s = replays, target_s
        self._clocks_for, self._straggler_clocks = clocks_for, straggler_clocks

    def clocks_in(self, known: frozenset[Condition]) -> Mapping[Condition, Clocks]:
        """Return clocks for each condition; undisturbed pipelines wait for the slowest of the
        others.
        """
        clocks = {condition: self._straggler_clocks(condition.stages) for condition in known}
        slowest_s = max(
            self._replays.replay(each, condition).time_s for condition, each in clocks.items()
        )
        if UNDISTURBED in clocks and slowest_s > self._target_s:
            clocks[UNDISTURBED] = self._clocks_for(slowest_s)
        return clocks


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
    if name == "planner":
        planned = _PlannedClocks(frontier, target_s)
        return ReactingPolicy(
            name, replays, target_s, planned.beside_straggler, planned.with_slow_stages
        )
    if name == "planner-fixed":
        return FixedPolicy(name, _clocks(frontier, target_s))
    if name == "max":
        return FixedPolicy(name, _checked_clocks(frontier, all_maximum(frontier.dag)))
    if name == "envpipe":
        return FixedPolicy(name, _checked_clocks(frontier, baselines.envpipe(frontier.dag)))
    clocks_for = _BaselineClocks(_RULES[name], frontier, replays)
    kept = clocks_for(target_s)
    return ReactingPolicy(name, replays, target_s, clocks_for, lambda _: kept)


class _PlannedClocks:
    """The planner's clocks; solves once for each set of slow stages."""

    def __init__(self, frontier: Frontier, target_s: float) -> None:
        self._frontier, self._target_s = frontier, target_s
        self._by_slow_stages: dict[SlowStages, Clocks] = {(): _clocks(frontier, target_s)}

    def beside_straggler(self, straggler_time_s: float) -> Clocks:
        return _clocks(self._frontier, straggler_time_s)

    def with_slow_stages(self, stages: SlowStages) -> Clocks:
        if stages not in self._by_slow_stages:
            profile = slowed(self._frontier.profile, dict(stages))
            frontier = solve_dag(PipelineDag(profile, self._frontier.dag.iteration))
            self._by_slow_stages[stages] = _clocks(
                frontier, max(frontier.baseline_time_s, self._target_s)
            )
        return self._by_slow_stages[stages]


class _BaselineClocks:
    """A baseline's clocks for an iteration time, with few calls of its rule.

    A rule takes the cheapest plan that meets a deadline. So its choice for one deadline is also its
    choice for every tighter deadline down to the time of that plan.
    """

    def __init__(self, rule: ClockRule, frontier: Frontier, replays: IterationReplays) -> None:
        self._rule, self._frontier, self._replays = rule, frontier, replays
        self._found: list[tuple[float, float, Clocks]] = []

    def __call__(self, deadline_s: float) -> Clocks:
        for least_s, most_s, clocks in self._found:
            if least_s <= deadline_s <= most_s:
                return clocks
        clocks = _checked_clocks(self._frontier, self._rule(self._frontier.dag, deadline_s))
        time_s = self._replays.replay(clocks, UNDISTURBED).time_s
        self._found.append((min(time_s, deadline_s), deadline_s, clocks))
        return clocks


def _clocks(frontier: Frontier, deadline_s: float) -> Clocks:
    """Return the clocks of the plan for a deadline; all deadlines beyond `max_time_s` share one
    plan.
    """
    return tuple(frontier.plan_until(min(deadline_s, frontier.max_time_s)).clocks.values())


def _checked_clocks(frontier: Frontier, clocks: Mapping[str, int]) -> Clocks:
    return tuple(frontier.plan_of(clocks).clocks.values())


_RULES: Mapping[str, ClockRule] = {
    "one-clock": baselines.one_clock,
    "per-stage": baselines.one_per_stage,
}
