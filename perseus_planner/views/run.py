"""A training run beside its plans: the summary of what its ranks recorded, and what `planner show`
and a page say of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from perseus_planner.base.prefixes import counted, si
from perseus_planner.base.tables import Column, Sheet, lay_out, table
from perseus_planner.plans.replay import profile_of_origin
from perseus_planner.profiles.csv_file import unit_of
from perseus_planner.profiles.sharding import difference
from perseus_planner.runs.account import Account, Entry, SavedInterval
from perseus_planner.runs.records import LATE, change_statistics
from perseus_planner.runs.verdict import (
    OFF,
    Verdict,
    percent_off,
    rank_names,
    verdict_of,
    why_no_saving,
)
from perseus_planner.views.accounts import (
    NOTHING_SET,
    clocked,
    off_clock_share,
    throttled,
    totals_text,
)
from perseus_planner.views.context import Context, context_of_plan, pipeline_text, saved_text
from perseus_planner.views.plan import summarize_plan
from perseus_planner.views.predicted import predict_records

if TYPE_CHECKING:
    from perseus_planner.plans.plan import Plan
    from perseus_planner.runs.run import Run

NO_PLAN = "no plan was in force"
"""Why an iteration without a plan did not run as planned."""

_SAME_TIME = 0.0005  #: times that differ by less, relative to each other, are called the same
_MOST_REASONS = 10  #: why iterations did not run as planned that are listed


@dataclass(frozen=True)
class PlanOfRun:
    """The iterations by one plan: means over those that count, all pipelines together."""

    version: int  #: number of the plan in this job
    name: str  #: what the service counts it by, if it is of one; else the number in this job
    iterations: int  #: number of iterations by it, on the rank that has most
    #: number of iterations that count: those that ran as planned, without the first one.
    counted: int
    #: seconds from begin to end on the rank where it is longest, or None if no iteration counts.
    time_s: float | None
    planned_time_s: float  #: iteration time by the plan of the slowest pipeline, seconds
    #: energy from begin to end over all ranks, joules, or None if that of a rank is not known.
    energy_j: float | None
    planned_energy_j: float  #: that energy by the plan, joules


@dataclass(frozen=True)
class RankOfRun:
    """One rank by one plan: the account of the iterations that count, and what the plan says of
    one.
    """

    rank: int  #: number of the rank in the job
    pipeline: int  #: number of its pipeline
    pipeline_rank: int  #: number of the rank in that pipeline
    ran: Account  #: the iterations that count
    planned: Account  #: one iteration by the plan, that waits for the slowest pipeline
    #: time from a request until the clock was set, median of the iterations' medians, seconds.
    latency_p50_s: float | None
    latency_p99_s: float | None  #: median of the iterations' 99th percentiles of that time, seconds

    def mean(self, name: str) -> float | None:
        """Return the mean of a sum over the iterations that count; None without any."""
        return getattr(self.ran, name) / self.ran.windows if self.ran.windows else None

    @property
    def busy_s(self) -> float | None:
        """Time of computations, seconds."""
        return self.mean("busy_s")

    @property
    def planned_busy_s(self) -> float:
        """That time by the plan, seconds."""
        return self.planned.busy_s

    @property
    def energy_j(self) -> float | None:
        """Energy of the GPU from begin to end, joules, if it is known for all iterations."""
        if self.ran.metered_s < (1 - 1e-9) * self.ran.gpu_s or not self.ran.windows:
            return None
        return (self.ran.energy_j - self.ran.between_j) / self.ran.windows

    @property
    def planned_energy_j(self) -> float:
        """That energy by the plan, joules."""
        return self.planned.energy_j


@dataclass(frozen=True)
class Deviation:
    """Iterations that did not run as planned, for one reason: how many, on which ranks, and the
    first of them.
    """

    reason: str
    times: int
    ranks: tuple[int, ...]
    first_iteration: int


@dataclass(frozen=True)
class RunSummary:
    """A run beside its plans."""

    context: Context  #: the profile and the iteration of the plan `version`
    #: how energy, clocks and throttling were obtained, "measured" or "simulated", or None if no GPU
    #: was read or the ranks differ. Times are always measured.
    gpu_origin: str | None
    pipelines: int  #: number of pipelines
    plans: tuple[PlanOfRun, ...]  #: the iterations by each plan, oldest plan first
    version: int  #: the newest plan with iterations that count; `ranks` are compared with it
    ranks: tuple[RankOfRun, ...]  #: the ranks
    #: why iterations did not run as planned, most frequent reason first.
    deviations: tuple[Deviation, ...]
    cut_off: tuple[int, ...]  #: ranks whose last row was cut off, and so does not count
    attempt: int  #: number of the attempt that all of this is about
    #: what ran by each plan in each attempt, and what that saved, oldest first.
    totals: tuple[Entry, ...]
    total: Account  #: the sum of all totals
    #: what was saved in all, with its interval; None if that is not known.
    saving: SavedInterval | None
    foreseen_share: float  #: saving by the plan `version`, against the same baseline as `total`
    verdict: Verdict | None  #: why iterations do not take the planned time, if they do not
    #: why no saving by the plan `version` can be stated, in a sentence; None if it can.
    unlike_plan: str | None
    #: on which ranks the energy counter and the power sensor disagree, in sentences.
    disagreements: tuple[str, ...] = ()
    #: that no clock was set, and what the plan would have set, in sentences; None if it was no dry
    #: run.
    dry_run: str | None = None

    @property
    def origin(self) -> str:
        """Where the time and the energy of an iteration come from."""
        return f"time measured, energy {self.gpu_origin or 'of unknown origin'}"

    @property
    def pipelines_of_plan(self) -> int:
        """How many of the plan's pipelines the GPUs of the ranks make up."""
        gpus = (self.context.ranks or 1) * self.context.gpus_per_stage
        return max(1, round(len(self.ranks) / gpus))

    @property
    def current(self) -> PlanOfRun:
        """The iterations by the plan `version`."""
        return next(plan for plan in self.plans if plan.version == self.version)


