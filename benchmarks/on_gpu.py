"""Measures what the runtime costs on an NVIDIA GPU, in a dry run: no clocks are set.

    python benchmarks/on_gpu.py          # a minute or two on one GPU; writes
    benchmarks/results/on_gpu_<GPU>_<date>

torch.distributed.pipelining trains a small GPT with one rank on one GPU, alternately with and
without `planner_runtime`. This needs torch with CUDA and nvidia-ml-py. Without a GPU the exit
status is 2, which is tested; the measurements are not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from engine_cost import FixedProgram
from gpu_training import Config, Training, training
from hook_cost import percentile
from results import Check, Section, Table, environment, failed, write

from perseus_planner.base.errors import PlannerError
from perseus_planner.engines.torch_pipelining import TorchPipeline
from perseus_planner.runtime.controller.client import Connection, start_controller
from perseus_planner.runtime.controller.protocol import AttachRequest, ControlChange
from perseus_planner.runtime.cuda_marks import CudaMarks
from perseus_planner.runtime.hook import Hook, Program
from perseus_planner.runtime.marks import IterationTimes

_HERE = Path(__file__).resolve().parent
_ATTACH_S = 60.0
_DONE_S = 10.0  #: longest wait for enqueued work
_SLACK_NS = 1_000_000  #: error of a time of the device
_CALLED = 200  #: iterations with calls only
_TIMES = {"which": ("iterations", ""), "count": ("number", "d"), "median_ms": ("median, ms", ".3f")}


def main() -> int:
    """Return the exit status: 1 if a check fails, 2 without a GPU; times never fail."""
    parser = argparse.ArgumentParser(
        description="Measure the runtime on an NVIDIA GPU, without setting clocks."
    )
    parser.add_argument(
        "--output", type=Path, default=_HERE / "results", metavar="FOLDER", help="for the results"
    )
    options = parser.parse_args()
    try:
        name = _gpu_name()
        import torch

        sections = _sections(Config(), torch.device("cuda", 0))
    except PlannerError as error:
        print(f"on_gpu: {error}", file=sys.stderr)
        return 2
    about = environment()
    about["versions"]["torch"], about["gpu"] = _torch_version(), name
    for section in sections:
        print(section.markdown(), end="\n\n")
    for path in write("on_gpu", sections, Config(), about, options.output, name):
        print(f"wrote {path}")
    return 1 if failed(sections) else 0


def _gpu_name() -> str:
    """Return the name of the GPU.

    Raises:
        PlannerError: If torch sees no GPU.
    """
    try:
        import torch
    except ImportError as error:
        raise PlannerError(
            f"torch cannot be imported ({error}); install torch with CUDA"
        ) from error
    if not torch.cuda.is_available():
        raise PlannerError(
            "torch sees no NVIDIA GPU here; run this on a machine with one, and torch with CUDA"
        )
    name: str = torch.cuda.get_device_name(0)
    return name


def _torch_version() -> str:
    import torch

    return str(torch.__version__)


def _sections(config: Config, device: Any) -> list[Section]:
    with training(config, device) as gpt:
        blocks: list[tuple[str, float, list[float]]] = []
        for which, runtime in gpt.turns():
            with runtime:
                blocks.append((which, *_block(gpt)))
        return [_synchronises(gpt), _ahead(blocks), _latency(gpt), _throughput(blocks), _calls(gpt)]


def _block(gpt: Training) -> tuple[float, list[float]]:
    """Return seconds per iteration, and for each how many milliseconds the device needs after
    its call returns.
    """
    import torch

    for _ in range(gpt.config.warm_up):
        gpt.iterate()
    torch.cuda.synchronize(gpt.device)
    begin_ns, returned_ns, events = time.monotonic_ns(), [], []
    for _ in range(gpt.config.iterations):
        gpt.iterate()
        returned_ns.append(time.monotonic_ns())
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
    torch.cuda.synchronize(gpt.device)
    end_ns = time.monotonic_ns()
    ended_ns = (end_ns - event.elapsed_time(events[-1]) * 1e6 for event in events)
    ahead_ms = [
        (ended - returned) / 1e6 for ended, returned in zip(ended_ns, returned_ns, strict=True)
    ]
    return (end_ns - begin_ns) / 1e9 / gpt.config.iterations, ahead_ms


def _synchronises(gpt: Training) -> Section:
    counts = {}
    for which, runtime in (("without", nullcontext()), ("with", gpt.runtime())):
        with runtime:
            counts[which] = _profiled(gpt)
    names = sorted({name for each in counts.values() for name in each})
    rows = [
        {"call": name, **{which: counts[which].get(name, 0) for which in counts}} for name in names
    ]
    waits = {
        which: sum(n for name, n in each.items() if "ynchronize" in name)
        for which, each in counts.items()
    }
    return Section(
        1,
        "Calls of CUDA functions",
        f"Measured: calls in a torch profiler trace of {gpt.config.profiled} iterations after the "
        "warm-up. The profiler itself synchronises the device when it ends, with the runtime and "
        "without.",
        [
            Table(
                {
                    "call": ("call", ""),
                    "without": ("without", "d"),
                    "with": ("with the runtime", "d"),
                },
                rows,
            )
        ],
        [
            Check(
                f"the runtime adds no synchronisation: {waits['with']} and {waits['without']}",
                waits["with"] <= waits["without"],
            )
        ],
    )


def _profiled(gpt: Training) -> dict[str, int]:
    """Return the number of calls of each CUDA function."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    for _ in range(gpt.config.warm_up):
        gpt.iterate()
    torch.cuda.synchronize(gpt.device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(gpt.config.profiled):
            gpt.iterate()
    return {each.key: each.count for each in trace.key_averages() if each.key.startswith("cu")}


def _ahead(blocks: list[tuple[str, float, list[float]]]) -> Section:
    rows = []
    for which in ("without", "with"):
        ahead_ms = [each for name, _, found in blocks if name == which for each in found]
        rows.append(
            {"which": which, "count": len(ahead_ms), "median_ms": statistics.median(ahead_ms)}
        )
    return Section(
        2,
        "How far the training thread runs ahead",
        "Measured: milliseconds from the return of the call of an iteration until the device has "
        "finished it; nothing waits for the device in between.",
        [Table(_TIMES, rows)],
    )


def _throughput(blocks: list[tuple[str, float, list[float]]]) -> Section:
    times_ms = {
        which: [1e3 * s for name, s, _ in blocks if name == which] for which in ("without", "with")
    }
    rows = [
        {"which": which, "count": len(found), "median_ms": statistics.median(found)}
        for which, found in times_ms.items()
    ]
    ratio = rows[1]["median_ms"] / rows[0]["median_ms"]  # type: ignore[operator]
    return Section(
        4,
        "Throughput",
        "Measured: milliseconds of an iteration, the mean of a block; blocks with the runtime and "
        "without in turn.",
        [Table({**_TIMES, "count": ("blocks", "d")}, rows)],
        notes=[f"With the runtime an iteration takes {100 * (ratio - 1):+.2f} %."],
    )


def _latency(gpt: Training) -> Section:
    """Use the parts of the runtime directly, because only they give access to the messages of
    the controller.
    """
    program = Program.of_plan(1, gpt.plan, 0)
    iterations = gpt.config.warm_up + gpt.config.iterations
    timed: list[IterationTimes] = []
    changes: list[ControlChange] = []
    with Connection(
        start_controller(1, 1e4, _ATTACH_S), AttachRequest(0, gpt.gpu, "clock", None)
    ) as connection:
        connection.attach(_ATTACH_S)
        with CudaMarks(connection.memory, gpt.device) as marks:
            with TorchPipeline(gpt.schedule).attached(Hook(marks, FixedProgram(program), program)):
                for _ in range(iterations):
                    gpt.iterate()
                    timed += marks.finished()
                    changes += _changes(connection)
            until_s = time.monotonic() + _DONE_S
            while len(timed) < iterations and time.monotonic() < until_s:
                timed += marks.finished()
                changes += _changes(connection)
        changes += _changes(connection)
    latencies_us = list(_latencies_us(timed, changes))
    rows = [
        {
            "count": len(latencies_us),
            "median_us": statistics.median(latencies_us),
            "p99_us": percentile(latencies_us, 99),
            "least_us": min(latencies_us),
        }
    ]
    columns = {
        "count": ("changes", "d"),
        "least_us": ("minimum, us", ".1f"),
        "median_us": ("median, us", ".1f"),
        "p99_us": ("p99, us", ".1f"),
    }
    return Section(
        3,
        "From a computation's end to the controller",
        "Measured: microseconds from the event at the end of a computation, in host time, until "
        "the controller sees the clock of the next one. The time of the event is accurate to some "
        "tens of microseconds.",
        [Table(columns, rows)],
        [Check("the controller saw requests from the device", bool(latencies_us))],
    )


def _latencies_us(timed: list[IterationTimes], changes: list[ControlChange]) -> Iterator[float]:
    """Yield, for each change, the time from the end of the computation before it until the
    change was seen.
    """
    ends_ns = {
        (each.number, place): end for each in timed for place, (_, end) in enumerate(each.spans_ns)
    }
    last = max(place for _, place in ends_ns)
    for change in changes:
        if change.position is not None:
            before = last if change.position == 0 else change.position - 1
            ended = [
                end
                for (_, place), end in ends_ns.items()
                if place == before and end - _SLACK_NS < change.seen_ns
            ]
            if ended:
                yield (change.seen_ns - max(ended)) / 1e3


def _changes(connection: Connection) -> list[ControlChange]:
    return [each for each in connection.messages() if isinstance(each, ControlChange)]


def _calls(gpt: Training) -> Section:
    import mmap

    import torch

    program = Program.of_plan(1, gpt.plan, 0)
    taken_ns: list[float] = []
    with CudaMarks(mmap.mmap(-1, mmap.PAGESIZE), gpt.device) as marks:
        hook, work = (
            Hook(marks, FixedProgram(program), program),
            torch.zeros(1024, device=gpt.device),
        )
        for _ in range(_CALLED):
            hook.begin_iteration()
            for computation in program.computations:
                begun_ns = _timed(partial(hook.begin, *computation))
                work.add_(1.0)
                taken_ns.append(begun_ns + _timed(hook.end))
            hook.end_iteration()
            torch.cuda.synchronize(gpt.device)
            marks.finished()
    row = {"median_us": statistics.median(taken_ns) / 1e3, "p99_us": percentile(taken_ns, 99) / 1e3}
    return Section(
        5,
        "What the hook costs the training thread",
        "Measured: microseconds of the calls at the begin and end of a computation, including "
        "what they enqueue. Goal: 20 us in the median, 100 us at the 99th percentile.",
        [Table({"median_us": ("median, us", ".2f"), "p99_us": ("p99, us", ".2f")}, [row])],
    )


def _timed(call: Callable[[], None]) -> int:
    begin_ns = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - begin_ns


if __name__ == "__main__":
    sys.exit(main())
