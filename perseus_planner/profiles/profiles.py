"""Profile: what every stage's forward and backward takes, in seconds and joules, at every measured
clock.

A profile is a CSV file with the columns `stage,instruction,frequency,time,energy` (MHz, seconds and
joules of one computation on one GPU), as Zeus documents it for its pipeline frequency optimizer,
and optionally a YAML file beside it that holds the rest: the blocking power, the GPU, and how the
numbers came to be.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import yaml

from perseus_planner.base.documents import Document, read_document
from perseus_planner.base.errors import PlannerError, ProfileError, shown
from perseus_planner.base.fields import Checked, CheckedBy, Choice, dump, restore, rules, types
from perseus_planner.base.files import replacing, sha256
from perseus_planner.base.tables import WHOLE, Column, Sheet, lay_out, make_frame
from perseus_planner.base.units import COUNT, STAGE, Count, Offset, Share, Watts
from perseus_planner.profiles.csv_file import (
    CONTROLS,
    WORDS,
    Row,
    Table,
    csv_bytes,
    read_table,
    setting_of,
    unit_of,
    word_of,
)
from perseus_planner.profiles.jitter import Jitter, Tail
from perseus_planner.profiles.keys import AnyKey, ByKey, Key, is_kind
from perseus_planner.profiles.measurement import ClockChange, Evidence, Measurement
from perseus_planner.profiles.modes import OWN, Mode, Modes, is_mode_name
from perseus_planner.profiles.plausible import (
    Doubt,
    column_of,
    find_doubts,
    power_problem,
    refuse_doubtful,
)

if TYPE_CHECKING:
    import pandas as pd

    from perseus_planner.profiles.estimation import Estimate

_FORMAT = "perseus-planner/profile"
_VERSION = 1
_COUNTS = ("microbatches", "virtual_stages", "microbatch_group")  # of the iteration
_ROUNDED = 1e-4  #: relative; rows of four digits and more scatter less around a curve
_YAML_SUFFIXES = (".yaml", ".yml")
_OF_STAGES = ("blocking_power_w", "shared_time_error", "shared_energy_error")
DOUBTS = "doubts"
"""The condition that holds what is unusual about the rows of a file."""
_EVIDENCE = (
    "iteration",
    "conditions",
    "shared_time_error",
    "shared_energy_error",
    "jitter",
    "jitter_common",
    "jitter_tail",
    "gpu_spread",
)
ASSUMED_SPREAD = 0.01
"""The `Profile.gpu_spread` that plans assume where none was measured, by hand.

