"""`planner measure` measures the time and energy of a command, as `perf stat` does.

It is a wrapper, so its exit status is that of the command: a supervisor that starts a job again
must see the end of the job, and not that of a measurement. Once the command has begun, whatever
goes wrong beside it is said on stderr, and changes nothing else.
"""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import click

from perseus_planner.base.errors import GpuError, PlannerError, UsageError
from perseus_planner.cli import console
from perseus_planner.cli.options import GpuName, Option, OutputFile, Time, command

if TYPE_CHECKING:
    from perseus_planner.gpu.monitor import Monitor, PowerSample, Window
    from perseus_planner.views.measured import Result

_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
#: how much a command handles
Handled = Annotated[float, Option(type=click.FloatRange(0, min_open=True), metavar="N")]


@command(
    "planner measure -- python train.py",
    "planner measure --gpu nvml:0 --tokens 1048576 -- torchrun --nproc-per-node 8 train.py",
    "planner measure --gpu cuda --csv power.csv --every 50ms -- python serve.py",
    context_settings={"allow_interspersed_args": False},
)
def measure(
    command: Annotated[tuple[str, ...], Option(required=True)],
    *,
    gpus: Annotated[
        tuple[GpuName, ...],
        "GPU to measure; repeat it for several. `cuda` names all that CUDA shows to this process.  "
        "[default: all of the node]",
        Option("--gpu"),
    ],
    tokens: Annotated[Handled | None, "Tokens that the command handles."],
    samples: Annotated[Handled | None, "Samples that the command handles."],
    every_s: Annotated[Time, "Time between two samples of the power.", Option(default="100ms")],
    table: Annotated[
        Path | None, "Write all samples there.", Option("--csv", type=OutputFile(".csv"))
    ],
) -> None:
    """Run COMMAND, and print on stderr its time and the energy that GPUs use meanwhile.

    Nothing is set. The exit status is that of the command, or 128 + N if signal N ended it,
    whatever becomes of the measurement. It is 2 if the command could not begin. With --json, the
    command's output goes to stderr, so that stdout has one JSON object.
    """
    from perseus_planner.views.measured import Result

    counts = {"token": tokens, "sample": samples}
    handled = {name: count for name, count in counts.items() if count is not None}
    # Everything that can fail is opened first, as nothing may fail once the command has begun.
    with ExitStack() as stack:
        record = stack.enter_context(_recording(table)) if table is not None else None
        monitor = stack.enter_context(_opened(gpus, every_s, record))
        window = monitor.window(command[0]).begin()
        process = console.start(command, sys.stderr.fileno() if console.is_json() else None)
        begun_s = time.monotonic()
        # The command runs now, so what was opened is kept open, and closed with its result.
        opened = stack.pop_all()
    # From here on, nothing but the command decides the exit status. Signals go to the command,
    # which decides what they mean, and this process ends when it does. A terminal sends an
    # interrupt to both, so that is not passed on.
    with (
        console.signals(_FORWARDED, process.send_signal),
        console.signals([signal.SIGINT], lambda _: None),
    ):
        status = process.wait()
        result = Result(
            command,
            # A status below 0 is a signal, which shells write as 128 and its number.
            status=128 - status if status < 0 else status,
            time_s=time.monotonic() - begun_s,
            handled=handled,
        )
        _end(result, monitor, window, opened)
        if table is not None and table.exists() and not result.problems:
            result.notes.append(f"Wrote {click.format_filename(table)}")
        # The environment may have been meant to choose GPUs, which NVML does not know of.
        if not gpus and (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
            result.notes.append(
                f"All GPUs of the node were measured, whatever CUDA_VISIBLE_DEVICES={visible!r} "
                "shows to the command; `--gpu cuda` measures these alone"
            )
        _print(result)
    click.get_current_context().exit(result.status)


@contextmanager
def _opened(
    gpus: tuple[str, ...], every_s: float, record: Callable[[PowerSample], None] | None
) -> Iterator[Monitor]:
    """Open the GPUs. Of all of the node, those that cannot be measured are left out."""
    from perseus_planner import Monitor
    from perseus_planner.gpu import expanded

    # A command takes real time, and a simulated GPU has its own.
    for gpu in gpus:
        if gpu.startswith("simulated:"):
            emulated = gpu.replace("simulated:", "emulated:", 1)
            raise UsageError(
                f"--gpu {gpu}: has a time of its own, in which commands take none; use {emulated}/0"
            )
    # Without names, all of the node.
    names = expanded(gpus) or None
    with Monitor(names, sample_s=every_s, on_sample=record, strict=False) as monitor:
        # A GPU that was named must be measured, and of all others those that can be.
        if gpus and monitor.unknown:
            raise GpuError("; ".join(monitor.unknown.values()))
        yield monitor


@contextmanager
def _recording(table: Path) -> Iterator[Callable[[PowerSample], None]]:
    """Yield the function that writes a sample as a row of the file at `table`, which is there at
    the end. A row that cannot be written is told at the end, not to the thread that samples.
    """
    from perseus_planner.base.files import replacing

    failed: list[OSError] = []
    with replacing(table, UsageError) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(("gpu", "time_s", "power_w"))

        def record(sample: PowerSample) -> None:
            if failed:
                # The thread that samples must go on after an error, so it is kept for the end.
                return
            try:
                rows.writerow((sample.gpu, f"{sample.time_s:.6f}", f"{sample.power_w:.3f}"))
            except OSError as error:
                failed.append(error)

        yield record
        # The wrapper would close the file with it, which the block still needs.
        text.detach()
        if failed:
            raise failed[0]


def _end(result: Result, monitor: Monitor, window: Window, opened: ExitStack) -> None:
    """End the window, close what was opened, and note in the result what becomes of both."""
    try:
        window.end()
        result.notes += window.warnings
        result.window = window
    except Exception as error:
        result.lost.append(_text(error))
    try:
        opened.close()
    except Exception as error:
        result.problems.append(_text(error))
    for gpu, why in window.unknown.items():
        if gpu in monitor.unknown:
            result.notes.append(f"not measured: {why}; name the GPUs to measure with --gpu")
        else:
            result.lost.append(why)


def _text(error: Exception) -> str:
    if isinstance(error, PlannerError):
        return str(error)
    return f"a fault of the planner, please report it: {type(error).__name__}: {error}"


def _print(result: Result) -> None:
    """Print the result. Where it cannot be printed, as on a full disk or into a closed pipe, it is
    lost.
    """
    from perseus_planner.views.measured import result_content, result_text

    if console.is_json():
        text = json.dumps(result_content(result), indent=2, allow_nan=False)
        if _is_printed(text, sys.stdout, err=False):
            return
        text = "Error: the output cannot be written"
    else:
        text = result_text(result)
    _is_printed(console.printable(text), sys.stderr, err=True)


def _is_printed(text: str, stream: IO[str], *, err: bool) -> bool:
    try:
        click.echo(text, err=err)
    except OSError:
        # What the stream still holds must not fail again when the process ends.
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
        return False
    return True
