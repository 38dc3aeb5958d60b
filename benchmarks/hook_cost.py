"""Number 16: cost of the runtime's hook per computation on the training thread, compared with
other hand-offs.
"""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from random import Random
from typing import Any

from data import Size, profile_of
from engine_cost import ENGINES, FixedProgram, time_in_turn
from results import Check, Section, Table

from perseus_planner import Profile, schedules, solve
from perseus_planner.extensions.autopilot.batches.batches import Batches
from perseus_planner.extensions.autopilot.batches.decider import BatchesDecider
from perseus_planner.extensions.autopilot.batches.exchange import Exchange, Seat
from perseus_planner.extensions.autopilot.decider import AutopilotDecider
from perseus_planner.extensions.autopilot.ranks.messages import Noted
from perseus_planner.extensions.autopilot.status import AutopilotStatus
from perseus_planner.profiles.keys import ByKey
from perseus_planner.runtime.follower import Follower
from perseus_planner.runtime.guarantee import Ledger
from perseus_planner.runtime.hook import Hook
from perseus_planner.runtime.job import TrainingJob
from perseus_planner.runtime.marks import IterationTimes, Marks, clock_request
from perseus_planner.runtime.options import AutopilotSettings
from perseus_planner.runtime.program import Expected, Program
from perseus_planner.runtime.switching import NodeShare

_COLUMNS = {
    "what": ("on the training thread", ""),
    "median_us": ("median, us", ".2f"),
    "p99_us": ("p99, us", ".2f"),
}
_ITERATION, _AUTOPILOT, _BY_BATCH = (
    "begin and end of an iteration",
    "the same by the autopilot, a new program in each",
    "a whole iteration by its batch, beyond one with a plan",
)
_LEARNING = 40  #: iterations, in which laws are learnt
_ENGINE_COLUMNS = {
    "engine": ("engine", ""),
    "without_us": ("a computation without the hook, us", ".0f"),
    "median_us": ("with it: more in the median, us", ".2f"),
    "p99_us": ("p99 above that median, us", ".1f"),
    "p99_without_us": ("the same without it, us", ".1f"),
}


def measure(size: Size) -> Section:
    """Time all ways in turn in every iteration, so that other load on the machine affects them
    alike.
    """
    program, shared = _program(size), memoryview(bytearray(8)).cast("Q")
    hook = Hook(Marks(shared), FixedProgram(program), program)
    rows, is_right = _bare(program, hook, shared, size.hook_iterations)
    rows.append(_by_batch(program, _first_stage(size), hook, size.hook_iterations))
    median_us = {row["what"]: row["median_us"] for row in rows}
    more_us = (median_us[_AUTOPILOT] - median_us[_ITERATION]) / len(program.computations)
    names = [name for name in list(ENGINES)[: size.hook_engines] if find_spec(ENGINES[name])]
    engines = [_engine_row(name, program, size.engine_iterations) for name in names]
    return Section(
        16,
        "Cost of the hook on the training thread",
        f"Time measured on this machine, per computation, of {len(program.computations)} in an "
        "iteration; all take their turn in every iteration. First the calls alone: the begin and "
        "the end of the hook, which writes the request that the controller polls, with a plan or "
        "by the autopilot, which adds to each iteration and to no computation; a message to "
        "another process per computation, as Zeus hands over its clocks (besides a device "
        "synchronization); a new thread for each, as EnvPipe changes clocks. Then real engines of "
        "one rank on the CPU, with a stage that does almost no work, with and without the hook. "
        "To reach: 20 us in the median, 100 us at the 99th percentile; 100 us for an iteration "
        "whose clocks follow its batch, all its calls together. Engines that are not installed "
        "are left out.",
        [Table(_COLUMNS, rows), Table(_ENGINE_COLUMNS, engines)],
        [
            Check("after each computation the request is the next one's clock", is_right),
            Check(
                "no engine deviated from the plan", not any(row["deviations"] for row in engines)
            ),
        ],
        [
            f"The autopilot adds {more_us:.2f} us per computation to the hook with a plan; to "
            "reach: 2 us.",
            "A computation of a real model takes 10 to 1,000 ms. On CUDA the hook also enqueues "
            "two events and one write; `planner doctor --acceptance` compares throughput on a GPU.",
        ],
    )


