"""Perfetto traces: the replayed iteration of a plan, and the recorded iterations of a run, in the
Trace Event Format, for Perfetto (ui.perfetto.dev) and chrome://tracing.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from perseus_planner.base.errors import RunError, UsageError
from perseus_planner.base.files import replacing
from perseus_planner.plans.replay import ALL_MAXIMUM, origin_text
from perseus_planner.profiles.csv_file import setting_of, unit_of
from perseus_planner.views.context import pipeline_text
from perseus_planner.views.run import NO_PLAN, run_origin_text, summarize_run

if TYPE_CHECKING:
    from perseus_planner.plans.plan import Plan
    from perseus_planner.runs.records import ComputationRecord, IterationRecord
    from perseus_planner.runs.run import RankRecord, Run

WAITING = "waiting"
"""The category of slices without computation; chrome://tracing draws them in grey."""

Steps = list[tuple[int, float]]
"""A number over time: nanoseconds after the start, and its value from then on."""


class Slice(NamedTuple):
    """A bar on a thread."""

    name: str  #: label of the bar
    category: str  #: category to search for
    start_ns: int  #: nanoseconds after the start of the trace
    end_ns: int  #: nanoseconds after the start of the trace, not before `start_ns`
    details: Mapping[str, Any]  #: shown when the bar is clicked


class PerfettoTrace:
    """The events of a trace, process by process; a process has a thread for each rank.

    Args:
        processes: how many there will be.
    """

    def __init__(self, processes: int) -> None:
        self._events: list[dict[str, Any]] = []
        self._pid = 0
        self._numbers = count(processes + 1)
        self._flows = count(1)
        self._threads: list[int] = []

    def begin(self, name: str, threads: Iterable[str]) -> None:
        """Begin a process with these threads."""
        self._pid += 1
        self._add("M", "process_name", args={"name": name})
        self._threads.clear()
        for thread in threads:
            tid = next(self._numbers)
            self._add("M", "thread_name", tid=tid, args={"name": thread})
            self._add("M", "thread_sort_index", tid=tid, args={"sort_index": tid})
            self._threads.append(tid)

    def add_slices(self, thread: int, slices: Iterable[Slice]) -> None:
        """Add the slices of a thread, in the order of time."""
        for name, category, start_ns, end_ns, details in slices:
            # The name of a colour of chrome://tracing, which refuses others.
            colour = {"cname": "grey"} if category == WAITING else {}
            times = {"ts": _us(start_ns), "dur": _us(end_ns - start_ns)}
            tid = self._threads[thread]
            self._add("X", name, cat=category, tid=tid, **times, **colour, args=details)

    def add_flow(self, name: str, begin: tuple[int, int], end: tuple[int, int]) -> None:
        """Add an arrow from the end of a slice to the start of another one: thread and
        nanoseconds.
        """
        # Both ends of an arrow are events with one number.
        what: dict[str, Any] = {"cat": "transfer", "id": next(self._flows)}
        self._add("s", name, **what, tid=self._threads[begin[0]], ts=_us(begin[1] - 1))
        self._add("f", name, **what, tid=self._threads[end[0]], ts=_us(end[1]), bp="e")

    def add_counter(self, name: str, unit: str, values: Steps) -> None:
        """Add a number over time."""
        for at_ns, value in values:
            self._add("C", name, ts=_us(at_ns), args={unit: value})

    def add_clock(
        self, plan: Plan, rank: int, spans: Sequence[tuple[int, float]], end_ns: int
    ) -> None:
        """Add what is set on a rank."""
        name = "power limit" if plan.control == "power-limit" else "clock"
        self.add_counter(f"rank {rank} {name}", unit_of(plan.control), steps(spans, end_ns))

    def add_powers(self, powers: Mapping[int, Steps], ranks: int) -> None:
        """Add the power of ranks, and their sum if it is known of all."""
        if powers and len(powers) == ranks:
            self.add_counter("pipeline power", "W", total([*powers.values()]))
        for rank, values in powers.items():
            self.add_counter(f"rank {rank} power", "W", values)

    def write(self, path: str | os.PathLike[str], about: Mapping[str, Any]) -> None:
        """Write the trace, whole or not at all. Equal traces give equal bytes.

        Raises:
            UsageError: If the file cannot be written.
        """
        with replacing(path, UsageError) as file:
            file.write(b'{"traceEvents":[\n')
            file.write(b",\n".join(map(_json, self._events)))
            file.write(b'\n],\n"otherData":' + _json(about) + b"}\n")

    def _add(self, phase: str, name: str, **more: Any) -> None:
        self._events.append({"ph": phase, "name": name, "pid": self._pid, **more})


