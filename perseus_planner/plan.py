"""Plan: one measured clock for every computation of an iteration, with what it costs; plan.yaml in and out."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from perseus_planner.documents import Document, read_document
from perseus_planner.errors import PlanError, PlannerError
from perseus_planner.files import replacing, sha256
from perseus_planner.profiles import Measurement
from perseus_planner.schedules import Computation, Schedule

_FORMAT = "perseus-planner/plan"
_VERSION = 1
_NUMBERS = (
    "blocking_power_w", "deadline_s", "time_s", "energy_j", "bound_j", "baseline_time_s", "baseline_energy_j"
)  # fmt: skip
_KEYS = ("digest", "profile", "gpu", "origin", "schedule", *_NUMBERS, "measurements", "ranks")
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


@dataclass(frozen=True)
class Plan:
    """One clock per computation, and what an iteration with them takes: replayed from measured points, never a fit's.

    Attributes:
        schedule: the computations, rank by rank, in the order they run in.
        clocks: "3F17" -> MHz, for every computation, in the order of `schedule.computations()`.
        measurements: (stage, kind) -> clock in MHz -> the measurement behind it, for the clocks in use.
        profile_digest: `Profile.digest` of the profile it was computed from.
        gpu: the GPU's name, where the profile has one.
        origin: how the profile came to be, "measured" or "simulated".
        blocking_power_w: what a GPU draws while it waits, watts.
        deadline_s: the iteration time that was asked for, seconds.
        time_s: replayed iteration time, seconds; at most `deadline_s`.
        energy_j: replayed energy of such an iteration over all GPUs, joules, waiting included.
        bound_j: the least relaxed energy of an iteration of `time_s`, joules: no plan of that time is below it.
        baseline_time_s: replayed iteration time with all clocks at their maximum, seconds.
        baseline_energy_j: its energy, joules.
    """

    schedule: Schedule
    clocks: Mapping[str, int] = field(repr=False)
    measurements: Mapping[tuple[int, str], Mapping[int, Measurement]] = field(repr=False)
    profile_digest: str
    gpu: str | None
    origin: str
    blocking_power_w: float
    deadline_s: float
    time_s: float
    energy_j: float
    bound_j: float
    baseline_time_s: float
    baseline_energy_j: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "clocks", MappingProxyType(dict(self.clocks)))
        points = {key: MappingProxyType(dict(clocks)) for key, clocks in self.measurements.items()}
        object.__setattr__(self, "measurements", MappingProxyType(points))
        wanted = [str(computation) for computation in self.schedule.computations()]
        if list(self.clocks) != wanted:
            raise PlanError("clocks: are not those of the schedule's computations, in their order")
        for computation in self.schedule.computations():
            self.measurement(computation)

    @property
    def power_w(self) -> float:
        """Average power of an iteration over all GPUs, watts."""
        return self.energy_j / self.time_s

    @property
    def saving_j(self) -> float:
        """Joules per iteration saved against all clocks at their maximum; of an iteration of `time_s` each."""
        return self.baseline_energy_j - self.energy_j

    def measurement(self, computation: Computation) -> Measurement:
        """What was measured of `computation` at the clock that the plan gives it.

        Raises:
            PlanError: the plan has no such computation or no measurement of that clock.
        """
        try:
            return self.measurements[computation.stage, computation.kind][self.clocks[str(computation)]]
        except KeyError:
            raise PlanError(f"{computation}: has no clock, or no measurement of it, in this plan") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as YAML; equal plans give equal bytes.

        Raises:
            PlanError: the file cannot be written.
        """
        content = self._content()
        document = {"format": _FORMAT, "version": _VERSION, "digest": _digest(content), **content}
        text = yaml.dump(document, Dumper=_DUMPER, sort_keys=False, width=120, default_flow_style=None)
        try:
            with replacing(path) as file:
                file.write(text.encode())
        except OSError as error:
            raise PlanError(f"{path}: cannot be written: {error.strerror}; check the folder") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read what `save` wrote.

        Raises:
            PlanError: the file cannot be read, or is not exactly what was written.
        """
        document = read_document(Path(path), _FORMAT, _VERSION, _KEYS, (), PlanError)
        content = {key: value for key, value in document.values.items() if key not in ("format", "version", "digest")}
        try:
            intact = document.values["digest"] == _digest(content)
        except TypeError:  # a key that JSON has not, so that it was never written
            intact = False
        if not intact:
            raise PlanError(
                f"{document.where('digest')}: does not match the content, so the file was changed after it was "
                "written; make the plan again with `planner plan`"
            )
        return _from_content(document)

    def _content(self) -> dict[str, Any]:
        return {
            "profile": self.profile_digest,
            "gpu": self.gpu,
            "origin": self.origin,
            "schedule": self.schedule.name,
            **{name: getattr(self, name) for name in _NUMBERS},
            "measurements": {
                f"{stage}{kind}": {clock: [point.time_s, point.energy_j] for clock, point in clocks.items()}
                for (stage, kind), clocks in self.measurements.items()
            },
            "ranks": [{str(each): self.clocks[str(each)] for each in rank} for rank in self.schedule.ranks],
        }


def _digest(content: Mapping[str, Any]) -> str:
    return sha256(json.dumps(content, default=str).encode())


def _from_content(document: Document) -> Plan:
    values = document.values
    try:
        ranks = tuple(tuple(Computation.parse(text) for text in rank) for rank in values["ranks"])
        measurements = {
            Computation.parse(f"{text}0")[:2]: {clock: Measurement(clock, *point) for clock, point in clocks.items()}
            for text, clocks in values["measurements"].items()
        }
        return Plan(
            schedule=Schedule(str(values["schedule"]), ranks),
            clocks={text: clock for rank in values["ranks"] for text, clock in rank.items()},
            measurements=measurements,
            profile_digest=str(values["profile"]),
            gpu=None if values["gpu"] is None else str(values["gpu"]),
            origin=str(values["origin"]),
            **{name: float(values[name]) for name in _NUMBERS},
        )
    except (PlannerError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise PlanError(f"{document.path}: is not a plan: {error}; make it again with `planner plan`") from error
