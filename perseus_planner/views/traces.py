"""Perfetto traces: the replayed iteration of a plan, and the recorded iterations of a run; and the
writer of the Trace Event Format, for Perfetto (ui.perfetto.dev) and chrome://tracing.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

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
    name = f"{plan.schedule}. {origin_text(plan.origin)}"
    processes = [_planned_process(name, plan)]
    if baseline is not None:
        processes.append(_planned_process(f"{ALL_MAXIMUM}: {name}", baseline))
    about = {
        "what": f"one iteration of a plan for {plan.schedule}",
        "origin": origin_text(plan.origin),
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
    write_trace(path, processes, about)


def _planned_process(name: str, plan: Plan) -> Process:
    gpus = "" if plan.gpus_per_stage == 1 else f" ({plan.gpus_per_stage} GPUs)"
    threads, powers, clocks = list[Thread](), list[Counter](), list[Counter]()
    for rank in range(len(plan.schedule.ranks)):
        slices = list(_planned_slices(plan, rank))
        end_ns = slices[-1].end_ns
        threads.append(Thread(f"rank {rank}{gpus}", slices))
        watts = (
            (planned_slice.start_ns, planned_slice.details["watts"]) for planned_slice in slices
        )
        powers.append(Counter(f"rank {rank} power", "W", steps(watts, end_ns)))
        # The clock of a computation lasts until the next one begins.
        setting = setting_of(plan.control)
        spans = [
            (planned_slice.start_ns, planned_slice.details[setting])
            for planned_slice in slices
            if setting in planned_slice.details
        ]
        clocks.append(_clock_counter(plan, rank, [(0, spans[0][1]), *spans], end_ns))
    counters = [total(powers, "pipeline power"), *powers, *clocks]
    return Process(name, threads, counters, list(_transfers(plan)))


def _transfers(plan: Plan) -> Iterator[Flow]:
    """Yield what each computation gets from another rank: activations for a forward, else
    gradients.
    """
    iteration, spans = plan.iteration, list(plan.timeline.spans.values())
    for place, computation in enumerate(iteration.computations):
        for other in iteration.predecessors[place]:
            ranks = iteration.rank_of[other], iteration.rank_of[place]
            if other >= len(iteration.computations) or ranks[0] == ranks[1]:
                continue
            from_ns, to_ns = _ns(spans[other].end_s), _ns(spans[place].start_s)
            if from_ns > _ns(spans[other].start_s):
                name = "activations" if computation.kind == "F" else "gradients"
                yield Flow(
                    f"{name} of microbatch {computation.microbatch}",
                    ranks[0],
                    from_ns,
                    ranks[1],
                    to_ns,
                )


def _planned_slices(plan: Plan, rank: int) -> Iterator[Slice]:
    """Yield what the rank runs, and its waiting in between."""
    iteration, timeline = plan.iteration, plan.timeline
    waiting_w, done_s = plan.rank_waiting_w[rank], 0.0
    for place in iteration.programs[rank]:
        name = iteration.names[place]
        span, category = timeline.spans[name], "operation of fixed time"
        details: dict[str, Any] = {}
        if place < len(iteration.computations):
            computation, category = iteration.computations[place], "computation"
            details = {"stage": computation.stage, "kind": iteration.keys[place][1]}
            details |= {
                "microbatch": computation.microbatch,
                setting_of(plan.control): plan.clocks[name],
            }
        details |= {"joules": span.energy_j, "watts": span.power_w}
        yield from _planned_waiting("waiting", done_s, span.start_s, waiting_w)
        yield Slice(name, category, _ns(span.start_s), _ns(span.end_s), details)
        done_s = span.end_s
    replayed_s = max(span.end_s for span in timeline.spans.values())
    yield from _planned_waiting("waiting", done_s, replayed_s, waiting_w)
    yield from _planned_waiting("calibrated overhead", replayed_s, timeline.time_s, waiting_w)


def _planned_waiting(name: str, start_s: float, end_s: float, power_w: float) -> Iterator[Slice]:
    details = {"joules": power_w * (end_s - start_s), "watts": power_w}
    yield from _waiting(name, _ns(start_s), _ns(end_s), details)


def _clock_counter(
    plan: Plan, rank: int, spans: Sequence[tuple[int, float]], end_ns: int
) -> Counter:
    name = "power limit" if plan.control == "power-limit" else "clock"
    return Counter(f"rank {rank} {name}", unit_of(plan.control), steps(spans, end_ns))


def _ns(time_s: float) -> int:
    """Return whole nanoseconds."""
    return round(time_s * 1e9)


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
    first = _first_kept(run)
    summary = summarize_run(run)
    sources = run_origin_text(summary)
    pipelines = sorted({rank.pipeline for rank in run.ranks})
    about = {
        "what": f"iterations of a training run from number {first} on, of "
        f"{pipeline_text(summary.context)}",
        "origin": sources,
        "gpu": summary.context.gpu or "unknown",
        "times": f"of each rank from the start of its iteration {first}",
        "power": "of the GPU of a rank; mean of each iteration, until the next one begins",
    }
    write_trace(
        path, [_recorded_pipeline(run, pipeline, first, sources) for pipeline in pipelines], about
    )


def _first_kept(run: Run) -> int:
    """Return the first iteration whose computations all ranks have kept."""
    kept = set.intersection(*({row.iteration for row in _kept(rank, 0)} for rank in run.ranks))
    if not kept:
        raise RunError(
            f"{run.folder}: there is no iteration whose computations all ranks have kept; try "
            "again in a minute, or when the training has ended"
        )
    return min(kept)


def _kept(rank: RankRecord, first: int) -> list[IterationRecord]:
    """Return the iterations of `rank` from number `first` on whose computations were kept."""
    return [
        row
        for row in rank.iterations
        if row.iteration >= first and row.iteration in rank.computations
    ]


def _recorded_pipeline(run: Run, pipeline: int, first: int, sources: str) -> Process:
    ranks = sorted(
        (rank for rank in run.ranks if rank.pipeline == pipeline),
        key=lambda rank: rank.pipeline_rank,
    )
    threads: list[Thread] = []
    counters: list[Counter] = []
    clocks: list[Counter] = []
    for rank in ranks:
        rows = _kept(rank, first)
        of_job = "" if rank.rank == rank.pipeline_rank else f" (of the job: {rank.rank})"
        threads.append(
            Thread(f"rank {rank.pipeline_rank}{of_job}", list(_recorded_slices(run, rank, rows)))
        )
        counters += _recorded_power(rank, rows)
        clocks += _recorded_clock(run, rank, rows)
    if len(counters) == len(ranks):
        counters.insert(0, total(counters, "pipeline power"))
    return Process(f"pipeline {pipeline}. {sources}", threads, [*counters, *clocks])


def _recorded_power(rank: RankRecord, rows: Sequence[IterationRecord]) -> Iterator[Counter]:
    """Yield the power of the rank's GPU, if it is known for all iterations."""
    spans = [
        (_ns(row.begin_s - rows[0].begin_s), row.energy_j / row.time_s)
        for row in rows
        if row.energy_j is not None and row.time_s > 0
    ]
    if len(spans) == len(rows):
        yield Counter(
            f"rank {rank.pipeline_rank} power",
            "W",
            steps(spans, _ns(rows[-1].end_s - rows[0].begin_s)),
        )


