"""Policies: which clocks each pipeline of a cluster runs while the stragglers are what they are known to be.

A pipeline's target is the job's: a slowdown of the iteration time with all clocks at maximum. T' is what the slowest
pipeline that is known to straggle takes with the clocks that it keeps.

| policy          | clocks for the target     | straggling pipeline     | the others, if T' is above the target |
|-----------------|---------------------------|-------------------------|---------------------------------------|
| `max`           | all at maximum            | keeps them              | keep them                             |
| `one-clock`     | one for the whole job     | keeps them              | one clock for T'                      |
| `per-stage`     | one per stage (Zeus)      | keeps them              | one per stage for T'                  |
| `envpipe`       | EnvPipe's; no target      | keeps them              | keep them: it has one point only      |
| `lowtime`       | lowtime 0.3.0 (Perseus)   | keeps them              | lowtime's plan for T'                 |
| `planner-fixed` | `Frontier.plan_for`       | keeps them              | keep them                             |
| `planner`       | `Frontier.plan_for`       | solved again if a stage | `Frontier.plan_beside_straggler(T')`  |
|                 |                           | is slow, else keeps them|                                       |

That the others react to T' is published for Perseus (SOSP'24), whose solver lowtime is. Zeus chooses along a curve of
time and energy, so it can be asked for another time; the same is granted to one clock, so that what differs are the
plans alone. A pipeline with a slow stage is solved again for the target if it can still meet it, else for its own time
with all clocks at maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from perseus_planner.cluster import baselines
from perseus_planner.cluster.stragglers import CALM, Condition
from perseus_planner.documents import shown
from perseus_planner.errors import UsageError
from perseus_planner.profiles.groups import slowed
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.solver.solve import solve_dag

if TYPE_CHECKING:
    from perseus_planner.cluster.slow_runs import Clocks, Runs
    from perseus_planner.solver.frontier import Frontier

Stages = tuple[tuple[int, float], ...]
Rule = Callable[[PipelineDag, float], Mapping[str, int]]

#: In the order of the table above.
POLICIES = ("max", "one-clock", "per-stage", "envpipe", "lowtime", "planner-fixed", "planner")


class Policy(Protocol):
    """What decides on clocks; each pipeline's depend on its own condition and on what others there are."""

    @property
    def name(self) -> str:
        """One of `POLICIES`."""

    def clocks_in(self, known: frozenset[Condition]) -> Mapping[Condition, Clocks]:
        """The clocks of a pipeline in each of the conditions that pipelines are known to be in."""


class Fixed:
    """The same clocks, whatever happens."""

    def __init__(self, name: str, clocks: Clocks) -> None:
        self.name = name
        self._clocks = clocks

    def clocks_in(self, known: frozenset[Condition]) -> Mapping[Condition, Clocks]:
        """See `Policy`."""
        return dict.fromkeys(known, self._clocks)


class Reacting:
    """Pipelines without a straggler become as slow as the slowest that has one.

    Args:
        name: one of `POLICIES`.
        runs: what iterations take.
        target_s: seconds that an iteration may take without stragglers.
        chosen: seconds -> the clocks of a pipeline without a straggler for such an iteration.
        kept: slow stages -> the clocks of a pipeline that has them; none of them where all of it is slow.
    """

    def __init__(
        self,
        name: str,
        runs: Runs,
        target_s: float,
        chosen: Callable[[float], Clocks],
        kept: Callable[[Stages], Clocks],
    ) -> None:
        self.name = name
        self._runs, self._target_s, self._chosen, self._kept = runs, target_s, chosen, kept

    def clocks_in(self, known: frozenset[Condition]) -> Mapping[Condition, Clocks]:
        """See `Policy`."""
        clocks = {condition: self._kept(condition.stages) for condition in known}
        slowest_s = max(self._runs.run(each, condition).time_s for condition, each in clocks.items())
        if CALM in clocks and slowest_s > self._target_s:
            clocks[CALM] = self._chosen(slowest_s)
        return clocks


