"""What a command says of a profile or a frontier: plain values, for its text and its JSON alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from perseus_planner.profiles.csv_file import word_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from perseus_planner.profiles.measurement import Measurement
    from perseus_planner.profiles.profiles import Profile
    from perseus_planner.schedules.iteration import Iteration
    from perseus_planner.solver.frontier import Frontier

_STEPS = 10  #: between the ends of a frontier, in its table


@dataclass(frozen=True)
class ClockRange:
    """What was measured of one computation.

    Attributes:
        stage: of the pipeline.
        instruction: as the CSV of a profile writes it.
        clocks: how many clocks were measured.
        highest: what was measured at the highest of them.
        lowest: and at the lowest.
        time_error: largest standard error of a time over that time; None where no error is known.
        energy_error: likewise of an energy.
        throttled: at how many clocks something held the GPU back.
    """

    stage: int
    instruction: str
    clocks: int
    highest: Measurement
    lowest: Measurement
    time_error: float | None
    energy_error: float | None
    throttled: int


@dataclass(frozen=True)
class ProfileSummary:
    """A profile; fields as `Profile` has them."""

    origin: str
    gpu: str | None
    stages: int
    control: str
    gpus_per_stage: int
    blocking_power_w: float | tuple[float, ...]
    overhead_s: float
    digest: str
    conditions: Mapping[str, str]
    computations: tuple[ClockRange, ...]


@dataclass(frozen=True)
class FrontierPoint:
    """One point of a frontier.

    Attributes:
        time_s: iteration time, seconds.
        time_ratio: that over the time with all clocks at maximum.
        bound_j: the least energy that any plan of that time can have, joules, waiting included.
        saved_j: joules below the energy with all clocks at maximum.
        saved_share: that over the energy with all clocks at maximum.
        mark: what is special about the point, or empty.
    """

    time_s: float
    time_ratio: float
    bound_j: float
    saved_j: float
    saved_share: float
    mark: str


@dataclass(frozen=True)
class FrontierSummary:
    """A frontier; fields as `Frontier` has them, `points` from the fastest to the slowest.

    `operations` counts those of fixed time, `longest_lag_s` is the longest transfer, and `remarks` say what a reader
    may not expect.
    """

    origin: str
    gpu: str | None
    schedule: str
    stages: int
    ranks: int
    microbatches: int
    computations: int
    operations: int
    longest_lag_s: float
    gpus_per_stage: int
    blocking_power_w: float | tuple[float, ...]
    overhead_s: float
    baseline_time_s: float
    baseline_energy_j: float
    min_time_s: float
    least_energy_time_s: float
    max_time_s: float
    points: tuple[FrontierPoint, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class FrontiersSummary:
    """The frontiers of a job whose pipelines are not all alike: one for each kind of them."""

    frontiers: tuple[FrontierSummary, ...]


def summarize_profile(profile: Profile) -> ProfileSummary:
    """What `planner profile` and `planner show` say."""
    ranges = tuple(_range(stage, kind, rows) for (stage, kind), rows in profile.measurements.items())
    return ProfileSummary(
        origin=profile.origin,
        gpu=profile.gpu,
        stages=profile.stages,
        control=profile.control,
        gpus_per_stage=profile.gpus_per_stage,
        blocking_power_w=profile.blocking_power_w,
        overhead_s=profile.overhead_s,
        digest=profile.digest,
        conditions=dict(profile.conditions),
        computations=ranges,
    )


def _range(stage: int, kind: str, rows: Sequence[Measurement]) -> ClockRange:
    known = [(row, row.evidence) for row in rows if row.evidence is not None]
    return ClockRange(
        stage,
        word_of(kind),
        len(rows),
        rows[0],
        rows[-1],
        time_error=max((evidence.time_stderr_s / row.time_s for row, evidence in known), default=None),
        energy_error=max(
            (evidence.energy_stderr_j / row.energy_j for row, evidence in known if row.energy_j), default=None
        ),
        throttled=sum(bool(evidence.throttle) for _, evidence in known),
    )


def summarize_frontier(frontier: Frontier) -> FrontierSummary:
    """What `planner solve` and `planner show` say."""
    profile, schedule = frontier.profile, frontier.schedule
    return FrontierSummary(
        origin=profile.origin,
        gpu=profile.gpu,
        schedule=schedule.name,
        stages=schedule.stages,
        ranks=len(schedule.ranks),
        microbatches=schedule.microbatches,
        computations=len(frontier.dag.computations),
        operations=len(frontier.dag.iteration.operations),
        longest_lag_s=longest_lag_s(frontier.dag.iteration),
        gpus_per_stage=profile.gpus_per_stage,
        blocking_power_w=profile.blocking_power_w,
        overhead_s=profile.overhead_s,
        baseline_time_s=frontier.baseline_time_s,
        baseline_energy_j=frontier.baseline_energy_j,
        min_time_s=frontier.min_time_s,
        least_energy_time_s=frontier.least_energy_time_s,
        max_time_s=frontier.max_time_s,
        points=tuple(_point(frontier, time_s, mark) for time_s, mark in _marked_times(frontier)),
        remarks=tuple(_remarks(frontier)),
    )


def longest_lag_s(iteration: Iteration) -> float:
    """The longest time that a result is on its way to what waits for it, seconds; 0 where nothing is."""
    return max((lag_s for lags_s in iteration.lags_s for lag_s in lags_s), default=0.0)


def share(part_j: float, whole_j: float) -> float:
    """`part_j` as a part of `whole_j`, joules; 0 where nothing costs energy."""
    return part_j / whole_j if whole_j else 0.0


def _marked_times(frontier: Frontier) -> list[tuple[float, str]]:
    """Times from the fastest to the slowest, the special ones among them, with what they are."""
    special = sorted(
        [
            (frontier.min_time_s, "fastest"),
            (frontier.baseline_time_s, "no slower than all clocks at maximum"),
            (frontier.least_energy_time_s, "least energy"),
            (frontier.max_time_s, "slowest useful, beside a straggler"),
        ]
    )
    marks: list[tuple[float, str]] = []
    for time_s, mark in special:
        if marks and _same(time_s, marks[-1][0]):
            mark = f"{marks.pop()[1]}; {mark}"
        marks.append((time_s, mark))
    between = np.linspace(special[0][0], special[-1][0], _STEPS + 1).tolist()
    near_s = (between[1] - between[0]) / 2
    plain = [(time_s, "") for time_s in between if all(abs(time_s - marked_s) > near_s for marked_s, _ in marks)]
    return sorted(marks + plain)


def _same(time_s: float, other_s: float) -> bool:
    """Whether they differ by rounding only."""
    return math.isclose(time_s, other_s, rel_tol=1e-12)


def _point(frontier: Frontier, time_s: float, mark: str) -> FrontierPoint:
    bound_j, baseline_j = frontier.bound_j(time_s), frontier.baseline_energy_j
    saved_j = baseline_j - bound_j
    ratio = time_s / frontier.baseline_time_s
    return FrontierPoint(time_s, ratio, bound_j, saved_j, share(saved_j, baseline_j), mark)


def _remarks(frontier: Frontier) -> Iterator[str]:
    profile, options = frontier.profile, frontier.dag.points
    most_waiting_w = max(map(profile.blocking_w, range(profile.stages)))
    power = f"{most_waiting_w:g} W"
    if all(len(rows) == 1 for rows in profile.measurements.values()):
        yield "Every computation has a single clock, so there is a single plan."
        return
    if all(len(worthwhile) == 1 for worthwhile in options.values()):
        yield f"No slowdown ever pays: computing slower costs more than being done early and waiting at {power}."
    elif _same(frontier.least_energy_time_s, frontier.min_time_s) and not _same(
        frontier.min_time_s, frontier.max_time_s
    ):
        yield (
            f"The blocking power of {power} is so large that no slowdown of the iteration ever pays: "
            "the fastest has the least energy. Slower ones are of use beside a straggler only."
        )
    most_w = max(row.energy_j / row.time_s for rows in profile.measurements.values() for row in rows)
    if most_waiting_w > most_w:
        yield f"The blocking power of {power} is more than any computation draws ({most_w:.6g} W at most); check it."
