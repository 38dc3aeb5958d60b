"""Calibration: the one constant of a job that makes replayed iteration times those that are measured."""

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
_LEAST = 0.5  #: of the replayed time; who measures less has measured something else
_DIGITS = 9  #: of seconds that are kept, so that 0.1234 is not written as 0.12340000000000018


@dataclass(frozen=True)
class Calibration:
    """What a measured iteration time says of a profile, or a job.

    Attributes:
        measured_s: iteration time with the plan, as measured, seconds.
        replayed_s: iteration time of the plan as replayed, without any overhead, seconds.
        overhead_before_s: the overhead that the profile had.
        overhead_s: the overhead that it has now: measured minus replayed.
        predicted_before_s: the iteration time of the plan that was predicted with the overhead before, seconds.
        predicted_s: that which is predicted now.
    """

    measured_s: float
    replayed_s: float
    overhead_before_s: float
    overhead_s: float
    predicted_before_s: float
    predicted_s: float


def calibrated(path: Path, plan: Plan, measured_s: float, source: str = "--measured") -> tuple[Calibration, str]:
    """What follows from an iteration that was measured with `plan`, and the text of the file at `path` with it.

    Args:
        path: the profile.yaml, or the job file, from which the plan was made.
        plan: what the job ran with.
        measured_s: mean seconds of an iteration.
        source: where that comes from, as error messages name it.

    Raises:
        UsageError: the plan is of another profile, or the time cannot be that of the plan.
        PlannerError: the file cannot be read, or written so that it has an overhead.
    """
    if path.suffix.lower() == ".csv":
        raise UsageError(f"{path}: a CSV carries no overhead; name a profile.yaml, or a job file")
    if kind_of(path) == "job":
        document, profiles = job_document(path), Job.load(path).profiles
    else:
        document = profile_document(path)
        profiles = (Profile.load(path),)
    of = [each for each in profiles if replace(each, overhead_s=plan.overhead_s).digest == plan.profile_digest]
    if not of:
        raise UsageError(
            f"{path}: is not what the plan was made from, whose profile has the digest {plan.profile_digest[:12]}; "
            "name the profile.yaml, or the job file, that it was made from without further options"
        )
    replayed_s = replay(plan).time_s - plan.overhead_s
    if measured_s < _LEAST * replayed_s:
        raise UsageError(
            f"{source}: {measured_s:.6g} s is less than half of the {replayed_s:.6g} s of the replay; "
            "give the mean time of an iteration with this plan"
        )
    before_s, overhead_s = of[0].overhead_s, round(measured_s - replayed_s, _DIGITS)
    result = Calibration(measured_s, replayed_s, before_s, overhead_s, replayed_s + before_s, replayed_s + overhead_s)
    return result, with_number(document, _KEY, overhead_s)