Equal GPUs under a power limit differ more: by 8 % in the mean of five clusters, and by up to 22 %
(Sinha et al., "Not All GPUs Are Created Equal", SC'22).
"""


@dataclass(frozen=True)
class Profile(Checked, error=ProfileError):
    """The measurements of every computation of a pipeline; immutable, and checked when it is made.

    Raises:
        ProfileError: If the values are not such a profile.
    """

    #: (stage, kind) -> measurements, highest clock first; (stage, kind, mode) for those in another
    #: mode than the training's own (`profiles.keys.Key`). Stages count from 0 without a hole; the
    #: kind is "F" (forward), "B" (backward), "I" or "W" (gradient of the inputs, of the weights),
    #: or one of them with a suffix that you choose, such as "B.sync"; each computation has every
    #: mode. Each stage has F, and B or both I and W; F of stage 0 alone is a whole iteration, of
    #: the schedule "whole". One clock is enough. A kind without work, such as B of a frozen first
    #: stage, takes 0 s and 0 J at every clock; one row is enough to say so.
    measurements: Mapping[AnyKey, tuple[Measurement, ...]] = field(repr=False)
    #: what a stage's GPUs draw while they wait for their neighbours, watts, 0 or more; or one
    #: number for each stage.
    blocking_power_w: Watts | tuple[Watts, ...]
    #: the GPU's name, one line of printable text.
    gpu: Annotated[str, CheckedBy(_checked_gpu)] | None = None
    #: the source of the numbers, "measured" or "simulated"; "traced" if they were seen at one clock
    #: and are estimates at all others; "unknown" of a CSV without a YAML.
    origin: Annotated[str, Choice("measured", "simulated", "traced", "unknown")] = "unknown"
    #: number of GPUs of a stage (tensor parallelism). Energies and powers are sums over them.
    gpus_per_stage: Count = 1
    #: calibration: a measured iteration time minus the replayed one, seconds. GPUs wait meanwhile.
    overhead_s: Offset = 0.0
    #: the cost of a clock change; None if it was not measured.
    clock_change: Annotated[ClockChange, CheckedBy(_checked_change)] | None = None
    #: what was set for each measurement: "clock", "power-limit", or "observed" if nothing was set
    #: and the GPU chose the clocks.
    control: Annotated[str, Choice(*CONTROLS)] = "clock"
    #: the relative standard error that the times of a stage's rows share, as the GPU drifts: how
    #: far apart those at its highest clock were at the begin, in the middle and at the end of its
    #: sweep. A number of 0 or more, 0.0 if it was not measured; or one for each stage.
    shared_time_error: Share | tuple[Share, ...] = field(default=0.0, compare=False, repr=False)
    #: the same of their energies.
    shared_energy_error: Share | tuple[Share, ...] = field(default=0.0, compare=False, repr=False)
    #: calibration: the relative standard deviation of a computation's time from one time it runs
    #: to the next, each for itself; 0.0 if it was not measured.
    jitter: Share = 0.0
    #: calibration: the relative standard deviation of what all computations of a GPU have in common
    #: in an iteration; 0.0 if it was not measured.
    jitter_common: Share = 0.0
    #: calibration: the few computations that take much longer; None if it saw none.
    jitter_tail: Annotated[Tail, CheckedBy(_checked_tail)] | None = None
    #: by how much equal GPUs differ: the relative standard deviation of the times of all rows of a
    #: stage together, its highest clock's too, on another GPU than the one that was profiled. None
    #: if it was not measured; see `assumed_spread`.
    gpu_spread: Share | None = field(default=None, compare=False, repr=False)
    #: what the modes of the measurements set, and how they are tied; None if each computation runs
    #: in one way.
    modes: Annotated[Modes | None, CheckedBy(_checked_modes)] = None
    #: the schedule in which the stages were measured, in the words of a job file: schedule,
    #: microbatches, virtual_stages and microbatch_group; empty if it is not known. Profiles that
    #: differ only in it are equal.
    iteration: Annotated[Mapping[str, str | int], CheckedBy(_checked_iteration)] = field(
        default_factory=dict, compare=False, repr=False
    )
    #: the conditions of the measurement, such as driver and time, as text; profiles that differ
    #: only in them are equal.
    conditions: Annotated[Mapping[str, str], CheckedBy(_checked_conditions)] = field(
        default_factory=dict, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        # All rows are checked before the fields, as these are told by the stages.
        table = dict[Key, tuple[Measurement, ...]]()
        for given, points in self.measurements.items():
            key = _checked_key(given)
            table[key] = _checked_points(key, points)
        # A whole iteration is one computation, without backwards of its own.
        is_whole = self.iteration and dict(self.iteration).get("schedule") == "whole"
        if not (is_whole and table.keys() == {Key(0, "F")}):
            _check_complete(table)
        # A kind without work has a row at each clock, so that others need not ask.
        table = _with_every_clock(table)
        # In a fixed order, so that equal profiles are written alike.
        kinds = list(WORDS)
        order = sorted(table, key=lambda key: (key.stage, kinds.index(key.kind[0]), key.name))
        object.__setattr__(self, "measurements", ByKey({key: table[key] for key in order}))
        super().__post_init__()
        self._check_modes()
        for name in _OF_STAGES:
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != self.stages:
                raise ProfileError(
                    f"{name}: has {len(value)} numbers for {self.stages} stages; give one for "
                    "each, or one for all"
                )

    def _check_modes(self) -> None:
        """Check that each computation has the modes that `modes` has, or fill these in."""
        # Rows in modes make a profile with modes, also if nobody says what these set.
        modes_of_rows = dict.fromkeys(key.mode for key in self.measurements)
        if self.modes is None and len(modes_of_rows) > 1:
            object.__setattr__(self, "modes", Modes({name: Mode() for name in modes_of_rows}))
        ways = {OWN: None} if self.modes is None else self.modes.ways
        if unknown := [name for name in modes_of_rows if name not in ways]:
            raise ProfileError(
                f"modes, ways: has no {unknown[0]}, which rows have; say what it sets"
            )
        # A plan may choose any mode anywhere, so each computation needs all of them.
        for key in self.measurements:
            for name in ways:
                if key.in_mode(name) not in self.measurements:
                    raise ProfileError(
                        f"modes: stage {key.stage} has no {word_of(key.kind)} in the mode {name}; "
                        "measure each computation in every mode, or leave the mode out"
                    )
        for of_stages in () if self.modes is None else self.modes.of_stages():
            if isinstance(of_stages, tuple) and len(of_stages) != self.stages:
                raise ProfileError(
                    f"modes: {shown(list(of_stages))} has {len(of_stages)} numbers of bytes for "
                    f"{self.stages} stages; give one for each, or one for all"
                )

    def has_work(self, key: AnyKey) -> bool:
        """Return whether a computation takes time, which is so at all of its clocks or at none."""
        return self.measurements[key][0].has_work

    @property
    def stages(self) -> int:
        """The number of pipeline stages."""
        stages: set[int] = {key.stage for key in self.measurements}
        return 1 + max(stages)

    def blocking_w(self, stage: int) -> float:
        """Return what the GPUs of `stage` draw while they wait, watts."""
        return _of_stage(self.blocking_power_w, stage)

    def shared_errors(self, stage: int) -> tuple[float, float]:
        """Return the relative errors that the rows of `stage` share: of times, and of energies."""
        return (
            _of_stage(self.shared_time_error, stage),
            _of_stage(self.shared_energy_error, stage),
        )

    @property
    def assumed_spread(self) -> float:
        """The `gpu_spread` that plans leave a margin for: as measured or given, else
        `ASSUMED_SPREAD`; 0.0 of rows that are exact, as they are of a model and not of a GPU.
        """
        if self.gpu_spread is not None:
            return self.gpu_spread
        return 0.0 if self.is_exact else ASSUMED_SPREAD

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content, in hex: equal for equal profiles, whichever file they are
        from.
        """
        names = [name for name in rules(Profile) if name not in _EVIDENCE]
        # How rows were measured is no part of what plans are made of.
        # A profile without modes has the digest that it had before there were any.
        given = {name: getattr(self, name) for name in names if name != "modes" or self.modes}
        fields_text = repr(given)
        return sha256(b"profile 2", self._csv(evidence=False), fields_text.encode())

    @property
    def all_jitter(self) -> Jitter:
        """The three parts of the jitter of a run together."""
        return Jitter(self.jitter, self.jitter_common, self.jitter_tail)

    @cached_property
    def is_exact(self) -> bool:
        """Whether the rows may be taken for the truth: they carry no standard errors, and differ
        from a smooth curve by no more than what is rounded when they are written.
        """
        from perseus_planner.profiles.estimation import scatter

        rows = self.measurements
        if any(row.evidence is not None for of_key in rows.values() for row in of_key):
            return False
        return scatter(rows) <= _ROUNDED

    def estimated(self, clocks_mhz: Collection[int] | None = None) -> Estimate[Profile]:
        """Return the expected time and energy at every clock that the GPU supports, with their
        joint uncertainty.

        Rows differ from the truth by as much as their standard errors say, or, without these, by as
        much as like stages and neighbouring clocks scatter. The curve over the clock is smooth but
        for kinks and steps, and stages share as much of it as their rows agree. Rows without noise
        stay as they are.

        Args:
            clocks_mhz: the clocks that the GPU supports, MHz (with power limits: the limits,
                watts). Without them, the measured ones, and those between if all differ by
                multiples of 5 MHz or more: a GPU's clocks are evenly spaced then.

        Raises:
            ProfileError: If one of `clocks_mhz` is above the highest measured one, or a row has an
                energy of 0.
        """
        from perseus_planner.profiles.estimation import estimate_rows

        return estimate_rows(
            self.measurements,
            self.control,
            clocks_mhz,
            self.shared_errors,
            profile_of=lambda rows: replace(self, measurements=rows),
        )

    def doubts(self) -> list[Doubt]:
        """Return what cannot be true of the rows, and then what is unusual; see
        `profiles.plausible`. Files with rows that cannot be true are not read.
        """
        return find_doubts(
            self.measurements,
            self.control,
            self.gpus_per_stage,
            self.blocking_w,
            self.gpu,
            is_learnt="learnt" in self.conditions,
        )

    @cached_property
    def without_full_clocks(self) -> Mapping[str, int]:
        """The computations that were not measured at the highest clock of the profile, such as "2
        forward" -> their highest clock. None where the GPU chose the clocks.
        """
        tops = {
            f"{key.stage} {word_of(key.name)}": rows[0].clock_mhz
            for key, rows in self.measurements.items()
            if rows[0].has_work
        }
        if self.control == "observed":
            return MappingProxyType({})
        highest = max(tops.values())
        return MappingProxyType({name: clock for name, clock in tops.items() if clock < highest})

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a reader of plans may not expect of the rows."""
        said = []
        # A stage that was not measured at full clocks makes their time look longer than it is.
        if self.without_full_clocks:
            name, clock = next(iter(self.without_full_clocks.items()))
            others = len(self.without_full_clocks) - 1
            highest = max(rows[0].clock_mhz for rows in self.measurements.values())
            unit = unit_of(self.control)
            said.append(
                f"Stage {name}{f' and {others} more were' if others else ' was'} not measured "
                f"above {clock} {unit}, others up to {highest} {unit}: unless a power limit holds "
                "it there, full clocks are faster than the rows say, and a plan that is no slower "
                f"than they are may be slower; measure it at {highest} {unit}."
            )
        if self.origin == "traced":
            expected = self.conditions.get("traced", "what a plan saves is not known well")
            # At the highest clock itself, watts may be assumed too.
            assumed = self.conditions.get("assumed")
            known = f" Known of the highest: {assumed}." if assumed else ""
            said.append(
                "Rows at other clocks than the highest are estimates from traces of it: "
                f"{expected}.{known} Profile the stages, or let the autopilot learn, before you "
                "count on it."
            )
        if DOUBTS in self.conditions:
            said.append(f"Check the rows: {self.conditions[DOUBTS]}.")
        return tuple(said)

    def _repr_html_(self) -> str:
        """What a notebook shows: a row for each computation, with the range of its clocks."""
        columns = lay_out(
            self.measurements.items(),
            Column("computation", lambda item: item[0], "<"),
            Column("clocks", lambda item: len(item[1])),
            Column("highest", lambda item: item[1][0].clock_mhz),
            Column("lowest", lambda item: item[1][-1].clock_mhz),
            Column("time at the highest {}", lambda item: item[1][0].time_s, "s"),
            Column("energy {}", lambda item: item[1][0].energy_j, "J"),
        )
        gpu = self.gpu or "an unknown GPU"
        return Sheet("", f"Profile of {gpu}, {self.origin}.", columns).html()

    def to_frame(self) -> pd.DataFrame:
        """Return a pandas frame with a row for each measurement, computation by computation,
        highest clock first.

        Its columns are stage, instruction, clock_mhz (or power_limit_w or observed_clock_mhz),
        time_s, energy_j, and then the fields of `Evidence`.

        Raises:
            UsageError: If pandas is not installed.
        """
        rows = [
            {
                "stage": key.stage,
                "instruction": word_of(key.name),
                setting_of(self.control): row.clock_mhz,
                "time_s": row.time_s,
                "energy_j": row.energy_j,
                **{name: getattr(row.evidence, name, None) for name in rules(Evidence)},
                "throttle": None if row.evidence is None else " ".join(row.evidence.throttle),
            }
            for key, measured in self.measurements.items()
            for row in measured
        ]
        types = {**dict.fromkeys(rules(Evidence), float), "windows": WHOLE}
        return make_frame(rows, types, origin=self.origin, gpu=self.gpu)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], blocking_power_w: float | tuple[float, ...] | None = None
    ) -> Profile:
        """Read `profile.csv`, or `profile.yaml` with the CSV that it names.

        Args:
            path: the file; read as YAML when its name ends with .yaml or .yml, else as CSV.
            blocking_power_w: what a waiting GPU draws, watts; or one number for each stage.
                Required for a CSV, which does not hold it; with a YAML file, it replaces the
                file's.

        Raises:
            ProfileError: If a file cannot be read or is not a profile; names file, line and remedy.
        """
        path = Path(path)
        if blocking_power_w is not None:
            _check("blocking_power_w", blocking_power_w, "blocking_power_w")
        if path.suffix.lower() in _YAML_SUFFIXES:
            return _load_yaml(path, blocking_power_w)
        # A CSV has no power of waiting, but what else is wrong with it is said first.
        if blocking_power_w is None:
            _checked_rows(*_built(path, blocking_power_w=0.0))  # what else is wrong is said first
            raise ProfileError(_without_power(path))
        profile, table = _built(path, blocking_power_w=blocking_power_w)
        # The power is the caller's, so an error of it names no line.
        _check_waiting(profile)
        return _checked_rows(profile, table)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `path`, a .yaml file, and the CSV of the same stem beside it; existing files are
        replaced.

        Each file is whole or absent at any moment, and equal profiles give equal bytes.
        `Profile.load(path)` returns an equal profile.

        Raises:
            ProfileError: If `path` does not end with .yaml or .yml, or a file cannot be written.
        """
        path = Path(path)
        if path.suffix.lower() not in _YAML_SUFFIXES:
            raise ProfileError(
                f"{path}: a profile is saved as YAML with a CSV beside it; end the name with .yaml"
            )
        table = path.with_suffix(".csv")
        for file in (path, table):
            if file.is_dir():
                raise ProfileError(f"{file}: is a folder; name another file")
        # Both are there or neither: each is whole on the disk before one takes its name.
        with replacing(path, ProfileError) as rest, replacing(table, ProfileError) as rows:
            csv_text, yaml_text = self.texts(table.name)
            rest.write(yaml_text.encode())
            rows.write(csv_text.encode())

    def texts(self, table: str = "profile.csv") -> tuple[str, str]:
        """Return the texts of the CSV file and of the YAML file that names it `table`."""
        document = {"format": _FORMAT, "version": _VERSION, "measurements": table, **self.rest()}
        document.pop("control", None)  # the header of the table has it
        text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=math.inf)
        return self._csv().decode(), text

    def rest(self) -> dict[str, Any]:
        """Return everything but the measurements as plain values; rarely used fields are left
        out at their defaults.
        """
        names = rules(Profile)
        content: dict[str, Any] = dump(self, names, names.keys() - {"gpu", "origin"})
        return content

    def _csv(self, *, evidence: bool = True) -> bytes:
        rows = [
            Row(
                key,
                point.clock_mhz,
                point.time_s,
                point.energy_j,
                point.evidence if evidence else None,
            )
            for key, points in self.measurements.items()
            for point in points
        ]
        return csv_bytes(rows, self.control)


