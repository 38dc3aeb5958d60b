"""Job files, as settings of a training job; and jobs: the pipelines of such a job with their
profiles, and the schedule that all of them run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from perseus_planner import schedules
from perseus_planner.base.documents import Document, load, read_document
from perseus_planner.base.errors import (
    JobError,
    PlannerError,
    ProfileError,
    ScheduleError,
    shown,
)
from perseus_planner.base.fields import Checked, Reader, keys
from perseus_planner.base.units import (
    COUNT,
    ENERGY,
    FACTOR,
    STAGE,
    TIME,
    Count,
    Offset,
    PowerBound,
    Share,
    Wait,
    Watts,
)
from perseus_planner.profiles.groups import (
    on_each_gpu,
    slowed,
    stage_by_stage,
    tensor_group,
    waiting_longer,
    within_power_limit,
)
from perseus_planner.profiles.jitter import Tail
from perseus_planner.profiles.measurement import ClockChange
from perseus_planner.profiles.profiles import Profile
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.schedules.layouts import CONDITION, read_layout
from perseus_planner.schedules.pipeline import FixedOperation, Transfer, Variant

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from perseus_planner.schedules import Schedule

_FORMAT = "perseus-planner/job"
_VERSION = 1
_GRIDS = (".csv", ".txt")
_OPERATION = re.compile(r"[a-z][a-z-]*")
_BUILDER = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")

Source = Path | tuple[Path, ...] | tuple[tuple[Path, ...], ...]
"""One profile of all stages; or one for each stage; or for each stage one for each GPU of its
tensor group.
"""
Power = float | tuple[float, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class ReplicaSettings:
    """The settings of one kind of data-parallel pipelines; None for those of the job."""

    count: Count  #: number of pipelines
    profile: Annotated[Source, Reader(_source)] | None = None  #: their measurements
    #: what their GPUs draw while they wait, watts.
    blocking_power_w: Watts | tuple[Watts, ...] | None = None
    #: stage -> how many times as long its computations take.
    slow_stages: Annotated[Mapping[int, float], Reader(_slow_stages)] | None = None


@dataclass(frozen=True)
class Correction:
    """How replays of a job were corrected by measured iteration times, beside its overhead."""

    #: seconds that each transfer between stages on different ranks takes beside the job's
    #: `transfer`.
    hop_latency_s: Wait = 0.0
    #: kind, such as "F" -> how many times as long as profiled a computation of it takes. Its GPUs
    #: wait in the time that is added.
    time_factors: Annotated[Mapping[str, float], Reader(_time_factors)] = field(
        default_factory=dict
    )


@dataclass(frozen=True)
class Settings(Checked, error=JobError):
    """The content of a job file; fields that it leaves out are None or empty.

    Raises:
        JobError: If a number breaks its rule.
    """

    #: measurements of the stages; `planner profile` writes them there.
    profile: Annotated[Source, Reader(_source)]
    #: what a GPU of the profile draws while it waits, watts, or one number for each stage; replaces
    #: the profile's. Required for a CSV.
    blocking_power_w: Watts | tuple[Watts, ...] | None = None
    #: a name of `schedules.schedule_names()`, or the path of a text grid.
    schedule: Annotated[str | Path, Reader(_read_schedule)] | None = None
    microbatches: Count | None = None  #: number of microbatches of one iteration
    #: number of pipeline ranks; None for as many as the stages of the profile need.
    ranks: Count | None = None
    virtual_stages: Count | None = None  #: number of stages of each rank
    #: microbatches that go through a stage before the rank's next one gets its turn (interleaved
    #: 1F1B).
    microbatch_group: Count | None = None
    stages: Count | None = None  #: number of pipeline stages, to be checked
    #: what each stage holds, as `schedules.layouts.read_layout` reads it, without "=" but for
    #: parts; replaces the profile's. Reports say which layer to move.
    layout: str | None = None
    #: number of GPUs of a stage; a profile that was measured on one GPU holds for each of them.
    tensor_parallel: Count | None = None
    transfer: Transfer = field(default_factory=Transfer)  #: the time of transfers between stages
    #: operations that are neither forward nor backward.
    operations: Annotated[tuple[FixedOperation, ...], Reader(_operations)] = ()
    #: computations that are measured apart.
    variants: Annotated[tuple[Variant, ...], Reader(_variants)] = ()
    #: stage -> how many times as long its computations take now.
    slow_stages: Annotated[Mapping[int, float], Reader(_slow_stages)] = field(default_factory=dict)
    #: the power limit under which the GPUs will run, watts, if it is lower than when they were
    #: profiled: clocks that it would cap are not used.
    gpu_power_limit_w: PowerBound | None = None
    #: calibrated seconds of an iteration that are not replayed; replaces the profile's.
    overhead_s: Offset | None = None
    #: what the calibration found beside the overhead.
    correction: Correction = field(default_factory=Correction)
    #: calibrated jitter of computations, a relative standard deviation; replaces the profile's.
    jitter: Share | None = None
    #: the same of what all computations of a GPU have in common in an iteration.
    jitter_common: Share | None = None
    jitter_tail: Tail | None = None  #: the few that take much longer; replaces the profile's
    #: by how much equal GPUs differ, relative; replaces the profile's.
    gpu_spread: Share | None = None
    clock_change: ClockChange | None = None  #: the cost of a clock change; replaces the profile's
    #: the pipelines; empty for one.
    replicas: Annotated[tuple[ReplicaSettings, ...], Reader(_replicas)] = ()
    #: tokens that all pipelines together train on in an iteration.
    tokens_per_iteration: Count | None = None
    #: samples that all pipelines together train on in an iteration.
    samples_per_iteration: Count | None = None
    #: the function that builds a stage to be profiled, "package.module:function".
    stage: Annotated[str, Reader(_stage)] | None = None
    gpu: str | None = None  #: the GPU that stages are profiled on, as `gpu.open_gpu` reads it
    file: Path | None = None  #: the job file


def schedule_of(text: str, folder: Path) -> str | Path:
    """Return the name of a schedule, or the path of a text grid, which is in `folder` if it is
    relative.
    """
    return folder / text if text.lower().endswith(_GRIDS) else text


def job_document(path: Path) -> Document:
    """Read the job file at `path` as a document, which has known keys only.

    Raises:
        JobError: If it cannot be read, or is not a job file.
    """
    return read_document(path, _FORMAT, _VERSION, *_KEYS, JobError)


def read_settings(path: Path) -> Settings:
    """Read the job file at `path`. Paths in it are relative to its folder.

    Raises:
        JobError: If it cannot be read or is not a job file; names the line and the remedy.
    """
    return load(Settings, job_document(path), file=path)


def _make(document: Document, key: str, make: Callable[[], T]) -> T:
    """Return the result of `make`; an error of it gets the place of `key`."""
    try:
        return make()
    except PlannerError as error:
        raise document.refusal(key, str(error)) from None


def _source(document: Document, key: str) -> Source:
    value = document.values[key]
    folder = document.path.parent
    # Paths in a file are relative to its folder.
    if isinstance(value, str) and value and value.isprintable():
        return folder / value
    if isinstance(value, list) and value:
        # One file for each stage.
        if all(isinstance(name, str) and name for name in value):
            return tuple(folder / name for name in value)
        # One list for each stage: entries that are none become empty lists, which are refused with
        # the rest.
        groups = [entry if isinstance(entry, list) else [] for entry in value]
        is_alike = len({*map(len, groups)}) == 1 and bool(groups[0])
        if is_alike and all(isinstance(name, str) and name for group in groups for name in group):
            return tuple(tuple(folder / name for name in group) for group in groups)
    raise document.refusal(
        key,
        f"{shown(value)} is not a profile: name a file; or a list of files, one for each stage; "
        "or a list of lists, one for each stage, with a file for each of its GPUs, equally many",
    )


def _read_schedule(document: Document, key: str) -> str | Path:
    return schedule_of(document.text(key), document.path.parent)


def _operations(document: Document, key: str) -> tuple[FixedOperation, ...]:
    return tuple(
        map(_operation, document.sections(key, ("name", "when", "time_s"), ("energy_j", "where")))
    )


def _operation(entry: Document) -> FixedOperation:
    if not _OPERATION.fullmatch(name := entry.text("name")):
        raise entry.refusal(
            "name",
            f"{shown(name)} is not the name of an operation: write lower-case letters, hyphens",
        )
    time_s = entry.number("time_s", TIME)
    energy_j = (
        entry.number("energy_j", ENERGY) if entry.values.get("energy_j") is not None else None
    )
    where = entry.numbers("where", STAGE) if "where" in entry.values else None
    return _make(
        entry, "when", lambda: FixedOperation(name, entry.values["when"], time_s, energy_j, where)
    )


def _variants(document: Document, key: str) -> tuple[Variant, ...]:
    return tuple(map(_variant, document.sections(key, ("kind", "microbatches"), ("stages",))))


def _variant(entry: Document) -> Variant:
    # The kind is checked first, so that its error names its line.
    _make(entry, "kind", lambda: Variant(entry.values["kind"], "all"))
    stages = entry.numbers("stages", STAGE) if "stages" in entry.values else None
    which = entry.values["microbatches"]
    chosen: Any = which if isinstance(which, str) else entry.numbers("microbatches", STAGE)
    return _make(entry, "microbatches", lambda: Variant(entry.values["kind"], chosen, stages))


def _time_factors(document: Document, key: str) -> Mapping[str, float]:
    factors = document.section(key, (), tuple("FBIW"))
    return {kind: factors.number(kind, FACTOR) for kind in factors.values}


def _slow_stages(document: Document, key: str) -> Mapping[int, float]:
    entries = document.table(key, "3: 1.15, stage and slowdown")
    return {
        STAGE.read(text, entries.where(text), JobError): entries.number(text, FACTOR)
        for text in entries.values
    }


def _stage(document: Document, key: str) -> str:
    if not _BUILDER.fullmatch(text := document.text(key)):
        raise document.refusal(
            key, f"{shown(text)} is not a function: write package.module:function"
        )
    return text


def _replicas(document: Document, key: str) -> tuple[ReplicaSettings, ...]:
    if not isinstance(document.values[key], list):
        return (ReplicaSettings(document.number(key, COUNT)),)
    entries = document.parts(key, ReplicaSettings)
    if not entries:
        raise document.refusal(
            key, "is empty; give how many pipelines there are, or an entry for each kind of them"
        )
    return entries


_REQUIRED, _OPTIONAL = keys(Settings)
_KEYS = _REQUIRED, [key for key in _OPTIONAL if key != "file"]


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
    samples_per_iteration: int | None = None  #: samples of an iteration of all; None if unknown
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
        # A job without replicas is one pipeline.
        replicas = settings.replicas or (ReplicaSettings(1),)
        profiles: dict[str, Profile] = {}
        counts: dict[str, int] = {}
        for number, replica in enumerate(replicas):
            try:
                profile = _profile(settings, replica)
            # With several kinds, the error has to say which.
            except ProfileError as error:
                raise (
                    ProfileError(f"replicas, entry {number}: {error}")
                    if len(replicas) > 1
                    else error
                ) from None
            # Kinds with equal profiles are one kind, so each is planned once.
            profiles[profile.digest] = profile
            counts[profile.digest] = counts.get(profile.digest, 0) + replica.count
        # Whether the schedule fits is checked by the first profile; others are checked with their
        # graphs.
        first = next(iter(profiles.values()))
        settings = _with_iteration(settings, first.iteration)
        schedule = _schedule(settings, first.stages)
        return cls(
            schedule=schedule,
            profiles=tuple(
                _laid_out(profile_of_kind, settings, schedule)
                for profile_of_kind in profiles.values()
            ),
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
    # What a kind of pipelines does not say is as in the job.
    source = settings.profile if replica.profile is None else replica.profile
    power_w = (
        settings.blocking_power_w if replica.blocking_power_w is None else replica.blocking_power_w
    )
    slow = settings.slow_stages if replica.slow_stages is None else replica.slow_stages
    gpus = settings.tensor_parallel
    # One profile of all stages, or one for each stage, which may in turn be one for each GPU.
    if isinstance(source, Path):
        profile = _grouped([_loaded(source, power_w, settings)], gpus)
    else:
        powers_w = _for_each(power_w, len(source))
        groups = [[entry] if isinstance(entry, Path) else entry for entry in source]
        # Profiles of each GPU say how large the group is; a number beside them must agree.
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
    # In this order: a limit cuts clocks that were measured, before slow stages change their times.
    if settings.gpu_power_limit_w is not None:
        profile = within_power_limit(profile, settings.gpu_power_limit_w)
    profile = slowed(profile, slow) if slow else profile
    # Last, as calibration has found them for rows as they are used.
    factors = settings.correction.time_factors
    return waiting_longer(profile, factors) if factors else profile


def _laid_out(profile: Profile, settings: Settings, schedule: Schedule) -> Profile:
    """Return the profile with the layout of the settings, checked against the schedule."""
    if settings.layout is None:
        return profile
    ranks = len(schedule.ranks)
    try:
        layout = read_layout(settings.layout, stages=schedule.stages)
        layout.check(ranks=ranks if schedule.stages % ranks == 0 else None)
    except ScheduleError as error:
        if settings.file is None:
            raise
        raise job_document(settings.file).refusal("layout", str(error)) from None
    return replace(profile, conditions={**profile.conditions, CONDITION: str(layout)})


def _loaded(path: Path, power_w: Power | None, settings: Settings) -> Profile:
    """Return the profile at `path`, with the fields that the job replaces."""
    # What the job says replaces what the profile says.
    names = (
        "overhead_s",
        "jitter",
        "jitter_common",
        "jitter_tail",
        "gpu_spread",
        "clock_change",
    )
    instead = {name: getattr(settings, name) for name in names}
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
    # Virtual stages follow from the ranks.
    of_ranks = ("virtual_stages",) if settings.ranks is not None else ()
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
            f"no schedule is given; {_give('schedule')}: "
            f"{', '.join(schedules.schedule_names())}, or a text grid"
        )
    if isinstance(settings.schedule, Path):
        if settings.microbatch_group is not None:
            raise JobError(
                "microbatch_group does not apply to a text grid, which has an order; leave it out"
            )
        schedule = schedules.load_grid(settings.schedule)
    else:
        schedule = _generated(settings, settings.schedule, profiled)
    # What the file says beside the schedule must agree with it: two numbers would be two jobs.
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
            noun = "rank" if of_ranks else "stage"
            raise JobError(
                f"operation {operation.name}, where: {noun} {number} does not exist; {noun}s are 0 "
                f"to {count - 1}"
            )
    # The kind is the last letter: "before F".
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
    # Each file once, in the order in which they were named.
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
