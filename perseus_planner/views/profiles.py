"""A profile: what `planner profile` and `planner show` print of it, and the time-energy curve of
each computation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perseus_planner.base.prefixes import counted, si
from perseus_planner.base.tables import Column, Sheet, lay_out, ranges
from perseus_planner.profiles.csv_file import unit_of, word_of
from perseus_planner.profiles.measurement import OperatingPoint, lower_hull, pareto_front
from perseus_planner.views.context import Context, context_of_profile, power_text

if TYPE_CHECKING:
    from perseus_planner.plans.calibration import Calibration
    from perseus_planner.profiles.measurement import Measurement
    from perseus_planner.profiles.profiles import Profile

_WARNINGS = (
    "warnings",
    "measured while too hot",
    "unlike training",
)  #: conditions of a profile that are always printed
_LARGE_OVERHEAD = 0.1  #: of the measured iteration time


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


def summarize_profile(profile: Profile) -> ProfileSummary:
    """Summarize a profile."""
    clock_ranges = tuple(
        _clock_range(stage, kind, rows) for (stage, kind), rows in profile.measurements.items()
    )
    errors = map(max, zip(*map(profile.shared_errors, range(profile.stages)), strict=True))
    return ProfileSummary(
        context_of_profile(profile), dict(profile.conditions), clock_ranges, *errors
    )


def _clock_range(stage: int, kind: str, rows: Sequence[Measurement]) -> ClockRange:
    with_evidence = [(row, row.evidence) for row in rows if row.evidence is not None]
    return ClockRange(
        stage,
        word_of(kind),
        len(rows),
        rows[0],
        rows[-1],
        time_error=max(
            (evidence.time_stderr_s / row.time_s for row, evidence in with_evidence), default=None
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
    context, rows = summary.context, summary.computations
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
    origin = {"simulated": "simulated: no GPU was touched", "unknown": "of unknown origin"}.get(
        context.origin, context.origin
    )
    origin += {
        "clock": "",
        "power-limit": "; power limits were set",
        "observed": "; no clock was set",
    }[context.control]
    stages = counted(context.stages, "stage") + (
        f" of {context.gpus_per_stage} GPUs" if context.gpus_per_stage > 1 else ""
    )
    title = f"Profile of {stages}, {context.gpu or 'unknown GPU'} ({origin}); "
    warnings = [(name, text) for name, text in summary.conditions.items() if name in _WARNINGS]
    if summary.shared_time_error or summary.shared_energy_error:
        drift = (
            f"{summary.shared_time_error:.2%} of time, {summary.shared_energy_error:.2%} of energy"
        )
        warnings.append(("drift", f"rows of a stage share an error of up to {drift}"))
    source = "\n".join(f"{name[0].upper()}{name[1:]}: {text}" for name, text in warnings)
    return Sheet(
        f"{title}blocking power {power_text(context.blocking_power_w)}", source, columns
    ).text()


def calibration_text(result: Calibration) -> str:
    """Return the text that `planner calibrate` prints: the overhead and the predicted time,
    before and now.
    """
    before, now = (si(time_s, "s", 6) for time_s in (result.predicted_before_s, result.predicted_s))
    overheads = [si(value, "s", 6) for value in (result.overhead_before_s, result.overhead_s)]
    several = len(result.plans) > 1
    lines = [
        f"Iteration time{f', mean of {len(result.plans)} plans' if several else ''}: "
        f"{si(result.measured_s, 's', 6)} measured, {si(result.replayed_s, 's', 6)} replayed.",
        f"Overhead: {overheads[0]} before, {overheads[1]} now.",
    ]
    if result.jitter is not None:
        lines.append(f"Jitter of computations: {100 * result.jitter:.2f} %.")
    if result.hop_latency_s:
        lines.append(
            f"Latency of each transfer between stages: {si(result.hop_latency_s, 's', 6)}."
        )
    if result.time_factors:
        factors = ", ".join(
            f"{word_of(kind)}s {factor:.4g}x" for kind, factor in result.time_factors.items()
        )
        lines.append(f"Computations take longer than profiled: {factors}.")
    lines.append(
        f"Predicted iteration time of {'these plans' if several else 'this plan'}: {before} "
        f"before, {now} now."
    )
    if result.left_out_error is not None:
        lines.append(
            "From the other plans, the time of a plan is predicted within "
            f"{100 * result.left_out_error:.2f} %, mean."
        )
    if result.overhead_share > _LARGE_OVERHEAD:
        lines.append(
            f"Warning: {100 * result.overhead_share:.0f} % of the iteration is overhead, which "
            "counts as equal for all plans. If computations really take longer, slower plans are "
            "later than predicted; calibrate a job file by three plans or more, of different "
            "times, to see it."
        )
    lines.append(
        "Existing frontiers and plans do not include it; make them again with `planner solve` and "
        "`planner plan`."
    )
    return "".join(f"{line}\n" for line in lines)


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
            stage,
            word_of(kind),
            tuple(map(_point, rows)),
            _hull(pareto_front(rows, profile.blocking_w(stage))),
        )
        for (stage, kind), rows in profile.measurements.items()
    )


def _point(row: Measurement) -> CurvePoint:
    evidence = row.evidence
    errors = (
        (None, None) if evidence is None else (evidence.time_stderr_s, evidence.energy_stderr_j)
    )
    return CurvePoint(row.clock_mhz, row.time_s, row.energy_j, *errors)


def _hull(points: Sequence[OperatingPoint]) -> tuple[int, ...]:
    clocks = {point.time_s: point.clock_mhz for point in points}
    on_hull = lower_hull((point.time_s, point.effective_j) for point in points)
    return tuple(clocks[time_s] for time_s, _ in on_hull)
