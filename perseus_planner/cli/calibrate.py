"""`planner calibrate`: correct predicted iteration times by measured ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from perseus_planner.cli import console
from perseus_planner.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from perseus_planner.jobs.calibration import MeasuredPlan


@click.command(
    epilog=console.examples(
        "planner calibrate profile.yaml plan.yaml --measured 5s",
        "planner calibrate profile.yaml run",
        "planner calibrate job.yaml run-1 run-2 run-3",
    )
)
@click.argument("profile_or_job", type=console.PATH)
@click.argument("plan_or_run", type=console.PATH, nargs=-1, required=True)
@click.option(
    "--measured",
    metavar="TIME",
    multiple=True,
    help="Mean time of iterations that ran with the plan, e.g. 6.31s; one for each plan. Not needed for a run.",
)
@console.as_json
def calibrate(profile_or_job: Path, plan_or_run: tuple[Path, ...], measured: tuple[str, ...], as_json: bool) -> None:
    """Correct predicted iteration times by measured ones.

    PROFILE_OR_JOB is the profile.yaml, or the job file, that the plans were made from. Its overhead_s is set to the
    measured time minus the replayed time, the mean over the plans. With three plans or more, a job file also gets a
    correction, if that predicts the time of a plan from the others clearly better: a latency of transfers between
    stages, and factors of the times of computations. Nothing else in the file changes. Frontiers and plans that you
    make from it later include this.

    PLAN_OR_RUN is a plan, or the folder that a training run wrote. For a run, the measured time is the mean over the
    iterations that ran as its newest plan says, except the first of them.
    """
    from perseus_planner.files import write_file
    from perseus_planner.jobs.calibration import calibrate as calibrate_file
    from perseus_planner.views.profiles import calibration_text

    result, text = calibrate_file(profile_or_job, _measured(plan_or_run, measured))
    write_file(profile_or_job, text, UsageError)
    console.report(result, calibration_text(result), [profile_or_job], as_json=as_json)


def _measured(paths: Sequence[Path], texts: Sequence[str]) -> list[MeasuredPlan]:
    """Return the plans with the mean times of an iteration; `texts` are those of the plans that are files."""
    from perseus_planner.jobs.calibration import MeasuredPlan
    from perseus_planner.plans.plan import Plan
    from perseus_planner.quantities import DURATION
    from perseus_planner.runs.run import Run, calibration_of

    times_s, runs = [DURATION.parse(text, "--measured") for text in texts], [path.is_dir() for path in paths]
    if len(times_s) < runs.count(False):
        raise UsageError(
            "the measured time of an iteration is missing; give it with --measured TIME, or give the folder of a "
            f"run instead of {paths[[i for i, is_run in enumerate(runs) if not is_run][len(times_s)]]}"
        )
    if len(times_s) > runs.count(False):
        if all(runs):
            raise UsageError(f"{paths[0]}: is a run, which contains the measured times; leave out --measured")
        raise UsageError(f"--measured: {len(times_s)} times for {runs.count(False)} plans; give one for each")
    found, left_s = [], iter(times_s)
    for path, is_run in zip(paths, runs, strict=True):
        if is_run:
            of_run = calibration_of(Run.load(path))
            found.append(MeasuredPlan(of_run.plan, of_run.time_s, str(path)))
        else:
            found.append(MeasuredPlan(Plan.load(path), next(left_s), "--measured" if len(paths) == 1 else str(path)))
    return found