def _of_stage(value: float | tuple[float, ...], stage: int) -> float:
    return value[stage] if isinstance(value, tuple) else value


def _checked_change(value: Any, where: str, error: type[PlannerError]) -> ClockChange:
    if isinstance(value, ClockChange):
        return value
    raise error(
        f"{where}: {shown(value)} is not a ClockChange; give one, such as ClockChange(call_s=0.006)"
    )


def _checked_tail(value: Any, where: str, error: type[PlannerError]) -> Tail:
    if isinstance(value, Tail):
        return value
    raise error(f"{where}: {shown(value)} is not a Tail; give one, such as Tail(0.01, 1.3)")


def _checked_modes(value: Any, where: str, error: type[PlannerError]) -> Modes | None:
    if value is None or isinstance(value, Modes):
        return value
    if not isinstance(value, Mapping) or not {"ways"} <= value.keys() <= types(Modes).keys():
        raise error(
            f"{where}: {shown(value)} does not describe modes; write the keys "
            f"{', '.join(types(Modes))}"
        )
    try:
        return restore(Modes, value)
    except ProfileError as problem:
        raise error(f"{where}: {problem}") from None


def _checked_gpu(value: Any, where: str, error: type[PlannerError]) -> str:
    if isinstance(value, str) and value and value.isprintable():
        return value
    raise error(
        f"{where}: {shown(value)} is not the name of a GPU: give one line of text, or leave it out"
    )


