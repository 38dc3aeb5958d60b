"""Plans: one measured clock for every computation of an iteration, with its cost, and how sure it
is if the plan was made for a probability; and their files, plan.yaml.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import fsum
from operator import mul
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import yaml

from perseus_planner.base.documents import check_digest, read_document
from perseus_planner.base.errors import PlanError, PlannerError
from perseus_planner.base.fields import Checked, dump, restore
from perseus_planner.base.files import sha256, write_file
from perseus_planner.base.prefixes import si
from perseus_planner.base.tables import WHOLE, Column, Sheet, lay_out, make_frame
from perseus_planner.base.units import Count, Offset, Watts
from perseus_planner.plans.replay import ALL_MAXIMUM, Timeline, origin_text, replay
from perseus_planner.profiles.csv_file import setting_of
from perseus_planner.profiles.jitter import Tail  # noqa: TC001 -- fields are read by their types
from perseus_planner.profiles.keys import AnyKey, ByKey, Key
from perseus_planner.profiles.measurement import ClockChange, Measurement, changes_per_rank
from perseus_planner.profiles.modes import OWN
from perseus_planner.schedules import Computation, Schedule
from perseus_planner.schedules.iteration import Iteration
from perseus_planner.schedules.pipeline import (
    ITERATION_KEYS,
    iteration_from_dict,
    iteration_to_dict,
)

if TYPE_CHECKING:
    import os

    import pandas as pd

INTERVAL = 0.9
"""The probability of each `Interval`: the truth is below it in 5 % of cases, and above it in 5
%.
"""

WIDER_SAVING = 1.5
"""The ends of the interval of a saving are so many times as far from the mean as those of the
draws.

