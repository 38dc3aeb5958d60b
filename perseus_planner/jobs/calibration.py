"""Calibration: the overhead of a job or profile, which makes replayed iteration times equal measured ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from perseus_planner.documents import kind_of, with_number
from perseus_planner.errors import UsageError
from perseus_planner.jobs.job import Job
from perseus_planner.jobs.settings import job_document
from perseus_planner.plans.replay import replay
from perseus_planner.profiles.profiles import Profile, profile_document

if TYPE_CHECKING:
    from pathlib import Path

    from perseus_planner.plans.plan import Plan

_KEY = "overhead_s"
_LEAST = 0.5  #: of the replayed time; less was measured with another plan
_DIGITS = 9  #: of seconds, so that 0.1234 is not written as 0.12340000000000018


@dataclass(frozen=True)
class Calibration:
    """The calibration of a profile or job by a measured iteration time.

    Attributes:
        measured_s: measured iteration time with the plan, seconds.
        replayed_s: replayed iteration time of the plan, without any overhead, seconds.
        overhead_before_s: overhead before the calibration, seconds.
        overhead_s: overhead now, measured minus replayed, seconds.
        predicted_before_s: iteration time predicted with the overhead before, seconds.
        predicted_s: iteration time predicted now, seconds.
    """

    measured_s: float
    replayed_s: float
    overhead_before_s: float
    overhead_s: float
    predicted_before_s: float
    predicted_s: float


def calibrate(path: Path, plan: Plan, measured_s: float, source: str = "--measured") -> tuple[Calibration, str]:
    """Return the calibration by an iteration that was measured with `plan`, and the text of the file at `path` with it.

    Args:
        path: the profile.yaml, or the job file, from which the plan was made.
        plan: the plan that the job ran with.
        measured_s: mean iteration time, seconds.
        source: the name of the measured time in error messages.

    Raises:
        UsageError: If the plan is of another profile, or the time cannot be that of the plan.
        PlannerError: If the file cannot be read, or its overhead cannot be changed.
    """
    if path.suffix.lower() == ".csv":
        raise UsageError(f"{path}: a CSV does not hold an overhead; name a profile.yaml, or a job file")
    if kind_of(path) == "job":
        document, profiles = job_document(path), Job.load(path).profiles
    else:
        document = profile_document(path)
        profiles = (Profile.load(path),)
    matching = [p for p in profiles if replace(p, overhead_s=plan.overhead_s).digest == plan.profile_digest]
    if not matching:
        raise UsageError(
            f"{path}: is not the profile that the plan was made from, which has the digest {plan.profile_digest[:12]}; "
            "name the profile.yaml, or the job file, that it was made from without further options"
        )
    replayed_s = replay(plan).time_s - plan.overhead_s
    if measured_s < _LEAST * replayed_s:
        raise UsageError(
            f"{source}: {measured_s:.6g} s is less than half of the {replayed_s:.6g} s of the replay; "
            "give the mean time of an iteration with this plan"
        )
    before_s, overhead_s = matching[0].overhead_s, round(measured_s - replayed_s, _DIGITS)
    result = Calibration(measured_s, replayed_s, before_s, overhead_s, replayed_s + before_s, replayed_s + overhead_s)
    return result, with_number(document, _KEY, overhead_s)