def _checked_conditions(value: Any, where: str, error: type[PlannerError]) -> Mapping[str, str]:
    if not isinstance(value, Mapping) or not all(
        isinstance(text, str) for pair in value.items() for text in pair
    ):
        raise error(
            f"{where}: {shown(value)} is not a mapping of texts: write `name: text`, one on each "
            "line"
        )
    return MappingProxyType(dict(value))


def _checked_iteration(
    value: Any, where: str, error: type[PlannerError]
) -> Mapping[str, str | int]:
    if value == {}:
        return MappingProxyType({})
    if not (isinstance(value, Mapping) and {"schedule"} <= value.keys() <= {"schedule", *_COUNTS}):
        raise error(
            f"{where}: {shown(value)} is not a schedule; write `schedule: 1f1b`, "
            f"{', '.join(_COUNTS)}, or leave it out"
        )
    for name in value.keys() & set(_COUNTS):
        COUNT.check(value[name], f"{where}, {name}", error)
    return MappingProxyType(dict(value))


def _checked_key(given: Any) -> Key:
    match given:
        case (_, str()) | (_, str(), str()):
            key = Key.of(given)
            if is_kind(key.kind) and is_mode_name(key.mode):
                return Key(STAGE.check(key.stage, "stage", ProfileError), key.kind, key.mode)
    raise ProfileError(
        f"measurements: {shown(given)} is not a stage and a kind: write it as (0, 'F') or "
        "(0, 'B'), or with a mode as (0, 'B', 'recompute')"
    )


