"""`planner profile`: measures the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perseus_planner.base.errors import UsageError
from perseus_planner.base.units import COUNT
from perseus_planner.cli import console

if TYPE_CHECKING:
    from perseus_planner.plans.settings import Settings
    from perseus_planner.profiles.profiles import Profile

_NEED_A_STAGE = ("blocking_power", "resume")


@click.command(
    epilog=console.examples(
        "planner profile --gpu simulated:a100-sxm --stages 4 -o profile.yaml",
        "torchrun --nproc-per-node 4 -m perseus_planner profile job.yaml",
        "torchrun --nproc-per-node 4 -m perseus_planner profile job.yaml --resume",
        "planner profile --gpu simulated:a40 --stages 4 --minutes 60 --saving-within 0.5% -o "
        "profile.yaml",
    )
)
@click.argument("job", type=console.PATH, required=False)
@click.option(
    "--gpu",
    metavar="GPU",
    shell_complete=console.complete(console.gpu_names),
    help="GPU to measure on: nvml:N, cuda:N, zeusd:N, command:N, amd:N or simulated:NAME, with or "
    "without dry-run: "
    "before it; cuda is the GPU of the rank.  [default: cuda]",
)
@click.option(
    "--stage",
    metavar="MODULE:FUNCTION",
    help="Function that builds a stage: it takes stage, stages, tensor_rank and tensor_parallel, "
    "and returns a torch "
    "module, a sample input and a loss (None except on the last stage).",
)
@click.option("--stages", type=int, metavar="S", help="Number of pipeline stages.")
@click.option(
    "--tensor-parallel", type=int, metavar="GPUS", help="Number of GPUs per stage.  [default: 1]"
)
@click.option(
    "--control",
    type=click.Choice(["clock", "power-limit"]),
    help="Control to sweep: the SM clock, or the power limit if clocks cannot be locked.  "
    "[default: clock]",
)
@click.option(
    "--observe",
    is_flag=True,
    help="Measure at the clock that the GPU runs at, without setting any.",
)
@click.option(
    "--full", is_flag=True, help="Measure every clock, instead of only those that plans need."
)
@click.option(
    "--saving-within",
    type=console.Quantity("SHARE_WITHIN", "share"),
    help="Measure clocks, and measure them again, until the share of energy that plans save is "
    "known within this, such "
    "as 0.3%: half of its 90 % interval.",
)
@click.option(
    "--minutes",
    type=console.Quantity("MINUTES_LIMIT", "m"),
    help="Stop measuring after so many minutes, all stages of a GPU together.  [default: no limit; "
    "without "
    "--saving-within at most 12 clocks]",
)
@click.option(
    "--allow-hot",
    is_flag=True,
    help="Keep rows for which the GPU was too hot, also when they were measured again.",
)
@click.option(
    "--split-backward",
    is_flag=True,
    help="Also measure the gradients of inputs and of weights separately.",
)
@click.option(
    "--blocking-power",
    type=console.BLOCKING_POWER,
    help="Power of a waiting GPU, instead of measuring it; required for a single stage, which has "
    "no neighbour.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Continue from the rows that an interrupted run has left beside the output.",
)
@click.option(
    "--output",
    "-o",
    type=console.OutputFile(".yaml", ".yml"),
    help="File to write: the profile, .yaml, with its table of measurements beside it, .csv.  "
    "[default: the profile of "
    "the job file]",
)
@console.as_json
def profile(job: Path | None, output: Path | None, as_json: bool, **flags: Any) -> None:
    """Measure the time and energy of every stage's computations over the clocks, and the power of a
    waiting GPU.

    JOB is a job file; its keys stage, gpu, stages, tensor_parallel and profile stand for the
    options of these names. Under torchrun, all stages are measured at once, one on each rank (or
    group of ranks, if tensor-parallel). Without it, they are measured one after another on one GPU.
    The clocks are always reset, even after Ctrl-C or SIGKILL; use --resume to continue.

    Without a stage, a small GPT is measured in virtual time, on a simulated GPU only.
    """
    from perseus_planner.views.profiles import profile_text, summarize_profile

    request = _read_request(job, output, flags)
    with console.progress("Profiling") as progress, _hint_to_resume(request):
        result = _measure(request, flags, progress)
    if result is None:
        return  # rank 0 prints the profile
    summary = summarize_profile(result)
    files = [request.output, request.output.with_suffix(".csv")]
    console.report(summary, profile_text(summary), files, as_json=as_json)


@dataclass(frozen=True)
class _Request:
    """What to profile, by the options or else by the job file."""

    output: Path
    gpu: str
    stages: int
    stage: str | None
    tensor_parallel: int
    blocking_power_w: float | None
    folder: Path | None


def _read_request(job: Path | None, output: Path | None, flags: Mapping[str, Any]) -> _Request:
    settings = _read(job)
    named = getattr(settings, "profile", None)
    target = output or (named if isinstance(named, Path) else None)
    if target is None:
        why = "the job has several profiles" if named else "the file to write is missing"
        raise UsageError(f"{why}; give --output FILE")
    if output is None:
        console.check_writable(target, f"{job}, key 'profile'")

    def setting(name: str, default: Any = None) -> Any:
        given = (flags[name], getattr(settings, name, None))
        return next((value for value in given if value is not None), default)

    stages, power_w = setting("stages"), flags["blocking_power"]
    if stages is None:
        raise UsageError("the number of pipeline stages is missing; give --stages S")
    COUNT.check(stages, "stages")
    folder = job.parent if job is not None and flags["stage"] is None else None
    return _Request(
        target,
        setting("gpu", "cuda"),
        stages,
        setting("stage"),
        setting("tensor_parallel", 1),
        power_w,
        folder,
    )


def _read(job: Path | None) -> Settings | None:
    if job is None:
        return None
    from perseus_planner.plans.settings import read_settings

    return read_settings(job)


def _measure(request: _Request, flags: Mapping[str, Any], progress: Any) -> Profile | None:
    from perseus_planner.profiler.sweep import SweepSettings

    if flags["observe"] and flags["control"] is not None:
        raise UsageError("--observe does not set anything; leave out --control")
    control = "observed" if flags["observe"] else flags["control"] or "clock"
    goal = {"--minutes": flags["minutes"], "--saving-within": flags["saving_within"]}
    if control == "observed" or flags["full"]:
        name = next((name for name, value in goal.items() if value is not None), None)
        if name is not None:
            fixed = "--full" if flags["full"] else "--observe"
            raise UsageError(
                f"{name} chooses what is measured, and {fixed} measures each row once; leave out "
                "one of them"
            )
    settings = SweepSettings(
        control,
        full=flags["full"],
        allow_hot=flags["allow_hot"],
        minutes=flags["minutes"],
        saving_within=flags["saving_within"],
    )
    if request.stage is None:
        return _measure_small_gpt(request, flags, settings, progress)
    from perseus_planner.profiler.build import profile_stages

    return profile_stages(
        request.stage,
        request.gpu,
        request.stages,
        folder=request.folder,
        tensor_parallel=request.tensor_parallel,
        split_backward=flags["split_backward"],
        settings=settings,
        output=request.output,
        resume=flags["resume"],
        blocking_power_w=request.blocking_power_w,
        progress=progress,
    )


def _measure_small_gpt(
    request: _Request, flags: Mapping[str, Any], settings: Any, progress: Any
) -> Profile:
    """Profile a small GPT on a simulated GPU, if no stage is given."""
    from perseus_planner.gpu import check_back_end

    check_back_end(request.gpu)
    if not request.gpu.startswith("simulated:"):
        raise UsageError(
            "the stages are missing; give --stage MODULE:FUNCTION, or profile a small GPT on a "
            "simulated GPU with --gpu simulated:a100-sxm"
        )
    for name, value in (
        ("tensor_parallel", request.tensor_parallel != 1),
        *((n, flags[n]) for n in _NEED_A_STAGE),
    ):
        if value:
            raise UsageError(
                f"--{name.replace('_', '-')} needs a stage that can run; add --stage "
                "MODULE:FUNCTION"
            )
    from perseus_planner.profiler.simulated_pipeline import profile_simulated

    result = profile_simulated(
        request.gpu,
        request.stages,
        progress=progress,
        split_backward=flags["split_backward"],
        settings=settings,
    )
    result.save(request.output)
    return result


@contextmanager
def _hint_to_resume(request: _Request) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        if request.stage is not None:
            click.echo(
                "Interrupted; clocks are reset. Finished rows are kept: continue with --resume.",
                err=True,
            )
        raise
