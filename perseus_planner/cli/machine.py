"""Commands about this machine: `planner measure` measures the time and energy of a command, as
`perf stat` does, `planner reset` resets GPUs that other processes left set, and `planner warm-up`
compiles all kernels.
"""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from perseus_planner.base.errors import GpuError, UsageError
from perseus_planner.cli import console
from perseus_planner.cli.options import AsJson, Gpu, Option, OutputFile, Time, command

if TYPE_CHECKING:
    from perseus_planner.gpu.monitor import PowerSample, Window

_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
Handled = Annotated[
    float, Option(type=click.FloatRange(0, min_open=True), metavar="N")
]  #: how much a command handles


@command(
    "planner measure -- python train.py",
    "planner measure --gpu nvml:0 --tokens 1048576 -- torchrun --nproc-per-node 8 train.py",
    "planner measure --csv power.csv --every 50ms -- python serve.py",
    context_settings={"allow_interspersed_args": False},
)
def measure(
    command: Annotated[tuple[str, ...], Option(required=True)],
    *,
    gpus: Annotated[
        tuple[Gpu, ...],
        "GPU to measure; repeat it for several.  [default: all]",
        Option("--gpu"),
    ],
    tokens: Annotated[Handled | None, "Tokens that the command handles."],
    samples: Annotated[Handled | None, "Samples that the command handles."],
    every_s: Annotated[Time, "Time between two samples of the power.", Option(default="100ms")],
    table: Annotated[
        Path | None, "Write all samples there.", Option("--csv", type=OutputFile(".csv"))
    ],
    as_json: AsJson,
) -> None:
    """Run COMMAND, and print on stderr its time and the energy that GPUs use meanwhile.

    Nothing is set. The exit status is that of the command. With --json, the command's output goes
    to stderr, so that stdout has one JSON object.
    """
    from perseus_planner.gpu.monitor import Monitor

    for gpu in gpus:
        if gpu.startswith("simulated:"):
            emulated = gpu.replace("simulated:", "emulated:", 1)
            raise UsageError(
                f"--gpu {gpu}: has a time of its own, in which commands take none; use {emulated}/0"
            )
    with ExitStack() as stack:
        record = stack.enter_context(_recording(table)) if table is not None else None
        monitor = stack.enter_context(Monitor(gpus or None, sample_s=every_s, on_sample=record))
        with monitor.window(command[0]) as window:
            exit_status = _run(command, into_stderr=as_json)
    counts = {"token": tokens, "sample": samples}
    handled = {name: count for name, count in counts.items() if count is not None}
    if as_json:
        content = {"command": command, "status": exit_status, **_content(window, handled)}
        click.echo(json.dumps(content, indent=2, allow_nan=False))
    else:
        click.echo(_window_text(window, handled), err=True)
        if table is not None:
            click.echo(f"Wrote {click.format_filename(table)}", err=True)
    click.get_current_context().exit(exit_status)


def _run(command: Sequence[str], *, into_stderr: bool) -> int:
    """Run the command, pass signals on to it, and return its exit status as a shell says it."""
    try:
        process = subprocess.Popen(command, stdout=sys.stderr.fileno() if into_stderr else None)
    except OSError as error:
        raise console.cannot_run(command, error) from error
    before = {
        number: signal.signal(number, lambda number, _: process.send_signal(number))
        for number in _FORWARDED
    }
    # A terminal sends an interrupt to the command too: it ends when the command does.
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - status if status < 0 else status


@contextmanager
def _recording(table: Path) -> Iterator[Any]:
    """Yield the function that writes a sample as a row of the file at `table`, which is there at
    the end.
    """
    from perseus_planner.base.files import replacing

    with replacing(table, UsageError) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(("gpu", "time_s", "power_w"))

        def record(sample: PowerSample) -> None:
            rows.writerow((sample.gpu, f"{sample.time_s:.6f}", f"{sample.power_w:.3f}"))

        yield record
        text.detach()


def _content(window: Window, handled: dict[str, float]) -> dict[str, Any]:
    whole = {name: getattr(window, name) for name in ("time_s", "energy_j", "error_j", "average_w")}
    whole["gpus"] = [{**asdict(gpu), "average_w": gpu.average_w} for gpu in window.gpus]
    for name, count in handled.items():
        whole[f"energy_per_{name}_j"] = window.energy_j / count
    if window.energy_j:
        whole |= {f"{name}s_per_j": count / window.energy_j for name, count in handled.items()}
    return whole


def _window_text(window: Window, handled: dict[str, float]) -> str:
    from perseus_planner.base.prefixes import si
    from perseus_planner.base.tables import Column, lay_out, table

    columns = lay_out(
        window.gpus,
        Column("GPU", "gpu", "<"),
        Column("name", "name", "<"),
        Column("energy (J)", "energy_j", ".2f"),
        Column("+- (J)", "error_j", ".2f"),
        Column("average (W)", "average_w", ".1f"),
        Column("peak (W)", "peak_w", ".1f"),
    )
    origins = " and ".join(sorted({gpu.origin for gpu in window.gpus}))
    lines = [
        f"{window.name}: {si(window.time_s, 's')}, {si(window.energy_j, 'J', 6)} +- "
        f"{si(window.error_j, 'J', 3)}, {si(window.average_w, 'W')} on average ({origins})"
    ]
    if window.energy_j:
        lines += [
            f"{si(window.energy_j / count, 'J', 6)}/{name}, {count / window.energy_j:.6g} {name}s/J"
            for name, count in handled.items()
        ]
    return "\n".join(["", table(columns), "", *lines])


