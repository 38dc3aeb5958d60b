"""Read job files: the settings of a training job; the files that they name are not read here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from perseus_planner.base.documents import Document, load, read_document
from perseus_planner.base.errors import JobError, PlannerError, shown
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
from perseus_planner.profiles.measurement import ClockChange
from perseus_planner.schedules.pipeline import FixedOperation, Transfer, Variant

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
    #: a name of `schedules.NAMES`, or the path of a text grid.
    schedule: Annotated[str | Path, Reader(_schedule)] | None = None
    microbatches: Count | None = None  #: number of microbatches of one iteration
    #: number of pipeline ranks; None for as many as the stages of the profile need.
    ranks: Count | None = None
    virtual_stages: Count | None = None  #: number of stages of each rank
    #: microbatches that go through a stage before the rank's next one gets its turn (interleaved
    #: 1F1B).
    microbatch_group: Count | None = None
    stages: Count | None = None  #: number of pipeline stages, to be checked
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
    clock_change: ClockChange | None = None  #: the cost of a clock change; replaces the profile's
    #: the pipelines; empty for one.
    replicas: Annotated[tuple[ReplicaSettings, ...], Reader(_replicas)] = ()
    #: tokens that all pipelines together train on in an iteration.
    tokens_per_iteration: Count | None = None
    samples_per_iteration: Count | None = None  #: likewise, samples
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
    value, folder = document.values[key], document.path.parent
    if isinstance(value, str) and value and value.isprintable():
        return folder / value
    if isinstance(value, list) and value:
        if all(isinstance(name, str) and name for name in value):
            return tuple(folder / name for name in value)
        groups = [entry if isinstance(entry, list) else [] for entry in value]
        alike = len({*map(len, groups)}) == 1 and groups[0]
        if alike and all(isinstance(name, str) and name for group in groups for name in group):
            return tuple(tuple(folder / name for name in group) for group in groups)
    raise document.refusal(
        key,
        f"{shown(value)} is not a profile: name a file; or a list of files, one for each stage; "
        "or a list of lists, one for each stage, with a file for each of its GPUs, equally many",
    )


def _schedule(document: Document, key: str) -> str | Path:
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
