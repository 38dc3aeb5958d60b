"""`planner calibrate`: correct the overhead in a profile by a measured iteration time."""

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
    help="Mean time of iterations that ran with the plan, e.g. 6.31s. Not needed for a run.",
)
@console.as_json
def calibrate(profile_or_job: Path, plan_or_run: Path, measured: float | None, as_json: bool) -> None:
    """Correct predicted iteration times by a measured one.

    PROFILE_OR_JOB is the profile.yaml, or the job file, that the plan was made from. Its overhead_s is set to the
    measured time minus the replayed time; nothing else in the file changes. Frontiers and plans that you make from it
    later include the overhead.

    PLAN_OR_RUN is the plan, or the folder that a training run wrote. For a run, the measured time is the mean over the
    iterations that ran as its newest plan says, except the first of them.
    """
    from perseus_planner.files import write_file
    from perseus_planner.jobs.calibration import calibrate as calibrate_file
    from perseus_planner.views.profiles import calibration_text

    plan, measured_s, source = _measured(plan_or_run, measured)
    result, text = calibrate_file(profile_or_job, plan, measured_s, source)
    write_file(profile_or_job, text, UsageError)
    console.report(result, calibration_text(result), [profile_or_job], as_json=as_json)


def _measured(plan_or_run: Path, measured_s: float | None) -> tuple[Plan, float, str]:
    """Return the plan, the mean time of an iteration, and the source of that time."""
    from perseus_planner.plans.plan import Plan
    from perseus_planner.runs.run import Run, calibration_of

    if not plan_or_run.is_dir():
        if measured_s is None:
            raise UsageError(
                "the measured time of an iteration is missing; give it with --measured TIME, or give the folder of a "
                f"run instead of {plan_or_run}"
            )
        return Plan.load(plan_or_run), measured_s, "--measured"
    if measured_s is not None:
        raise UsageError(f"{plan_or_run}: is a run, which contains the measured times; leave out --measured")
    found = calibration_of(Run.load(plan_or_run))
    return found.plan, found.time_s, str(plan_or_run)
