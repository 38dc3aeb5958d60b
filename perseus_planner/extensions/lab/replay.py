"""Replays a job on a cluster: data-parallel pipelines that end every iteration together, some
slower for a while; under policies, which say what clocks each pipeline runs, given the stragglers
that are known.

All pipelines are alike. An iteration takes as long as its slowest pipeline; the GPUs of the others
wait at the blocking power. The stragglers of an iteration are those that are active when it begins.
A policy learns of them late, by the reaction delay, and its decisions take effect at the beginning
of an iteration.

Time is simulated, and iterations are replayed from the profile. Between two events (a straggler
begins or ends, or the policy learns of it) all iterations are equal, so the replay goes from event
to event and its cost does not depend on the number of iterations. Moments are exact fractions, so
that no rounding moves an event to another iteration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from perseus_planner import Frontier
from perseus_planner.base.errors import UsageError
from perseus_planner.base.fields import Checked
from perseus_planner.base.units import Count, Wait
from perseus_planner.extensions.lab.policies import (
    Clocks,
    IterationReplays,
    Policy,
    ReplayedIteration,
    make_policy,
)
from perseus_planner.extensions.lab.stragglers import (
    UNDISTURBED,
    Condition,
    Straggler,
    condition_of,
)

Floats = NDArray[np.float64]


_MOST_GPUS = 2**24
"""GPUs of a cluster: more than there are anywhere, and results of 130 MB for each policy."""


@dataclass(frozen=True, eq=False)
class Cluster(Checked):
    """A training job on a cluster, with its stragglers.

    Raises:
        UsageError: If a number is out of range.
    """

    frontier: Frontier  #: the frontier of each pipeline; all pipelines are alike
    pipelines: Count  #: number of data-parallel pipelines
    iterations: Count  #: number of iterations that the job runs
    #: in any order. The slowdowns of stragglers that hit the same stage at once are multiplied.
    stragglers: Sequence[Straggler] = ()
    delay_s: Wait = 1.0  #: how late a policy learns of a change, seconds, 0 or more

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frontier.dag.has_open_modes:
            raise UsageError(
                "modes: a cluster is replayed in one way of running; leave the other modes out of "
                "the profile"
            )
        if self.gpus > _MOST_GPUS:
            raise UsageError(
                f"pipelines: {self.pipelines:,} of {self.gpus // self.pipelines} GPUs are more "
                f"than {_MOST_GPUS:,} GPUs; give fewer, as a result has a row for each"
            )

    @cached_property
    def replays(self) -> IterationReplays:
        """The replayed iterations of a pipeline."""
        return IterationReplays(self.frontier.dag)

    @property
    def gpus(self) -> int:
        """The number of GPUs in the cluster."""
        return (
            self.pipelines
            * len(self.frontier.schedule.ranks)
            * self.frontier.profile.gpus_per_stage
        )


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of a job under one policy. All GPUs of a rank do the same."""

    policy: str  #: name of the policy
    iterations: int  #: number of iterations
    time_s: float  #: time of all iterations, seconds
    #: (pipelines, ranks) time for which each GPU of a rank works, seconds. It is idle for the rest.
    busy_s: Floats
    #: (pipelines, ranks) energy of each GPU of a rank, waiting included, joules.
    energy_per_gpu_j: Floats
    gpus_per_stage: int  #: number of GPUs of a rank

    @property
    def idle_s(self) -> Floats:
        """(pipelines, ranks) time for which each GPU of a rank waits, seconds."""
        return self.time_s - self.busy_s

    @property
    def energy_j(self) -> float:
        """Energy of all GPUs, waiting included, joules."""
        return math.fsum(self.energy_per_gpu_j.flat) * self.gpus_per_stage

    @property
    def power_w(self) -> float:
        """Average power of all GPUs, watts."""
        return self.energy_j / self.time_s


def simulate(cluster: Cluster, name: str, slowdown: float = 1.0) -> Outcome:
    """Replay the job under the policy called `name`.

    Args:
        cluster: the job.
        name: one of `policies.POLICIES`.
        slowdown: the target, as a multiple of the iteration time with all clocks at maximum.

    Raises:
        InfeasibleError: If no iteration is as fast as the target.
        UsageError: If there is no such policy, or it does not apply to this schedule or profile.
    """
    policy = make_policy(name, cluster.frontier, slowdown, cluster.replays)
    return replay_under(cluster, name, policy)


