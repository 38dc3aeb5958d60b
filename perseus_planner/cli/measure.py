"""`planner measure`: the time and energy of a command, as `perf stat` measures it."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perseus_planner.base.errors import UsageError
from perseus_planner.cli import console

if TYPE_CHECKING:
    from perseus_planner.gpu.monitor import PowerSample, Window

_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@click.command(
    context_settings={"allow_interspersed_args": False},
    epilog=console.examples(
        "planner measure -- python train.py",
        "planner measure --gpu nvml:0 --tokens 1048576 -- torchrun --nproc-per-node 8 train.py",
        "planner measure --csv power.csv --every 50ms -- python serve.py",
    ),
)
@click.option(
    "--gpu",
    "gpus",
    multiple=True,
    metavar="GPU",
    help="GPU to measure; repeat it for several.  [default: all]",
)
@click.option(
    "--tokens",
    type=click.FloatRange(0, min_open=True),
    metavar="N",
    help="Tokens that the command handles.",
)
@click.option(
    "--samples",
    type=click.FloatRange(0, min_open=True),
    metavar="N",
    help="Samples that the command handles.",
)
@click.option(
    "--every",
    default="100ms",
    show_default=True,
    type=console.TIME,
    help="Time between two samples of the power.",
)
@click.option("--csv", "table", type=console.OutputFile(".csv"), help="Write all samples there.")
@console.as_json
@click.argument("command", nargs=-1, required=True)
def measure(
    gpus: tuple[str, ...],
    tokens: float | None,
    samples: float | None,
    every: float,
    table: Path | None,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND, and print the time and the energy that GPUs use meanwhile on stderr.

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
        monitor = stack.enter_context(Monitor(gpus or None, sample_s=every, on_sample=record))
        with monitor.window(command[0]) as window:
            status = _run(command, into_stderr=as_json)
    counts = {
        name: count for name, count in (("token", tokens), ("sample", samples)) if count is not None
    }
    if as_json:
        click.echo(json.dumps(_content(window, counts, command, status), indent=2, allow_nan=False))
    else:
        click.echo(_text(window, counts), err=True)
        if table is not None:
            click.echo(f"Wrote {click.format_filename(table)}", err=True)
    click.get_current_context().exit(status)


def _run(command: Sequence[str], *, into_stderr: bool) -> int:
    """Run the command, pass signals on to it, and return its exit status as a shell says it."""
    try:
        process = subprocess.Popen(command, stdout=sys.stderr.fileno() if into_stderr else None)
    except OSError as error:
        raise UsageError(
            f"{command[0]}: cannot be run: {error.strerror}; write the command after `--`"
        ) from error
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


def _content(
    window: Window, counts: dict[str, float], command: Sequence[str], status: int
) -> dict[str, Any]:
    return {
        "command": list(command),
        "status": status,
        "time_s": window.time_s,
        "energy_j": window.energy_j,
        "error_j": window.error_j,
        "average_w": window.average_w,
        "gpus": [{**asdict(gpu), "average_w": gpu.average_w} for gpu in window.gpus],
        **{f"energy_per_{name}_j": window.energy_j / count for name, count in counts.items()},
        **{
            f"{name}s_per_j": count / window.energy_j
            for name, count in counts.items()
            if window.energy_j
        },
    }


def _text(window: Window, counts: dict[str, float]) -> str:
    from perseus_planner.base import tables as columns
    from perseus_planner.base.prefixes import si

    def peak(peak_w: float | None) -> str:
        return "-" if peak_w is None else f"{peak_w:.1f}"

    cells = [
        [
            gpu.gpu,
            gpu.name,
            f"{gpu.energy_j:.2f}",
            f"{gpu.error_j:.2f}",
            f"{gpu.average_w:.1f}",
            peak(gpu.peak_w),
        ]
        for gpu in window.gpus
    ]
    heads = ("GPU", "name", "energy (J)", "+- (J)", "average (W)", "peak (W)")
    listed = [list(column) for column in zip(heads, *cells, strict=True)]
    table = columns.table(
        [*listed[:2], *(columns.column(column[0], column[1:]) for column in listed[2:])]
    )
    origins = " and ".join(sorted({gpu.origin for gpu in window.gpus}))
    lines = [
        f"{window.name}: {si(window.time_s, 's')}, {si(window.energy_j, 'J', 6)} +- "
        f"{si(window.error_j, 'J', 3)}, {si(window.average_w, 'W')} on average ({origins})"
    ]
    if window.energy_j:
        lines += [
            f"{si(window.energy_j / count, 'J', 6)}/{name}, {count / window.energy_j:.6g} {name}s/J"
            for name, count in counts.items()
        ]
    return "\n".join(["", table, "", *lines])