def _recorded_clock(
    run: Run, rank: RankRecord, rows: Sequence[IterationRecord]
) -> Iterator[Counter]:
    """Yield the clock or the power limit that was set, from when it was; nothing where no
    iteration ran by a plan.
    """
    zero_s, spans, control = rows[0].begin_s, list[tuple[int, float]](), None
    for row in rows:
        if row.version is None:
            continue
        control = run.plan(row.version, rank.pipeline)
        for record in rank.computations[row.iteration]:
            if record.clock is not None and not record.is_overtaken:
                set_s = (
                    record.begin_s
                    if record.set_end_s is None
                    else max(record.begin_s, record.set_end_s)
                )
                spans.append((max(spans[-1][0] if spans else 0, _ns(set_s - zero_s)), record.clock))
    if control is not None and spans:
        yield _clock_counter(
            control, rank.pipeline_rank, spans, max(spans[-1][0], _ns(rows[-1].end_s - zero_s))
        )


def _recorded_slices(
    run: Run, rank: RankRecord, rows: Sequence[IterationRecord]
) -> Iterator[Slice]:
    """Yield the computations and the rest of each iteration; overlapping slices are cut to
    follow each other.
    """
    zero_s, done_ns = rows[0].begin_s, 0
    for row in rows:
        plan = None if row.version is None else run.plan(row.version, rank.pipeline)
        done_ns = max(done_ns, _ns(row.begin_s - zero_s))
        for record in rank.computations[row.iteration]:
            start_ns = max(done_ns, _ns(record.begin_s - zero_s))
            yield from _rest(row, done_ns, start_ns)
            done_ns = max(start_ns, _ns(record.end_s - zero_s))
            yield Slice(
                str(record.computation),
                "computation",
                start_ns,
                done_ns,
                _details(row, record, plan),
            )
        end_ns = _ns(row.end_s - zero_s)
        yield from _rest(row, done_ns, end_ns)
        done_ns = max(done_ns, end_ns)


