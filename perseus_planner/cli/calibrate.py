"""`planner calibrate`: correct predicted iteration times by measured ones, or measure kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perseus_planner.base.errors import UsageError
from perseus_planner.cli import console

if TYPE_CHECKING:
    from perseus_planner.plans.calibration import MeasuredPlan

_COUNTS = console.Listed("COUNT", "n")


@click.command(
    epilog=console.examples(
        "planner calibrate profile.yaml plan.yaml --measured 5s -o profile.yaml",
        "planner calibrate profile.yaml run -o profile.yaml",
        "planner calibrate job.yaml run-1 run-2 run-3 -o job.yaml",
        "planner calibrate --kernels llama3-8b --gpu h100-sxm --microbatch 1,2 -o system.yaml",
    )
)
@click.argument("profile_or_job", type=console.PATH, required=False)
@click.argument("plan_or_run", type=console.PATH, nargs=-1)
@click.option(
    "--measured",
    metavar="TIME",
    multiple=True,
    help="Mean time of iterations that ran with the plan, e.g. 6.31s; one for each plan. Not "
    "needed for a run.",
)
@click.option(
    "--kernels",
    metavar="MODEL",
    help="Measure kernels of this model instead, for `planner explore`.",
)
@click.option(
    "--gpu",
    metavar="GPU",
    help="With --kernels: kind of GPU, e.g. a100-sxm; clocks and power are its.",
)
@click.option(
    "--microbatch",
    default="1,2,4",
    show_default=True,
    type=_COUNTS,
    help="With --kernels: microbatches.",
)
@click.option(
    "--tensor-parallel",
    type=_COUNTS,
    help="With --kernels: GPUs of a layer.  [default: 1 and all ranks]",
)
@click.option(
    "--recompute",
    default="none",
    show_default=True,
    metavar="WHAT",
    help="With --kernels: none or full.",
)
@click.option(
    "--node-bandwidth",
    type=float,
    metavar="GB/S",
    help="With --kernels: network of a node, each way.",
)
@click.option(
    "--output",
    "-o",
    type=console.OutputFile(".yaml", ".yml"),
    help="File to write: the profile or job with what was found, which may be the one that is "
    "read; with --kernels a "
    "system file.  [default: only print]",
)
@console.as_json
def calibrate(
    profile_or_job: Path | None,
    plan_or_run: tuple[Path, ...],
    measured: tuple[str, ...],
    kernels: str | None,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Correct predicted iteration times by measured ones.

    PROFILE_OR_JOB is the profile.yaml, or the job file, that the plans were made from. With
    --output, FILE gets its text with overhead_s set to the measured time minus the replayed time,
    the mean over the plans. With three plans or more, a job file also gets a correction, if that
    predicts the time of a plan from the others clearly better: a latency of transfers between
    stages, and factors of the times of computations. Nothing else changes. Frontiers and plans that
    you make from FILE later include this.

    PLAN_OR_RUN is a plan, or the folder that a training run wrote. For a run, the measured time is
    the mean over the iterations that ran as its newest plan says, except the first of them.

    With --kernels, on one GPU or, started by torchrun, on the GPUs of one node: measure a layer of
    MODEL forward and backward, its head, all-reduces and memory, and write a system file for
    `planner explore`. It takes about a minute.
    """
    if kernels is not None:
        if profile_or_job is not None or measured:
            raise UsageError(
                "--kernels: measures on its own; leave out profile, plan and --measured"
            )
        from perseus_planner.base import registry

        measure_kernels = registry.load(registry.MEASURE_KERNELS)
        measure_kernels(kernels, output=output, as_json=as_json, **options)
        return
    if profile_or_job is None or not plan_or_run:
        raise UsageError("give a profile or job and a plan or run, or --kernels and a model")
    from perseus_planner.base.files import write_file
    from perseus_planner.plans.calibration import calibrate as calibrate_file
    from perseus_planner.views.profiles import calibration_text

    result, text = calibrate_file(profile_or_job, _measured(plan_or_run, measured))
    if output is None:
        console.report(
            result,
            f"{calibration_text(result)}\nNothing is written; add -o FILE.",
            [],
            as_json=as_json,
        )
        return
    write_file(output, text, UsageError)
    console.report(result, calibration_text(result), [output], as_json=as_json)


def _measured(paths: Sequence[Path], texts: Sequence[str]) -> list[MeasuredPlan]:
    """Return the plans with the mean times of an iteration; `texts` are those of the plans that
    are files.
    """
    from perseus_planner.base.units import DURATION
    from perseus_planner.plans.calibration import MeasuredPlan
    from perseus_planner.plans.plan import Plan
    from perseus_planner.runs.run import Run, calibration_of

    times_s, runs = (
        [DURATION.read(text, "--measured") for text in texts],
        [path.is_dir() for path in paths],
    )
    if len(times_s) < runs.count(False):
        raise UsageError(
            "the measured time of an iteration is missing; give it with --measured TIME, or give "
            "the folder of a run instead of "
            f"{paths[[i for i, is_run in enumerate(runs) if not is_run][len(times_s)]]}"
        )
    if len(times_s) > runs.count(False):
        if all(runs):
            raise UsageError(
                f"{paths[0]}: is a run, which contains the measured times; leave out --measured"
            )
        raise UsageError(
            f"--measured: {len(times_s)} times for {runs.count(False)} plans; give one for each"
        )
    found, left_s = [], iter(times_s)
    for path, is_run in zip(paths, runs, strict=True):
        if is_run:
            of_run = calibration_of(Run.load(path))
            found.append(MeasuredPlan(of_run.plan, of_run.time_s, str(path)))
        else:
            found.append(
                MeasuredPlan(
                    Plan.load(path), next(left_s), "--measured" if len(paths) == 1 else str(path)
                )
            )
    return found