def summarize_run(run: Run) -> RunSummary:
    """Summarize a run."""
    # The newest plan may have no iteration that counts yet.
    version = max(
        (number for number in run.versions if run.time_s(number) is not None),
        default=run.newest_version,
    )
    # Pipelines of a job may have plans of their own, and any of this version will do.
    plan = run.plan(
        version, next(rank.pipeline for rank in run.ranks if rank.iterations_by(version))
    )
    origins = {rank.iterations[-1].origin for rank in run.ranks}
    ranks = {number: tuple(_ranks(run, number)) for number in run.versions}
    plans = tuple(_plan(run, *of_plan) for of_plan in ranks.items())
    accounts = {rank.rank: rank.ran for rank in ranks[version]}
    # A dry run ran at full clocks, so it is judged by the plan of full clocks.
    if run.is_dry_run:
        accounts = {rank: _beside_baseline(account, plan) for rank, account in accounts.items()}
    name = run.plan_name(version)
    # What the plan was to save, at the plan's own time.
    foreseen_share = 1.0 - plan.energy_j / plan.baseline_j(plan.time_s)
    return RunSummary(
        context=context_of_plan(plan),
        gpu_origin=origins.pop() if len(origins) == 1 else None,
        pipelines=len({rank.pipeline for rank in run.ranks}),
        plans=plans,
        version=version,
        ranks=ranks[version],
        deviations=_deviations(run),
        cut_off=tuple(rank.rank for rank in run.ranks if rank.is_cut_off),
        attempt=run.attempt,
        totals=run.totals,
        total=run.total,
        saving=run.total.saving,
        foreseen_share=foreseen_share,
        verdict=verdict_of(accounts, _torch_difference(run, plan), run.folder),
        disagreements=run.disagreements,
        unlike_plan=why_no_saving(
            accounts, plan.gpu, [rank.iterations[-1].gpu for rank in run.ranks]
        ),
        dry_run=_dry_run_text(plan, name, foreseen_share) if run.is_dry_run else None,
    )


def _beside_baseline(account: Account, plan: Plan) -> Account:
    """Return the account of a dry run, which runs at full clocks, as if that had been its plan; how
    long its computations take there is not known.
    """
    planned_s = plan.baseline_time_s * account.as_planned
    return replace(account, planned_s=planned_s, planned_busy_s=0.0)


