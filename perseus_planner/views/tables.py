"""Summaries as plain text for a terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from perseus_planner.profiles.csv_file import WORDS, unit_of
from perseus_planner.schedules import Computation
from perseus_planner.views.columns import column, number, numbers, ranges, table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from perseus_planner.jobs.calibration import Calibration
    from perseus_planner.views.cluster_summary import ClusterSummary
    from perseus_planner.views.plan_summary import (
        BesideStraggler,
        ComputationSummary,
        PlansSummary,
        PlanSummary,
        RankSummary,
        TimelineSummary,
    )
    from perseus_planner.views.summary import FrontierSummary, ProfileSummary

_WARNINGS = ("warnings", "measured while too hot")  #: conditions of a profile that a reader must see
_STRIP = 48  #: moments of an iteration that a timeline shows


def profile_text(summary: ProfileSummary) -> str:
    """What was measured of each computation, from the highest clock to the lowest."""
    ends = [(each.highest, each.lowest) for each in summary.computations]
    columns = [
        column("stage", [str(each.stage) for each in summary.computations]),
        column("computation", [each.instruction for each in summary.computations]),
        column("clocks", [str(each.clocks) for each in summary.computations]),
        column(unit_of(summary.control), [f"{high.clock_mhz} to {low.clock_mhz}" for high, low in ends]),
        column("seconds", ranges([(high.time_s, low.time_s) for high, low in ends])),
        column("joules", ranges([(high.energy_j, low.energy_j) for high, low in ends])),
        *_evidence_columns(summary),
    ]
    made = "measured" if summary.origin == "measured" else "simulated: no GPU was touched"
    made += {"clock": "", "power-limit": "; power limits were set", "observed": "; no clock was set"}[summary.control]
    stages = f"{summary.stages} stages" + (f" of {summary.gpus_per_stage} GPUs" if summary.gpus_per_stage > 1 else "")
    head = f"Profile of {stages}, {summary.gpu or 'GPU not named'} ({made}); "
    warnings = [(name, text) for name, text in summary.conditions.items() if name in _WARNINGS]
    notices = "".join(f"\n{name[0].upper()}{name[1:]}: {text}" for name, text in warnings)
    return f"{head}blocking power {_watts(summary.blocking_power_w)}{notices}\n\n{table(columns)}\n"


def _evidence_columns(summary: ProfileSummary) -> list[list[str]]:
    """The largest standard errors, percent, and at how many clocks the GPU was held back; none where none is known."""
    rows = summary.computations
    if all(each.time_error is None for each in rows):
        return []
    return [
        column("time +- %", [_percent(each.time_error) for each in rows]),
        column("energy +- %", [_percent(each.energy_error) for each in rows]),
        column("throttled", [str(each.throttled) for each in rows]),
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"


def frontier_text(summary: FrontierSummary) -> str:
    """The frontier from its fastest to its slowest point, against all clocks at maximum."""
    points = summary.points
    columns = [
        column("time s", numbers([point.time_s for point in points])),
        column("x baseline", [f"{point.time_ratio:.4f}" for point in points]),
        column("bound J", numbers([point.bound_j for point in points])),
        column("saved J", numbers([point.saved_j for point in points])),
        column("saved %", [f"{100 * point.saved_share:.2f}" for point in points]),
        ["", *(f"  {point.mark}" for point in points)],
    ]
    time, energy = number(summary.baseline_time_s), number(summary.baseline_energy_j)
    return (
        f"Frontier of {_work(summary)}; {summary.computations} computations\n"
        f"{origin_text(summary.origin)}; blocking power {_watts(summary.blocking_power_w)}.\n"
        f"{_counted_in(summary)}"
        f"Baseline of every saving: all clocks at maximum, {time} s and {energy} J an iteration.\n\n"
        f"{table(columns)}\n\n"
        "The bound is what no plan of that time can be below, waiting included, on all GPUs of the pipeline.\n"
        + "".join(f"{remark}\n" for remark in summary.remarks)
    )


def plan_text(summary: PlanSummary) -> str:
    """The plan against all clocks at maximum."""
    times = numbers([summary.time_s, summary.baseline_time_s])
    energies = numbers([summary.energy_j, summary.baseline_energy_j])
    powers = numbers([summary.power_w, summary.baseline_energy_j / summary.baseline_time_s])
    columns = [
        ["", "seconds an iteration", "joules an iteration", "watts on average"],
        column("this plan", [times[0], energies[0], powers[0]]),
        column("all clocks at maximum", [times[1], energies[1], powers[1]]),
    ]
    return (
        f"Plan for {_work(summary)}, within {number(summary.deadline_s)} s\n"
        f"{origin_text(summary.origin)}; blocking power {_watts(summary.blocking_power_w)}.\n"
        f"{_counted_in(summary)}\n"
        f"{table(columns)}\n\n"
        f"It saves {_saving(summary.saved_j, summary.saved_share)} of an iteration with all clocks at maximum, "
        f"at {summary.time_ratio:.4f}x its time.\n"
        f"It is {100 * summary.above_bound_share:.3f} % above the bound, which no plan of that time can be below.\n"
        f"{_changes_text(summary.most_changes)}"
        + (_beside_text(summary.beside_straggler) if summary.beside_straggler else "")
    )


def plans_text(summary: PlansSummary) -> str:
    """The plans of pipelines that wait for each other, and what they are together."""
    time, baseline = numbers([summary.time_s, summary.baseline_time_s])
    energy, baseline_energy = numbers([summary.energy_j, summary.baseline_energy_j])
    return (
        "\n".join(map(plan_text, summary.plans))
        + f"\nAll {summary.pipelines} pipelines together, each waiting for the slowest: {time} s and {energy} J an "
        f"iteration;\nwith all clocks at maximum {baseline} s and {baseline_energy} J. "
        f"They save {_saving(summary.saved_j, summary.saved_share)} at {summary.time_ratio:.4f}x the time.\n"
    )


def calibration_text(result: Calibration) -> str:
    """The overhead and the predicted time, before and now."""
    before, now = numbers([result.predicted_before_s, result.predicted_s])
    overheads = [f"{value:.6g}" for value in (result.overhead_before_s, result.overhead_s)]
    return (
        f"Measured {result.measured_s:.6g} s an iteration, replayed {result.replayed_s:.6g} s.\n"
        f"Overhead: {overheads[0]} s before, {overheads[1]} s now.\n"
        f"Predicted time of an iteration with this plan: {before} s before, {now} s now.\n"
        "Frontiers and plans made before do not count it in; make them again with `planner solve` and `planner plan`.\n"
    )


def timeline_text(summary: TimelineSummary) -> str:
    """The plan, and what each stage does in an iteration of it."""
    ranks = summary.per_rank
    columns = [
        column("rank", [str(rank.rank) for rank in ranks]),
        column(unit_of(summary.control), [_clocks(rank) for rank in ranks]),
        column("changes", [str(rank.clock_changes) for rank in ranks]),
        column("busy %", [f"{100 * rank.busy_s / summary.time_s:.1f}" for rank in ranks]),
        column("joules", numbers([rank.energy_j for rank in ranks])),
        ["  timeline", *(f"  {strip}" for strip in _strips(summary))],
    ]
    return (
        f"{plan_text(summary)}\n{table(columns)}\n\n"
        f"Timeline: {_STRIP} moments of the iteration; {', '.join(_letters(summary))}, . waiting.\n"
        "Changes: of the clock from one computation to the next, and back for the next iteration.\n"
    )


def cluster_text(summary: ClusterSummary) -> str:
    """A job on a cluster, a row for each policy."""
    rows = summary.policies
    columns = [
        ["policy", *(row.policy for row in rows)],
        column("iteration s", numbers([row.iteration_s for row in rows])),
        column("x baseline", [f"{row.time_ratio:.4f}" for row in rows]),
        column("iterations/s", numbers([row.iterations_per_s for row in rows])),
        column("energy MJ", numbers([row.energy_j / 1e6 for row in rows])),
        column("power kW", numbers([row.power_w / 1e3 for row in rows])),
        column("idle %", [f"{100 * row.idle_share:.2f}" for row in rows]),
        column("saved %", [f"{100 * row.saved_share:.2f}" for row in rows]),
    ]
    size = f"{summary.gpus} GPUs: {summary.pipelines} pipelines x {summary.ranks} ranks x {summary.gpus_per_stage} GPUs"
    return (
        f"Cluster of {size}, each pipeline {_work(summary)}\n"
        f"{origin_text(summary.origin)}, in simulated time: {summary.iterations} iterations, "
        f"{summary.stragglers} stragglers, to which policies react {summary.reaction_delay_s:g} s late.\n\n"
        f"{table(columns)}\n\n"
        f"x baseline: mean iteration over {number(summary.baseline_time_s)} s, all clocks at maximum without "
        f"stragglers; the target is {summary.slowdown:g}x.\n"
        "Baseline of every saving: all clocks at maximum (max) with the same stragglers, for as many iterations.\n"
        + "".join(f"Left out: {reason}.\n" for reason in summary.left_out)
    )


def origin_text(origin: str) -> str:
    """Where a number that the planner replayed comes from."""
    return f"Replayed from a {origin} profile"


def _work(summary: FrontierSummary | PlanSummary | ClusterSummary) -> str:
    gpu = f" on {summary.gpu}" if summary.gpu else ""
    return f"{summary.schedule}, {_stages(summary.stages, summary.ranks)} x {summary.microbatches} microbatches{gpu}"


def _stages(stages: int, ranks: int) -> str:
    if stages == ranks:
        return f"{stages} stages"
    return (
        f"{ranks} ranks x {stages // ranks} virtual stages"
        if stages % ranks == 0
        else f"{stages} stages on {ranks} ranks"
    )


def _counted_in(summary: FrontierSummary | PlanSummary) -> str:
    """What an iteration has beside computations of one GPU a stage; empty where that is all."""
    parts = []
    if summary.gpus_per_stage > 1:
        parts.append(f"{summary.gpus_per_stage} GPUs a stage")
    if summary.operations:
        parts.append(f"{summary.operations} operations of fixed time")
    if summary.longest_lag_s:
        parts.append(f"transfers of up to {summary.longest_lag_s:.6g} s")
    if summary.overhead_s:
        parts.append(f"{summary.overhead_s:.6g} s of calibrated overhead")
    return f"Counted in: {', '.join(parts)}.\n" if parts else ""


def _changes_text(most: int) -> str:
    if most == 0:
        return "No GPU changes its clock.\n"
    return f"No GPU changes its clock more than {most} times an iteration.\n"


def _saving(saved_j: float, share: float) -> str:
    return f"{number(saved_j)} J ({100 * share:.2f} %)"


def _beside_text(beside: BesideStraggler) -> str:
    return (
        f"Beside a straggler of {number(beside.straggler_time_s)} s, for which both would wait, it saves "
        f"{_saving(beside.saved_j, beside.saved_share)}.\n"
    )


def _clocks(rank: RankSummary) -> str:
    if rank.lowest_clock_mhz == rank.highest_clock_mhz:
        return str(rank.lowest_clock_mhz)
    return f"{rank.lowest_clock_mhz} to {rank.highest_clock_mhz}"


def _strips(summary: TimelineSummary) -> Iterable[str]:
    strips = [["."] * _STRIP for _ in summary.per_rank]
    for each in summary.computations:
        # A calibrated iteration may end before its last computation, as replayed, does.
        first, end = (min(math.ceil(t / summary.time_s * _STRIP - 0.5), _STRIP) for t in (each.start_s, each.end_s))
        strips[each.rank][first:end] = _letter(each) * (end - first)
    return map("".join, strips)


def _letters(summary: TimelineSummary) -> Iterable[str]:
    words = {**{kind: word.replace("-", " ") for kind, word in WORDS.items()}, "o": "fixed operation"}
    used = set(map(_letter, summary.computations))
    return (f"{letter} {word}" for letter, word in words.items() if letter in used)


def _letter(each: ComputationSummary) -> str:
    return "o" if each.clock_mhz is None else Computation.parse(each.computation).kind


def _watts(power_w: float | tuple[float, ...]) -> str:
    if not isinstance(power_w, tuple):
        return f"{power_w:.2f} W"
    return f"{min(power_w):.2f} to {max(power_w):.2f} W"