def _checked_points(key: Key, points: Iterable[Measurement]) -> tuple[Measurement, ...]:
    # Rows are kept from the highest clock down, as everything that reads them expects.
    ordered = tuple(sorted(points, key=lambda point: point.clock_mhz, reverse=True))
    where = f"stage {key.stage} {word_of(key.name)}"
    if not ordered:
        raise ProfileError(f"{where}: has no measurement; give one for each clock, at least one")
    for above, below in pairwise(ordered):
        if above.clock_mhz == below.clock_mhz:
            raise ProfileError(
                f"{where}: {below.clock_mhz} MHz is there twice; keep one measurement of each clock"
            )
        # A computation has work at all clocks or at none.
        if above.has_work != below.has_work:
            idle, busy = sorted((above, below), key=lambda row: row.has_work)
            raise ProfileError(
                f"{where}: takes 0 s at {idle.clock_mhz} MHz and {busy.time_s:g} s at "
                f"{busy.clock_mhz} MHz; leave the row of 0 s out, or give 0 s and 0 J at every "
                "clock if it has no work"
            )
    return ordered


def _with_every_clock(
    table: Mapping[Key, tuple[Measurement, ...]],
) -> dict[Key, tuple[Measurement, ...]]:
    """Return the rows, with one at each clock of its stage for each kind without work: no clock
    needs to be set for it.
    """
    if not any(rows[0].has_work for rows in table.values()):
        raise ProfileError("no computation takes time; give at least one that has work")
    # What runs in no time needs no clock, so it must not keep others from theirs.
    filled = dict(table)
    for key, rows in table.items():
        if rows[0].has_work:
            continue
        of_stage = [
            rows_of_stage for other, rows_of_stage in table.items() if other.stage == key.stage
        ]
        busy = [rows_of_stage for rows_of_stage in of_stage if rows_of_stage[0].has_work]
        # A stage without any work may run at the clocks of all others.
        near = busy or list(table.values())
        clocks = {row.clock_mhz for rows_of_stage in [*near, rows] for row in rows_of_stage}
        filled[key] = tuple(Measurement(clock, 0.0, 0.0) for clock in sorted(clocks, reverse=True))
    return filled