def policy_of(name: str, frontier: Frontier, slowdown: float, runs: Runs) -> Policy:
    """The policy of that name.

    Args:
        name: one of `POLICIES`.
        frontier: of each pipeline without a straggler.
        slowdown: the target, as a multiple of the iteration time with all clocks at maximum.
        runs: what iterations of `frontier.dag` take.

    Raises:
        InfeasibleError: no iteration is as fast as the target.
        UsageError: there is no such policy, or it does not apply to this schedule or profile.
    """
    if name not in POLICIES:
        raise UsageError(f"policy {shown(name)} is unknown; choose from {', '.join(POLICIES)}")
    target_s = slowdown * frontier.baseline_time_s
    if name == "planner":
        planned = _Planned(frontier, target_s)
        return Reacting(name, runs, target_s, planned.beside, planned.with_slow)
    if name == "planner-fixed":
        return Fixed(name, _clocks(frontier, target_s))
    if name == "max":
        return Fixed(name, _checked_clocks(frontier, baselines.all_maximum(frontier.dag)))
    if name == "envpipe":
        return Fixed(name, _checked_clocks(frontier, baselines.envpipe(frontier.dag)))
    chosen = _Menu(frontier, runs) if name == "lowtime" else _Chosen(_RULES[name], frontier, runs)
    return Reacting(name, runs, target_s, chosen, partial(_whatever_is_slow, chosen(target_s)))


class _Planned:
    """The planner's clocks, each solved for once."""

    def __init__(self, frontier: Frontier, target_s: float) -> None:
        self._frontier, self._target_s = frontier, target_s
        self._with_slow: dict[Stages, Clocks] = {(): _clocks(frontier, target_s)}

    def beside(self, straggler_time_s: float) -> Clocks:
        return _clocks(self._frontier, straggler_time_s)

    def with_slow(self, stages: Stages) -> Clocks:
        if stages not in self._with_slow:
            profile = slowed(self._frontier.profile, dict(stages))
            frontier = solve_dag(PipelineDag(profile, self._frontier.dag.iteration))
            self._with_slow[stages] = _clocks(frontier, max(frontier.baseline_time_s, self._target_s))
        return self._with_slow[stages]


class _Chosen:
    """A baseline's clocks for a time, with as few calls of its rule as will do.

    A rule takes the cheapest plan of those that meet a deadline. So what it took for one deadline is also what it takes
    for any other down to the time of that plan.
    """

    def __init__(self, rule: Rule, frontier: Frontier, runs: Runs) -> None:
        self._rule, self._frontier, self._runs = rule, frontier, runs
        self._found: list[tuple[float, float, Clocks]] = []

    def __call__(self, deadline_s: float) -> Clocks:
        for least_s, most_s, clocks in self._found:
            if least_s <= deadline_s <= most_s:
                return clocks
        clocks = _checked_clocks(self._frontier, self._rule(self._frontier.dag, deadline_s))
        time_s = self._runs.run(clocks, CALM).time_s
        self._found.append((min(time_s, deadline_s), deadline_s, clocks))
        return clocks


class _Menu:
    """lowtime's clocks for a time: of all its plans the cheapest that meets it, as `baselines.lowtime` has it.

    Its own times are rounded down, so even its fastest plan may be late by a little; it is taken where none meets.
    """

    def __init__(self, frontier: Frontier, runs: Runs) -> None:
        waiting_w = np.array(frontier.dag.rank_waiting_w)
        self._plans: list[tuple[float, float, Clocks]] = []  # seconds, effective joules, clocks
        for plan in baselines.lowtime_plans(frontier.dag):
            clocks = _checked_clocks(frontier, plan)
            run = runs.run(clocks, CALM)
            self._plans.append((run.time_s, float(np.sum(run.busy_j - waiting_w * run.busy_s)), clocks))

    def __call__(self, deadline_s: float) -> Clocks:
        meeting = [plan for plan in self._plans if plan[0] <= deadline_s]
        return min(meeting, key=lambda plan: plan[1])[2] if meeting else min(self._plans)[2]


def _whatever_is_slow(clocks: Clocks, _: Stages) -> Clocks:
    return clocks


def _clocks(frontier: Frontier, deadline_s: float) -> Clocks:
    """Of the plan for that deadline; beyond `max_time_s` all plans are one, which is looked up once."""
    return tuple(frontier.plan_for(min(deadline_s, frontier.max_time_s)).clocks.values())


def _checked_clocks(frontier: Frontier, clocks: Mapping[str, int]) -> Clocks:
    return tuple(frontier.plan_of(clocks).clocks.values())


_RULES: Mapping[str, Rule] = {
    "one-clock": baselines.one_clock,
    "per-stage": baselines.one_per_stage,
}
