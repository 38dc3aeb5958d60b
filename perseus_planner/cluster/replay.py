"""Replays a job on a cluster: data-parallel pipelines that end every iteration together, some slower for a while.

All pipelines are alike. An iteration takes as long as its slowest pipeline; the GPUs of the others wait, at the
blocking power. Which stragglers are there is judged as each iteration begins. A policy sees them late, by the reaction
delay: it knows those that were there so long ago, and what it decides is in force from the beginning of an iteration.

Time is simulated, and what iterations take is replayed from the profile. Between two events (a straggler comes or goes,
or that becomes known) all iterations are alike, so the replay goes from event to event and its cost does not depend on
the number of iterations. Moments are exact fractions: no rounding moves an event to another iteration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from perseus_planner.cluster.policies import Policy, policy_of
from perseus_planner.cluster.slow_runs import Clocks, Run, Runs
from perseus_planner.cluster.stragglers import CALM, Condition, Straggler, condition_of
from perseus_planner.documents import shown
from perseus_planner.errors import UsageError
from perseus_planner.quantities import COUNT, WAIT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from perseus_planner.solver.frontier import Frontier

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Cluster:
    """A job on a cluster, and what befalls it.

    Attributes:
        frontier: of each pipeline.
        pipelines: how many there are.
        iterations: for how many the job runs.
        stragglers: in any order; several at once multiply where they hit the same stage.
        delay_s: how late a policy reacts, seconds, 0 or more.

    Raises:
        UsageError: a number is not of that kind, or a straggler is in no pipeline or stage of the cluster.
    """

    frontier: Frontier
    pipelines: int
    iterations: int
    stragglers: Sequence[Straggler] = ()
    delay_s: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stragglers", tuple(self.stragglers))
        for name, rule in (("pipelines", COUNT), ("iterations", COUNT), ("delay_s", WAIT)):
            value = rule.accept(getattr(self, name))
            if value is None:
                raise UsageError(f"{name}: {shown(getattr(self, name))} is not {rule.wanted}")
            object.__setattr__(self, name, value)
        for each in self.stragglers:
            each.check(self.pipelines, self.frontier.schedule.stages)

    @cached_property
    def runs(self) -> Runs:
        """What iterations of a pipeline take."""
        return Runs(self.frontier.dag)

    @property
    def gpus(self) -> int:
        """How many there are in the cluster."""
        return self.pipelines * len(self.frontier.schedule.ranks) * self.frontier.profile.gpus_per_stage


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a job did under one policy; the GPUs of a rank do all the same.

    Attributes:
        policy: its name.
        iterations: how many there were.
        time_s: how long they took, seconds.
        busy_s: (pipelines, ranks) seconds that each GPU of a rank worked; the rest of `time_s` it was idle.
        energy_per_gpu_j: (pipelines, ranks) joules of each GPU of a rank, waiting included.
        gpus_per_stage: how many GPUs a rank has.
    """

    policy: str
    iterations: int
    time_s: float
    busy_s: Floats
    energy_per_gpu_j: Floats
    gpus_per_stage: int

    @property
    def idle_s(self) -> Floats:
        """(pipelines, ranks) seconds that each GPU of a rank waited."""
        return self.time_s - self.busy_s

    @property
    def energy_j(self) -> float:
        """Joules over all GPUs, waiting included."""
        return math.fsum(self.energy_per_gpu_j.flat) * self.gpus_per_stage

    @property
    def power_w(self) -> float:
        """Average watts over all GPUs."""
        return self.energy_j / self.time_s


def simulate(cluster: Cluster, name: str, slowdown: float = 1.0) -> Outcome:
    """Replay the job under the policy of that name.

    Args:
        cluster: the job.
        name: one of `policies.POLICIES`.
        slowdown: the target, as a multiple of the iteration time with all clocks at maximum.

    Raises:
        InfeasibleError: no iteration is as fast as the target.
        UsageError: there is no such policy, or it does not apply to this schedule or profile.
    """
    return replay_under(cluster, policy_of(name, cluster.frontier, slowdown, cluster.runs))


