"""A plan: what `planner plan` and `planner show` print of it, with the timeline of its
iteration.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perseus_planner.base.prefixes import counted, si
from perseus_planner.base.tables import Column, Sheet, column, lay_out, quantities, table
from perseus_planner.plans.plan import INTERVAL, OnTime
from perseus_planner.plans.replay import ALL_MAXIMUM, HIGHEST_MEASURED
from perseus_planner.profiles.csv_file import WORDS, unit_of
from perseus_planner.schedules import Computation
from perseus_planner.solver.again import LEAST_SHARE
from perseus_planner.views.context import (
    Comparison,
    Context,
    compare,
    context_of_plan,
    pipeline_text,
    saving_text,
    schedule_remarks,
    share,
    source_text,
)

if TYPE_CHECKING:
    from perseus_planner.plans.plan import Plan
    from perseus_planner.solver.again import MeasuringAgain
    from perseus_planner.solver.replicas import Replicas

_STRIP = 48  #: moments of an iteration in a timeline


@dataclass(frozen=True)
class RankSummary:
    """What the GPUs of one rank do in an iteration of a plan."""

    rank: int  #: number of the rank
    lowest_clock_mhz: int  #: the lowest clock in use
    highest_clock_mhz: int  #: the highest clock in use
    #: number of clock changes between computations, and back for the next iteration.
    clock_changes: int
    busy_s: float  #: time of computations and fixed operations, seconds
    energy_j: float  #: energy with waiting, joules


@dataclass(frozen=True, kw_only=True)
class PlanSummary(Comparison):
    """A plan, compared with all clocks at maximum."""

    context: Context  #: the profile and the iteration
    deadline_s: float  #: the deadline that the plan was made for, seconds
    power_w: float  #: average power of all GPUs, watts
    bound_j: float  #: the least energy that a plan of this time can have, joules
    above_bound_share: float  #: energy above the bound, over the bound
    #: a closer bound, for plans of measured clocks alone, joules; None if it is not known.
    point_bound_j: float | None
    above_point_bound_share: float | None  #: energy above that bound, over it, or None
    most_changes: int  #: clock changes of the rank that changes its clock most often
    per_rank: tuple[RankSummary, ...]  #: the ranks
    #: the comparison where both wait for the straggler that the plan was made for, or None.
    beside_straggler: Comparison | None
    straggler_time_s: float | None  #: the iteration time of that straggler, seconds, or None
    on_time: OnTime | None  #: how sure the plan is, if it was made for a probability, or None
    #: what measuring its rows again would bring, if that was found, or None.
    measuring_again: MeasuringAgain | None
    #: mode -> number of computations that run in it, besides those that run in the training's own
    #: way.
    modes: Mapping[str, int]
    remarks: tuple[str, ...]  #: what a reader may not expect


@dataclass(frozen=True, kw_only=True)
class PlansSummary(Comparison):
    """The plans of pipelines that wait for each other; all pipelines together, compared with all
    clocks at maximum.
    """

    pipelines: int  #: number of pipelines
    plans: tuple[PlanSummary, ...]  #: one for each kind of pipeline


@dataclass(frozen=True)
class ComputationSummary:
    """A computation, or a fixed operation, in the timeline of an iteration."""

    computation: str  #: its name, such as "3F17", or the names of a pair, as grids have them
    rank: int  #: number of the rank that runs it
    clock_mhz: int | None  #: its clock, or None for a fixed operation
    start_s: float  #: when it starts, seconds after the start of the iteration
    end_s: float  #: when it ends, seconds after the start of the iteration
    power_w: float  #: average power of the GPUs of the rank, watts


@dataclass(frozen=True, kw_only=True)
class TimelineSummary(PlanSummary):
    """A plan with its computations, rank by rank in the order in which they run, then its fixed
    operations.
    """

    computations: tuple[ComputationSummary, ...]


def summarize_plan(
    plan: Plan,
    straggler_time_s: float | None = None,
    measuring_again: MeasuringAgain | None = None,
) -> PlanSummary:
    """Summarize a plan; `straggler_time_s` is the iteration time of the straggler that it was
    made for, if any, and `measuring_again` what is known of a second sweep.
    """
    # A plan is compared with its own baseline first; what else is said adds to that.
    return PlanSummary(
        **vars(
            compare(
                plan.time_s,
                plan.energy_j,
                plan.baseline_time_s,
                plan.baseline_energy_j,
                plan.baseline,
            )
        ),
        context=context_of_plan(plan),
        deadline_s=plan.deadline_s,
        power_w=plan.power_w,
        bound_j=plan.bound_j,
        above_bound_share=share(plan.energy_j - plan.bound_j, plan.bound_j),
        point_bound_j=plan.point_bound_j,
        above_point_bound_share=None
        if plan.point_bound_j is None
        else share(plan.energy_j - plan.point_bound_j, plan.point_bound_j),
        most_changes=max(plan.changes),
        per_rank=tuple(_rank(plan, number) for number in range(len(plan.schedule.ranks))),
        beside_straggler=None
        if straggler_time_s is None
        else _beside_straggler(plan, straggler_time_s),
        straggler_time_s=straggler_time_s,
        on_time=plan.on_time,
        measuring_again=measuring_again,
        modes=Counter(plan.modes.values()),
        remarks=plan.remarks,
    )


def summarize_plans(
    replicas: Replicas, plans: Sequence[Plan], straggler_time_s: float | None = None
) -> PlansSummary:
    """Summarize the plans of several frontiers, one for each of `replicas.frontiers`."""
    # With plans of several baselines only the weaker name holds for all.
    names = {plan.baseline for plan in plans}
    together = compare(
        *replicas.time_and_energy(plans),
        replicas.baseline_time_s,
        replicas.baseline_energy_j,
        ALL_MAXIMUM if names == {ALL_MAXIMUM} else HIGHEST_MEASURED,
    )
    return PlansSummary(
        **vars(together),
        pipelines=sum(replicas.counts),
        plans=tuple(summarize_plan(plan, straggler_time_s) for plan in plans),
    )


def summarize_timeline(plan: Plan) -> TimelineSummary:
    """Summarize a plan with the timeline of its iteration."""
    pairs = {
        str(backward): plan.schedule.text_of(backward) for backward in plan.schedule.forward_of
    }
    computations = tuple(
        ComputationSummary(
            pairs.get(name, name),
            rank,
            plan.clocks.get(name),
            span.start_s,
            span.end_s,
            span.power_w,
        )
        for rank, (name, span) in zip(
            plan.iteration.rank_of, plan.timeline.spans.items(), strict=True
        )
    )
    return TimelineSummary(**vars(summarize_plan(plan)), computations=computations)


def _rank(plan: Plan, number: int) -> RankSummary:
    # Modes are no part of the schedule, so clocks are looked up by the computation.
    clocks = [plan.clocks[str(computation)] for computation in plan.schedule.ranks[number]]
    spans = [
        plan.timeline.spans[plan.iteration.names[node]] for node in plan.iteration.programs[number]
    ]
    busy_s = math.fsum(span.time_s for span in spans)
    busy_j = math.fsum(span.energy_j for span in spans)
    # What a rank does not compute in the iteration, it waits.
    energy_j = busy_j + plan.rank_waiting_w[number] * (plan.timeline.time_s - busy_s)
    return RankSummary(number, min(clocks), max(clocks), plan.changes[number], busy_s, energy_j)


def _beside_straggler(plan: Plan, straggler_time_s: float) -> Comparison:
    # Both wait until the straggler ends, if they are faster than it.
    waiting_w = math.fsum(plan.rank_waiting_w)
    waiting_s = [
        max(0.0, straggler_time_s - time_s) for time_s in (plan.time_s, plan.baseline_time_s)
    ]
    return compare(
        plan.time_s + waiting_s[0],
        plan.energy_j + waiting_w * waiting_s[0],
        plan.baseline_time_s + waiting_s[1],
        plan.baseline_energy_j + waiting_w * waiting_s[1],
        f"{plan.baseline}, both waiting for a straggler of {si(straggler_time_s, 's', 6)}",
    )


def plan_text(summary: PlanSummary) -> str:
    """Return what `planner plan` prints: a table that compares the plan with all clocks at
    maximum.
    """
    # Each quantity is a column of two numbers, which get one unit; turned, these become rows.
    rows = [
        *quantities(["{} per iteration"], "s", [summary.time_s, summary.baseline_time_s]),
        *quantities(["{} per iteration"], "J", [summary.energy_j, summary.baseline_energy_j]),
        *quantities(
            ["{} on average"],
            "W",
            [summary.power_w, summary.baseline_energy_j / summary.baseline_time_s],
        ),
    ]
    names, plan, baseline = (list(map(str.strip, cells)) for cells in zip(*rows, strict=True))
    columns = [["", *names], column("this plan", plan), column(summary.baseline, baseline)]
    most = counted(summary.most_changes, "time")
    changes = f" more than {most} per iteration" if summary.most_changes else ""
    notes = [
        _saving_note(summary),
        _bound_note(summary),
        f"No GPU changes its clock{changes}.",
    ]
    notes += [
        f"In the mode {mode}: {counted(count, 'computation')}."
        for mode, count in summary.modes.items()
    ]
    if summary.on_time is not None:
        notes += _certainty_notes(summary)
    if summary.measuring_again is not None:
        notes.append(_again_note(summary.measuring_again))
    notes += schedule_remarks(summary.context)
    notes += summary.remarks
    # Remarks come last: they are about the profile, and not about this plan.
    return Sheet(
        f"Plan for {pipeline_text(summary.context)}, within {si(summary.deadline_s, 's', 6)}",
        source_text(summary.context),
        columns,
        notes,
    ).text()


def _saving_note(summary: PlanSummary) -> str:
    beside = summary.beside_straggler
    straggler_s = summary.straggler_time_s
    alone = f"saves {saving_text(summary)} compared with {summary.baseline}"
    if beside is None or straggler_s is None:
        return f"It {alone}, at {summary.time_ratio:.4f}x the time."
    # Nobody waits for what is faster than this pipeline itself.
    if straggler_s < min(summary.time_s, summary.baseline_time_s):
        return (
            f"Nothing waits for an iteration of {si(straggler_s, 's', 6)}, as this pipeline takes "
            f"longer even with {summary.baseline}. It {alone}, at {summary.time_ratio:.4f}x the "
            "time."
        )
    # Beside a straggler both wait, so the saving is told against waiting too.
    return (
        f"Beside a straggler of {si(beside.time_s, 's', 6)} it saves {saving_text(beside)} "
        f"compared with {summary.baseline} and waiting; it draws "
        f"{si(beside.energy_j / beside.time_s, 'W', 6)} on average, waiting included."
    )


def _bound_note(summary: PlanSummary) -> str:
    note = (
        f"Its energy is {_percent(summary.above_bound_share)} % above the bound of "
        f"{si(summary.bound_j, 'J', 6)}, the least of any plan of that time"
    )
    if summary.above_point_bound_share is not None:
        note += (
            f", and {_percent(summary.above_point_bound_share)} % above a closer bound, for plans "
            "of measured clocks alone"
        )
    # Energies of such a plan are of estimated rows, and so are its bounds.
    if summary.on_time is None:
        return f"{note}."
    return f"{note}: all by its estimates; `planner solve` shows the bound of rows as measured."


def _percent(share_: float) -> str:
    """Write a share in percent to three digits after the point; what rounds to nothing without a
    sign.
    """
    return f"{round(100 * share_, 3) + 0.0:.3f}"


def _certainty_notes(summary: PlanSummary) -> list[str]:
    """Return notes on how sure a plan is that was made for a probability; without what it saves
    alone, if it waits for a straggler.
    """
    sure = summary.on_time
    assert sure is not None
    baseline = summary.baseline
    probability = f"{100 * sure.probability:g} %"
    interval = f"{100 * INTERVAL:g} %"
    ratio = sure.time_ratio
    saved = sure.saved_share
    expected = ""
    if sure.limit_ratio is not None:
        limit = f"takes at most {sure.limit_ratio:.4f}x the time of {baseline}"
        if sure.expected_limit_ratio is not None:
            expected = (
                f" is expected at {ratio.expected:.4f}x (at most {sure.expected_limit_ratio:.4f}x) "
                "and"
            )
    else:
        limit = f"draws at most {si(sure.limit_power_w or 0.0, 'W', 6)}"
        # GPUs that differ make the slowest stage slower in the mean: the replay above, in which
        # all are as expected, is faster.
        expected = (
            f" is expected at {ratio.expected:.4f}x the time of {baseline} and "
            f"{si(sure.power_w.expected, 'W', 6)} if GPUs differ as they may, saves "
            f"{100 * saved.expected:.2f} % then, and"
        )
    notes = [f"It{expected} {limit} with a probability of {probability} or more."]
    # Beside a straggler a plan's own saving is of no interest. A trace has an interval of its own,
    # among the remarks, and errors of rows that were never seen would make a narrower one.
    if summary.beside_straggler is None and summary.context.origin != "traced":
        notes.append(
            f"{interval} intervals: {ratio.low:.4f}x to {ratio.high:.4f}x the time of {baseline}, "
            f"{100 * saved.low:.2f} to {100 * saved.high:.2f} % of its energy saved."
        )
    return [*notes, *_margin_notes(sure), *_assumption_notes(sure)]


def _margin_notes(sure: OnTime) -> Iterator[str]:
    """Say what the margin of a plan costs."""
    # No margin was found, so the plan is the fastest one.
    if sure.margin is None:
        yield "No plan with lower clocks is that sure; measure more, or allow a longer time."
    elif sure.limit_ratio is not None:
        yield (
            f"To be that sure costs {100 * sure.safety_share:.2f} % of that energy, beside a plan "
            "of the same estimates without a margin. `--as-measured` is not that plan: it takes "
            "measured rows at face value."
        )


def _assumption_notes(sure: OnTime) -> Iterator[str]:
    """Say what is taken to be so of rows and GPUs, without having been measured."""
    if sure.interpolated:
        yield (
            f"{sure.interpolated} of its {sure.points} operating points were not measured but "
            "estimated."
        )
    # What is assumed of errors is said, as a measured one could be smaller or larger.
    if not sure.has_errors:
        yield "The profile has no standard errors: its noise is taken from how its rows scatter."
    # The spread of GPUs is often an assumption, which a reader may replace.
    if sure.gpu_spread:
        source = (
            "assumed, as one GPU of each stage was measured (--gpu-spread of `planner solve`)"
            if sure.is_spread_assumed
            else "as measured or given"
        )
        yield (
            f"GPUs are taken to differ from the profiled ones by {100 * sure.gpu_spread:g} % of "
            f"time (standard deviation): {source}."
        )
    # Without jitter, each computation counts as if it took its mean time.
    if not (sure.jitter or sure.jitter_common or sure.jitter_tail):
        yield (
            "Jitter of computations is left out; `planner calibrate` takes it from a recorded run."
        )


def _again_note(again: MeasuringAgain) -> str:
    would = (
        f"would save about {100 * again.more_share:.2f} points more by smaller margins"
        if again.more_share >= LEAST_SHARE
        else "would save next to nothing more by smaller margins"
    )
    return (
        f"Measuring {again.rows} rows again, its own and their neighbours (`planner profile "
        f"--for`), {would}."
    )


def plans_text(summary: PlansSummary) -> str:
    """Return the text that `planner plan` prints of several plans, with their total."""
    time, baseline = (si(time_s, "s", 6) for time_s in (summary.time_s, summary.baseline_time_s))
    energy, baseline_energy = (
        si(energy_j, "J", 6) for energy_j in (summary.energy_j, summary.baseline_energy_j)
    )
    return (
        "\n".join(map(plan_text, summary.plans))
        + f"\nAll {summary.pipelines} pipelines together, each waiting for the slowest: {time} and "
        f"{energy} per "
        f"iteration;\nwith {summary.baseline} {baseline} and {baseline_energy}. "
        f"They save {saving_text(summary)} at {summary.time_ratio:.4f}x the time.\n"
    )


def timeline_text(summary: TimelineSummary) -> str:
    """Return the text that `planner show` prints: the plan, and what each rank does in an
    iteration.
    """
    unit = unit_of(summary.context.control)
    columns = [
        *load_columns(summary.per_rank, summary.time_s, unit),
        ["  timeline", *(f"  {strip}" for strip in _strips(summary))],
    ]
    return (
        f"{plan_text(summary)}\n{table(columns)}\n\n"
        f"Timeline: {_STRIP} moments of the iteration; {', '.join(_legend(summary))}, . waiting.\n"
        "Changes: clock changes from one computation to the next, and back for the next "
        "iteration.\n"
    )


def load_columns(
    ranks: Sequence[RankSummary], time_s: float, unit: str, digits: int = 6
) -> list[list[str]]:
    """Return the columns of clocks and load of ranks in an iteration of `time_s` seconds."""
    return lay_out(
        ranks,
        Column("rank", "rank"),
        Column(unit, _clock_range),
        Column("changes", "clock_changes"),
        Column("busy %", lambda rank: 100 * rank.busy_s / time_s, ".1f"),
        Column("{}", "energy_j", "J"),
        digits=digits,
    )


def _clock_range(rank: RankSummary) -> str:
    if rank.lowest_clock_mhz == rank.highest_clock_mhz:
        return str(rank.lowest_clock_mhz)
    return f"{rank.lowest_clock_mhz} to {rank.highest_clock_mhz}"


def _strips(summary: TimelineSummary) -> list[str]:
    strips = [["."] * _STRIP for _ in summary.per_rank]
    for computation in summary.computations:
        # With a negative calibrated overhead, an iteration ends before its last computation as it
        # is replayed.
        first, end = (
            min(math.ceil(t / summary.time_s * _STRIP - 0.5), _STRIP)
            for t in (computation.start_s, computation.end_s)
        )
        strips[computation.rank][first:end] = _letter(computation) * (end - first)
    return list(map("".join, strips))


def _legend(summary: TimelineSummary) -> Iterable[str]:
    words = {
        **{kind: word.replace("-", " ") for kind, word in WORDS.items()},
        _PAIR: "forward and backward overlapped",
        "o": "fixed operation",
    }
    used = set(map(_letter, summary.computations))
    return (f"{letter} {word}" for letter, word in words.items() if letter in used)


_PAIR = "P"


def _letter(each: ComputationSummary) -> str:
    if each.computation.startswith("("):
        return _PAIR
    return "o" if each.clock_mhz is None else Computation.parse(each.computation).kind