@dataclass(frozen=True)
class GpuReset:
    """The result for one GPU."""

    gpu: str  #: Text that opens the GPU
    name: str | None  #: Name of the GPU; None if it cannot be opened
    left_by: str | None  #: Dead process that left the GPU set; None if there is no record of one
    problem: str | None  #: Why the GPU is not reset, and what to do; None if it is reset


@command("planner reset", "planner reset nvml:0 nvml:1", "planner reset --all --power-limit")
def reset(
    gpus: Annotated[tuple[str, ...], Option(metavar="[GPU]...")],
    *,
    every: Annotated[
        bool, "Reset all GPUs that NVML and AMD SMI show on this node.", Option("--all")
    ],
    power_limit: Annotated[bool, "Also set the power limit of these GPUs back to its default."],
    force: Annotated[bool, "Also reset GPUs that a living process has leased."],
    as_json: AsJson,
) -> None:
    """Reset locked clocks.

    Without GPU, this resets what dead processes left set. With GPUs, such as nvml:0, or with --all,
    it resets these, unless a living process has leased them.
    """
    if gpus and every:
        raise UsageError("--all: resets every GPU; do not name GPUs as well")
    if not gpus and not every and (power_limit or force):
        raise UsageError(
            f"{'--force' if force else '--power-limit'}: name the GPUs to reset, or give --all"
        )
    from perseus_planner.gpu import all_gpus
    from perseus_planner.gpu.lease.lease import recover
    from perseus_planner.gpu.lease.records import read_records

    invalid: list[str] = []
    if every or gpus:
        names = [gpu.text for gpu in all_gpus()] if every else gpus
        results = [_reset_one(text, power_limit, force) for text in names]
        nothing = "Nothing to reset: NVML shows no GPU on this node."
    else:
        results = [
            GpuReset(left.record.gpu, left.record.name, str(left.record.owner), left.problem)
            for left in recover()
        ]
        invalid = read_records()[1]
        nothing = "Nothing to reset: no dead process has left a GPU set."
    problems = [result.problem for result in results if result.problem is not None]
    if as_json or len(problems) < len(results) or not problems:
        lines = [
            f"Reset {result.gpu} ({result.name})"
            + (f", left set by {result.left_by}" if result.left_by else "")
            for result in results
            if result.problem is None
        ]
        text = "\n".join([*(lines if results else [nothing]), *invalid])
        console.report({"gpus": results, "invalid_records": invalid}, text, [], as_json=as_json)
    if problems:
        raise GpuError("; ".join(problems))


def _reset_one(text: str, power_limit: bool, force: bool) -> GpuReset:
    from perseus_planner.gpu import open_gpu
    from perseus_planner.gpu.lease.lease import reset_gpu

    name = None
    try:
        with open_gpu(text) as gpu:
            name = gpu.name
            removed = reset_gpu(gpu, power_limit=power_limit, force=force)
    except GpuError as error:
        return GpuReset(text, name, None, str(error))
    return GpuReset(gpu.text, name, str(removed[0].owner) if removed else None, None)


@command(
    "planner warm-up",
    "NUMBA_CACHE_DIR=/opt/planner-cache planner warm-up  # in an image whose containers set it too",
)
def warm_up(*, as_json: AsJson) -> None:
    """Compile what solving, planning and training need, once.

    Otherwise, the first command that needs compiled code compiles for about 20 s, and keeps the
    result beside the package or in the home folder. In an image, run this command during the build:
    containers then find everything compiled, even if they run as another user or cannot write. They
    must have the same kind of CPU, and the same NUMBA_CACHE_DIR if you set one.
    """
    from perseus_planner.solver.kernels import when_compiling

    compiled: list[int] = []
    with console.progress("Warming up"), when_compiling(lambda: compiled.append(1)):
        _use_all_kernels()
    text = f"Compiled {len(compiled)} functions." if compiled else "Everything is compiled already."
    console.report({"compiled": len(compiled)}, text, [], as_json=as_json)


def _use_all_kernels() -> None:
    """Solve, plan within a switch budget, and search as training does, on a small pipeline."""
    import numpy as np

    from perseus_planner.profiler.simulated_pipeline import profile_simulated
    from perseus_planner.profiles.measurement import ClockChange
    from perseus_planner.runtime.autopilot.job import AutopilotJob
    from perseus_planner.runtime.autopilot.planning import Costs, Searcher
    from perseus_planner.schedules import one_f_one_b
    from perseus_planner.solver.frontier import solve

    profile = profile_simulated("simulated:a100-sxm", 2)
    for microbatches in (
        1,
        6,
    ):  # all choices of the first one are tried, the second one is searched
        frontier = solve(profile, one_f_one_b(2, microbatches))
        frontier.plan_until(1.05 * frontier.baseline_time_s, max_changes=2, on_time=None)
    iteration = frontier.dag.iteration
    search = Searcher(
        AutopilotJob(iteration, (1410, 1200, 1000), 1, ClockChange(0.0045, 0.0009)), 8
    )
    classes = (len(search.keys), 3)
    search.polish(
        search.full(),
        Costs(np.full(classes, 0.1), np.full(classes, 300.0), np.full(2, 80.0)),
        10.0,
        1,
    )
