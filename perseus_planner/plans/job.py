"""Jobs: the pipelines of a training job with their profiles, and the schedule that all of them
run.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perseus_planner import schedules
from perseus_planner.base.errors import JobError, ProfileError
from perseus_planner.plans.settings import Power, ReplicaSettings, Settings, Source, read_settings
from perseus_planner.profiles.groups import (
    on_each_gpu,
    slowed,
    stage_by_stage,
    tensor_group,
    waiting_longer,
    within_power_limit,
)
from perseus_planner.profiles.profiles import Profile
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.schedules.pipeline import FixedOperation, Transfer, Variant

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from perseus_planner.schedules import Schedule


@dataclass(frozen=True)
class Job:
    """A training job: pipelines that run one schedule side by side, each kind of them given once.

    Raises:
        JobError: If an operation is at a rank, stage or computation that the schedule does not
            have.
    """

    schedule: Schedule  #: the schedule of each pipeline
    #: the profile of each kind of pipeline; includes tensor parallelism and slow stages.
    profiles: tuple[Profile, ...]
    counts: tuple[int, ...]  #: the number of pipelines of each kind, aligned with `profiles`
    transfer: Transfer = field(default_factory=Transfer)  #: the time of transfers between stages
    operations: tuple[FixedOperation, ...] = ()  #: operations that are neither forward nor backward
    variants: tuple[Variant, ...] = ()  #: computations that are measured apart
    #: tokens that all pipelines together train on in an iteration; None if unknown.
    tokens_per_iteration: int | None = None
    samples_per_iteration: int | None = None  #: likewise, samples
    files: tuple[Path, ...] = field(default=(), compare=False)  #: the files that were read

    def __post_init__(self) -> None:
        for operation in self.operations:
            _check_location(operation, self.schedule)

    @classmethod
    def load(cls, path: str | os.PathLike[str], **overrides: Any) -> Job:
        """Read a job file, and the profiles and the text grid that it names.

        Args:
            path: the file, YAML.
            overrides: fields of `settings.Settings` that replace those of the file.

        Raises:
            JobError: If it cannot be read or is not a job; names the line and the remedy.
            PlannerError: If a file that it names cannot be used.
        """
        return cls.of(replace(read_settings(Path(path)), **overrides))

    @classmethod
    def of(cls, settings: Settings) -> Job:
        """Make the job that `settings` describe, and read the files that they name.

        Raises:
            JobError: If they do not fit together, or something is missing.
            PlannerError: If a file that they name cannot be used.
        """
        replicas = settings.replicas or (ReplicaSettings(1),)
        profiles: dict[str, Profile] = {}
        counts: dict[str, int] = {}
        for number, replica in enumerate(replicas):
            try:
                profile = _profile(settings, replica)
            except ProfileError as error:
                raise (
                    ProfileError(f"replicas, entry {number}: {error}")
                    if len(replicas) > 1
                    else error
                ) from None
            profiles[profile.digest] = profile
            counts[profile.digest] = counts.get(profile.digest, 0) + replica.count
        first = next(iter(profiles.values()))
        settings = _with_iteration(settings, first.iteration)
        return cls(
            schedule=_schedule(settings, first.stages),
            profiles=tuple(profiles.values()),
            counts=tuple(counts.values()),
            transfer=settings.transfer.later(settings.correction.hop_latency_s),
            operations=settings.operations,
            variants=settings.variants,
            tokens_per_iteration=settings.tokens_per_iteration,
            samples_per_iteration=settings.samples_per_iteration,
            files=_files(settings),
        )

    def dags(self) -> tuple[PipelineDag, ...]:
        """Return the graph of an iteration of each kind of pipeline, aligned with `counts`.

        Raises:
            ProfileError: If a profile does not fit the schedule.
            ScheduleError: If the schedule cannot run, or transfers or variants do not fit it.
        """
        extras = {
            "transfer": self.transfer,
            "operations": self.operations,
            "variants": self.variants,
        }
        dags = []
        for number, profile in enumerate(self.profiles):
            try:
                dags.append(PipelineDag.from_schedule(profile, self.schedule, **extras))
            except ProfileError as error:
                kind = f"pipelines of kind {number}: " if len(self.profiles) > 1 else ""
                raise ProfileError(f"{kind}{error}") from None
        return tuple(dags)


def _profile(settings: Settings, replica: ReplicaSettings) -> Profile:
    """Return the profile of one kind of pipelines."""
    source = settings.profile if replica.profile is None else replica.profile
    power_w = (
        settings.blocking_power_w if replica.blocking_power_w is None else replica.blocking_power_w
    )
    slow = settings.slow_stages if replica.slow_stages is None else replica.slow_stages
    gpus = settings.tensor_parallel
    if isinstance(source, Path):
        profile = _grouped([_loaded(source, power_w, settings)], gpus)
    else:
        powers_w = _for_each(power_w, len(source))
        groups = [[entry] if isinstance(entry, Path) else entry for entry in source]
        grouped = isinstance(source[0], tuple)
        if grouped and gpus not in (None, len(groups[0])):
            raise JobError(
                f"tensor_parallel is {gpus}, but the profile names {len(groups[0])} GPUs for each "
                "stage; correct one"
            )
        loaded = [
            [_loaded(path, stage_w, settings) for path in group]
            for group, stage_w in zip(groups, powers_w, strict=True)
        ]
        profile = stage_by_stage([_grouped(group, None if grouped else gpus) for group in loaded])
    if settings.gpu_power_limit_w is not None:
        profile = within_power_limit(profile, settings.gpu_power_limit_w)
    profile = slowed(profile, slow) if slow else profile
    factors = settings.correction.time_factors
    return waiting_longer(profile, factors) if factors else profile


def _loaded(path: Path, power_w: Power | None, settings: Settings) -> Profile:
    """Return the profile at `path`, with the fields that the job replaces."""
    instead = {name: getattr(settings, name) for name in ("overhead_s", "jitter", "clock_change")}
    given = {name: value for name, value in instead.items() if value is not None}
    return replace(Profile.load(path, blocking_power_w=power_w), **given)


def _grouped(profiles: Sequence[Profile], gpus: int | None) -> Profile:
    """Return one profile of stages of `gpus` GPUs; a profile of single GPUs holds for each of
    them.
    """
    profile = profiles[0] if len(profiles) == 1 else tensor_group(profiles)
    if gpus is None or profile.gpus_per_stage == gpus:
        return profile
    if profile.gpus_per_stage != 1:
        raise JobError(
            f"tensor_parallel is {gpus}, but the profile was measured with "
            f"{profile.gpus_per_stage} GPUs for each stage; correct one"
        )
    return on_each_gpu(profile, gpus)


def _for_each(power_w: Power | None, stages: int) -> Sequence[float | None]:
    if not isinstance(power_w, tuple):
        return (power_w,) * stages
    if len(power_w) != stages:
        raise JobError(
            f"blocking_power_w has {len(power_w)} numbers for {stages} profiles; give one for "
            "each, or one for all"
        )
    return power_w


def _with_iteration(settings: Settings, iteration: Mapping[str, Any]) -> Settings:
    """Return the settings with the schedule that the profile was measured in, unless they name
    another.
    """
    if settings.schedule not in (None, iteration.get("schedule")):
        return settings
    of_ranks = (
        ("virtual_stages",) if settings.ranks is not None else ()
    )  # these follow from the ranks
    missing = {name: value for name, value in iteration.items() if getattr(settings, name) is None}
    return replace(
        settings, **{name: value for name, value in missing.items() if name not in of_ranks}
    )


def _schedule(settings: Settings, profiled: int) -> Schedule:
    """Return the schedule; it has as many stages as were profiled, unless the settings have a
    number.
    """
    if settings.schedule is None:
        raise JobError(
            f"no schedule is given; {_give('schedule')}: {', '.join(schedules.NAMES)}, or a text "
            "grid"
        )
    if isinstance(settings.schedule, Path):
        if settings.microbatch_group is not None:
            raise JobError(
                "microbatch_group does not apply to a text grid, which has an order; leave it out"
            )
        schedule = schedules.load_grid(settings.schedule)
    else:
        schedule = _generated(settings, settings.schedule, profiled)
    ranks = len(schedule.ranks)
    counts = {"ranks": ranks, "microbatches": schedule.microbatches, "stages": schedule.stages}
    if settings.virtual_stages is not None:
        counts["virtual_stages"] = schedule.stages // ranks if schedule.stages % ranks == 0 else 0
    for name, value in counts.items():
        if getattr(settings, name) not in (None, value):
            raise JobError(
                f"{name} is {getattr(settings, name)}, but schedule {schedule} "
                f"has {value or 'ranks with different numbers of stages'}; correct one"
            )
    return schedule


def _generated(settings: Settings, name: str, profiled: int) -> Schedule:
    if settings.microbatches is None:
        raise JobError(
            f"the number of microbatches of an iteration is missing; {_give('microbatches')}"
        )
    return schedules.generate_for_stages(
        name,
        profiled if settings.stages is None else settings.stages,
        microbatches=settings.microbatches,
        ranks=settings.ranks,
        virtual_stages=settings.virtual_stages,
        group=settings.microbatch_group,
    )


def _give(name: str) -> str:
    return f"give --{name.replace('_', '-')}, or {name} in a job file"


def _check_location(operation: FixedOperation, schedule: Schedule) -> None:
    of_ranks = operation.when in ("start", "end")
    count = len(schedule.ranks) if of_ranks else schedule.stages
    for number in operation.where or ():
        if number not in range(count):
            what = "rank" if of_ranks else "stage"
            raise JobError(
                f"operation {operation.name}, where: {what} {number} does not exist; {what}s are 0 "
                f"to {count - 1}"
            )
    kind = operation.when[-1]
    if not of_ranks and all(computation.kind != kind for computation in schedule.computations()):
        raise JobError(
            f"operation {operation.name}, when: schedule {schedule} has no {kind}; name a kind "
            "that it has"
        )


def _files(settings: Settings) -> tuple[Path, ...]:
    sources = [
        settings.profile,
        *(replica.profile for replica in settings.replicas if replica.profile is not None),
    ]
    named = [
        settings.file,
        settings.schedule,
        *(path for source in sources for path in _paths(source)),
    ]
    return tuple(dict.fromkeys(path for path in named if isinstance(path, Path)))


def _paths(source: Source) -> Sequence[Path]:
    if isinstance(source, Path):
        return (source,)
    return [path for entry in source for path in ((entry,) if isinstance(entry, Path) else entry)]