def steps(spans: Iterable[tuple[int, float]], end_ns: int) -> Steps:
    """Return the steps of a counter. The last value is repeated at the end, so that the counter can
    be integrated.

    Args:
        spans: (nanoseconds after the start, value from then on), in the order of time; the last of
            equal times counts.
        end_ns: when the last value ends.
    """
    kept: Steps = []
    for at_ns, value in spans:
        if kept and kept[-1][0] == at_ns:
            kept.pop()
        if not kept or kept[-1][1] != value:
            kept.append((at_ns, value))
    return [*kept, (end_ns, kept[-1][1])] if kept and end_ns > kept[-1][0] else kept


def total(counters: Sequence[Steps]) -> Steps:
    """Return the sum of counters, starting when all of them have a value."""
    changes = sorted(
        (at_ns, number, value)
        for number, counter in enumerate(counters)
        for at_ns, value in counter
    )
    values = dict[int, float]()
    sums = Steps()
    for at_ns, number, value in changes:
        values[number] = value
        if len(values) == len(counters):
            sums.append((at_ns, math.fsum(values.values())))
    return steps(sums, changes[-1][0])


def _us(time_ns: int) -> float:
    """Return microseconds; written as text they have at most three decimals."""
    return time_ns / 1000


def _ns(time_s: float) -> int:
    """Return whole nanoseconds."""
    return round(time_s * 1e9)


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def _waiting(name: str, start_ns: int, end_ns: int, **details: Any) -> Iterator[Slice]:
    """Yield a slice of waiting, unless it takes no time."""
    if end_ns > start_ns:
        yield Slice(name, WAITING, start_ns, end_ns, details)


def trace_plan(plan: Plan, path: str | os.PathLike[str], baseline: Plan | None = None) -> None:
    """Write the replayed iteration of a plan: a thread for each rank, power and clock of its GPUs,
    and transfers.

    With a negative calibrated overhead, the trace ends with the replay, which is later than
    `plan.time_s`.

    Args:
        plan: the plan.
        path: the file.
        baseline: the plan with all clocks at maximum, which becomes a second process.

    Raises:
        UsageError: If the file cannot be written.
    """
    origin = origin_text(plan.origin)
    name = f"{plan.schedule}. {origin}"
    trace = PerfettoTrace(1 if baseline is None else 2)
    _add_plan(trace, name, plan)
    if baseline is not None:
        _add_plan(trace, f"{ALL_MAXIMUM}: {name}", baseline)
    about = {
        "what": f"one iteration of a plan for {plan.schedule}",
        "origin": origin,
        "gpu": plan.gpu or "unknown",
        "gpus_per_rank": plan.gpus_per_stage,
        "profile_digest": plan.profile_digest,
        "time_s": plan.time_s,
        "energy_j": plan.energy_j,
        "overhead_s": plan.overhead_s,
        "baseline": ALL_MAXIMUM,
        "baseline_time_s": plan.baseline_time_s,
        "baseline_energy_j": plan.baseline_energy_j,
        "power": "of all GPUs of a rank; average over each computation",
    }
    trace.write(path, about)


def _add_plan(trace: PerfettoTrace, name: str, plan: Plan) -> None:
    gpus = "" if plan.gpus_per_stage == 1 else f" ({plan.gpus_per_stage} GPUs)"
    slices = [list(_planned_slices(plan, rank)) for rank in range(len(plan.schedule.ranks))]
    trace.begin(name, (f"rank {rank}{gpus}" for rank in range(len(slices))))
    for rank, of_rank in enumerate(slices):
        trace.add_slices(rank, of_rank)
    # Arrows show what each computation waited for from another rank.
    for flow in _transfers(plan):
        trace.add_flow(*flow)
    # Power is an average of each computation, so it steps where they begin.
    powers = {
        rank: steps(
            ((slice_of_rank.start_ns, slice_of_rank.details["watts"]) for slice_of_rank in row),
            row[-1].end_ns,
        )
        for rank, row in enumerate(slices)
    }
    trace.add_powers(powers, len(slices))
    setting = setting_of(plan.control)
    for rank, of_rank in enumerate(slices):
        # The clock of a computation lasts until the next one begins.
        spans = [
            (slice_of_rank.start_ns, slice_of_rank.details[setting])
            for slice_of_rank in of_rank
            if setting in slice_of_rank.details
        ]
        trace.add_clock(plan, rank, [(0, spans[0][1]), *spans], of_rank[-1].end_ns)