def _program(size: Size) -> Program:
    """Return the program of a pipeline with one stage, so that one process runs all of it."""
    schedule = schedules.one_f_one_b(1, size.hook_microbatches)
    frontier = solve(_first_stage(size), schedule)
    return Program.of_plan(1, frontier.plan_until(1.1 * frontier.baseline_time_s), 0)


def _first_stage(size: Size) -> Profile:
    profile = profile_of(size.cases[0])
    first = {key: found for key, found in profile.measurements.items() if key[0] == 0}
    return Profile(first, profile.blocking_power_w)


def _bare(
    program: Program, hook: Hook, shared: memoryview, iterations: int
) -> tuple[list[dict[str, Any]], bool]:
    """Return the rows of the calls alone, and whether the hook wrote the right requests."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    reader = context.Process(target=_drain, args=(queue,), daemon=True)
    reader.start()
    requests = [clock_request(position, clock) for position, clock in enumerate(program.clocks)]
    ways: dict[str, tuple[Callable[..., None], Callable[[], None]]] = {
        "no hook": (_nothing, _nothing),
        "the hook": (hook.begin, hook.end),
        "multiprocessing.Queue.put": (
            lambda *computation: queue.put((*computation, 1410)),
            _nothing,
        ),
        "a new thread": (lambda *_: threading.Thread(target=_nothing).start(), _nothing),
    }
    taken_ns: dict[str, list[int]] = {way: [] for way in (*ways, _ITERATION, _AUTOPILOT)}
    learning = _learning_hook(program, iterations)
    is_right = True
    for _ in range(iterations):
        for way, (begin, end) in ways.items():
            if way != "the hook":
                taken_ns[way] += [_taken_ns(begin, end, each)[0] for each in program.computations]
                continue
            begin_ns = _timed(hook.begin_iteration, len(requests) // 2)
            for position, each in enumerate(program.computations):
                spent_ns, written = _taken_ns(begin, end, each, shared)
                taken_ns[way].append(spent_ns)
                is_right &= written == requests[(position + 1) % len(requests)]
            taken_ns[_ITERATION].append(begin_ns + _timed(hook.end_iteration))
            begin_ns = _timed(learning.begin_iteration, len(requests) // 2)
            for each in program.computations:
                learning.begin(*each)
                learning.end()
            taken_ns[_AUTOPILOT].append(begin_ns + _timed(learning.end_iteration))
    queue.put(None)
    reader.join()
    nothing_ns = statistics.median(taken_ns.pop("no hook"))
    return [
        _row(way, [ns - nothing_ns for ns in found]) for way, found in taken_ns.items()
    ], is_right


def _learning_hook(program: Program, iterations: int) -> Hook:
    """Return a hook that runs by the autopilot: a new program in each iteration, two iterations
    older than what is known.
    """
    time_s, status = program.expected.time_s, AutopilotStatus("learning", 7)

    def make(number: int, _: bytes) -> Program:
        return replace(
            program,
            version=number,
            expected=Expected(time_s, program.clocks[0]),
            note=Noted(
                number + 1,
                1,
                Ledger(time_s, burst_s=0.005 * time_s, last=max(-1, number - 2)),
                status,
            ),
        )

    decider = AutopilotDecider(ended_s=lambda: time_s)
    decider.program_of = make  # type: ignore[method-assign]
    source = Follower(
        TrainingJob(object(), 0, 1),  # type: ignore[arg-type] # nothing is agreed on
        NodeShare(),
        decider,
        lambda *_: None,
    )
    for number in range(iterations):
        source._prepare(number, b"")
    source.agreement.version_at = lambda iteration: iteration  # type: ignore[method-assign]
    return Hook(Marks(memoryview(bytearray(8)).cast("Q")), source, source._programs[0])


def _by_batch(program: Program, profile: Profile, plain: Hook, iterations: int) -> dict[str, Any]:
    """Return the row of iterations whose work is drawn and whose clocks come while they run,
    beside those of the hook with a plan.
    """
    from torch.distributed import HashStore

    batches = Batches(
        Exchange(HashStore(), Seat(0, 0, 1, 1)),
        Seat(0, 0, 1, 1),
        program.computations,
        profile,
        AutopilotSettings(slowdown=1.1),
        float,
        print,
    )
    source = Follower(
        TrainingJob(object(), 0, 1),  # type: ignore[arg-type] # nothing is agreed on
        NodeShare(),
        BatchesDecider(batches),
        lambda *_: None,
    )
    hook = Hook(Marks(memoryview(bytearray(8)).cast("Q")), source, None, batches.show)
    random, more_ns, planned = Random(1), list[float](), 0
    full_s = ByKey({key: rows[0].time_s for key, rows in profile.measurements.items()})
    batches.start()
    for number in range(_LEARNING + iterations):
        work = [random.uniform(0.5, 1.5) for _ in range(program.microbatches)]
        taken_ns = _timed(hook.begin_iteration, len(work), lambda work=work: work)
        plain_ns = _timed(plain.begin_iteration, len(work))
        while number not in batches._decided:
            time.sleep(1e-4)  # an iteration goes on meanwhile
        at_ns, spans_ns = 0, list[tuple[int, int]]()
        for each in program.computations:
            taken_ns += sum(_taken_ns(hook.begin, hook.end, each))
            plain_ns += sum(_taken_ns(plain.begin, plain.end, each))
            end_ns = at_ns + round(1e9 * full_s[each[:2]] * work[each.microbatch])
            spans_ns.append((at_ns, end_ns))
            at_ns = end_ns
        taken_ns += _timed(hook.end_iteration)
        plain_ns += _timed(plain.end_iteration)
        batches.observe([IterationTimes(number, 0, tuple(spans_ns), at_ns)])
        if number >= _LEARNING:
            planned += batches._decided[number].note is not None
            more_ns.append(taken_ns - plain_ns)
    batches.stop(1.0)
    return _row(f"{_BY_BATCH} ({planned} of {iterations} with lower clocks)", more_ns)


def _taken_ns(
    begin: Callable[..., None],
    end: Callable[[], None],
    computation: tuple[int, str, int],
    shared: Any = (0,),
) -> tuple[int, int]:
    return _timed(begin, *computation) + _timed(end), shared[0]


def _timed(call: Callable[..., None], *arguments: object) -> int:
    begin_ns = time.perf_counter_ns()
    call(*arguments)
    return time.perf_counter_ns() - begin_ns


def _row(what: str, taken_ns: list[float]) -> dict[str, Any]:
    return {
        "what": what,
        "median_us": statistics.median(taken_ns) / 1e3,
        "p99_us": percentile(taken_ns, 99) / 1e3,
    }


def percentile(values: list[float], percent: int) -> float:
    """Return the least value that `percent` percent of `values` do not exceed."""
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)]


def _engine_row(name: str, program: Program, iterations: int) -> dict[str, Any]:
    """Time an engine in a separate process, because engines leave state behind."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        found = process.submit(
            time_in_turn, name, program.expected.plan.dumps(), iterations
        ).result()
    typical_ns = [statistics.median(samples) for samples in zip(*found.without_ns, strict=True)]
    more_ns, noise_ns = (
        [
            ns - typical
            for iteration in each
            for ns, typical in zip(iteration, typical_ns, strict=True)
        ]
        for each in (found.with_ns, found.without_ns)
    )
    return {
        "engine": name,
        "without_us": statistics.mean(typical_ns) / 1e3,
        "median_us": statistics.median(more_ns) / 1e3,
        "p99_us": percentile(more_ns, 99) / 1e3,
        "p99_without_us": percentile(noise_ns, 99) / 1e3,
        "deviations": found.deviations,
    }


def _nothing(*_: object) -> None:
    pass


def _drain(queue: Any) -> None:
    while queue.get() is not None:
        pass