def _rest(row: IterationRecord, start_ns: int, end_ns: int) -> Iterator[Slice]:
    yield from _waiting("waiting or other work", start_ns, end_ns, {"iteration": row.iteration})


def _waiting(name: str, start_ns: int, end_ns: int, details: Mapping[str, Any]) -> Iterator[Slice]:
    """Yield a slice of waiting, unless it takes no time."""
    if end_ns > start_ns:
        yield Slice(name, WAITING, start_ns, end_ns, details)


def _details(row: IterationRecord, record: ComputationRecord, plan: Plan | None) -> dict[str, Any]:
    computation = record.computation
    details: dict[str, Any] = {
        "iteration": row.iteration,
        "plan": row.version,
        "not_as_planned": NO_PLAN if plan is None else row.deviation,
        "stage": computation.stage,
        "kind": computation.kind,
        "microbatch": computation.microbatch,
        "achieved_mhz": record.achieved_mhz,
    }
    if plan is not None:
        details[setting_of(plan.control)] = record.clock
    if plan is not None and row.is_as_planned:
        planned = plan.measurement(computation)
        details["planned_seconds"] = planned.time_s
        details["planned_joules"] = planned.energy_j / plan.gpus_per_stage
    if record.set_end_s is not None:
        details["clock_set_after_us"] = _ns(record.set_end_s - record.begin_s) / 1000
    if record.is_late or record.is_overtaken:
        details["clock_change"] = "late" if record.is_late else "overtaken"
    return {name: value for name, value in details.items() if value is not None}


WAITING = "waiting"
"""The category of slices without computation; chrome://tracing draws them in grey."""
_GREY = "grey"  #: one of the colour names of chrome://tracing, which refuses others


@dataclass(frozen=True)
class Slice:
    """A bar on a thread."""

    name: str  #: label of the bar
    category: str  #: category to search for
    start_ns: int  #: nanoseconds after the start of the trace
    end_ns: int  #: likewise, not before `start_ns`
    #: name -> text, number or bool; shown when the bar is clicked.
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Thread:
    """A row of slices, in the order of time."""

    name: str
    slices: Sequence[Slice]


@dataclass(frozen=True)
class Counter:
    """A number over time."""

    name: str  #: name of the quantity
    unit: str  #: unit of its values
    #: (nanoseconds after the start, value from then on), in the order of time.
    steps: Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Flow:
    """An arrow from the end of a slice to the start of another one, of the same process."""

    name: str  #: what flows
    thread: int  #: place of the thread that it comes from
    from_ns: int  #: end of the slice that it comes from
    to_thread: int  #: place of the thread that it goes to
    to_ns: int  #: start of the slice that it goes to


