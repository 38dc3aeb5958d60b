"""Replays an iteration: when every computation starts and ends, and what the GPUs draw meanwhile.

Plain Python over the rules of the schedule, with nothing of the solver in it: the oracle that plans are held against.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perseus_planner.dag import PipelineDag, pipeline_predecessors, topological_order
from perseus_planner.profiles import Measurement

if TYPE_CHECKING:
    from perseus_planner.plan import Plan


@dataclass(frozen=True)
class Span:
    """One computation on the time axis.

    Attributes:
        start_s: seconds from the start of the iteration.
        end_s: seconds from the start of the iteration.
        power_w: average power of its GPU meanwhile, watts.
    """

    start_s: float
    end_s: float
    power_w: float


@dataclass(frozen=True)
class Timeline:
    """One iteration.

    Attributes:
        spans: "3F17" -> when it runs, for every computation, rank by rank in program order.
        time_s: when the last computation ends, seconds.
        energy_j: energy over all GPUs until then, joules, waiting included.
    """

    spans: Mapping[str, Span]
    time_s: float
    energy_j: float


def replay(plan: Plan) -> Timeline:
    """Run one iteration of a plan of a pipeline schedule: each computation as soon as it can, at its measured time.

    Raises:
        ScheduleError: the plan's schedule cannot run.
    """
    computations = tuple(plan.schedule.computations())
    points = [plan.measurement(computation) for computation in computations]
    predecessors = pipeline_predecessors(plan.schedule)
    order = topological_order(computations, predecessors)
    end_s = _end_times(order, predecessors, [point.time_s for point in points])
    spans = {
        str(computation): Span(
            max((end_s[other] for other in predecessors[place]), default=0.0),
            end_s[place],
            points[place].energy_j / points[place].time_s,
        )
        for place, computation in enumerate(computations)
    }
    time_s = max(end_s)
    return Timeline(spans, time_s, _energy_j(points, time_s, len(plan.schedule.ranks), plan.blocking_power_w))


def time_and_energy(dag: PipelineDag, points: Sequence[Measurement]) -> tuple[float, float]:
    """What an iteration takes: seconds, and joules over all GPUs, waiting included.

    Args:
        dag: the iteration.
        points: what was measured of each computation at its clock, by its place in `dag.computations`.
    """
    time_s = max(end_times(dag, [point.time_s for point in points]))
    return time_s, _energy_j(points, time_s, dag.profile.stages, dag.profile.blocking_power_w)


def end_times(dag: PipelineDag, durations_s: Sequence[float]) -> list[float]:
    """When each computation ends, seconds, if each starts as soon as all that it waits for has ended.

    Args:
        dag: the iteration.
        durations_s: seconds of each computation, by its place in `dag.computations`.
    """
    return _end_times(dag.order, dag.predecessors, durations_s)


def _end_times(
    order: Sequence[int], predecessors: Sequence[Sequence[int]], durations_s: Sequence[float]
) -> list[float]:
    end_s = [0.0] * len(durations_s)
    for place in order:
        end_s[place] = max((end_s[other] for other in predecessors[place]), default=0.0) + durations_s[place]
    return end_s


def _energy_j(points: Sequence[Measurement], time_s: float, gpus: int, blocking_power_w: float) -> float:
    waiting_s = gpus * time_s - math.fsum(point.time_s for point in points)
    return math.fsum(point.energy_j for point in points) + blocking_power_w * waiting_s