def replay_under(cluster: Cluster, name: str, policy: Policy) -> Outcome:
    """Replay the job under `policy`, called `name`."""
    waiting_w = np.array(cluster.frontier.dag.rank_waiting_w)
    busy_s = np.zeros((cluster.pipelines, len(waiting_w)))
    energy_j = np.zeros_like(busy_s)
    # An exact fraction, so that rounding moves no event to another iteration.
    time_s = Fraction(0)
    for count, groups in _equal_iterations(cluster, policy):
        # All pipelines end an iteration together, with the slowest.
        longest_s = max(iteration.time_s for iteration, _ in groups)
        for iteration, members in groups:
            # A count of equal iterations costs as much as one, so the length of the job does not
            # matter.
            busy_s[members] += count * iteration.busy_s
            energy_j[members] += count * (
                # Waiting GPUs draw their power until the slowest pipeline has ended.
                iteration.busy_j + waiting_w * (longest_s - iteration.busy_s)
            )
        time_s += count * Fraction(longest_s)
    gpus = cluster.frontier.profile.gpus_per_stage
    return Outcome(name, cluster.iterations, float(time_s), busy_s, energy_j / gpus, gpus)


def _equal_iterations(
    cluster: Cluster, policy: Policy
) -> Iterator[tuple[int, list[tuple[ReplayedIteration, list[int]]]]]:
    """Yield a number of equal iterations, with each distinct iteration in them and the pipelines
    that run it.
    """
    # What is, and what the policy knows, are two views of the same events, one of them late.
    actual = _DelayedView(cluster.stragglers, 0.0)
    delayed = _DelayedView(cluster.stragglers, cluster.delay_s)
    plans: dict[frozenset[Condition], Mapping[Condition, Clocks]] = {}
    now = Fraction(0)
    left = cluster.iterations
    while left:
        actual.move_to(now)
        delayed.move_to(now)
        # Pipelines in the same state run the same, so each state is replayed once.
        groups = _groups(cluster.pipelines, actual.conditions, delayed.conditions)
        seen = frozenset(belief for _, belief in groups)
        # Equal beliefs have equal plans, and each takes a solve.
        if seen not in plans:
            plans[seen] = policy(seen)
        running = [
            # Clocks follow what is believed, and times what is true.
            (cluster.replays.replay(plans[seen][belief], truth), pipelines)
            for (truth, belief), pipelines in groups.items()
        ]
        longest_s = Fraction(max(iteration.time_s for iteration, _ in running))
        # Until the next event of either view all iterations are equal.
        upcoming = [moment for moment in (actual.upcoming, delayed.upcoming) if moment is not None]
        # An event counts from the first iteration that begins after it, so the count is rounded up.
        count = min([left, *(math.ceil((moment - now) / longest_s) for moment in upcoming)])
        yield count, running
        now = now + count * longest_s
        left = left - count


def _groups(
    pipelines: int, actual: Mapping[int, Condition], known: Mapping[int, Condition]
) -> dict[tuple[Condition, Condition], list[int]]:
    """Group the pipelines by their actual and their known condition."""
    groups: dict[tuple[Condition, Condition], list[int]] = {}
    for number in range(pipelines):
        groups.setdefault(
            (actual.get(number, UNDISTURBED), known.get(number, UNDISTURBED)), []
        ).append(number)
    return groups


class _DelayedView:
    """The stragglers as an observer sees them who is `late_s` seconds late.

    `conditions` maps each pipeline in which a straggler was seen to its condition.
    """

    def __init__(self, stragglers: Sequence[Straggler], late_s: float) -> None:
        self._stragglers = stragglers
        events = [
            (Fraction(moment_s) + Fraction(late_s), number)
            for number, straggler in enumerate(stragglers)
            for moment_s in (straggler.start_s, straggler.end_s)
            if moment_s != math.inf
        ]
        self._events = sorted(events, reverse=True)
        self._seen: dict[int, set[int]] = {}
        self.conditions: dict[int, Condition] = {}

    @property
    def upcoming(self) -> Fraction | None:
        """The moment of the next change."""
        return self._events[-1][0] if self._events else None

    def move_to(self, now: Fraction) -> None:
        """Apply all changes up to `now`. Successive moments must rise."""
        changed = set()
        while self._events and self._events[-1][0] <= now:
            number = self._events.pop()[1]
            pipeline = self._stragglers[number].pipeline
            # A straggler begins at its first event and ends at its second.
            self._seen.setdefault(pipeline, set()).symmetric_difference_update({number})
            changed.add(pipeline)
        for pipeline in changed:
            self.conditions[pipeline] = condition_of(self._in_order(self._seen[pipeline]))

    def _in_order(self, places: Iterable[int]) -> list[Straggler]:
        return [self._stragglers[number] for number in sorted(places)]