@dataclass(frozen=True)
class Process:
    """A group of threads with their counters, and the flows between them."""

    name: str
    threads: Sequence[Thread]
    counters: Sequence[Counter]
    flows: Sequence[Flow] = ()


def steps(spans: Iterable[tuple[int, float]], end_ns: int) -> list[tuple[int, float]]:
    """Return the steps of a counter. The last value is repeated at the end, so that the counter can
    be integrated.

    Args:
        spans: (nanoseconds after the start, value from then on), in the order of time; the last of
            equal times counts.
        end_ns: when the last value ends.
    """
    kept: list[tuple[int, float]] = []
    for at_ns, value in spans:
        if kept and kept[-1][0] == at_ns:
            kept.pop()
        if not kept or kept[-1][1] != value:
            kept.append((at_ns, value))
    return [*kept, (end_ns, kept[-1][1])] if kept and end_ns > kept[-1][0] else kept


def total(counters: Sequence[Counter], name: str) -> Counter:
    """Return the sum of counters that have one unit, starting when all of them have a value."""
    changes = sorted(
        (at_ns, number, value)
        for number, counter in enumerate(counters)
        for at_ns, value in counter.steps
    )
    values, started, sums = [0.0] * len(counters), set(), []
    for at_ns, number, value in changes:
        values[number] = value
        started.add(number)
        if len(started) == len(counters):
            sums.append((at_ns, math.fsum(values)))
    return Counter(name, counters[0].unit, steps(sums, changes[-1][0]))


def write_trace(
    path: str | os.PathLike[str], processes: Sequence[Process], about: Mapping[str, Any]
) -> None:
    """Write a trace, whole or not at all. Equal traces give equal bytes.

    Args:
        path: the file.
        processes: the content.
        about: name -> text or number, about the trace as a whole.

    Raises:
        UsageError: If the file cannot be written.
    """
    with replacing(path, UsageError) as file:
        file.write(b'{"traceEvents":[\n')
        for number, event in enumerate(_events(processes)):
            file.write((",\n" if number else "").encode() + _json(event))
        file.write(b'\n],\n"otherData":' + _json(about) + b"}\n")


def _events(processes: Sequence[Process]) -> Iterator[dict[str, Any]]:
    numbers, flows = count(len(processes) + 1), count(1)
    for pid, process in enumerate(processes, 1):
        yield _named("process", process.name, pid)
        threads = [(next(numbers), thread) for thread in process.threads]
        for tid, thread in threads:
            yield _named("thread", thread.name, pid, tid=tid)
            yield {
                "ph": "M",
                "name": "thread_sort_index",
                "pid": pid,
                "tid": tid,
                "args": {"sort_index": tid},
            }
        for tid, thread in threads:
            for thread_slice in thread.slices:
                yield _complete(thread_slice, pid, tid)
        for flow in process.flows:
            what = {"name": flow.name, "cat": "transfer", "id": next(flows), "pid": pid}
            yield {"ph": "s", **what, "tid": threads[flow.thread][0], "ts": _us(flow.from_ns - 1)}
            yield {
                "ph": "f",
                "bp": "e",
                **what,
                "tid": threads[flow.to_thread][0],
                "ts": _us(flow.to_ns),
            }
        for counter in process.counters:
            for at_ns, value in counter.steps:
                yield {
                    "ph": "C",
                    "name": counter.name,
                    "pid": pid,
                    "ts": _us(at_ns),
                    "args": {counter.unit: value},
                }


def _named(what: str, name: str, pid: int, **thread: int) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "pid": pid, **thread, "args": {"name": name}}


def _complete(each: Slice, pid: int, tid: int) -> dict[str, Any]:
    colour = {"cname": _GREY} if each.category == WAITING else {}
    times = {"ts": _us(each.start_ns), "dur": _us(each.end_ns - each.start_ns)}
    what = {"ph": "X", "name": each.name, "cat": each.category, "pid": pid, "tid": tid}
    return {**what, **times, **colour, "args": dict(each.details)}


def _us(time_ns: int) -> float:
    """Return microseconds; written as text they have at most three decimals."""
    return time_ns / 1000


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