def _transfers(plan: Plan) -> Iterator[tuple[str, tuple[int, int], tuple[int, int]]]:
    """Yield what each computation gets from another rank: activations for a forward, else
    gradients.
    """
    iteration = plan.iteration
    spans = list(plan.timeline.spans.values())
    for node, computation in enumerate(iteration.computations):
        for before in iteration.predecessors[node]:
            ranks = iteration.rank_of[before], iteration.rank_of[node]
            # Within a rank, the order says what waits for what.
            if before >= len(iteration.computations) or ranks[0] == ranks[1]:
                continue
            from_ns = _ns(spans[before].end_s)
            to_ns = _ns(spans[node].start_s)
            # A computation without work has no slice that an arrow could begin at.
            if from_ns > _ns(spans[before].start_s):
                name = "activations" if computation.kind == "F" else "gradients"
                name += f" of microbatch {computation.microbatch}"
                yield name, (ranks[0], from_ns), (ranks[1], to_ns)


def _planned_slices(plan: Plan, rank: int) -> Iterator[Slice]:
    """Yield what the rank runs, and its waiting in between."""
    iteration = plan.iteration
    timeline = plan.timeline

    def waiting(name: str, start_s: float, end_s: float) -> Iterator[Slice]:
        watts = plan.rank_waiting_w[rank]
        joules = watts * (end_s - start_s)
        yield from _waiting(name, _ns(start_s), _ns(end_s), joules=joules, watts=watts)

    # Waiting is what lies between two slices.
    done_s = 0.0
    for node in iteration.programs[rank]:
        name = iteration.names[node]
        span = timeline.spans[name]
        category = "operation of fixed time"
        details: dict[str, Any] = {}
        if node < len(iteration.computations):
            category = "computation"
            stage, _, microbatch = iteration.computations[node]
            details = {"stage": stage, "kind": iteration.keys[node].name, "microbatch": microbatch}
            details[setting_of(plan.control)] = plan.clocks[name]
        details |= {"joules": span.energy_j, "watts": span.power_w}
        yield from waiting("waiting", done_s, span.start_s)
        yield Slice(name, category, _ns(span.start_s), _ns(span.end_s), details)
        done_s = span.end_s
    # The overhead comes after all ranks have ended.
    replayed_s = max(span.end_s for span in timeline.spans.values())
    yield from waiting("waiting", done_s, replayed_s)
    yield from waiting("calibrated overhead", replayed_s, timeline.time_s)


def trace_run(run: Run, path: str | os.PathLike[str]) -> None:
    """Write the iterations of a run whose computations were kept: a process for each pipeline, a
    thread for each rank.

    Each computation has its planned time and energy beside it, and each iteration its mean power.
    The clocks of nodes may differ, so the times of ranks are not comparable: each rank's times
    count from where the first iteration began that all ranks have kept.

    Raises:
        RunError: If there is no iteration whose computations all ranks have kept.
        UsageError: If the file cannot be written.
    """
    # Times are compared by eye, so only iterations that all ranks have kept count.
    kept = set.intersection(*({row.iteration for row in _kept(rank, 0)} for rank in run.ranks))
    if not kept:
        raise RunError(
            f"{run.folder}: there is no iteration whose computations all ranks have kept; try "
            "again in a minute, or when the training has ended"
        )
    first = min(kept)
    # The title says what was measured and what was simulated, as a trace has no place for it
    # elsewhere.
    summary = summarize_run(run)
    sources = run_origin_text(summary)
    pipelines = sorted({rank.pipeline for rank in run.ranks})
    trace = PerfettoTrace(len(pipelines))
    # A process for each pipeline, as their ranks have the same numbers.
    for pipeline in pipelines:
        ranks = [rank for rank in run.ranks if rank.pipeline == pipeline]
        ranks.sort(key=lambda rank: rank.pipeline_rank)
        _add_run(trace, f"pipeline {pipeline}. {sources}", run, ranks, first)
    about = {
        "what": f"iterations of a training run from number {first} on, of "
        f"{pipeline_text(summary.context)}",
        "origin": sources,
        "gpu": summary.context.gpu or "unknown",
        "times": f"of each rank from the start of its iteration {first}",
        "power": "of the GPU of a rank; mean of each iteration, until the next one begins",
    }
    trace.write(path, about)


def _kept(rank: RankRecord, first: int) -> list[IterationRecord]:
    """Return the iterations of `rank` from number `first` on whose computations were kept."""
    return [
        row
        for row in rank.iterations
        if row.iteration >= first and row.iteration in rank.computations
    ]


