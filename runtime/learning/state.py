"""What the autopilot has learnt, as a profile in a file, from which the next start of a job goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perseus_planner.errors import PlannerError
from perseus_planner.profiles.profiles import Profile

if TYPE_CHECKING:
    from pathlib import Path

    from perseus_planner.runtime.autopilot import AutopilotJob

STATE_FILE = "autopilot.yaml"
"""Its name, in the run folder or else in the folder in which rank 0 was started."""


class State:
    """The file, and the table of its rows beside it.

    Args:
        path: The file; None to keep nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def save(self, profile: Profile) -> None:
        """Replace the file.

        Raises:
            ProfileError: If it cannot be written.
        """
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            profile.save(self._path)

    def prior_of(self, job: AutopilotJob, learned: Profile | None) -> tuple[Profile | None, list[str]]:
        """Return what is known of this job's stages and GPUs, and what there is to say of it.

        Args:
            job: The job.
            learned: What this process has learnt before, by another order; None if nothing.
        """
        if learned is not None and _difference(learned, job) is None:
            return learned, []
        if self._path is None or not self._path.exists():
            return None, []
        try:
            found = Profile.load(self._path)
        except PlannerError as error:
            return None, [f"what was learnt before is not used: {error}"]
        difference = _difference(found, job)
        if difference is not None:
            return None, [f"what was learnt before is not used: {self._path} {difference}"]
        rows = sum(map(len, found.measurements.values()))
        return found, [f"the autopilot begins with {rows} rows that were learnt before, from {self._path}"]


def _difference(found: Profile, job: AutopilotJob) -> str | None:
    """Return why a profile is not one of this job; None if it is."""
    if found.gpu != job.gpu:
        return f"is of the GPU {found.gpu!r}, and this job has {job.gpu!r}"
    if found.gpus_per_stage != job.gpus_per_stage:
        return f"has {found.gpus_per_stage} GPUs in a stage, and this job {job.gpus_per_stage}"
    if set(found.measurements) != set(job.iteration.keys):
        return "has other stages or kinds of computations than this job"
    if found.control != "clock":
        return "is of power limits"
    return None
