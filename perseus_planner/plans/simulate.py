"""Replays an iteration: when every computation starts and ends, and what the GPUs draw meanwhile.

Plain Python over the rules of the schedule, with nothing of the solver in it: the oracle that plans are held against.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.plans.clock_replay import Call, ChangeReplay, replay_with_changes
from perseus_planner.plans.tasks import Fixed, Task, TaskGraph
from perseus_planner.profiles.clock_changes import ClockChange

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from perseus_planner.plans.plan import Plan
    from perseus_planner.profiles.measurement import Measurement
    from perseus_planner.schedules.dag import PipelineDag
    from perseus_planner.schedules.iteration import Iteration


@dataclass(frozen=True)
class Span:
    """One computation, or one fixed operation, on the time axis.

    Attributes:
        start_s: seconds from the start of the iteration.
        end_s: seconds from the start of the iteration.
        power_w: average power of its GPUs meanwhile, watts.
    """

    start_s: float
    end_s: float
    power_w: float


@dataclass(frozen=True)
class Timeline:
    """One iteration.

    Attributes:
        spans: "3F17" -> when it runs, for every computation, rank by rank in program order, then for every operation.
        time_s: how long the iteration takes, seconds: until the last one ends, and the overhead that was calibrated.
        energy_j: energy over all GPUs in that time, joules, waiting included.
    """

    spans: Mapping[str, Span]
    time_s: float
    energy_j: float


def replay(plan: Plan) -> Timeline:
    """Run one of many equal iterations of a plan: each computation as soon as it can, at its measured time.

    Where the plan knows what changing a clock costs, a computation runs at the clock that was in force before until its
    own is, as `clock_replay` says.
    """
    if plan.clock_change is not None:
        return _with_changes(plan, plan.clock_change)
    points = [plan.measurement(computation) for computation in plan.iteration.computations]
    durations_s = _durations_s(plan.iteration, [point.time_s for point in points])
    energies_j = _energies_j(plan.iteration, points, plan.rank_waiting_w)
    waits, end_s = plan.iteration.waits, _end_times(plan.iteration, durations_s)
    start_s = [max((end_s[other] + lag_s for other, lag_s in before), default=0.0) for before in waits]
    return _timeline(plan, start_s, end_s, durations_s, energies_j)


class Nodes(NamedTuple):
    """What every node of an iteration did, by its place."""

    start_s: Sequence[float]
    end_s: Sequence[float]
    durations_s: Sequence[float]
    energies_j: Sequence[float]


def run_with_changes(
    iteration: Iteration,
    tasks: Sequence[Task],
    change: ClockChange,
    *,
    waiting_w: Sequence[float],
    gpus_per_stage: int,
) -> Nodes:
    """Run one of many equal iterations in which changing a clock costs time.

    Args:
        iteration: what runs.
        tasks: each of its computations at its clock, by place.
        change: what changing a clock costs.
        waiting_w: what each rank draws while it waits, watts.
        gpus_per_stage: GPUs of a rank.
    """
    ran = _replayed(iteration, tasks, change, waiting_w, gpus_per_stage)
    places = [place for program in iteration.programs for place in program]
    number = {place: i for i, place in enumerate(places)}
    columns = ran.starts_s, ran.ends_s, ran.durations_s, ran.energies_j
    return Nodes(*([column[number[place]] for place in range(len(places))] for column in columns))


def clock_calls(plan: Plan) -> tuple[Call, ...]:
    """The clock changes of an iteration of `plan` as replayed, in the order in which they begin.

    They take no time where the plan does not know what they cost.
    """
    change = plan.clock_change or ClockChange(0.0)
    return _replayed(plan.iteration, _tasks(plan), change, plan.rank_waiting_w, plan.gpus_per_stage).calls


def _replayed(
    iteration: Iteration, tasks: Sequence[Task], change: ClockChange, waiting_w: Sequence[float], gpus_per_stage: int
) -> ChangeReplay:
    """The iteration's programs, rank by rank; places count in that order."""
    fixed_j = _energies_j(iteration, (), waiting_w)
    fixed = zip(iteration.operations, fixed_j, strict=True)
    each = [*tasks, *(Task.operation(Fixed(operation.time_s, energy_j)) for operation, energy_j in fixed)]
    places = [place for program in iteration.programs for place in program]
    number = {place: i for i, place in enumerate(places)}
    return replay_with_changes(
        TaskGraph(
            [[each[place] for place in program] for program in iteration.programs],
            [[(number[other], lag_s) for other, lag_s in iteration.waits[place]] for place in places],
        ),
        change,
        node_of_rank=change.node_of_rank(len(waiting_w), gpus_per_stage),
        blocking_power_w=waiting_w,
        gpus_per_rank=change.calls_per_change(gpus_per_stage),
    )


