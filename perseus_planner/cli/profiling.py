"""`planner profile`, which measures the stages of a pipeline, and `planner calibrate`, which
corrects predicted iteration times by measured ones, or measures kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import click

from perseus_planner.base.errors import ProfileError, UsageError
from perseus_planner.base.units import COUNT, MINUTES_LIMIT, SHARE_WITHIN
from perseus_planner.cli import console
from perseus_planner.cli.options import (
    BlockingPower,
    Counts,
    GpuCount,
    GpuName,
    Option,
    OutputFile,
    Quantity,
    SourceFile,
    Stages,
    check_writable,
    command,
    complete,
    gpu_names,
    option_name,
)

if TYPE_CHECKING:
    from perseus_planner import Profile
    from perseus_planner.plans.calibration import MeasuredPlan
    from perseus_planner.plans.job import Settings
    from perseus_planner.profiler.again import Again
    from perseus_planner.profiler.sweep import SweepSettings


@dataclass(frozen=True)
class StageOptions:
    """What is measured, if the job file does not say it."""

    gpu: Annotated[
        GpuName | None,
        "GPU to measure on: nvml:N, cuda:N, zeusd:N, command:N, amd:N or simulated:NAME, with or "
        "without dry-run: before it; cuda is the GPU of the rank.  [default: cuda]",
        complete(gpu_names),
    ]
    stage: Annotated[
        str | None,
        "Function that builds a stage: it takes stage, stages, tensor_rank and tensor_parallel, "
        "and returns a torch module, a sample input and a loss (None except on the last stage).",
        Option(metavar="MODULE:FUNCTION"),
    ]
    stages: Annotated[Stages | None, "Number of pipeline stages."]
    tensor_parallel: Annotated[GpuCount | None, "Number of GPUs per stage.  [default: 1]"]


@dataclass(frozen=True)
class SweepOptions:
    """Which clocks or power limits are measured, and how well."""

    control: Annotated[
        Literal["clock", "power-limit"] | None,
        "Control to sweep: the SM clock, or the power limit if clocks cannot be locked.  "
        "[default: clock]",
    ]
    observe: Annotated[bool, "Measure at the clock that the GPU runs at, without setting any."]
    full: Annotated[bool, "Measure every clock, instead of only those that plans need."]
    saving_within: Annotated[
        float | None,
        "Measure clocks again and again, until the share of energy that plans save is known "
        "within this, e.g. 0.3%: half of its 90 % interval.",
        Option(type=Quantity(SHARE_WITHIN, "share")),
    ]
    minutes: Annotated[
        float | None,
        "Stop measuring after this many minutes, all stages of a GPU together.  [default: no "
        "limit; without --saving-within at most 12 clocks]",
        Option(type=Quantity(MINUTES_LIMIT, "m")),
    ]
    allow_hot: Annotated[
        bool,
        "Keep rows for which the GPU was too hot even when they were measured again.",
    ]


@dataclass(frozen=True)
class RowOptions:
    """How rows are measured and kept."""

    split_backward: Annotated[
        bool, "Also measure the gradients of inputs and of weights separately."
    ]
    modes: Annotated[
        str | None,
        "Measure every mode of the stages. The function takes a built module and returns its "
        "modes, as name -> function that enters the mode, with own for how training runs "
        "without a plan; e.g. perseus_planner.engines.modes:recompute_modes.",
        Option(metavar="MODULE:FUNCTION"),
    ]
    blocking_power_w: Annotated[
        BlockingPower | None,
        "Power of a waiting GPU, instead of measuring it; required for a single stage, which has "
        "no neighbour.",
    ]
    resume: Annotated[
        bool, "Continue from the rows that an interrupted run has left beside the output."
    ]
    for_plan: Annotated[
        Annotated[Path, SourceFile("plan")] | None,
        "Measure again only the rows that this plan uses most and their neighbours, and join them "
        "to the profile that it was made from: the output, which must exist.",
        Option("--for"),
    ]


@command(
    "planner profile --gpu simulated:a100-sxm --stages 4 -o profile.yaml",
    "torchrun --nproc-per-node 4 -m perseus_planner profile job.yaml",
    "torchrun --nproc-per-node 4 -m perseus_planner profile job.yaml --resume",
    "planner profile --gpu simulated:a40 --stages 4 --minutes 60 --saving-within 0.5% -o "
    "profile.yaml",
    "torchrun --nproc-per-node 4 -m perseus_planner profile job.yaml --for plan.yaml",
)
def profile(
    job: Annotated[Path, SourceFile("job")] | None,
    *,
    wanted: StageOptions,
    sweep: SweepOptions,
    rows: RowOptions,
    output: Annotated[
        Path | None,
        "File to write: the profile, .yaml, with its table of measurements beside it, .csv.  "
        "[default: the profile of the job file]",
        Option("--output", "-o", type=OutputFile(".yaml", ".yml")),
    ],
) -> None:
    """Measure the time and energy of every stage's computations over the clocks, and the power of a
    waiting GPU.

    JOB is a job file; its keys stage, gpu, stages, tensor_parallel and profile replace missing
    options. Under torchrun, all stages are measured at once, one on each rank (or group of ranks,
    if tensor-parallel). Without torchrun, they are measured one after another on one GPU. The
    clocks are always reset, even after Ctrl-C or SIGKILL; use --resume to continue.

    Without a stage, a small GPT is measured in virtual time, on a simulated GPU only.

    With --for, a plan's own rows are measured again, which takes a part of the time: solve and plan
    again from the profile that they are joined to, and less of the saving goes to the margin for
    noise.
    """
    from perseus_planner.plans.job import read_settings
    from perseus_planner.views.curves import profile_text, summarize_profile

    settings = None if job is None else read_settings(job)
    target = output or _profile_of(job, settings)
    # Refused before measuring, which takes long.
    check_writable(target.with_suffix(".csv"), "--output: the table beside it,")
    again = _again(rows.for_plan, sweep, target)
    stages = _stages(wanted, settings, again)
    # A stage that is named here is found from where the command runs, and one of the job from its
    # folder.
    if job is not None and wanted.stage is None:
        stages = stages._replace(folder=job.parent)
    with console.progress("Profiling") as progress:
        try:
            settings_of_sweep = _sweep_settings(sweep)
            if again is not None:
                settings_of_sweep = replace(settings_of_sweep, control=again.profile.control)
            result = _measure(stages, settings_of_sweep, rows, again, target, progress)
        except KeyboardInterrupt:
            if stages.stage is not None:
                click.echo(
                    "Interrupted; clocks are reset. Finished rows are kept: continue with "
                    "--resume.",
                    err=True,
                )
            raise
    # Other ranks have measured too, and rank 0 has the whole.
    if result is None:
        return  # rank 0 prints the profile
    summary = summarize_profile(result)
    files = [target, target.with_suffix(".csv")]
    console.report(summary, profile_text(summary), files)
    # The profile is kept, but must not be planned on without a word.
    if difference := result.conditions.get("unlike training"):
        from perseus_planner.profiler.ranks.measure import UNLIKE_TRAINING

        raise ProfileError(f"{target}: {difference}, {UNLIKE_TRAINING}")


def _profile_of(job: Path | None, settings: Settings | None) -> Path:
    """Return the profile that a job file names, which can be written."""
    named = getattr(settings, "profile", None)
    if not isinstance(named, Path):
        why = "the job has several profiles" if named else "the file to write is missing"
        raise UsageError(f"{why}; give --output FILE")
    check_writable(named, f"{job}, key 'profile'")
    return named


class _Stages(NamedTuple):
    """What is measured, by the options or else by the job file."""

    gpu: str
    stages: int
    tensor_parallel: int
    stage: str | None = None
    folder: Path | None = None  #: where the module of the stage is looked for first


def _stages(
    options: StageOptions, settings: Settings | None, again: Again | None = None
) -> _Stages:
    of_job = _options_of(settings)
    gpu = of_job.gpu if options.gpu is None else options.gpu
    stage = of_job.stage if options.stage is None else options.stage
    stages = of_job.stages if options.stages is None else options.stages
    tensor_parallel = options.tensor_parallel
    if tensor_parallel is None:
        tensor_parallel = of_job.tensor_parallel
    # What is measured again has as many stages as the first time.
    if stages is None and again is not None:
        stages = again.profile.stages
    if stages is None:
        raise UsageError("the number of pipeline stages is missing; give --stages S")
    COUNT.check(stages, "stages")
    return _Stages(
        "cuda" if gpu is None else gpu,
        stages,
        1 if tensor_parallel is None else tensor_parallel,
        stage,
    )


def _options_of(settings: Settings | None) -> StageOptions:
    """Return what a job file says of the options; nothing without one."""
    if settings is None:
        return StageOptions(gpu=None, stage=None, stages=None, tensor_parallel=None)
    return StageOptions(
        gpu=settings.gpu,
        stage=settings.stage,
        stages=settings.stages,
        tensor_parallel=settings.tensor_parallel,
    )


def _sweep_settings(options: SweepOptions) -> SweepSettings:
    from perseus_planner.profiler.sweep import SweepSettings

    if options.observe and options.control is not None:
        raise UsageError("--observe does not set anything; leave out --control")
    settings = dict(vars(options))
    control = "observed" if settings.pop("observe") else options.control or "clock"
    return SweepSettings(**{**settings, "control": control})


def _again(plan: Path | None, sweep: SweepOptions, target: Path) -> Again | None:
    """Return what to measure again for a plan, if one is given; the profile is `target`."""
    if plan is None:
        return None
    from perseus_planner import Plan, Profile
    from perseus_planner.profiler.again import Again

    names = ("control", "observe", "full", "saving_within", "minutes")
    if chosen := [option_name(name) for name in names if getattr(sweep, name)]:
        raise UsageError(f"--for: says what is measured, and how; leave out {chosen[0]}")
    if not target.exists():
        raise UsageError(
            f"--for: joins rows to a profile, and {target} does not exist; name the profile that "
            "the plan was made from with --output"
        )
    return Again(Plan.load(plan), Profile.load(target))


def _measure(
    wanted: _Stages,
    settings: SweepSettings,
    rows: RowOptions,
    again: Again | None,
    output: Path,
    progress: Any,
) -> Profile | None:
    """Measure the stages and write the profile, which is returned on rank 0."""
    # A stage that can run is measured, on whatever GPU there is.
    if wanted.stage is not None:
        from perseus_planner.profiler.build import profile_stages

        return profile_stages(
            wanted.stage,
            wanted.gpu,
            wanted.stages,
            folder=wanted.folder,
            tensor_parallel=wanted.tensor_parallel,
            split_backward=rows.split_backward,
            settings=settings,
            output=output,
            resume=rows.resume,
            blocking_power_w=rows.blocking_power_w,
            progress=progress,
            modes=rows.modes,
            again=again,
        )
    _check_simulated(wanted, rows)
    from perseus_planner.profiler.simulated_pipeline import profile_simulated

    result = profile_simulated(
        wanted.gpu,
        wanted.stages,
        progress,
        split_backward=rows.split_backward,
        settings=settings,
        again=again,
    )
    result.save(output)
    return result


def _check_simulated(wanted: _Stages, rows: RowOptions) -> None:
    """Refuse what a profile without a stage that can run cannot have."""
    from perseus_planner.gpu import check_back_end

    check_back_end(wanted.gpu)
    # Without a stage only a simulated GPU knows what it would take.
    if not wanted.gpu.startswith("simulated:"):
        raise UsageError(
            "the stages are missing; give --stage MODULE:FUNCTION, or profile a small GPT on a "
            "simulated GPU with --gpu simulated:a100-sxm"
        )
    # A simulated pipeline has no module that these could act on.
    for option, is_given in {
        "--tensor-parallel": wanted.tensor_parallel != 1,
        "--blocking-power": rows.blocking_power_w,
        "--resume": rows.resume,
        "--modes": rows.modes,
    }.items():
        if is_given:
            raise UsageError(f"{option} needs a stage that can run; add --stage MODULE:FUNCTION")


@dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """Which kernels to measure, for `planner explore`."""

    kernels: Annotated[
        str | None,
        "Measure kernels of this model instead, for `planner explore`.",
        Option(metavar="MODEL"),
    ]
    layer: Annotated[
        str | None,
        "With --kernels: function that returns your own layer, given shape and process group.",
        Option(metavar="MODULE:FUNCTION"),
    ]
    gpu: Annotated[
        GpuName | None, "With --kernels: kind of GPU, e.g. a100-sxm, for its clocks and power."
    ]
    microbatch: Annotated[Counts, "With --kernels: microbatches.", Option(default="1,2,4")]
    tensor_parallel: Annotated[
        Counts | None, "With --kernels: GPUs of a layer.  [default: 1 and all ranks]"
    ]
    recompute: Annotated[str, "With --kernels: none or full.", Option(metavar="WHAT")] = "none"
    node_bandwidth: Annotated[
        float | None,
        "With --kernels: network of a node, each way.",
        Option(metavar="GB/S"),
    ]


@command(
    "planner calibrate profile.yaml plan.yaml --measured 5s -o profile.yaml",
    "planner calibrate profile.yaml run -o profile.yaml",
    "planner calibrate job.yaml run-1 run-2 run-3 -o job.yaml",
    "planner calibrate --kernels llama3-8b --gpu h100-sxm --microbatch 1,2 -o system.yaml",
)
def calibrate(
    profile_or_job: Annotated[Path, SourceFile("profile", "job")] | None,
    plan_or_run: tuple[Annotated[Path, SourceFile("plan", "run")], ...],
    *,
    measured: Annotated[
        tuple[str, ...],
        "Mean time of iterations that ran with the plan, e.g. 6.31s; one for each plan. Not "
        "needed for a run.",
        Option(metavar="TIME"),
    ],
    kernels: KernelOptions,
    output: Annotated[
        Path | None,
        "File to write: the profile or job with what was found, which may be the one that is "
        "read; with --kernels a system file.  [default: only print]",
        Option("--output", "-o", type=OutputFile(".yaml", ".yml")),
    ],
) -> None:
    """Correct predicted iteration times by measured ones.

    PROFILE_OR_JOB is the profile.yaml, or the job file, that the plans were made from. With
    --output, FILE gets the same text, with overhead_s set to the measured time minus the replayed
    time (the mean over the plans). With three plans or more, a job file also gets a correction, if
    one predicts the time of each plan from the others clearly better: a latency of transfers
    between stages, and factors for the times of computations. Nothing else changes. Frontiers and
    plans that you make from FILE later include the overhead and the correction.

    PLAN_OR_RUN is a plan, or the folder that a training run wrote. For a run, the measured time is
    the mean over the iterations that ran as its newest plan says, except the first of them. A run
    also shows the jitter of its computations, which FILE gets, and for which plans leave a margin.

    With --kernels, on one GPU or, started by torchrun, on the GPUs of one node: measure a layer of
    MODEL forward and backward, its head, all-reduces and memory, and write a system file for
    `planner explore`. This takes about a minute.
    """
    if kernels.kernels is not None:
        # Kernels are measured without profile and plan, which would be ignored.
        if profile_or_job is not None or measured:
            raise UsageError(
                "--kernels: measures on its own; leave out profile, plan and --measured"
            )
        from perseus_planner.base import extensions

        measure_kernels = extensions.offer("kernels")
        measure_kernels(kernels, output)
        return
    if profile_or_job is None or not plan_or_run:
        raise UsageError("give a profile or job and a plan or run, or --kernels and a model")
    _calibrate_times(profile_or_job, list(_measured(plan_or_run, measured)), output)


def _calibrate_times(
    profile_or_job: Path, plans: Sequence[MeasuredPlan], output: Path | None
) -> None:
    """Correct a profile or a job by measured iteration times, and print what was found."""
    from perseus_planner.base.files import write_file
    from perseus_planner.plans.calibration import calibrate as calibrate_file
    from perseus_planner.views.calibration import calibration_text

    result, content = calibrate_file(profile_or_job, plans)
    text = calibration_text(result)
    written = list[Path]()
    if output is None:
        text += "\nNothing is written; add -o FILE."
    else:
        write_file(output, content, UsageError)
        written.append(output)
    console.report(result, text, written)


def _measured(paths: Sequence[Path], texts: Sequence[str]) -> Iterator[MeasuredPlan]:
    """Yield the plans with the mean times of an iteration; `texts` are those of the plans that
    are files.
    """
    from perseus_planner import Plan, Run
    from perseus_planner.base.units import DURATION
    from perseus_planner.plans.calibration import MeasuredPlan
    from perseus_planner.runs.run import calibration_of

    # In the order of the plans that are files.
    times_s = [DURATION.read(text, "--measured") for text in texts]
    # Runs have their times in them, so only plans that are files need one.
    plans = [path for path in paths if not path.is_dir()]
    # A folder that is not there would be taken for a plan that lacks its time.
    for path in plans:
        if not path.exists():
            raise UsageError(
                f"{path}: there is no such plan or run folder; name the folder that the training "
                "was given as `record`"
            )
    if len(times_s) < len(plans):
        raise UsageError(
            "the measured time of an iteration is missing; give it with --measured TIME, or give "
            f"the folder of a run instead of {plans[len(times_s)]}"
        )
    if times_s and not plans:
        raise UsageError(
            f"{paths[0]}: is a run, which contains the measured times; leave out --measured"
        )
    if len(times_s) > len(plans):
        raise UsageError(
            f"--measured: {len(times_s)} times for {len(plans)} plans; give one for each"
        )
    left_s = iter(times_s)
    for path in paths:
        if path.is_dir():
            yield calibration_of(Run.load(path))
        else:
            # One plan alone has one time, so the option names it; of several, the file does.
            name = "--measured" if len(paths) == 1 else str(path)
            yield MeasuredPlan(Plan.load(path), next(left_s), name)
