"""Profiles: what is printed and charted of them, with a time-energy curve of each computation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perseus_planner.base.prefixes import counted
from perseus_planner.base.tables import Column, Sheet, lay_out, ranges
from perseus_planner.profiles.csv_file import unit_of, word_of
from perseus_planner.profiles.measurement import OperatingPoint, lower_hull, pareto_front
from perseus_planner.views.context import (
    Context,
    context_of_profile,
    power_text,
)

if TYPE_CHECKING:
    from perseus_planner.profiles.keys import Key
    from perseus_planner.profiles.measurement import Measurement
    from perseus_planner.profiles.profiles import Profile

_WARNINGS = ("warnings", "measured while too hot", "unlike training")
"""Conditions of a profile that are always printed."""


@dataclass(frozen=True)
class ClockRange:
    """The measurements of one computation."""

    stage: int  #: number of the stage
    instruction: str  #: kind of computation, as in the CSV of a profile
    clocks: int  #: number of measured clocks
    highest: Measurement  #: the measurement at the highest clock
    lowest: Measurement  #: the measurement at the lowest clock
    #: largest relative standard error of a time, or None if no errors are known.
    time_error: float | None
    #: largest relative standard error of an energy, or None if no errors are known.
    energy_error: float | None
    throttled: int  #: number of clocks at which the GPU was throttled


@dataclass(frozen=True)
class ProfileSummary:
    """A profile, its measuring conditions, and its computations."""

    context: Context
    conditions: Mapping[str, str]
    computations: tuple[ClockRange, ...]
    shared_time_error: float  #: the largest of the stages, relative
    shared_energy_error: float  #: the same for energies
    remarks: tuple[str, ...]  #: what a reader may not expect


def summarize_profile(profile: Profile) -> ProfileSummary:
    """Summarize a profile."""
    clock_ranges = tuple(_clock_range(key, rows) for key, rows in profile.measurements.items())
    of_stages = map(profile.shared_errors, range(profile.stages))
    time_error, energy_error = map(max, zip(*of_stages, strict=True))
    return ProfileSummary(
        context=context_of_profile(profile),
        conditions=dict(profile.conditions),
        computations=clock_ranges,
        shared_time_error=time_error,
        shared_energy_error=energy_error,
        remarks=profile.remarks,
    )


def _clock_range(key: Key, rows: Sequence[Measurement]) -> ClockRange:
    with_evidence = [(row, row.evidence) for row in rows if row.evidence is not None]
    return ClockRange(
        key.stage,
        word_of(key.name),
        len(rows),
        rows[0],
        rows[-1],
        # Without work or energy an error has nothing to be relative to.
        time_error=max(
            (
                evidence.time_stderr_s / row.time_s
                for row, evidence in with_evidence
                if row.has_work
            ),
            default=None,
        ),
        energy_error=max(
            (
                evidence.energy_stderr_j / row.energy_j
                for row, evidence in with_evidence
                if row.energy_j
            ),
            default=None,
        ),
        throttled=sum(bool(evidence.throttle) for _, evidence in with_evidence),
    )


def profile_text(summary: ProfileSummary) -> str:
    """Return what `planner profile` and `planner show` print: a table with a row for each
    computation, from its highest clock to its lowest.
    """
    context = summary.context
    rows = summary.computations
    # Errors are known of all rows or of none, by how the profile was made.
    has_errors = any(row.time_error is not None for row in rows)
    columns = [
        *lay_out(
            rows,
            Column("computation", lambda row: f"{row.stage} {row.instruction}", "<"),
            Column("rows", "clocks"),
            Column(
                unit_of(context.control),
                lambda row: f"{row.highest.clock_mhz}-{row.lowest.clock_mhz}",
            ),
        ),
        ranges("time {}", "s", [(row.highest.time_s, row.lowest.time_s) for row in rows]),
        *(lay_out(rows, Column("+- %", "time_error", "%")) if has_errors else ()),
        ranges("energy {}", "J", [(row.highest.energy_j, row.lowest.energy_j) for row in rows]),
    ]
    if has_errors:
        columns += lay_out(
            rows, Column("+- %", "energy_error", "%"), Column("throttled", "throttled")
        )
    return Sheet(
        f"Profile of {_stages_words(context)}, {context.gpu or 'unknown GPU'} "
        f"({_origin_words(context)}); blocking power {power_text(context.blocking_power_w)}",
        "\n".join(_warning_lines(summary)),
        columns,
        [_ENDS] if any(row.clocks > 2 for row in rows) else [],
    ).text()


_ENDS = (
    "Times and energies are those at the highest and at the lowest clock; energy may be lower "
    "between them."
)
"""What a range of energies would hide."""


def _stages_words(context: Context) -> str:
    stages = counted(context.stages, "stage")
    if context.gpus_per_stage == 1:
        return stages
    return f"{stages} of {context.gpus_per_stage} GPUs"


def _origin_words(context: Context) -> str:
    """Return where a profile comes from, and what was set if that was not the clock."""
    # What was not measured on a GPU must not be taken for it.
    origin = context.origin
    if origin == "simulated":
        origin = "simulated: no GPU was touched"
    elif origin == "unknown":
        origin = "of unknown origin"
    if context.control == "power-limit":
        return f"{origin}; power limits were set"
    if context.control == "observed":
        return f"{origin}; no clock was set"
    return origin


def _warning_lines(summary: ProfileSummary) -> Iterator[str]:
    """Yield a line for each thing that every reader needs to know."""
    # Most conditions are for the record alone.
    for name, text in summary.conditions.items():
        if name in _WARNINGS:
            yield f"{name[0].upper()}{name[1:]}: {text}"
    for text in summary.remarks:
        yield f"Remark: {text}"
    # What rows of a stage have in common does not show in the errors of each.
    if summary.shared_time_error or summary.shared_energy_error:
        yield (
            f"Drift: rows of a stage share an error of up to {summary.shared_time_error:.2%} of "
            f"time, {summary.shared_energy_error:.2%} of energy"
        )


@dataclass(frozen=True)
class CurvePoint:
    """A computation at one clock; standard errors are None if they are not known."""

    clock: int
    time_s: float
    energy_j: float
    time_stderr_s: float | None
    energy_stderr_j: float | None


@dataclass(frozen=True)
class MeasuredCurve:
    """The time-energy curve of one computation."""

    stage: int  #: number of the stage
    computation: str  #: kind of computation, such as "forward"
    points: tuple[CurvePoint, ...]  #: the measurements, highest clock first
    #: the clocks on the lower convex hull of time and effective energy, fastest first. The solver
    #: mixes neighbours on the hull; clocks above it never pay in the long run.
    hull: tuple[int, ...]


def curves_of(profile: Profile) -> tuple[MeasuredCurve, ...]:
    """Return the curve of each computation of the profile."""
    return tuple(
        MeasuredCurve(
            key.stage,
            word_of(key.name),
            tuple(map(_measured, rows)),
            _hull(pareto_front(rows, profile.blocking_w(key.stage))),
        )
        for key, rows in profile.measurements.items()
    )


def _measured(row: Measurement) -> CurvePoint:
    evidence = row.evidence
    errors = (
        (None, None) if evidence is None else (evidence.time_stderr_s, evidence.energy_stderr_j)
    )
    return CurvePoint(row.clock_mhz, row.time_s, row.energy_j, *errors)


def _hull(points: Sequence[OperatingPoint]) -> tuple[int, ...]:
    clocks = {point.time_s: point.clock_mhz for point in points}
    on_hull = lower_hull((point.time_s, point.effective_j) for point in points)
    return tuple(clocks[time_s] for time_s, _ in on_hull)