def _check_complete(table: Mapping[Key, object]) -> None:
    if not table:
        raise ProfileError(
            "has no measurements; give at least one forward and one backward of stage 0"
        )
    stages = {key.stage for key in table}
    # Stages are numbered from 0 without a hole, so the first missing one is the mistake.
    hole = next(stage for stage in count() if stage not in stages)
    if hole < len(stages):
        raise ProfileError(
            f"stage {hole} is missing though there is a stage {max(stages)}; measure it, or number "
            "the stages from 0"
        )
    for stage in sorted(stages):
        # A backward is whole, or in two parts, or measured in both ways.
        split = any(Key(stage, kind) in table for kind in "IW")
        needed = "FB"
        if split:
            needed = "FIW" if Key(stage, "B") not in table else "FBIW"
        for kind in needed:
            if Key(stage, kind) not in table:
                word = WORDS[kind]
                raise ProfileError(
                    f"stage {stage} has no {word}; measure its {word} at one clock or more, or, "
                    "if it does not run, as in a frozen stage, give it a row of 0 s and 0 J"
                )


def _built(path: Path, **rest: Any) -> tuple[Profile, Table]:
    """Return the profile of the CSV at `path`, which errors name, and the table."""
    table = read_table(path)
    by_key: dict[Key, list[Measurement]] = {}
    for row in table.rows:
        option = Measurement(row.clock_mhz, row.time_s, row.energy_j, row.evidence)
        by_key.setdefault(row.key, []).append(option)
    measurements = {key: tuple(options) for key, options in by_key.items()}
    try:
        return Profile(measurements, control=table.control, **rest), table
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from None