def replay_under(cluster: Cluster, policy: Policy) -> Outcome:
    """Replay the job under `policy`."""
    waiting_w = np.array(cluster.frontier.dag.rank_waiting_w)
    busy_s = np.zeros((cluster.pipelines, len(waiting_w)))
    energy_j = np.zeros_like(busy_s)
    time_s = Fraction(0)
    for count, pairs in _stretches(cluster, policy):
        longest_s = max(run.time_s for run, _ in pairs)
        for run, members in pairs:
            busy_s[members] += count * run.busy_s
            energy_j[members] += count * (run.busy_j + waiting_w * (longest_s - run.busy_s))
        time_s += count * Fraction(longest_s)
    gpus = cluster.frontier.profile.gpus_per_stage
    return Outcome(policy.name, cluster.iterations, float(time_s), busy_s, energy_j / gpus, gpus)


def _stretches(cluster: Cluster, policy: Policy) -> Iterator[tuple[int, list[tuple[Run, list[int]]]]]:
    """Iterations that are alike: how many, and what the pipelines do in each, those alike together."""
    actual, known = _View(cluster.stragglers, 0.0), _View(cluster.stragglers, cluster.delay_s)
    plans: dict[frozenset[Condition], Mapping[Condition, Clocks]] = {}
    now, left = Fraction(0), cluster.iterations
    while left:
        actual.move_to(now)
        known.move_to(now)
        groups = _groups(cluster.pipelines, actual.conditions, known.conditions)
        seen = frozenset(belief for _, belief in groups)
        if seen not in plans:
            plans[seen] = policy.clocks_in(seen)
        pairs = [(cluster.runs.run(plans[seen][belief], truth), each) for (truth, belief), each in groups.items()]
        longest_s = Fraction(max(run.time_s for run, _ in pairs))
        upcoming = [moment for moment in (actual.upcoming, known.upcoming) if moment is not None]
        count = min([left, *(math.ceil((moment - now) / longest_s) for moment in upcoming)])
        yield count, pairs
        now, left = now + count * longest_s, left - count


def _groups(
    pipelines: int, actual: Mapping[int, Condition], known: Mapping[int, Condition]
) -> dict[tuple[Condition, Condition], list[int]]:
    """(what a pipeline is like, what it is known to be like) -> the numbers of those pipelines."""
    groups: dict[tuple[Condition, Condition], list[int]] = {}
    for number in range(pipelines):
        groups.setdefault((actual.get(number, CALM), known.get(number, CALM)), []).append(number)
    return groups


class _View:
    """The stragglers as they are seen, so many seconds late.

    `conditions` has every pipeline that a straggler is seen in.
    """

    def __init__(self, stragglers: Sequence[Straggler], late_s: float) -> None:
        self._stragglers = stragglers
        events = [
            (Fraction(moment_s) + Fraction(late_s), place)
            for place, each in enumerate(stragglers)
            for moment_s in (each.start_s, each.end_s)
            if moment_s != math.inf
        ]
        self._events = sorted(events, reverse=True)
        self._seen: dict[int, set[int]] = {}
        self.conditions: dict[int, Condition] = {}

    @property
    def upcoming(self) -> Fraction | None:
        """When what is seen may next change."""
        return self._events[-1][0] if self._events else None

    def move_to(self, now: Fraction) -> None:
        """Take in all that happened until then; moments must rise."""
        changed = set()
        while self._events and self._events[-1][0] <= now:
            place = self._events.pop()[1]
            pipeline = self._stragglers[place].pipeline
            self._seen.setdefault(pipeline, set()).symmetric_difference_update({place})  # comes first, then goes
            changed.add(pipeline)
        for pipeline in changed:
            self.conditions[pipeline] = condition_of(self._in_order(self._seen[pipeline]))

    def _in_order(self, places: Iterable[int]) -> list[Straggler]:
        return [self._stragglers[place] for place in sorted(places)]