No model of a GPU's curves is exact: `python benchmarks/run.py --only 19` counts how often the truth
is in them. """


@dataclass(frozen=True)
class Interval:
    """What an uncertain number is expected to be, and the ends of its 90 % interval."""

    expected: float
    low: float
    high: float


@dataclass(frozen=True)
class OnTime:
    """How sure a plan is of its time and its saving."""

    probability: float  #: the probability, at least, of being within the limit
    #: the longest iteration time that is on time, tolerance included, over the time with all clocks
    #: at their maximum; None if the limit is a power.
    limit_ratio: float | None
    limit_power_w: float | None  #: the limit of the average power, watts; None if it is a time
    #: how many standard errors were added to the times of computations below their maximum clock;
    #: None if all clocks are at their maximum because no other plan was sure enough.
    margin: float | None
    time_ratio: Interval  #: the iteration time, over that with all clocks at their maximum
    saved_share: Interval  #: the energy saved, over that with all clocks at their maximum
    power_w: Interval  #: the average power over all GPUs of the pipeline, watts
    #: how much more the plan without a margin is expected to save, over the same energy; a plan
    #: within a switch budget has that of the plan without one.
    safety_share: float
    points: int  #: number of operating points in use
    #: how many of them were not measured, but estimated from others; of a trace, all that are not
    #: at the highest clock.
    interpolated: int
    #: whether the profile has standard errors, or its noise is taken from how its rows scatter.
    has_errors: bool
    #: the jitter of computations that it is on time with, a relative standard deviation.
    jitter: float = 0.0
    #: the same of what all computations of a GPU have in common in an iteration.
    jitter_common: float = 0.0
    #: the few computations that take much longer, with which it is on time as well.
    jitter_tail: Tail | None = None
    #: by how much the GPUs of a stage may differ from the profiled ones, a relative standard
    #: deviation; 0.0 in plans of 0.4.
    gpu_spread: float = 0.0
    #: whether that is assumed, as only one GPU of a stage was measured.
    is_spread_assumed: bool = False
    #: the longest expected iteration time, over that with all clocks at their maximum; None if the
    #: limit is a power, and in plans of 0.4.
    expected_limit_ratio: float | None = None
    #: what the expected times of the rows were multiplied by, so that an iteration with all clocks
    #: at their maximum takes as long as measured.
    time_scale: float = 1.0


def check_trusted(plan: Plan, trusts_traced: bool) -> None:
    """Refuse a plan of a traced profile, unless it is trusted.

    Raises:
        PlanError: If it is one, with what to do instead.
    """
    if plan.origin == "traced" and not trusts_traced:
        raise PlanError(
            "the plan is of a traced profile, which was seen at one clock and is estimated at all "
            "others, so it may be late: profile the stages with `planner profile`, or train "
            "without a plan, and the autopilot learns one; or apply it with --trust-traced (in "
            "Python trust_traced=True)"
        )


_FORMAT = "perseus-planner/plan"
_VERSION = 1
_WITH_MODES = 2  #: the version of the file of a plan whose computations run in several modes
# The fields that stand in a file as they are, before and after the schedule's name.
_ORIGIN = ("gpu", "origin", "control", "gpus_per_stage")
_NUMBERS = (
    "blocking_power_w",
    "overhead_s",
    "deadline_s",
    "time_s",
    "energy_j",
    "bound_j",
    "baseline_time_s",
    "baseline_energy_j",
    "clock_change",
)
_OPTIONAL = ("point_bound_j", "on_time", "torch", "baseline", "remarks", "made_with")
_KEYS = ("profile", *_ORIGIN, "schedule", *_NUMBERS, "changes", "measurements", "ranks")
_OPTIONAL_KEYS = (*ITERATION_KEYS, *_OPTIONAL, "full_clocks", "min_dwell_s")
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


@dataclass(frozen=True, repr=False)
class Plan(Checked, error=PlanError):
    """One clock per computation, and the replayed time and energy of an iteration with these
    clocks.

    Raises:
        PlanError: If the clocks, measurements or powers do not fit the iteration.
    """

    iteration: Iteration  #: the computations and operations, rank by rank, and what they wait for
    #: "3F17" -> MHz, for every computation, in the order of `schedule.computations()`.
    clocks: Mapping[str, int] = field(repr=False)
    #: (stage, kind) -> clock in MHz -> its measurement, keyed as in the profile, for the clocks in
    #: use. If clock changes cost time, for all clocks in use on the rank, or the next lower ones
    #: that were measured.
    measurements: Mapping[AnyKey, Mapping[int, Measurement]] = field(repr=False)
    profile_digest: str  #: `Profile.digest` of the profile that it was computed from
    gpu: str | None  #: the GPU's name, if the profile has one
    origin: str  #: the source of the profile, "measured", "simulated", "traced" or "unknown"
    #: what a stage's GPUs draw while they wait, watts; or one number for each stage.
    blocking_power_w: Watts | tuple[Watts, ...]
    deadline_s: float  #: the requested iteration time, seconds
    time_s: float  #: replayed iteration time, seconds; at most `deadline_s`
    #: replayed energy of such an iteration over all GPUs, joules, waiting included.
    energy_j: float
    #: the least relaxed energy of an iteration of `time_s`, joules; no plan of that time is below
    #: it.
    bound_j: float
    baseline_time_s: float  #: replayed iteration time with all clocks at their maximum, seconds
    baseline_energy_j: float  #: its energy, joules
    gpus_per_stage: Count = 1  #: number of GPUs of a stage
    #: calibrated seconds of an iteration that are not replayed; part of all times above.
    overhead_s: Offset = 0.0
    #: the cost of a clock change, which `time_s` and `energy_j` include; None for nothing.
    clock_change: ClockChange | None = None
    #: what the profile set: "clock"; "power-limit", and the clocks here are limits in watts; or
    #: "observed": nothing was set and nothing will be.
    control: str = "clock"
    #: a closer bound, for plans of measured clocks alone, joules; no plan of `time_s` is below it.
    #: None unless `Frontier.with_point_bound` found it.
    point_bound_j: float | None = None
    #: how sure it is of its time and its saving, if it was made for a probability. Its numbers are
    #: expected ones then, and operating points in `measurements` may be estimates.
    on_time: OnTime | None = None
    torch: str | None = None  #: the version of torch of the profile, if it has one
    #: with what it is compared: all clocks at maximum, or as near to them as was measured.
    baseline: str = ALL_MAXIMUM
    #: with which Python and numpy it was made, as the last digits of both decide which of nearly
    #: equal plans is found; None in plans of 0.4. Plans that differ only in it are equal.
    made_with: str | None = field(default=None, compare=False)
    #: what a reader may not expect of the profile.
    remarks: tuple[str, ...] = ()
    #: (stage, kind) -> the measurement at its highest clock, in the training's own way: what a
    #: saving is stated against. None in plans of 0.3.
    full_clocks: Mapping[AnyKey, Measurement] | None = field(default=None, repr=False)
    _keys: Mapping[Computation, Key] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Read-only copies: plans are kept and shared, and whoever made one may go on to change its
        # own.
        object.__setattr__(self, "clocks", MappingProxyType(dict(self.clocks)))
        points = {key: MappingProxyType(dict(clocks)) for key, clocks in self.measurements.items()}
        object.__setattr__(self, "measurements", ByKey(points))
        if self.full_clocks is not None:
            object.__setattr__(self, "full_clocks", ByKey(self.full_clocks))
        # In their order, so that equal plans have equal files and digests.
        wanted = [str(computation) for computation in self.schedule.computations()]
        if list(self.clocks) != wanted:
            raise PlanError("clocks: are not those of the schedule's computations, in their order")
        power_w = self.blocking_power_w
        if isinstance(power_w, tuple) and len(power_w) != self.schedule.stages:
            raise PlanError(
                f"blocking_power_w: has {len(power_w)} numbers for {self.schedule.stages} stages"
            )
        object.__setattr__(
            self, "_keys", dict(zip(self.iteration.computations, self.iteration.keys, strict=True))
        )
        # What is missing is refused here, and not in the middle of a training that runs by it.
        for computation in self.schedule.computations():
            self.measurement(computation)
            self._check_full_clocks(computation)

    def __repr__(self) -> str:
        time = si(self.time_s, "s", 6)
        energy = si(self.energy_j, "J", 6)
        deadline = si(self.deadline_s, "s", 6)
        return f"<Plan: {self.schedule}, {time} and {energy} per iteration, deadline {deadline}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the plan in a line, and the clocks of each rank."""
        saved = 1.0 - self.energy_j / self.baseline_energy_j if self.baseline_energy_j else 0.0
        # Under a power limit, the "clocks" are limits in watts.
        unit = "W" if self.control == "power-limit" else "MHz"
        # A row for each rank: a table of all computations would have thousands.
        rows = [
            (rank, changes, [self.clocks[str(computation)] for computation in program])
            for rank, (changes, program) in enumerate(
                zip(self.changes, self.schedule.ranks, strict=True)
            )
        ]
        columns = lay_out(
            rows,
            Column("rank", lambda row: row[0]),
            Column(f"lowest {unit}", lambda row: min(row[2])),
            Column(f"highest {unit}", lambda row: max(row[2])),
            Column("changes", lambda row: row[1]),
        )
        note = f"{100 * saved:.1f} % less energy than {self.baseline}, {self.origin}."
        return Sheet("", repr(self), columns, [note]).html()

    def _check_full_clocks(self, computation: Computation) -> None:
        wanted = self.key(computation).in_mode(OWN)
        if self.full_clocks is not None and wanted not in self.full_clocks:
            raise PlanError(f"full_clocks: has no {wanted}, which the plan runs")

    @property
    def schedule(self) -> Schedule:
        """The computations, rank by rank, in the order in which they run."""
        return self.iteration.schedule

    @cached_property
    def modes(self) -> Mapping[str, str]:
        """The modes: "3F17" -> "recompute", for computations that run in another than their own."""
        return MappingProxyType(
            {str(c): key.mode for c, key in self._keys.items() if key.mode != OWN}
        )

    @cached_property
    def timeline(self) -> Timeline:
        """When each computation runs in a replayed iteration."""
        return replay(self)

    @property
    def rank_waiting_w(self) -> tuple[float, ...]:
        """What the GPUs of each rank draw while they wait, watts."""
        # All stages of a rank stand on the same GPUs, so its first one says what they draw.
        power_w = self.blocking_power_w
        stages = [program[0].stage for program in self.schedule.ranks]
        return tuple(power_w[stage] if isinstance(power_w, tuple) else power_w for stage in stages)

    def baseline_j(self, iteration_s: float) -> float:
        """Return the energy of an iteration of so many seconds with all clocks at maximum, joules.

        After the baseline's time, its GPUs wait.
        """
        return self.baseline_energy_j + sum(self.rank_waiting_w) * max(
            0.0, iteration_s - self.baseline_time_s
        )

    @property
    def changes(self) -> tuple[int, ...]:
        """How often each rank's clock changes in an iteration, including the change back to the
        first one.
        """
        # An iteration follows the next: the change back to the first clock is paid as well.
        return tuple(
            changes_per_rank([self.clocks[str(c)] for c in program])
            for program in self.schedule.ranks
        )

    @cached_property
    def rank_clocks(self) -> tuple[float, ...]:
        """The mean clock of the computations of each rank, over their time."""
        means = []
        for program in self.schedule.ranks:
            times_s = [self.measurement(c).time_s for c in program]
            clocks = [self.clocks[str(c)] for c in program]
            if not any(times_s):  # a rank without work, whose computations all count alike
                times_s = [1.0] * len(clocks)
            means.append(fsum(map(mul, clocks, times_s)) / fsum(times_s))
        return tuple(means)

    @property
    def power_w(self) -> float:
        """Average power of an iteration over all GPUs, watts."""
        return self.energy_j / self.time_s

    @property
    def saving_j(self) -> float:
        """Joules saved per iteration, compared with all clocks at their maximum."""
        return self.baseline_energy_j - self.energy_j

    def key(self, computation: Computation) -> Key:
        """Return the key, in the profile, of a computation of the plan."""
        return self._keys[computation]

    def measurement(self, computation: Computation) -> Measurement:
        """Return the measurement of `computation` at its clock in the plan.

        Raises:
            PlanError: If the plan lacks the computation, or a measurement at its clock.
        """
        try:
            return self.measurements[self._keys[computation]][self.clocks[str(computation)]]
        except KeyError:
            raise PlanError(
                f"{computation}: has no clock, or no measurement of it, in this plan"
            ) from None

    def to_frame(self) -> pd.DataFrame:
        """Return a pandas frame with a row for each computation, rank by rank in program order,
        then for each operation of fixed time.

        Its columns are computation, rank, stage, kind, mode (where the plan has several),
        microbatch, clock_mhz (or power_limit_w or observed_clock_mhz), start_s, end_s, power_w and
        energy_j. The numbers are replayed, and waiting is not included.

        Raises:
            UsageError: If pandas is not installed.
        """
        iteration = self.iteration
        setting = setting_of(self.control)
        rows: list[dict[str, Any]] = []
        # The timeline has the computations first, and then the operations of fixed time, which have
        # neither stage nor clock.
        for index, (name, span) in enumerate(self.timeline.spans.items()):
            computation = (
                iteration.computations[index] if index < len(iteration.computations) else None
            )
            rows.append(
                {
                    "computation": name,
                    "rank": iteration.rank_of[index],
                    "stage": None if computation is None else computation.stage,
                    "kind": None if computation is None else iteration.keys[index].kind,
                    **(
                        {"mode": self.modes.get(name, OWN) if computation else None}
                        if self.modes
                        else {}
                    ),
                    "microbatch": None if computation is None else computation.microbatch,
                    setting: self.clocks.get(name),
                    **asdict(span),
                    "energy_j": span.energy_j,
                }
            )
        return make_frame(
            rows,
            # whole numbers, although operations have none
            dict.fromkeys(("stage", "microbatch", setting), WHOLE),
            origin=origin_text(self.origin),
            time_s=self.time_s,
            energy_j=self.energy_j,
            baseline=ALL_MAXIMUM,
            baseline_time_s=self.baseline_time_s,
            baseline_energy_j=self.baseline_energy_j,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as YAML; equal plans give equal bytes.

        Raises:
            PlanError: If the file cannot be written.
        """
        content = self._content()
        # Without modes the file stays as planners read it that know none.
        version = _WITH_MODES if self.modes else _VERSION
        document = {"format": _FORMAT, "version": version, "digest": _digest(content), **content}
        text = yaml.dump(
            document, Dumper=_DUMPER, sort_keys=False, width=120, default_flow_style=None
        )
        write_file(path, text, PlanError)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a file that `save` wrote.

        Raises:
            PlanError: If the file cannot be read, or is not exactly what was written.
        """
        document = read_document(
            Path(path),
            _FORMAT,
            _VERSION,
            ("digest", *_KEYS),
            _OPTIONAL_KEYS,
            PlanError,
            also=_WITH_MODES,
            written_by="planner plan",
        )
        return _from_content(check_digest(document, _digest, "planner plan"), str(document.path))

    def dumps(self) -> str:
        """Return the plan as JSON, for another process; it is ten times faster to read than the
        file.
        """
        return json.dumps(self._content())

    @classmethod
    def loads(cls, text: str) -> Plan:
        """Read a text that `dumps` returned.

        Raises:
            PlanError: If the text is not exactly that.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise PlanError(f"the plan that was sent: is not JSON: {error}") from error
        if not isinstance(values, dict) or values.keys() - set(_OPTIONAL_KEYS) != set(_KEYS):
            raise PlanError(
                "the plan that was sent: its keys are not those of a plan; use one planner on all "
                "ranks"
            )
        return _from_content(values, "the plan that was sent")

    def _content(self) -> dict[str, Any]:
        return {
            "profile": self.profile_digest,
            **dump(self, _ORIGIN),
            "schedule": self.schedule.name,
            **dump(self, (*_NUMBERS, *_OPTIONAL), _OPTIONAL),
            # for people; they follow from the clocks below
            "changes": list(self.changes),
            "measurements": {
                str(key): {clock: [point.time_s, point.energy_j] for clock, point in clocks.items()}
                for key, clocks in self.measurements.items()
            },
            **self._full_clocks_content(),
            **iteration_to_dict(self.iteration),
            "ranks": [
                {str(computation): self.clocks[str(computation)] for computation in rank}
                for rank in self.schedule.ranks
            ],
        }

    def _full_clocks_content(self) -> dict[str, Any]:
        if self.full_clocks is None:
            return {}
        rows = {
            str(key): [row.clock_mhz, row.time_s, row.energy_j]
            for key, row in self.full_clocks.items()
        }
        return {"full_clocks": rows}


def _digest(content: Mapping[str, Any]) -> str:
    return sha256(json.dumps(content, default=str).encode())


def _from_content(values: Mapping[str, Any], name: str) -> Plan:
    if values.get("min_dwell_s"):  # 0 or more until 0.2
        raise PlanError(
            f"{name}: min_dwell_s: plans keep no least time at a clock any more; plan again with "
            "--max-changes"
        )
    try:
        ranks = tuple(tuple(Computation.parse(text) for text in rank) for rank in values["ranks"])
        measurements = {
            # JSON keys are always text.
            Key.parse(text): {
                int(clock): Measurement(int(clock), *point) for clock, point in clocks.items()
            }
            for text, clocks in values["measurements"].items()
        }
        # Plans of older versions lack some of these, which then have their defaults.
        fields = (*_ORIGIN, *_NUMBERS, *_OPTIONAL)
        full_clocks = None
        if "full_clocks" in values:  # not until 0.3
            full_clocks = {
                Key.parse(text): Measurement(*row) for text, row in values["full_clocks"].items()
            }
        return restore(
            Plan,
            {name: values[name] for name in fields if name in values},
            iteration=iteration_from_dict(Schedule(str(values["schedule"]), ranks), values),
            clocks={text: clock for rank in values["ranks"] for text, clock in rank.items()},
            measurements=measurements,
            full_clocks=full_clocks,
            profile_digest=str(values["profile"]),
        )
    except (PlannerError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise PlanError(
            f"{name}: is not a plan: {error}; make it again with `planner plan`"
        ) from error