def _add_run(
    trace: PerfettoTrace, name: str, run: Run, ranks: Sequence[RankRecord], first: int
) -> None:
    # The number in the job is said only where it differs from that in the pipeline.
    names = {
        rank.pipeline_rank: "" if rank.rank == rank.pipeline_rank else f" (of the job: {rank.rank})"
        for rank in ranks
    }
    trace.begin(name, (f"rank {number}{of_job}" for number, of_job in names.items()))
    kept = [_kept(rank, first) for rank in ranks]
    for number, (rank, rows) in enumerate(zip(ranks, kept, strict=True)):
        trace.add_slices(number, _recorded_slices(run, rank, rows))
    powers = dict[int, Steps]()
    for rank, rows in zip(ranks, kept, strict=True):
        spans = [
            (_ns(row.begin_s - rows[0].begin_s), row.energy_j / row.time_s)
            for row in rows
            if row.energy_j is not None and row.time_s > 0
        ]
        # A sum over ranks with gaps would look like less power.
        if len(spans) == len(rows):  # it is known for all iterations
            end_ns = _ns(rows[-1].end_s - rows[0].begin_s)
            powers[rank.pipeline_rank] = steps(spans, end_ns)
    trace.add_powers(powers, len(ranks))
    for rank, rows in zip(ranks, kept, strict=True):
        _add_recorded_clock(trace, run, rank, rows)


def _add_recorded_clock(
    trace: PerfettoTrace, run: Run, rank: RankRecord, rows: Sequence[IterationRecord]
) -> None:
    """Add the clock or the power limit that was set, from when it was; nothing where no iteration
    ran by a plan.
    """
    zero_s = rows[0].begin_s
    spans = Steps()
    plan = None
    for row in rows:
        if row.version is None:
            continue
        plan = run.plan(row.version, rank.pipeline)
        for record in rank.computations[row.iteration]:
            # A change that was overtaken was never in force.
            if record.clock is not None and not record.is_overtaken:
                # A clock counts from when it was set, and not from when it was asked for.
                set_s = max(record.begin_s, record.set_end_s or record.begin_s)
                # Measured times may overlap, and a counter must not go back.
                spans.append((max(spans[-1][0] if spans else 0, _ns(set_s - zero_s)), record.clock))
    if plan is not None and spans:
        end_ns = max(spans[-1][0], _ns(rows[-1].end_s - zero_s))
        trace.add_clock(plan, rank.pipeline_rank, spans, end_ns)


def _recorded_slices(
    run: Run, rank: RankRecord, rows: Sequence[IterationRecord]
) -> Iterator[Slice]:
    """Yield the computations and the rest of each iteration; overlapping slices are cut to
    follow each other.
    """
    zero_s = rows[0].begin_s
    done_ns = 0
    rest = "waiting or other work"
    for row in rows:
        plan = None if row.version is None else run.plan(row.version, rank.pipeline)
        done_ns = max(done_ns, _ns(row.begin_s - zero_s))
        for record in rank.computations[row.iteration]:
            # Slices of one thread must not overlap, so each begins where the last one has ended.
            start_ns = max(done_ns, _ns(record.begin_s - zero_s))
            yield from _waiting(rest, done_ns, start_ns, iteration=row.iteration)
            done_ns = max(start_ns, _ns(record.end_s - zero_s))
            details = _details(row, record, plan)
            yield Slice(str(record.computation), "computation", start_ns, done_ns, details)
        # The rest of an iteration is waiting, or what is no computation.
        end_ns = _ns(row.end_s - zero_s)
        yield from _waiting(rest, done_ns, end_ns, iteration=row.iteration)
        done_ns = max(done_ns, end_ns)


def _details(row: IterationRecord, record: ComputationRecord, plan: Plan | None) -> dict[str, Any]:
    details: dict[str, Any] = {
        "iteration": row.iteration,
        "plan": row.version,
        "not_as_planned": NO_PLAN if plan is None else row.deviation,
        **record.computation._asdict(),
        "achieved_mhz": record.achieved_mhz,
    }
    # Without a plan it is not known whether a number is a clock or a limit.
    if plan is not None:
        details[setting_of(plan.control)] = record.clock
    # What did not run as planned has no prediction.
    if plan is not None and row.is_as_planned:
        planned = plan.measurement(record.computation)
        details["planned_seconds"] = planned.time_s
        details["planned_joules"] = planned.energy_j / plan.gpus_per_stage
    if record.set_end_s is not None:
        details["clock_set_after_us"] = _ns(record.set_end_s - record.begin_s) / 1000
    if record.is_late or record.is_overtaken:
        details["clock_change"] = "late" if record.is_late else "overtaken"
    return {name: value for name, value in details.items() if value is not None}
