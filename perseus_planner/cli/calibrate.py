"""`planner calibrate`: a measured iteration time in, an overhead in the profile out."""

from __future__ import annotations

from pathlib import Path

import click

from perseus_planner.cli import console


@click.command(epilog=console.examples("planner calibrate profile.yaml plan.yaml --measured 5s"))
@click.argument("profile_or_job", type=console.PATH)
@click.argument("plan", type=console.PATH)
@click.option(
    "--measured",
    required=True,
    metavar="TIME",
    callback=console.quantity("DURATION"),
    help="Mean time of an iteration that ran with PLAN, e.g. 6.31s.",
)
@console.as_json
def calibrate(profile_or_job: Path, plan: Path, measured: float, as_json: bool) -> None:
    """Correct predicted iteration times by one that was measured.

    PROFILE_OR_JOB is the profile.yaml, or the job file, from which PLAN was made. Its overhead_s becomes the measured
    time minus the replayed one. Nothing else in it changes. Frontiers and plans that are made from then on count it in.
    """
    from perseus_planner.calibration import calibrated, write_text
    from perseus_planner.plan import Plan
    from perseus_planner.tables import calibration_text

    result, text = calibrated(profile_or_job, Plan.load(plan), measured)
    write_text(profile_or_job, text)
    console.report(result, calibration_text(result), [profile_or_job], as_json=as_json)
