"""Frontiers: what is printed and charted of them, with the bound of all plans."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from perseus_planner.base.prefixes import counted, si
from perseus_planner.base.tables import Column, Sheet, lay_out, table
from perseus_planner.plans.replay import baseline_name, origin_text
from perseus_planner.profiles.sharding import remark
from perseus_planner.views.context import (
    Comparison,
    Context,
    compare,
    context_of_profile,
    origin_label,
    pipeline_text,
    schedule_remarks,
    source_text,
)

if TYPE_CHECKING:
    from perseus_planner.solver.frontier import Frontier

_BOUND = (
    "The bound is the least energy of any plan of that time, on all GPUs of the pipeline, "
    "waiting included."
)
_RATIOS = (1.01, 1.02, 1.05, 1.1, 1.2)  #: of the baseline's time, in the table
#: of the baseline's time, in the table beside stragglers
_STRAGGLER_RATIOS = (1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0)
_NEAR = 1e-3  #: a row so near to a marked one is left out
_MOST_POINTS = 500  #: of a charted bound, far more than can be seen


@dataclass(frozen=True, kw_only=True)
class FrontierPoint(Comparison):
    """A point of a frontier: `energy_j` is the bound, the least energy that a plan of that time can
    have.
    """

    mark: str  #: what is special about the point; may be empty


@dataclass(frozen=True)
class FrontierSummary:
    """A frontier."""

    context: Context  #: the profile and the iteration
    computations: int  #: number of computations of an iteration
    baseline: str  #: with what it is compared: all clocks at maximum, or as near as was measured
    baseline_time_s: float  #: iteration time with all clocks at maximum, seconds
    baseline_energy_j: float  #: energy of such an iteration, joules
    min_time_s: float  #: iteration time of the fastest point, seconds
    least_energy_time_s: float  #: iteration time of the point of least energy, seconds
    max_time_s: float  #: iteration time of the slowest useful point, seconds
    points: tuple[FrontierPoint, ...]  #: from the fastest to that of least energy
    #: slower ones, which pay only beside a straggler of that time; their baseline waits for it, and
    #: their `time_ratio` is that of the straggler.
    beside_stragglers: tuple[FrontierPoint, ...]
    remarks: tuple[str, ...]  #: what a reader may not expect


def summarize_frontier(frontier: Frontier) -> FrontierSummary:
    """Summarize a frontier."""
    return FrontierSummary(
        context=context_of_profile(frontier.profile, frontier.dag.iteration),
        computations=len(frontier.dag.computations),
        baseline=baseline_name(frontier.profile),
        baseline_time_s=frontier.baseline_time_s,
        baseline_energy_j=frontier.baseline_energy_j,
        min_time_s=frontier.min_time_s,
        least_energy_time_s=frontier.least_energy_time_s,
        max_time_s=frontier.max_time_s,
        points=tuple(_point(frontier, time_s, mark) for time_s, mark in _marked_times(frontier)),
        beside_stragglers=tuple(_beside_stragglers(frontier)),
        remarks=tuple(_remarks(frontier)),
    )


def frontier_text(summary: FrontierSummary) -> str:
    """Return the text that `planner solve` and `planner show` print: the points from the fastest
    to that of least energy, against all clocks at maximum.
    """
    baseline = (
        f"Baseline of every saving: {summary.baseline}, {si(summary.baseline_time_s, 's', 6)} and "
        f"{si(summary.baseline_energy_j, 'J', 6)} per iteration."
    )
    text = Sheet(
        f"Frontier of {pipeline_text(summary.context)}; "
        f"{counted(summary.computations, 'computation')}",
        f"{source_text(summary.context)}\n{baseline}",
        _point_columns("time {}", summary.points),
        [_BOUND, *summary.remarks],
    ).text()
    if not summary.beside_stragglers:
        return text
    beside = table(_point_columns("straggler {}", summary.beside_stragglers))
    return (
        f"{text}\nBeside a straggler (`planner plan --straggler-time`), saved against waiting "
        f"for it:\n\n{beside}\n"
    )


def _point_columns(name: str, points: Sequence[FrontierPoint]) -> list[list[str]]:
    return lay_out(
        points,
        Column(name, "time_s", "s"),
        Column("x baseline", "time_ratio", ".4f"),
        Column("bound {}", "energy_j", "J"),
        Column("saved {}", "saved_j", "J"),
        Column("saved %", "saved_share", "%"),
        Column("  ", "mark", "<"),
    )


def _marked_times(frontier: Frontier) -> list[tuple[float, str]]:
    """Return iteration times from the fastest up to that of least energy, with marks for the
    special ones.
    """
    baseline_s = frontier.baseline_time_s
    least_s = frontier.least_energy_time_s
    special = sorted(
        [
            (frontier.min_time_s, "fastest"),
            (baseline_s, "time of full clocks"),
            (least_s, "least energy"),
        ]
    )
    marks: list[tuple[float, str]] = []
    for time_s, mark in special:
        if marks and _is_same(time_s, marks[-1][0]):
            mark = f"{marks.pop()[1]}; {mark}"
        marks.append((time_s, mark))
    # Times beyond that of least energy take more energy, so no ratio of them is asked for.
    asked = [
        (ratio * baseline_s, "") for ratio in _RATIOS if ratio * baseline_s < least_s * (1 - _NEAR)
    ]
    return sorted(marks + asked)


def _beside_stragglers(frontier: Frontier) -> Iterator[FrontierPoint]:
    """Yield plans for stragglers that are slower than the time of least energy, against waiting
    for them.
    """
    waiting_w = frontier.dag.waiting_w
    least_s = frontier.least_energy_time_s
    most_s = frontier.max_time_s
    # Beyond the time of least energy a plan pays only beside a straggler.
    times_s = [ratio * frontier.baseline_time_s for ratio in _STRAGGLER_RATIOS]
    asked = [
        (time_s, "") for time_s in times_s if least_s * (1 + _NEAR) < time_s < most_s * (1 - _NEAR)
    ]
    # Later than its slowest useful time, a plan only waits.
    last = [(most_s, "then it waits")] if most_s > least_s * (1 + _NEAR) else []
    for time_s, mark in [*asked, *last]:
        # A fair baseline waits for the same straggler at its own power.
        waiting_j = frontier.baseline_energy_j + waiting_w * (time_s - frontier.baseline_time_s)
        comparison = compare(
            time_s,
            frontier.bound_j(time_s),
            time_s,
            waiting_j,
            f"{baseline_name(frontier.profile)}, then waiting",
        )
        # The ratio is that of the straggler, as both wait for it.
        yield FrontierPoint(
            **{**vars(comparison), "time_ratio": time_s / frontier.baseline_time_s}, mark=mark
        )


def _is_same(time_s: float, other_s: float) -> bool:
    """Tell whether two times differ by rounding only."""
    return math.isclose(time_s, other_s, rel_tol=1e-12)


def _point(frontier: Frontier, time_s: float, mark: str) -> FrontierPoint:
    comparison = compare(
        time_s,
        frontier.bound_j(time_s),
        frontier.baseline_time_s,
        frontier.baseline_energy_j,
        baseline_name(frontier.profile),
    )
    return FrontierPoint(**vars(comparison), mark=mark)


def _remarks(frontier: Frontier) -> Iterator[str]:
    profile = frontier.profile
    options = frontier.dag.points
    yield from schedule_remarks(context_of_profile(profile, frontier.dag.iteration))
    sharded = remark(profile.conditions)
    if sharded is not None:
        yield sharded
    yield from profile.remarks
    if frontier.dag.has_tied_modes:
        yield (
            "Modes are chosen for each plan, within memory and with what ties them to each other; "
            "the bound leaves these ties out."
        )
    # Stages may wait at different powers, and the largest is the one that could mislead.
    most_waiting_w = max(map(profile.blocking_w, range(profile.stages)))
    power = si(most_waiting_w, "W", 6)
    # One clock for each computation leaves nothing to choose, so nothing else is to be said.
    if all(len(rows) == 1 for rows in profile.measurements.values()):
        yield "Every computation has a single clock, so there is a single plan."
        return
    # A hull of one point says that no slower clock is worth its time.
    if all(len(front) == 1 for front in options.values()):
        yield (
            "Slower clocks never pay: a slower computation costs more than finishing early and "
            f"waiting at {power}."
        )
    elif _is_same(frontier.least_energy_time_s, frontier.min_time_s) and not _is_same(
        frontier.min_time_s, frontier.max_time_s
    ):
        yield (
            f"The blocking power of {power} is so large that the fastest iteration takes the "
            "least energy. Slower iterations pay only beside a straggler."
        )
    # Waiting that draws more than computing is an error of the given power, most likely.
    most_w = max(row.power_w for rows in profile.measurements.values() for row in rows)
    if most_waiting_w > most_w:
        yield (
            f"The blocking power of {power} is more than any computation draws, "
            f"{si(most_w, 'W', 6)} at most; check it."
        )


@dataclass(frozen=True)
class IterationPoint:
    """A point in the chart of a frontier: an iteration of one pipeline."""

    name: str  #: label of the point
    #: what it is; decides how it is drawn.
    kind: Literal["baseline", "plan", "peer", "run", "landmark"]
    time_s: float  #: iteration time, seconds
    energy_j: float  #: energy over all GPUs, waiting included, joules
    origin: str  #: where the numbers come from


@dataclass(frozen=True)
class FrontierChart:
    """What the figure of a frontier shows."""

    title: str  #: schedule and origin; empty without a frontier
    #: iteration times of the bound, rising, seconds; empty without a frontier.
    times_s: tuple[float, ...]
    #: the least energy that a plan of each time can have, waiting included, joules.
    energies_j: tuple[float, ...]
    points: tuple[IterationPoint, ...]  #: plans, runs, other planners and special points
    #: the deadline that the other planners had to meet, seconds, or None if no planner was asked.
    deadline_s: float | None = None
    left_out: tuple[str, ...] = ()  #: other planners that are missing, each with the reason


def chart_frontier(frontier: Frontier) -> FrontierChart:
    """Return the chart of a frontier alone: its bound, the baseline and the special points."""
    count = len(frontier.times_s)
    # Evenly spread over the points, both ends among them.
    last = min(count, _MOST_POINTS) - 1
    kept = sorted({round(k * (count - 1) / max(1, last)) for k in range(last + 1)}, reverse=True)
    origin = origin_label(frontier.profile.origin)
    baseline = IterationPoint(
        baseline_name(frontier.profile),
        "baseline",
        frontier.baseline_time_s,
        frontier.baseline_energy_j,
        origin,
    )
    # The ends of the bound: nothing is faster than the one, and nothing takes less than the other.
    special = (
        IterationPoint(f"bound, {name}", "landmark", time_s, frontier.bound_j(time_s), origin)
        for name, time_s in (
            ("fastest", frontier.min_time_s),
            ("least energy", frontier.least_energy_time_s),
        )
    )
    return FrontierChart(
        f"Frontier of {frontier.schedule}\n{origin_text(frontier.profile.origin)}",
        tuple(frontier.times_s[kept].tolist()),
        tuple(frontier.energies_j[kept].tolist()),
        (baseline, *special),
    )
