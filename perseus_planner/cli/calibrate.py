"""`planner calibrate`: a measured iteration time, or a run, in; an overhead in the profile out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from perseus_planner.cli import console
from perseus_planner.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from perseus_planner.plans.plan import Plan


@click.command(
    epilog=console.examples(
        "planner calibrate profile.yaml plan.yaml --measured 5s",
        "planner calibrate profile.yaml run",
    )
)
@click.argument("profile_or_job", type=console.PATH)
@click.argument("plan_or_run", type=console.PATH)
@click.option(
    "--measured",
    metavar="TIME",
    callback=console.quantity("DURATION"),
    help="Mean time of an iteration that ran with the plan, e.g. 6.31s. A run says it itself.",
)
@console.as_json
def calibrate(profile_or_job: Path, plan_or_run: Path, measured: float | None, as_json: bool) -> None:
    """Correct predicted iteration times by one that was measured.

    PROFILE_OR_JOB is the profile.yaml, or the job file, from which the plan was made. Its overhead_s becomes the
    measured time minus the replayed one. Nothing else in it changes. Frontiers and plans that are made from then on
    count it in.

    PLAN_OR_RUN is the plan, or the folder that a training run wrote. Of a run, the mean is taken over the iterations
    that ran as planned by its newest plan, but for the first of them.
    """
    from perseus_planner.files import write_file
    from perseus_planner.jobs.calibration import calibrated
    from perseus_planner.views.tables import calibration_text

    plan, measured_s, source = _measured(plan_or_run, measured)
    result, text = calibrated(profile_or_job, plan, measured_s, source)
    write_file(profile_or_job, text, UsageError)
    console.report(result, calibration_text(result), [profile_or_job], as_json=as_json)


def _measured(plan_or_run: Path, measured_s: float | None) -> tuple[Plan, float, str]:
    """What ran, mean seconds of an iteration, and where those come from."""
    from perseus_planner.plans.plan import Plan
    from perseus_planner.runs.run import Run, calibration_of

    if not plan_or_run.is_dir():
        if measured_s is None:
            raise UsageError(
                "the measured time of an iteration is missing; give it with --measured TIME, or name the folder of a "
                f"run instead of {plan_or_run}"
            )
        return Plan.load(plan_or_run), measured_s, "--measured"
    if measured_s is not None:
        raise UsageError(f"{plan_or_run}: is a run, which says itself what was measured; leave out --measured")
    found = calibration_of(Run.load(plan_or_run))
    return found.plan, found.time_s, str(plan_or_run)