def _dry_run_text(plan: Plan, name: str, foreseen_share: float) -> str:
    """Say that nothing was set, and what a plan would have set."""
    clocks = sorted(set(plan.clocks.values()))
    unit = unit_of(plan.control)
    span = f"{clocks[0]} {unit}" if len(clocks) == 1 else f"{clocks[0]} to {clocks[-1]} {unit}"
    return (
        f"{NOTHING_SET}. Plan {name} would have set {span}, in "
        f"{counted(sum(plan.changes), 'change')} per iteration, to save "
        f"{100 * foreseen_share:.1f} % at {si(plan.time_s, 's', 3)}"
    )


def _torch_difference(run: Run, plan: Plan) -> str | None:
    """Return in a clause why the plan's profile does not carry over to the torch of a rank."""
    versions = (rank.iterations[-1].sharded_torch for rank in run.ranks)
    return next(filter(None, (difference(plan.torch, version) for version in versions)), None)


def _plan(run: Run, version: int, ranks: Sequence[RankOfRun]) -> PlanOfRun:
    energies_j = [rank.energy_j for rank in ranks if rank.energy_j is not None]
    return PlanOfRun(
        version=version,
        name=run.plan_name(version),
        iterations=max(len(rank.iterations_by(version)) for rank in run.ranks),
        counted=max(rank.ran.windows for rank in ranks),
        time_s=run.time_s(version),
        planned_time_s=_planned_time_s(run, version),
        # A sum with a rank missing would be too small.
        energy_j=math.fsum(energies_j) if len(energies_j) == len(ranks) else None,
        planned_energy_j=math.fsum(rank.planned_energy_j for rank in ranks),
    )


def _planned_time_s(run: Run, version: int) -> float:
    """Return the planned iteration time of the slowest pipeline, seconds."""
    return max(
        run.plan(version, rank.pipeline).time_s for rank in run.ranks if rank.iterations_by(version)
    )


def _ranks(run: Run, version: int) -> Iterator[RankOfRun]:
    """Summarize the ranks that have iterations by that plan."""
    planned: dict[int, list[Account]] = {}
    for rank in run.ranks:
        if rank.iterations_by(version):
            # Pipelines of one kind share a plan, which is replayed once.
            if rank.pipeline not in planned:
                planned[rank.pipeline] = _planned_ranks(
                    run.plan(version, rank.pipeline), _planned_time_s(run, version)
                )
            # Iterations without a change of clock have no latency.
            rows = rank.counted(version)
            p50_s = [row.latency_p50_s for row in rows if row.latency_p50_s is not None]
            p99_s = [row.latency_p99_s for row in rows if row.latency_p99_s is not None]
            yield RankOfRun(
                rank.rank,
                rank.pipeline,
                rank.pipeline_rank,
                rank.account(version),
                planned[rank.pipeline][rank.pipeline_rank],
                median(p50_s) if p50_s else None,
                median(p99_s) if p99_s else None,
            )


def _planned_ranks(plan: Plan, time_s: float) -> list[Account]:
    """Return the account of an iteration of each rank of a pipeline by the plan, as one GPU, where
    the slowest pipeline takes `time_s`.
    """
    ranks = zip(
        summarize_plan(plan).per_rank, predict_records(plan), plan.rank_waiting_w, strict=True
    )
    planned = []
    for rank, computations, waiting_w in ranks:
        changes = change_statistics(computations)
        # Beside a slower pipeline the rank waits for longer than its own plan says.
        energy_j = rank.energy_j + waiting_w * (time_s - plan.time_s)
        planned.append(
            Account(
                windows=1,
                gpu_s=time_s,
                busy_s=math.fsum(computation.duration_s for computation in computations),
                # Accounts are of one GPU.
                energy_j=energy_j / plan.gpus_per_stage,
                changes_late=changes["changes_late"],
                off_clock_s=changes["off_clock_s"],
            )
        )
    return planned


def _deviations(run: Run) -> tuple[Deviation, ...]:
    by_reason: dict[str, list[tuple[int, int]]] = {}
    for rank in run.ranks:
        for row in rank.iterations:
            if not row.is_as_planned:
                by_reason.setdefault(row.deviation or NO_PLAN, []).append(
                    (row.iteration, rank.rank)
                )
    deviations = (
        Deviation(reason, len(rows), tuple(sorted({rank for _, rank in rows})), min(rows)[0])
        for reason, rows in by_reason.items()
    )
    # The most frequent first, and of equals the earliest.
    return tuple(sorted(deviations, key=lambda entry: (-entry.times, entry.first_iteration)))