def time_and_energy(dag: PipelineDag, points: Sequence[Measurement]) -> tuple[float, float]:
    """What an iteration takes: seconds, and joules over all GPUs, waiting included.

    Args:
        dag: the iteration.
        points: what was measured of each computation at its clock, by its place in `dag.computations`.
    """
    durations_s = _durations_s(dag.iteration, [point.time_s for point in points])
    time_s = max(_end_times(dag.iteration, durations_s)) + dag.profile.overhead_s
    energies_j = _energies_j(dag.iteration, points, dag.rank_waiting_w)
    return time_s, _energy_j(dag.iteration, durations_s, energies_j, dag.rank_waiting_w, time_s)


def end_times(dag: PipelineDag, durations_s: Sequence[float]) -> list[float]:
    """When each node ends, seconds, if each starts as soon as all that it waits for allows it.

    Args:
        dag: the iteration.
        durations_s: seconds of each computation, by its place in `dag.computations`.
    """
    return _end_times(dag.iteration, _durations_s(dag.iteration, durations_s))


def _with_changes(plan: Plan, change: ClockChange) -> Timeline:
    waiting_w, gpus = plan.rank_waiting_w, plan.gpus_per_stage
    ran = run_with_changes(plan.iteration, _tasks(plan), change, waiting_w=waiting_w, gpus_per_stage=gpus)
    return _timeline(plan, *ran)


def _tasks(plan: Plan) -> list[Task]:
    clocks = [plan.clocks[str(computation)] for computation in plan.iteration.computations]
    return [Task(plan.measurements[key], mhz) for key, mhz in zip(plan.iteration.keys, clocks, strict=True)]


def _timeline(
    plan: Plan,
    start_s: Sequence[float],
    end_s: Sequence[float],
    durations_s: Sequence[float],
    energies_j: Sequence[float],
) -> Timeline:
    """The timeline of what each node did, by place."""
    values = zip(plan.iteration.names, start_s, end_s, durations_s, energies_j, strict=True)
    spans = {name: Span(start, end, joules / seconds) for name, start, end, seconds, joules in values}
    time_s = max(end_s) + plan.overhead_s
    energy_j = _energy_j(plan.iteration, durations_s, energies_j, plan.rank_waiting_w, time_s)
    return Timeline(spans, time_s, energy_j)


def _durations_s(iteration: Iteration, computed_s: Sequence[float]) -> list[float]:
    return [*computed_s, *(operation.time_s for operation in iteration.operations)]


def _energies_j(iteration: Iteration, points: Sequence[Measurement], waiting_w: Sequence[float]) -> list[float]:
    fixed_j = [
        waiting_w[operation.rank] * operation.time_s if operation.energy_j is None else operation.energy_j
        for operation in iteration.operations
    ]
    return [*(point.energy_j for point in points), *fixed_j]


def _end_times(iteration: Iteration, durations_s: Sequence[float]) -> list[float]:
    end_s, waits = [0.0] * len(durations_s), iteration.waits
    for place in iteration.order:
        start_s = max((end_s[other] + lag_s for other, lag_s in waits[place]), default=0.0)
        end_s[place] = start_s + durations_s[place]
    return end_s


def _energy_j(
    iteration: Iteration,
    durations_s: Sequence[float],
    energies_j: Sequence[float],
    waiting_w: Sequence[float],
    time_s: float,
) -> float:
    busy_s: list[list[float]] = [[] for _ in waiting_w]
    for rank, duration_s in zip(iteration.rank_of, durations_s, strict=True):
        busy_s[rank].append(duration_s)
    waiting_j = [power_w * (time_s - math.fsum(busy)) for power_w, busy in zip(waiting_w, busy_s, strict=True)]
    return math.fsum(energies_j) + math.fsum(waiting_j)
