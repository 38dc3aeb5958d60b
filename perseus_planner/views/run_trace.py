"""The iterations of a run whose computations were kept, as a trace: a process a pipeline, a thread a rank.

The clocks of several nodes may differ, so no rank's times are compared with another's: each rank's time counts from
where the first iteration began whose computations all ranks have kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perseus_planner.errors import RunError
from perseus_planner.profiles.csv_file import setting_of
from perseus_planner.views.plan_trace import to_ns
from perseus_planner.views.run_summary import NO_PLAN, summarize_run
from perseus_planner.views.run_text import sources_text
from perseus_planner.views.trace_events import WAITING, Counter, Process, Slice, Thread, steps, total, write_trace

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from perseus_planner.plans.plan import Plan
    from perseus_planner.runs.records import ComputationRecord, IterationRecord
    from perseus_planner.runs.run import RankRecord, Run


def trace_run(run: Run, path: str | os.PathLike[str]) -> None:
    """Write what ran, beside what each computation takes by the plan, and the mean power of each iteration.

    Raises:
        RunError: there is no iteration whose computations all ranks have kept.
        UsageError: the file cannot be written.
    """
    first = _first(run)
    summary = summarize_run(run)
    pipelines = sorted({rank.pipeline for rank in run.ranks})
    about = {
        "what": f"iterations of a training run from number {first} on, of {summary.schedule}",
        "origin": sources_text(summary),
        "gpu": summary.gpu or "not named",
        "times": f"of each rank from where its iteration {first} began",
        "power": "of the GPU of a rank, mean of each iteration, until the next one begins",
    }
    write_trace(path, [_pipeline(run, each, first, sources_text(summary)) for each in pipelines], about)


def _first(run: Run) -> int:
    """The first iteration that all ranks have kept."""
    kept = set.intersection(*({row.iteration for row in _kept(rank, 0)} for rank in run.ranks))
    if not kept:
        raise RunError(
            f"{run.folder}: there is no iteration whose computations all ranks have kept; trace it a minute later, or "
            "when the training has ended"
        )
    return min(kept)


def _kept(rank: RankRecord, first: int) -> list[IterationRecord]:
    """The iterations of `rank` from that on whose computations it has."""
    return [row for row in rank.iterations if row.iteration >= first and row.iteration in rank.computations]


def _pipeline(run: Run, pipeline: int, first: int, sources: str) -> Process:
    ranks = sorted((rank for rank in run.ranks if rank.pipeline == pipeline), key=lambda rank: rank.pipeline_rank)
    threads: list[Thread] = []
    counters: list[Counter] = []
    for rank in ranks:
        rows = _kept(rank, first)
        threads.append(Thread(_name(rank), list(_slices(run, rank, rows))))
        counters += _power(rank, rows)
    if len(counters) == len(ranks):
        counters.insert(0, total(counters, "pipeline power"))
    return Process(f"pipeline {pipeline}. {sources}", threads, counters)


def _name(rank: RankRecord) -> str:
    return f"rank {rank.pipeline_rank}" + ("" if rank.rank == rank.pipeline_rank else f" (of the job: {rank.rank})")


def _power(rank: RankRecord, rows: Sequence[IterationRecord]) -> Iterator[Counter]:
    """What its GPU drew; nothing where that is not known of all iterations."""
    spans = [
        (to_ns(row.begin_s - rows[0].begin_s), row.energy_j / row.time_s)
        for row in rows
        if row.energy_j is not None and row.time_s > 0
    ]
    if len(spans) == len(rows):
        yield Counter(f"rank {rank.pipeline_rank} power", "W", steps(spans, to_ns(rows[-1].end_s - rows[0].begin_s)))


def _slices(run: Run, rank: RankRecord, rows: Sequence[IterationRecord]) -> Iterator[Slice]:
    """The computations, and the rest of each iteration; where two overlap, the later one begins when the other ends."""
    zero_s, done_ns = rows[0].begin_s, 0
    for row in rows:
        plan = None if row.version is None else run.plan(row.version, rank.pipeline)
        done_ns = max(done_ns, to_ns(row.begin_s - zero_s))
        for each in rank.computations[row.iteration]:
            start_ns = max(done_ns, to_ns(each.begin_s - zero_s))
            yield from _rest(row, done_ns, start_ns)
            done_ns = max(start_ns, to_ns(each.end_s - zero_s))
            yield Slice(str(each.computation), "computation", start_ns, done_ns, _details(row, each, plan))
        end_ns = to_ns(row.end_s - zero_s)
        yield from _rest(row, done_ns, end_ns)
        done_ns = max(done_ns, end_ns)


def _rest(row: IterationRecord, start_ns: int, end_ns: int) -> Iterator[Slice]:
    if end_ns > start_ns:
        yield Slice("waiting or other work", WAITING, start_ns, end_ns, {"iteration": row.iteration})


def _details(row: IterationRecord, ran: ComputationRecord, plan: Plan | None) -> dict[str, Any]:
    one = ran.computation
    known: dict[str, Any] = {
        "iteration": row.iteration,
        "plan": row.version,
        "not_as_planned": NO_PLAN if plan is None else row.deviation,
        "stage": one.stage,
        "kind": one.kind,
        "microbatch": one.microbatch,
        "achieved_mhz": ran.achieved_mhz,
    }
    if plan is not None:
        known[setting_of(plan.control)] = ran.clock
    if plan is not None and row.is_as_planned:
        planned = plan.measurement(one)
        known["planned_seconds"] = planned.time_s
        known["planned_joules"] = planned.energy_j / plan.gpus_per_stage
    if ran.set_end_s is not None:
        known["clock_set_after_us"] = to_ns(ran.set_end_s - ran.begin_s) / 1000
    if ran.is_late or ran.is_overtaken:
        known["clock_change"] = "late" if ran.is_late else "overtaken"
    return {name: value for name, value in known.items() if value is not None}
