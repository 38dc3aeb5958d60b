"""`planner trace`: what traces of a training show, and what a plan would save."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from perseus_planner.base.errors import UsageError
from perseus_planner.cli import console
from perseus_planner.cli.options import (
    Option,
    Positive,
    check_folder,
    chip_names,
    command,
    complete,
)

if TYPE_CHECKING:
    from perseus_planner.extensions.traces.job import TracedJob
    from perseus_planner.extensions.traces.power import SeenPower
    from perseus_planner.extensions.traces.saving import Saving, SecondClock
    from perseus_planner.schedules import Schedule

_Gpu = Annotated[str, complete(chip_names), Option(metavar="GPU")]
_MHZ = Annotated[float, click.FloatRange(min=1.0), Option(metavar="MHZ")]


@dataclass(frozen=True)
class _Job:
    """What is known of the job beside its traces."""

    power: Annotated[
        tuple[Path, ...],
        "Log of power and clocks: nvidia-smi --query-gpu or dmon as CSV, or Prometheus' answer; "
        "can be repeated.",
    ]
    gpu: Annotated[_Gpu | None, "Kind of GPU, e.g. a100-sxm.  [default: the traces']"]
    schedule: Annotated[
        Path | None,
        "Grid of the schedule, if it is the training's own.",
        Option(metavar="GRID"),
    ]
    pipelines: Annotated[
        Positive | None,
        "Number of pipelines side by side that FILEs are of.  [default: found]",
    ]
    slower: Annotated[
        tuple[Path, ...],
        "Trace of the same job at a lower clock, about 80 % of that of FILE; can be repeated.",
    ]
    slower_clock: Annotated[_MHZ | None, "Clock of --slower, in MHz."]
    slower_power: Annotated[
        tuple[Path, ...], "Log of power while --slower was traced; can be repeated."
    ]

    def grid(self) -> Schedule | None:
        """Return the schedule that is given."""
        from perseus_planner.schedules.schedule import load_grid

        # Traces show the two of an overlapped pair apart.
        return None if self.schedule is None else load_grid(self.schedule).one_by_one

    def read(self, files: tuple[Path, ...]) -> TracedJob:
        """Read files of one clock."""
        from perseus_planner.extensions.traces.job import read_kineto_job
        from perseus_planner.extensions.traces.tables import is_table, read_table_job

        if any(is_table(path) for path in files):
            if not all(is_table(path) for path in files):
                raise UsageError(
                    "some FILEs are traces of PyTorch's profiler and some are tables; name one kind"
                )
            return read_table_job(files, self.grid())
        return read_kineto_job(files, self.grid(), self.pipelines)

    def seen(self, logs: tuple[Path, ...], job: TracedJob, gpu: str) -> SeenPower | None:
        """Return what logs show."""
        from perseus_planner.extensions.traces.power import fit_power, read_power
        from perseus_planner.gpu.simulated.model import CATALOG

        if not logs:
            return None
        samples = [of_gpu for path in logs for of_gpu in read_power(path)]
        return fit_power(samples, job.busy_spans(), job.span_s(), CATALOG[gpu].blocking_power_w)

    def second(self, gpu: str) -> SecondClock | None:
        """Return what the second traces show."""
        from perseus_planner.extensions.traces.analysis import healthy_times_s
        from perseus_planner.extensions.traces.saving import SecondClock

        # Options of the second traces mean nothing without them.
        if not self.slower:
            for option, given in (
                ("--slower-clock", self.slower_clock),
                ("--slower-power", self.slower_power),
            ):
                if given:
                    raise UsageError(f"{option}: is of --slower; name its traces too")
            return None
        job = self.read(self.slower)
        seen = self.seen(self.slower_power, job, gpu)
        # What the user gives counts before what a log shows.
        clock_mhz = self.slower_clock
        if clock_mhz is None and seen is not None:
            clock_mhz = seen.clock_mhz
        if clock_mhz is None:
            raise UsageError(
                "--slower-clock: is missing; give the clock of --slower in MHz, or a log with it "
                "by --slower-power"
            )
        watts = None if seen is None else seen.computing_w
        return SecondClock(clock_mhz, healthy_times_s(job), watts)


@command(
    "planner trace rank0.json.gz rank1.json.gz --gpu h100-sxm -o traced",
)
def trace(
    files: Annotated[tuple[Path, ...], Option(required=True)],
    *,
    of: _Job,
    output: Annotated[
        Path | None,
        "Folder to write: profile.yaml, schedule.csv, page.html and perfetto.json.",
        Option("--output", "-o", metavar="FOLDER"),
    ],
) -> None:
    """Say how large the bubbles of a training are, and what a plan would save, from traces of it.

    FILEs are traces of PyTorch's profiler of one rank of each stage or more, .json or .json.gz; or
    tables of computations, .csv or .parquet, with the columns stage, replica, step, kind, start,
    duration and microbatch. Nothing is installed in the training and nothing is set on GPUs.

    The saving is an interval, as a trace shows one clock only: a plan of it is an expectation,
    which is not applied without --trust-traced. Profile the stages, or let the autopilot learn, to
    have a measured one.
    """
    from perseus_planner.extensions.traces.analysis import analyse
    from perseus_planner.extensions.traces.saving import (
        estimate_saving,
        find_gpu,
        guess_gpu,
    )
    from perseus_planner.extensions.traces.summary import summarize_trace, trace_text

    if output is not None:
        # The folder is checked before the files are read, so that nothing is read in vain.
        check_folder(output, "--output")
    job = of.read(files)
    seen = analyse(job)
    saving: Saving | None = None
    # Neither times of hosts nor unlike microbatches can be planned by means.
    if job.has_gpu_times and not seen.varies:
        gpu = find_gpu(of.gpu, job.gpu)
        guess = guess_gpu(gpu, [key.kind for key in job.keys], of.seen(of.power, job, gpu))
        with console.progress("Estimating"):
            saving = estimate_saving(job, guess, seen.jitter, seen.rest_s, of.second(gpu))
    summary = summarize_trace(job, seen, saving)
    written: list[Path] = []
    if output is not None:
        from perseus_planner.extensions.traces.writing import write_job

        written = write_job(output, job, seen, saving, summary)
    console.report(summary, trace_text(summary), written)