def _sheet(summary: RunSummary) -> Sheet:
    """Return a table of the recorded iterations beside what was planned, a row for each plan."""
    pipelines = f", {summary.pipelines} pipelines" if summary.pipelines > 1 else ""
    overhead_s = summary.context.overhead_s
    overhead = (
        f" The planned time includes {si(overhead_s, 's', 6)} of calibrated overhead."
        if overhead_s
        else ""
    )
    return Sheet(
        f"Run of {pipeline_text(summary.context)}{pipelines}",
        f"{run_origin_text(summary)}.{overhead}",
        lay_out(summary.plans, *_PLANS),
        [
            "An iteration goes from its begin to its end, on the slowest rank. All figures are "
            "means over the iterations that count: those that ran in the planned order, without "
            "the first one by each plan."
        ],
    )


def tables_of_run(summary: RunSummary) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield the tables of a run for a page, to three digits: headings and columns."""
    rank = Column("rank", "rank")
    yield "Each plan", lay_out(summary.plans, *_PLANS, digits=3)
    yield (
        f"Ranks by plan {summary.current.name}, per iteration",
        lay_out(summary.ranks, rank, *_LOAD, digits=3),
    )
    yield (
        f"{_changes_heading(summary)} by plan {summary.current.name}, in all iterations that count",
        lay_out(summary.ranks, rank, *_clock_columns(summary), digits=3),
    )


_CHANGE_TERMS = (
    f"Late: set when more than {100 * LATE:g} % of the first computation was over. Overtaken: not "
    "set before another clock\nwas requested. Off clock: share of the computing time before the "
    "clock was set. Delay: from the request until\nthe clock was set."
)


def time_and_saving(summary: RunSummary) -> str:
    """Say the one time and the one saving of a run whose time is known, without a full stop."""
    current = summary.current
    assert current.time_s is not None
    # A dry run ran at full clocks, so its plan says nothing of its time.
    text = time_text(current.time_s, current.planned_time_s if summary.dry_run is None else None)
    # Iterations by earlier plans took other times.
    if len(summary.plans) > 1:
        text += f", by plan {current.name}"
    if summary.unlike_plan is not None or summary.dry_run is not None:
        return text
    saved = saved_text(summary.total)
    if saved.startswith("saved"):
        return f"{text}. The run {saved}"
    return f"{text}. {saved[0].upper()}{saved[1:]}"


def time_text(time_s: float, planned_s: float | None) -> str:
    """Say how long an iteration of a run takes, beside what its plan says, if there is one."""
    text = f"An iteration takes {si(time_s, 's', 3)}"
    if not planned_s:
        return text
    if abs(time_s / planned_s - 1) < _SAME_TIME:
        return f"{text}, as planned"
    return f"{text}, {percent_off(time_s / planned_s)} than planned"


def run_text(summary: RunSummary) -> str:
    """Return the text that `planner show` prints: the run by plan, its ranks, their clock
    changes, and deviations.
    """
    # What every reader wants comes first, and all else behind details.
    return "\n\n".join([*_first_texts(summary), "Details", *_detail_texts(summary)]) + "\n"


def _first_texts(summary: RunSummary) -> Iterator[str]:
    """Say what every reader wants to know."""
    if summary.dry_run is not None:
        yield f"{summary.dry_run}."
    if summary.unlike_plan is not None:
        yield f"{summary.unlike_plan}."
    if summary.current.time_s is not None:
        yield f"{time_and_saving(summary)}."
    if summary.verdict is not None:
        yield str(summary.verdict)


def _detail_texts(summary: RunSummary) -> Iterator[str]:
    """Say all else: tables of plans and ranks, deviations, and what was saved."""
    count = max((rank.ran.windows for rank in summary.ranks), default=0)
    several = [Column("pipeline", "pipeline")] if summary.pipelines > 1 else []
    rank_columns = [Column("rank", "rank"), *several]
    yield f"{_sheet(summary).text()}Ranks by plan {summary.current.name}, per iteration:"
    yield table(lay_out(summary.ranks, *rank_columns, *_LOAD))
    yield f"{_changes_heading(summary)}, in all {count} iterations that count:"
    yield table(lay_out(summary.ranks, *rank_columns, *_clock_columns(summary)))
    # A dry run set nothing, so terms of setting have no meaning.
    if not summary.dry_run:
        yield _CHANGE_TERMS
    yield _deviations_text(summary)
    if summary.cut_off:
        yield f"Not counted: the last row of {rank_names(summary.cut_off)}, which was cut off."
    if summary.disagreements:
        yield "\n".join(summary.disagreements)
    # Without a comparison there is nothing that was foreseen for this run.
    if not summary.unlike_plan:
        yield (
            f"Foreseen by plan {summary.current.name}: {100 * summary.foreseen_share:.2f} %, of an "
            "iteration as planned, without what passes between iterations."
        )
    yield totals_text(summary.totals, summary.total, saves=summary.unlike_plan is None)


def run_origin_text(summary: RunSummary) -> str:
    """Say where the numbers of the run and of its plan come from."""
    read = {
        None: "no GPU was read",
        "measured": "energy and clocks measured",
        "simulated": "energy and clocks simulated",
    }
    return (
        f"Run: times measured, {read[summary.gpu_origin]}. Plan: replayed from a "
        f"{profile_of_origin(summary.context.origin)}"
    )


def _off(name: str) -> Callable[[Any], str | None]:
    """Return the function that writes the deviation of a field from what was planned, percent."""

    def write(row: Any) -> str | None:
        value = getattr(row, name)
        planned = getattr(row, f"planned_{name}")
        if value is None or not planned:
            return None
        text = f"{100 * (value / planned - 1):+.2f}"
        return text if float(text) else "0.00"

    return write


_ENERGY = (
    Column("energy {}", "energy_j", "J"),
    Column("planned", "planned_energy_j", "J"),
    Column("off %", _off("energy_j")),
)
_PLANS = (
    Column("plan", "name"),
    Column("iterations", "iterations"),
    Column("counted", "counted"),
    Column("time {}", "time_s", "s"),
    Column("planned", "planned_time_s", "s"),
    Column("off %", _off("time_s")),
    *_ENERGY,
)
_LOAD = (
    Column("busy {}", "busy_s", "s"),
    Column("planned", "planned_busy_s", "s"),
    Column("off %", _off("busy_s")),
    *_ENERGY,
    Column("deg C", "ran.temperature_c", ".0f"),
    Column("  throttled", throttled, "<"),
)


def _changes_heading(summary: RunSummary) -> str:
    return "Clock changes" if summary.dry_run is None else "Clock changes, none of which was made"


def _clock_columns(summary: RunSummary) -> list[Column]:
    asked = [
        Column(f"{unit_of(summary.context.control)} requested", clocked("clock_s"), ".0f"),
        Column("MHz achieved", clocked("achieved_mhz_s"), ".0f"),
        Column("changes", "ran.changes_asked"),
    ]
    # A dry run has requests alone.
    if summary.dry_run is not None:
        return asked
    return [
        *asked,
        Column("set", "ran.changes_set"),
        Column("late", "ran.changes_late"),
        # The plan expects late changes too, of which each counted iteration has as many.
        Column("planned", lambda rank: rank.planned.changes_late * rank.ran.windows),
        Column("overtaken", "ran.changes_overtaken"),
        Column("off clock %", lambda rank: off_clock_share(rank.ran), "%"),
        Column("planned", lambda rank: off_clock_share(rank.planned), "%"),
        Column("delay ms p50", lambda rank: _ms(rank.latency_p50_s), ".2f"),
        Column("p99", lambda rank: _ms(rank.latency_p99_s), ".2f"),
    ]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _deviations_text(summary: RunSummary) -> str:
    """Say what ran, and in what time: two statements."""
    deviations = summary.deviations
    if not deviations:
        # A dry run has no verdict either: nothing was set, so its times are not those of the plan.
        is_judged = summary.dry_run is None and summary.current.time_s is not None
        in_time = is_judged and summary.verdict is None
        time = f" They took the planned time, up to {100 * OFF:.0f} %." if in_time else ""
        return f"Every iteration ran in the planned order.{time}"
    lines = [
        f"{deviation.times} on {rank_names(deviation.ranks)}, first iteration "
        f"{deviation.first_iteration}: {deviation.reason}"
        for deviation in deviations[:_MOST_REASONS]
    ]
    others = deviations[_MOST_REASONS:]
    if others:
        lines.append(
            f"and {sum(deviation.times for deviation in others)} for {len(others)} more reasons"
        )
    return "\n".join(["Not as planned:", *lines])
