"""The files of what was learnt: `autopilot.yaml`, and beside it what was learnt of other pipelines.

A job may be resumed with another number of stages, on another GPU, or with other modes. What it
learnt before is of no use then, until it is resumed as it was. So it is kept under a name of its
own, by stages and GPU, such as `autopilot.4-stages.nvidia-h100.yaml`, and found there again. A file
that cannot be read, such as one of a newer version, is never touched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.base.errors import PlannerError
from perseus_planner.profiles.modes import OWN
from perseus_planner.profiles.profiles import Profile

if TYPE_CHECKING:
    from perseus_planner.extensions.autopilot import AutopilotJob
    from perseus_planner.profiles.measurement import Measurement


class Note(NamedTuple):
    """What there is to say of the files."""

    text: str
    is_warning: bool = False


class LearntFiles(NamedTuple):
    """What is known of a job, and where what it learns goes."""

    prior: Profile | None  #: what was learnt of it before
    path: Path | None  #: the file to write; None if none can be written
    notes: tuple[Note, ...] = ()


def open_files(path: Path | None, job: AutopilotJob) -> LearntFiles:
    """Find what was learnt of a job before, and keep what was learnt of another one.

    Args:
        path: The file of what was learnt; None to keep nothing.
        job: The job.
    """
    if path is None:
        return LearntFiles(None, None)
    found: dict[Path, Profile] = {}
    # A file that cannot be read is left alone, and is a problem only under the job's own name.
    problem: PlannerError | None = None
    for file in (path, *_kept_beside(path)):
        try:
            if file.exists():
                found[file] = Profile.load(file)
        except PlannerError as error:
            if file == path:
                problem = error
    own, notes = _path_to_write(path, job, found, problem)

    # Of several files of this job, the one that knows the most.
    of_job = [file for file, profile in found.items() if difference(profile, job) is None]
    best = max(of_job, key=lambda file: row_count(found[file]), default=None)
    if best is None:
        return LearntFiles(None, own, tuple(notes))
    text = (
        f"the autopilot begins with {row_count(found[best])} rows that were learnt before, "
        f"from {best}"
    )
    return LearntFiles(found[best], own, (*notes, Note(text)))


def difference(profile: Profile, job: AutopilotJob) -> str | None:
    """Return why a profile is not one of this job; None if it is."""
    # Times and powers of another GPU, or of a stage on more of them, tell nothing of this one.
    if profile.gpu != job.gpu:
        return f"is for the GPU {profile.gpu!r}, and this job has {job.gpu!r}"
    if profile.gpus_per_stage != job.gpus_per_stage:
        return f"has {profile.gpus_per_stage} GPUs in a stage, and this job {job.gpus_per_stage}"
    stages = _stages(job)
    if profile.stages != stages:
        return f"is for {profile.stages} stages, and this job has {stages}"
    # Fewer modes than the job has are no difference, as the others are learnt.
    if profile.modes is not None and not set(profile.modes.ways) <= set(job.modes):
        return f"has the modes {', '.join(profile.modes.ways)}, and this job {', '.join(job.modes)}"
    # Modes are added to a profile later, so only the training's own way has to be complete.
    own = {key for key in profile.measurements if key.mode == OWN}
    if own != set(job.iteration.keys):
        return "has other kinds of computations than this job"
    if profile.control != job.control:
        return f"has the control {profile.control!r}, and this job {job.control!r}"
    return None


def row_count(profile: Profile) -> int:
    """Return the number of rows of a profile."""
    return sum(map(len, profile.measurements.values()))


def with_rows_of(profile: Profile, prior: Profile) -> Profile:
    """Return what was learnt, with the rows of `prior` at clocks that this job does not try, such
    as those of a job that was a dry run. They are scaled to what full clocks take now.
    """
    rows = dict(profile.measurements)
    for key, before in prior.measurements.items():
        if key in rows:
            rows[key] = _merged(rows[key], before)
    return replace(profile, measurements=rows)


def _merged(
    now: tuple[Measurement, ...], before: tuple[Measurement, ...]
) -> tuple[Measurement, ...]:
    known = {row.clock_mhz for row in now}
    # Old rows count relative to the highest clock, as the GPU may have become slower since.
    top = next((row for row in before if row.clock_mhz == now[0].clock_mhz), None)
    # Without a row at the same highest clock there is nothing to scale by.
    if top is None or not (top.has_work and now[0].has_work):
        return now
    time = now[0].time_s / top.time_s
    energy = now[0].energy_j / top.energy_j
    missing = (row for row in before if row.clock_mhz not in known)
    return (*now, *(_scaled(row, time, energy) for row in missing))


def _scaled(row: Measurement, time: float, energy: float) -> Measurement:
    evidence = row.evidence
    if evidence is not None:
        evidence = replace(
            evidence,
            time_stderr_s=evidence.time_stderr_s * time,
            energy_stderr_j=evidence.energy_stderr_j * energy,
        )
    return replace(row, time_s=row.time_s * time, energy_j=row.energy_j * energy, evidence=evidence)


def _path_to_write(
    path: Path, job: AutopilotJob, found: dict[Path, Profile], problem: PlannerError | None
) -> tuple[Path | None, list[Note]]:
    """Return the file to write, and what there is to say of the one at `path`.

    Args:
        path: The file of what was learnt.
        job: The job.
        found: The profiles of `path` and the files beside it.
        problem: Why the file at `path` cannot be read; None if it can, or there is none.
    """
    if problem is not None:
        return _path_beside_unread(path, job, found, problem)
    profile = found.get(path)
    if profile is None:
        return path, []
    why_other = difference(profile, job)
    if why_other is not None:
        return _path_of_other(path, profile, why_other)
    _keep_other_modes(path, profile, job)
    return path, []


def _path_beside_unread(
    path: Path, job: AutopilotJob, found: dict[Path, Profile], problem: PlannerError
) -> tuple[Path, list[Note]]:
    """Leave a file that cannot be read, as it may be one of a newer version: write the one of this
    job beside it, or a new one.
    """
    of_job = (file for file, profile in found.items() if difference(profile, job) is None)
    own = next(of_job, None)
    if own is None:
        own = next(file for file in _names(path, _stages(job), job.gpu) if _is_free(file))
    text = (
        f"what was learnt before is not used: {problem}; it is left as it is, and what this "
        f"job learns is written to {own}"
    )
    return own, [Note(text, is_warning=True)]


def _path_of_other(path: Path, profile: Profile, why_other: str) -> tuple[Path | None, list[Note]]:
    """Move what another job learnt aside, before its place is taken."""
    text = f"what was learnt before is not used: {path} {why_other}"
    try:
        kept = _keep(path, profile)
    # It must not be lost, so this job writes nothing rather than replace it.
    except PlannerError as error:
        note = Note(f"{text}; it cannot be kept ({error}), so nothing is written", is_warning=True)
        return None, [note]
    text = f"{text}; it is kept in {kept}, for when the job is resumed as before"
    return path, [Note(text, is_warning=True)]


def _keep_other_modes(path: Path, profile: Profile, job: AutopilotJob) -> None:
    """Keep what this job learnt with other modes than it has now: it goes on from there, with modes
    that the job as it was could not use.
    """
    modes = (OWN,) if profile.modes is None else tuple(profile.modes.ways)
    if set(modes) != set(job.modes):
        # The job goes on from it in any case, so a copy that cannot be kept stops nothing.
        with suppress(PlannerError):
            _keep(path, profile)


def _keep(path: Path, profile: Profile) -> Path:
    """Write a profile under a name of its own beside `path`, and return it. It replaces what is
    known less of the same pipeline, and nothing else.

    Raises:
        ProfileError: If it cannot be written.
    """
    for file in _names(path, profile.stages, profile.gpu):
        if not _is_free(file):
            try:
                before = Profile.load(file)
            except PlannerError:
                continue
            is_same = _subject(before) == _subject(profile)
            if not is_same or row_count(before) > row_count(profile):
                continue
        profile.save(file)
        return file
    raise AssertionError("there is always another name")


def _is_free(file: Path) -> bool:
    return not file.exists() and not file.with_suffix(".csv").exists()


def _subject(profile: Profile) -> tuple[object, ...]:
    """Return what tells pipelines apart, of which different things are learnt."""
    modes = None if profile.modes is None else tuple(sorted(profile.modes.ways))
    keys = tuple(profile.measurements)
    return profile.gpu, profile.gpus_per_stage, profile.control, modes, keys


def _stages(job: AutopilotJob) -> int:
    return len({key.stage for key in job.iteration.keys})


def _names(path: Path, stages: int, gpu: str | None) -> Iterator[Path]:
    """Yield the names for what is known of a pipeline, best first."""
    of_gpu = re.sub(r"[^a-z0-9]+", "-", (gpu or "unknown gpu").lower()).strip("-")
    stem = f"{path.stem}.{stages}-stage{'s' * (stages > 1)}.{of_gpu or 'gpu'}"
    yield path.with_name(f"{stem}{path.suffix}")
    for number in count(2):
        yield path.with_name(f"{stem}.{number}{path.suffix}")


def _kept_beside(path: Path) -> list[Path]:
    """Return the files beside `path` that have such a name."""
    name = re.compile(rf"{re.escape(path.stem)}\.\d+-stages?\..+{re.escape(path.suffix)}")
    if not path.parent.is_dir():
        return []
    return sorted(file for file in path.parent.iterdir() if name.fullmatch(file.name))
