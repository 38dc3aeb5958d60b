"""The time-energy curve of each computation: what was measured, and the lower hull that planning sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from perseus_planner.profiles.csv_file import word_of
from perseus_planner.profiles.operating_points import OperatingPoint, lower_hull, pareto_front

if TYPE_CHECKING:
    from perseus_planner.profiles.measurement import Measurement
    from perseus_planner.profiles.profiles import Profile

_NANO, _MICRO = 10**9, 10**6


@dataclass(frozen=True)
class CurvePoint:
    """A computation at one clock; standard errors are None where the profile has none."""

    clock: int
    time_s: float
    energy_j: float
    time_stderr_s: float | None
    energy_stderr_j: float | None


@dataclass(frozen=True)
class Curve:
    """One computation.

    Attributes:
        stage: of the pipeline.
        computation: forward, backward or whatever else, in words.
        points: what was measured, highest clock first.
        hull: clocks on the lower convex hull of time and effective energy, fastest first: in between, planning may
            mix two neighbours; clocks above it are never of use in the long run.
    """

    stage: int
    computation: str
    points: tuple[CurvePoint, ...]
    hull: tuple[int, ...]


def curves(profile: Profile) -> tuple[Curve, ...]:
    """That of each (stage, kind) of the profile."""
    return tuple(
        Curve(stage, word_of(kind), tuple(map(_point, rows)), _hull(pareto_front(rows, profile.blocking_w(stage))))
        for (stage, kind), rows in profile.measurements.items()
    )


def _point(row: Measurement) -> CurvePoint:
    known = row.evidence
    errors = (None, None) if known is None else (known.time_stderr_s, known.energy_stderr_j)
    return CurvePoint(row.clock_mhz, row.time_s, row.energy_j, *errors)


def _hull(options: tuple[OperatingPoint, ...]) -> tuple[int, ...]:
    scaled: dict[int, tuple[int, int]] = {}  # nanoseconds -> microjoules and clock; of equal times the cheaper, last
    for each in options:
        scaled[round(each.time_s * _NANO)] = round(each.effective_j * _MICRO), each.clock_mhz
    on_hull = lower_hull((time, cost) for time, (cost, _) in scaled.items())
    return tuple(scaled[time][1] for time, _ in on_hull)
