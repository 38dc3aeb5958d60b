"""One iteration of a plan, as it is replayed, as a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perseus_planner.plans.replay import Span, Timeline, replay
from perseus_planner.profiles.csv_file import setting_of
from perseus_planner.views.tables import origin_text
from perseus_planner.views.trace_events import WAITING, Counter, Process, Slice, Thread, steps, total, write_trace

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from perseus_planner.plans.plan import Plan


def trace_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the replayed iteration: a thread for each rank, with what its GPUs draw.

    Where the overhead that was calibrated is below 0, the trace ends with the replay, so later than `plan.time_s`.

    Raises:
        UsageError: the file cannot be written.
    """
    name = f"{plan.schedule}. {origin_text(plan.origin)}"
    write_trace(path, [process_of(plan, name)], about_plan(plan))


def process_of(plan: Plan, name: str) -> Process:
    """The replayed iteration under that name."""
    timeline = replay(plan)
    ranks = range(len(plan.schedule.ranks))
    slices = [list(_slices(plan, timeline, rank)) for rank in ranks]
    counters = [_power(f"rank {rank} power", slices[rank]) for rank in ranks]
    threads = [Thread(rank_name(rank, plan.gpus_per_stage), slices[rank]) for rank in ranks]
    return Process(name, threads, [total(counters, "pipeline power"), *counters])


def rank_name(rank: int, gpus: int) -> str:
    """What its thread is called."""
    return f"rank {rank}" if gpus == 1 else f"rank {rank} ({gpus} GPUs)"


def about_plan(plan: Plan) -> dict[str, Any]:
    """What a trace says of its plan."""
    return {
        "what": f"one iteration of a plan for {plan.schedule}",
        "origin": origin_text(plan.origin),
        "gpu": plan.gpu or "not named",
        "gpus_per_rank": plan.gpus_per_stage,
        "profile_digest": plan.profile_digest,
        "time_s": plan.time_s,
        "energy_j": plan.energy_j,
        "overhead_s": plan.overhead_s,
        "baseline": "all clocks at maximum",
        "baseline_time_s": plan.baseline_time_s,
        "baseline_energy_j": plan.baseline_energy_j,
        "power": "of all GPUs of a rank; computations at their average",
    }


def to_ns(time_s: float) -> int:
    """Whole nanoseconds."""
    return round(time_s * 1e9)


def _slices(plan: Plan, timeline: Timeline, rank: int) -> Iterator[Slice]:
    """What the rank runs, and its waiting in between."""
    waiting_w, done_s = plan.rank_waiting_w[rank], 0.0
    for place in plan.iteration.programs[rank]:
        name = plan.iteration.names[place]
        span = timeline.spans[name]
        yield from _waiting("waiting", done_s, span.start_s, waiting_w)
        yield _slice(plan, place, name, span)
        done_s = span.end_s
    replayed_s = max(span.end_s for span in timeline.spans.values())
    yield from _waiting("waiting", done_s, replayed_s, waiting_w)
    yield from _waiting("calibrated overhead", replayed_s, timeline.time_s, waiting_w)


def _slice(plan: Plan, place: int, name: str, span: Span) -> Slice:
    computations = plan.iteration.computations
    details: dict[str, Any] = {"joules": span.power_w * (span.end_s - span.start_s), "watts": span.power_w}
    if place >= len(computations):
        return Slice(name, "operation of fixed time", to_ns(span.start_s), to_ns(span.end_s), details)
    one, (_, kind) = computations[place], plan.iteration.keys[place]
    what = {"stage": one.stage, "kind": kind, "microbatch": one.microbatch, setting_of(plan.control): plan.clocks[name]}
    return Slice(name, "computation", to_ns(span.start_s), to_ns(span.end_s), {**what, **details})


def _waiting(name: str, start_s: float, end_s: float, power_w: float) -> Iterator[Slice]:
    """Nothing, where that takes no time."""
    start_ns, end_ns = to_ns(start_s), to_ns(end_s)
    if end_ns > start_ns:
        yield Slice(name, WAITING, start_ns, end_ns, {"joules": power_w * (end_s - start_s), "watts": power_w})


def _power(name: str, slices: list[Slice]) -> Counter:
    return Counter(name, "W", steps(((each.start_ns, each.details["watts"]) for each in slices), slices[-1].end_ns))