def _check_waiting(profile: Profile) -> None:
    """Refuse a blocking power that no GPU draws."""
    for stage in range(profile.stages):
        waiting_w = profile.blocking_w(stage) / profile.gpus_per_stage
        if problem := power_problem(waiting_w, profile.gpu):
            raise ProfileError(f"blocking_power_w: {problem}")


def _checked_rows(profile: Profile, table: Table) -> Profile:
    """Return the profile of a table with what is unusual about its rows; refuse rows that cannot
    be true.
    """
    # Doubts need the whole profile, as rows are compared with each other.
    doubts = profile.doubts()

    def place_of(doubt: Doubt) -> str:
        where = table.places[doubt.key, doubt.clock]
        column = column_of(doubt, profile.control)
        # A file that was cut often ends in the middle of a number.
        cut = " (the last row, cut short?)" if where == table.cut else ""
        return f"{where}, column {column!r}{cut}"

    refuse_doubtful(doubts, place_of)
    # What is unusual is kept with the profile, so that whoever reads a plan sees it.
    said = [f"{place_of(doubt)}: {doubt.problem}" for doubt in doubts]
    if table.cut is not None:
        said.append(
            f"{table.cut}: the file ends inside this row, or lacks its last end of line; compare "
            "the row with its source"
        )
    # Doubts of an older reading are not kept, as the rows may have been mended.
    conditions = {name: text for name, text in profile.conditions.items() if name != DOUBTS}
    if said:
        conditions[DOUBTS] = "; ".join(said)
    return replace(profile, conditions=conditions)


def _check(name: str, value: object, where: str) -> None:
    rules(Profile)[name].check(value, where, ProfileError)


def _without_power(path: Path) -> str:
    beside = [file for file in map(path.with_suffix, _YAML_SUFFIXES) if file.exists()]
    remedy = (
        f"load {beside[0]}, which holds it" if beside else "load the profile.yaml that holds it"
    )
    return (
        f"{path}: a CSV does not hold the blocking power, what a GPU draws while it waits; "
        f"give it with --blocking-power W (in Python blocking_power_w=), or {remedy}"
    )


def profile_document(path: Path) -> Document:
    """Read the YAML file of a profile as a document, which has known keys only.

    Raises:
        ProfileError: If the file cannot be read, or is not such a file.
    """
    required = ("measurements", "blocking_power_w")
    optional = tuple(key for key in rules(Profile) if key not in (*required, "control"))
    return read_document(path, _FORMAT, _VERSION, required, optional, ProfileError)


def _load_yaml(path: Path, power_w: float | tuple[float, ...] | None) -> Profile:
    document = profile_document(path)
    # Unknown keys were refused before, so what is left are fields of a profile.
    rest = {key: value for key, value in document.values.items() if key in rules(Profile)}
    if rest.get("clock_change") is not None:
        rest["clock_change"] = document.part("clock_change", ClockChange)
    if rest.get("jitter_tail") is not None:
        rest["jitter_tail"] = document.part("jitter_tail", Tail)
    # Each value is checked by itself first, as its line is known then.
    for key, value in rest.items():
        _check(key, value, document.where(key))
    table = _table_path(document)
    # What the caller gives counts before what the file says.
    if power_w is not None:
        rest["blocking_power_w"] = power_w
    # The rows make a profile of their own first, so that their errors name the CSV.
    profile, rows = _built(table, blocking_power_w=0.0, iteration=rest.get("iteration", {}))
    try:
        profile = replace(profile, **rest)
        _check_waiting(profile)
    except ProfileError as error:  # each value alone is right, but it is not of these stages
        name = re.split("[,:]", str(error))[0]
        line = document.lines.get(name, document.lines["blocking_power_w"])
        raise ProfileError(f"{path}, line {line}, {error}") from None
    return _checked_rows(profile, rows)


def _table_path(document: Document) -> Path:
    """Return the CSV that a profile.yaml names, which must be in the same folder so that nothing
    else is read.
    """
    name = document.values["measurements"]
    where = document.where("measurements")
    if not isinstance(name, str) or name in ("", "..") or "\\" in name or name != Path(name).name:
        raise ProfileError(
            f"{where}: {shown(name)} is not a plain file name: name a CSV in the same folder"
        )
    path = document.path.with_name(name)
    if not path.exists():
        raise ProfileError(f"{where}: {path} does not exist; put the CSV beside the YAML")
    return path
