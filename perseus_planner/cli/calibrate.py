"""`planner calibrate`: correct predicted iteration times by measured ones, or measure kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from perseus_planner.base.errors import UsageError
from perseus_planner.cli import console
from perseus_planner.cli.options import AsJson, Counts, Gpu, Option, OutputFile, SourceFile, command

if TYPE_CHECKING:
    from perseus_planner.plans.calibration import MeasuredPlan


@dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """Which kernels to measure, for `planner explore`."""

    kernels: Annotated[
        str | None,
        "Measure kernels of this model instead, for `planner explore`.",
        Option(metavar="MODEL"),
    ]
    gpu: Annotated[
        Gpu | None, "With --kernels: kind of GPU, e.g. a100-sxm, for its clocks and power."
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
    as_json: AsJson,
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
        if profile_or_job is not None or measured:
            raise UsageError(
                "--kernels: measures on its own; leave out profile, plan and --measured"
            )
        from perseus_planner.base import registry

        measure_kernels = registry.load(registry.MEASURE_KERNELS)
        measure_kernels(kernels, output, as_json=as_json)
        return
    if profile_or_job is None or not plan_or_run:
        raise UsageError("give a profile or job and a plan or run, or --kernels and a model")
    from perseus_planner.base.files import write_file
    from perseus_planner.plans.calibration import calibrate as calibrate_file
    from perseus_planner.views.profiles import calibration_text

    result, content = calibrate_file(profile_or_job, list(_measured(plan_or_run, measured)))
    text, written = calibration_text(result), list[Path]()
    if output is None:
        text += "\nNothing is written; add -o FILE."
    else:
        write_file(output, content, UsageError)
        written.append(output)
    console.report(result, text, written, as_json=as_json)


def _measured(paths: Sequence[Path], texts: Sequence[str]) -> Iterator[MeasuredPlan]:
    """Yield the plans with the mean times of an iteration; `texts` are those of the plans that
    are files.
    """
    from perseus_planner.base.units import DURATION
    from perseus_planner.plans.calibration import MeasuredPlan
    from perseus_planner.plans.plan import Plan
    from perseus_planner.runs.run import Run, calibration_of

    times_s = [DURATION.read(text, "--measured") for text in texts]
    plans = [path for path in paths if not path.is_dir()]
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
            name = "--measured" if len(paths) == 1 else str(path)
            yield MeasuredPlan(Plan.load(path), next(left_s), name)
