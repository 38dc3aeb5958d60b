"""Replay an iteration: when every computation starts and ends, and what the GPUs draw meanwhile.

Plain Python over the rules of the schedule, independent of the solver: the reference that plans are
checked against.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from perseus_planner.plans.clock_replay import (
    Call,
    ChangeReplay,
    FixedCost,
    Task,
    replay_with_changes,
)
from perseus_planner.profiles.measurement import ClockChange

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from perseus_planner.profiles.keys import AnyKey
    from perseus_planner.profiles.measurement import Measurement
    from perseus_planner.profiles.profiles import Profile
    from perseus_planner.schedules import Computation
    from perseus_planner.schedules.dag import PipelineDag
    from perseus_planner.schedules.iteration import Iteration

ALL_MAXIMUM = "all clocks at maximum"
"""The name of the baseline of every saving."""
HIGHEST_MEASURED = "the highest measured clocks"
"""Its name where some computations were not measured at the highest clock."""

Nodes: TypeAlias = "tuple[Sequence[float], Sequence[float], Sequence[float], Sequence[float]]"
"""When each node of an iteration starts and ends, how long it takes, seconds, and its energy,
joules.
"""


class Planned(Protocol):
    """What a replay reads of a `Plan`, which imports this file for its frame."""

    @property
    def iteration(self) -> Iteration: ...  # noqa: D102
    @property
    def clocks(self) -> Mapping[str, int]: ...  # noqa: D102
    @property
    def measurements(self) -> Mapping[AnyKey, Mapping[int, Measurement]]: ...  # noqa: D102
    @property
    def rank_waiting_w(self) -> tuple[float, ...]: ...  # noqa: D102
    @property
    def gpus_per_stage(self) -> int: ...  # noqa: D102
    @property
    def overhead_s(self) -> float: ...  # noqa: D102
    @property
    def clock_change(self) -> ClockChange | None: ...  # noqa: D102
    def measurement(self, computation: Computation) -> Measurement: ...  # noqa: D102


@dataclass(frozen=True)
class Span:
    """When one computation or fixed operation runs."""

    start_s: float  #: seconds from the start of the iteration
    end_s: float  #: seconds from the start of the iteration
    power_w: float  #: average power of its GPUs meanwhile, watts

    @property
    def time_s(self) -> float:
        """How long it runs, seconds."""
        return self.end_s - self.start_s

    @property
    def energy_j(self) -> float:
        """What its GPUs use meanwhile, joules."""
        return self.power_w * self.time_s


@dataclass(frozen=True)
class Timeline:
    """One replayed iteration."""

    #: "3F17" -> when it runs, for every computation, rank by rank in program order, then for every
    #: operation.
    spans: Mapping[str, Span]
    #: iteration time, seconds: until the last span ends, plus the calibrated overhead.
    time_s: float
    energy_j: float  #: energy over all GPUs in that time, joules, waiting included


def all_maximum(dag: PipelineDag) -> dict[str, int]:
    """Run every computation at its highest measured clock: the baseline of every saving."""
    keys = zip(dag.computations, dag.iteration.keys, strict=True)
    return {
        str(computation): dag.profile.measurements[key][0].clock_mhz for computation, key in keys
    }


def baseline_name(profile: Profile) -> str:
    """Return what the highest rows of a profile are, with which savings are compared."""
    return HIGHEST_MEASURED if profile.without_full_clocks else ALL_MAXIMUM


def origin_text(origin: str) -> str:
    """Say where a replayed number comes from, as the start of a sentence."""
    return f"Replayed from a {profile_of_origin(origin)}"


def profile_of_origin(origin: str) -> str:
    """Name a profile by its origin."""
    return "profile of unknown origin" if origin == "unknown" else f"{origin} profile"


def replay(plan: Planned) -> Timeline:
    """Run one of many equal iterations of a plan: each computation as soon as it can, at its
    measured time.

    If the plan has the cost of a clock change, a computation runs at the previous clock until its
    own is in force, as `clock_replay` describes.
    """
    iteration = plan.iteration
    waiting_w = plan.rank_waiting_w
    # Changes of clocks take time only where their cost is known; otherwise each computation has its
    # planned time.
    if plan.clock_change is not None:
        changed = replay_changes(
            iteration, _tasks(plan), plan.clock_change, waiting_w, plan.gpus_per_stage
        )
        nodes: Nodes = changed.starts_s, changed.ends_s, changed.durations_s, changed.energies_j
    else:
        points = [plan.measurement(computation) for computation in iteration.computations]
        durations_s = _durations_s(iteration, [point.time_s for point in points])
        energies_j = _energies_j(iteration, points, waiting_w)
        nodes = *_starts_and_ends_s(iteration, durations_s), durations_s, energies_j
    # A node without time, such as a kind without work, has no power.
    values = zip(iteration.names, *nodes, strict=True)
    spans = {
        name: Span(start, end, joules / seconds if seconds else 0.0)
        for name, start, end, seconds, joules in values
    }
    # What an iteration takes beside its computations comes after the last of them.
    time_s = max(nodes[1]) + plan.overhead_s
    return Timeline(
        spans, time_s, iteration_energy_j(iteration.rank_of, *nodes[2:], waiting_w, time_s)
    )


def replay_changes(
    iteration: Iteration,
    tasks: Sequence[Task],
    change: ClockChange,
    waiting_w: Sequence[float],
    gpus_per_stage: int,
) -> ChangeReplay:
    """Run one of many equal iterations in which changing a clock costs time.

    Args:
        iteration: the iteration.
        tasks: each of its computations at its clock, by place.
        change: the cost of a clock change.
        waiting_w: what each rank draws while it waits, watts.
        gpus_per_stage: GPUs of a rank.

    Returns:
        The replay of all nodes of the iteration, by place.
    """
    # Operations run at any clock, so they are tasks with one cost.
    fixed_j = _energies_j(iteration, (), waiting_w)
    fixed = zip(iteration.operations, fixed_j, strict=True)
    return replay_with_changes(
        [
            *tasks,
            *(
                Task.operation(FixedCost(operation.time_s, energy_j))
                for operation, energy_j in fixed
            ),
        ],
        iteration.programs,
        iteration.waits,
        change,
        node_of_rank=change.node_of_rank(len(waiting_w), gpus_per_stage),
        gpus_per_rank=change.calls_per_change(gpus_per_stage),
    )


def clock_calls(plan: Planned) -> tuple[Call, ...]:
    """Return the clock changes of a replayed iteration of `plan`, in the order in which they begin.

    They take no time if the plan does not have the cost of a clock change.
    """
    change = plan.clock_change or ClockChange(0.0)
    return replay_changes(
        plan.iteration, _tasks(plan), change, plan.rank_waiting_w, plan.gpus_per_stage
    ).calls


def time_and_energy(dag: PipelineDag, points: Sequence[Measurement]) -> tuple[float, float]:
    """Return the seconds of an iteration, and its joules over all GPUs, waiting included.

    Args:
        dag: the iteration.
        points: the measurement of each computation at its clock, by its place in
            `dag.computations`.
    """
    iteration = dag.iteration
    waiting_w = dag.rank_waiting_w
    durations_s = _durations_s(iteration, [point.time_s for point in points])
    time_s = max(_starts_and_ends_s(iteration, durations_s)[1]) + dag.profile.overhead_s
    energies_j = _energies_j(iteration, points, waiting_w)
    return time_s, iteration_energy_j(iteration.rank_of, durations_s, energies_j, waiting_w, time_s)


def end_times(dag: PipelineDag, durations_s: Sequence[float]) -> list[float]:
    """Return when each node ends, seconds, if each starts as soon as everything that it waits for
    allows it.

    Args:
        dag: the iteration.
        durations_s: seconds of each computation, by its place in `dag.computations`.
    """
    return _starts_and_ends_s(dag.iteration, _durations_s(dag.iteration, durations_s))[1]


def iteration_energy_j(
    rank_of: Sequence[int],
    durations_s: Sequence[float],
    energies_j: Sequence[float],
    waiting_w: Sequence[float],
    time_s: float,
) -> float:
    """Return the joules of an iteration over all GPUs, waiting included.

    Args:
        rank_of: the rank of each node.
        durations_s: seconds of each node.
        energies_j: joules of each node.
        waiting_w: what each rank draws while it waits, watts.
        time_s: iteration time, seconds.
    """
    # Sums of many small times are exact this way, in whatever order nodes come.
    busy_s: list[list[float]] = [[] for _ in waiting_w]
    for rank, duration_s in zip(rank_of, durations_s, strict=True):
        busy_s[rank].append(duration_s)
    # A rank's GPUs wait while nothing of the rank runs.
    waiting_j = [
        power_w * (time_s - math.fsum(busy))
        for power_w, busy in zip(waiting_w, busy_s, strict=True)
    ]
    return math.fsum(energies_j) + math.fsum(waiting_j)


def _tasks(plan: Planned) -> list[Task]:
    clocks = [plan.clocks[str(computation)] for computation in plan.iteration.computations]
    return [
        Task(plan.measurements[key], mhz)
        for key, mhz in zip(plan.iteration.keys, clocks, strict=True)
    ]


def _durations_s(iteration: Iteration, computed_s: Sequence[float]) -> list[float]:
    return [*computed_s, *(operation.time_s for operation in iteration.operations)]


def _energies_j(
    iteration: Iteration, points: Sequence[Measurement], waiting_w: Sequence[float]
) -> list[float]:
    # An operation without energy of its own draws what waiting draws.
    fixed_j = [
        waiting_w[operation.rank] * operation.time_s
        if operation.energy_j is None
        else operation.energy_j
        for operation in iteration.operations
    ]
    return [*(point.energy_j for point in points), *fixed_j]


def _starts_and_ends_s(
    iteration: Iteration, durations_s: Sequence[float]
) -> tuple[list[float], list[float]]:
    starts_s = [0.0] * len(durations_s)
    ends_s = [0.0] * len(durations_s)
    waits = iteration.waits
    for node in iteration.order:
        starts_s[node] = max((ends_s[before] + lag_s for before, lag_s in waits[node]), default=0.0)
        ends_s[node] = starts_s[node] + durations_s[node]
    return starts_s, ends_s
