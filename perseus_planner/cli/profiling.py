"""`planner profile`: measure the stages of a pipeline."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perseus_planner.cli import console
from perseus_planner.errors import UsageError
from perseus_planner.quantities import COUNT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from perseus_planner.jobs.settings import Settings
    from perseus_planner.profiles.profiles import Profile

_OF_A_STAGE = ("blocking_power", "resume")


@click.command(
    epilog=console.examples(
        "planner profile --gpu simulated:a100-sxm --stages 4 -o profile.yaml",
        "torchrun --nproc-per-node 4 -m perseus_planner profile job.yaml",
        "torchrun --nproc-per-node 4 -m perseus_planner profile job.yaml --resume",
    )
)
@click.argument("job", type=console.PATH, required=False)
@click.option(
    "--gpu",
    metavar="GPU",
    help="GPU to measure on: nvml:N, cuda:N, zeusd:N, command:N, simulated:NAME, or dry-run: before one of these; cuda "
    "is each rank's own.  [default: cuda]",
)
@click.option(
    "--stage",
    metavar="MODULE:FUNCTION",
    help="What builds a stage: called with stage, stages, tensor_rank and tensor_parallel, it returns a torch module, "
    "a sample input and a loss (None but for the last stage).",
)
@click.option("--stages", type=int, metavar="S", help="Number of pipeline stages, at least 1.")
@click.option("--tensor-parallel", type=int, metavar="GPUS", help="GPUs of a stage.  [default: 1]")
@click.option(
    "--control",
    type=click.Choice(["clock", "power-limit"]),
    help="What is set: the SM clock, or the power limit where clocks cannot be locked.  [default: clock]",
)
@click.option("--observe", is_flag=True, help="Set nothing: measure at whatever clock the GPU runs.")
@click.option("--full", is_flag=True, help="Measure every clock, not only as many as plans need.")
@click.option("--split-backward", is_flag=True, help="Measure the gradients of inputs and of weights apart too.")
@click.option(
    "--window",
    metavar="TIME",
    callback=console.quantity("DURATION"),
    help="Least length of a measuring window.  [default: 5s]",
)
@click.option(
    "--blocking-power",
    metavar="POWER",
    callback=console.quantity("BLOCKING_POWER"),
    help="What a GPU draws while it waits, instead of measuring it; needed where a stage has no neighbour.",
)
@click.option("--resume", is_flag=True, help="Go on from the rows that an interrupted run has left beside the output.")
@click.option(
    "--output",
    "-o",
    type=console.PATH,
    callback=console.writable,
    metavar="FILE",
    help="File to write: the profile, .yaml; its table of measurements goes beside it, .csv.  [default: the profile "
    "that the job file names]",
)
@console.as_json
def profile(job: Path | None, output: Path | None, as_json: bool, **flags: Any) -> None:
    """Measure time and energy of every stage's computations over the clocks, and what a waiting GPU draws.

    JOB is a job file, whose keys stage, gpu, stages, tensor_parallel and profile say what the options say. Under
    torchrun all stages are measured at once, one on each rank (or group of ranks, if tensor-parallel); without it one
    after another, on one GPU. Whatever happens, also Ctrl-C and SIGKILL, the clocks are reset, and --resume goes on.

    Without a stage, and on a simulated GPU only, the stages are those of a small GPT, in virtual time.
    """
    from perseus_planner.views.summary import summarize_profile
    from perseus_planner.views.tables import profile_text

    wanted = _wanted(job, output, flags)
    with console.progress("Profiling") as progress, _said_how_to_go_on(wanted):
        result = _profiled(wanted, flags, progress)
    if result is None:
        return  # rank 0 has it
    summary = summarize_profile(result)
    files = [wanted.output, wanted.output.with_suffix(".csv")]
    console.report(summary, profile_text(summary), files, as_json=as_json)


@dataclass(frozen=True)
class _Wanted:
    """What is to be profiled, by the options, or else by the job file."""

    output: Path
    gpu: str
    stages: int
    stage: str | None
    tensor_parallel: int
    blocking_power_w: float | None
    folder: Path | None


def _wanted(job: Path | None, output: Path | None, flags: Mapping[str, Any]) -> _Wanted:
    settings = _read(job)
    named = getattr(settings, "profile", None)
    target = output or (named if isinstance(named, Path) else None)
    if target is None:
        why = "the profile of the job is more than one file" if named else "no file to write is named"
        raise UsageError(f"{why}; give --output FILE")
    if output is None:
        console.check_writable(target, f"{job}, key 'profile'")

    def of(name: str, otherwise: Any = None) -> Any:
        given = (flags[name], getattr(settings, name, None))
        return next((value for value in given if value is not None), otherwise)

    stages, power_w = of("stages"), flags["blocking_power"]
    if stages is None:
        raise UsageError("how many pipeline stages there are is missing; give --stages S")
    COUNT.check(stages, "stages")
    folder = job.parent if job is not None and flags["stage"] is None else None
    return _Wanted(target, of("gpu", "cuda"), stages, of("stage"), of("tensor_parallel", 1), power_w, folder)


def _read(job: Path | None) -> Settings | None:
    if job is None:
        return None
    from perseus_planner.jobs.settings import read_settings

    return read_settings(job)


def _profiled(wanted: _Wanted, flags: Mapping[str, Any], progress: Any) -> Profile | None:
    from perseus_planner.profiler.sweep import SweepSettings

    if flags["observe"] and flags["control"] is not None:
        raise UsageError("--observe sets nothing, so leave out --control")
    control = "observed" if flags["observe"] else flags["control"] or "clock"
    settings = SweepSettings(control, full=flags["full"], **({"window_s": flags["window"]} if flags["window"] else {}))
    if wanted.stage is None:
        return _small_gpt(wanted, flags, settings, progress)
    from perseus_planner.profiler.build import profile_stages

    return profile_stages(
        wanted.stage,
        wanted.gpu,
        wanted.stages,
        folder=wanted.folder,
        tensor_parallel=wanted.tensor_parallel,
        split_backward=flags["split_backward"],
        settings=settings,
        output=wanted.output,
        resume=flags["resume"],
        blocking_power_w=wanted.blocking_power_w,
        progress=progress,
    )


def _small_gpt(wanted: _Wanted, flags: Mapping[str, Any], settings: Any, progress: Any) -> Profile:
    """What a simulated GPU is profiled on where no stage is given."""
    if not wanted.gpu.startswith("simulated:"):
        raise UsageError(
            "what the stages are is missing; give --stage MODULE:FUNCTION, or profile a small GPT on a simulated GPU "
            "with --gpu simulated:a100-sxm"
        )
    for name, value in (("tensor_parallel", wanted.tensor_parallel != 1), *((n, flags[n]) for n in _OF_A_STAGE)):
        if value:
            raise UsageError(f"--{name.replace('_', '-')} is of stages that run; give --stage MODULE:FUNCTION with it")
    from perseus_planner.profiler.simulated_pipeline import profile_simulated

    result = profile_simulated(
        wanted.gpu, wanted.stages, progress=progress, split_backward=flags["split_backward"], settings=settings
    )
    result.save(wanted.output)
    return result


@contextmanager
def _said_how_to_go_on(wanted: _Wanted) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        if wanted.stage is not None:
            click.echo("Interrupted; clocks are reset. Go on with --resume: finished rows are kept.", err=True)
        raise
