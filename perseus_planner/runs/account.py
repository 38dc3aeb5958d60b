"""What ran, took, used and saved: one value for an iteration, a rank, a job and all in between.

The *window* of an iteration goes from its begin to the begin of the next one, so the windows of a
rank tile its run: the optimizer's step and the wait for data are inside, and no joule between two
iterations is lost. The first window begins with the first iteration that a rank ran, and the last
one ends with its last iteration. What comes before and after is in no account.

A pause, for example an evaluation, is cut out of the window that it ends: its seconds and joules
stand apart, because plans do not cover pauses. So do those of the iteration that follows an
evaluation: it begins while other ranks still evaluate, and engines prepare anew in it.

There is one baseline: what ran, each computation at full clocks, in as much time as the iteration
took (`savings`). Where no clock was lowered, nothing was saved. Between iterations nothing is
saved: what was used there counts on both sides, as no profile has it.

A saving is known of some windows, which are *judged*: all in which no clock was lowered, and those
that ran as planned and took about as long as rows say. Its 95 % interval adds up the standard
errors that iterations share (those of rows and of the power of waiting GPUs), and, as independent
ones, by how much the energy of each iteration differs from what rows say of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from perseus_planner.base.units import Finite, Index

if TYPE_CHECKING:
    from perseus_planner.runs.records import IterationRecord

A = TypeVar("A", bound="Account")
JUDGED = 0.5
"""Share of the energy of which it must be known what was saved before a saving is stated."""
QUANTILE = 1.96
"""Standard errors on each side of a saving in its 95 % interval."""


@dataclass(frozen=True)
class SavedInterval:
    """What was saved, and half of its 95 % interval."""

    saved_j: float  #: Joules less than with all clocks at maximum, in as much time
    within_j: float  #: Joules by which it may be more or less
    share: float  #: Of the energy with all clocks at maximum
    within_share: float  #: By which that may be more or less


@dataclass(frozen=True, kw_only=True)
class Account:
    """What ran, took, used and saved.

    `a + b` is the account of both, in any order: of other iterations, ranks, attempts or jobs.
    Fields add up, unless they say "greatest" or "least".
    """

    iterations: Index = 0  #: Number of iterations of the job, counted on its first rank
    time_s: Finite = 0.0  #: Seconds of their windows, without pauses
    windows: Index = 0  #: Number of iterations of all ranks
    gpu_s: Finite = 0.0  #: Seconds of their windows, without pauses
    between_s: Finite = 0.0  #: Those of them that passed after the end of an iteration
    busy_s: Finite = 0.0  #: Seconds of computations
    as_planned: Index = 0  #: Number of windows whose iteration ran as planned
    planned_s: Finite = 0.0  #: Seconds of these iterations by the plan
    planned_busy_s: Finite = 0.0  #: Seconds of their computations by the plan
    pause_s: Finite = 0.0  #: Seconds of pauses, and of the iterations that follow evaluations
    metered_s: Finite = 0.0  #: Those of `gpu_s` whose energy is known
    energy_j: Finite = 0.0  #: Joules of the GPUs in them
    between_j: Finite = 0.0  #: Those of them that were used after the end of an iteration
    pause_j: Finite = 0.0  #: Joules in `pause_s`
    lowered: Index = 0  #: Number of windows for which a clock below the highest was requested
    judged_j: Finite = 0.0  #: Those joules of `energy_j` of which it is known what was saved
    #: Joules less than with all clocks at maximum in as much time, where that is known; negative if
    #: more.
    saved_j: Finite = 0.0
    saved_error_j: Finite = 0.0  #: Standard error of `saved_j`, as far as windows share it
    saved_variance_j2: Finite = 0.0  #: Variance of `saved_j`, as far as each window has its own
    changes_asked: Index = 0  #: Number of clock changes that were requested
    changes_set: Index = 0  #: Number of them that were made before another clock was requested
    changes_late: Index = 0  #: Number of those made late; see `IterationRecord`
    changes_overtaken: Index = 0  #: Number of changes that were not made in time
    off_clock_s: Finite = 0.0  #: Seconds of computation before the requested clock was set
    clocked_s: Finite = 0.0  #: Seconds of computations whose achieved clock is known
    clock_s: Finite = 0.0  #: Their requested clock times these seconds
    achieved_mhz_s: Finite = 0.0  #: Their achieved clock times these seconds
    #: Throttle reason -> seconds in which it held a GPU back.
    throttled_s: Mapping[str, float] = field(default_factory=dict)
    overloaded: Index = 0  #: Number of windows at whose end the host had more to run than CPUs
    temperature_c: Finite | None = None  #: Degrees Celsius, the greatest; None if not known
    begin_s: Finite | None = None  #: When the first began, seconds since the epoch: the least
    end_s: Finite | None = None  #: When the last ended, seconds since the epoch: the greatest
    last_iteration: Index | None = None  #: Number of the last of them, the greatest
    #: "measured" or "simulated", for the energy; "simulated" if any is, None if none is known.
    energy_is: str | None = None

    @classmethod
    def of(cls: type[A], row: IterationRecord, *, is_first: bool, **key: Any) -> A:
        """Return the account of one iteration of one rank.

        Args:
            row: What was recorded of it.
            is_first: Whether the rank is the first one of the job.
            key: Other fields of a class that has more.
        """
        # It may hold a part of the evaluation, so it stands apart as a pause does.
        if row.follows_evaluation:
            return cls._of_evaluation(row, **key)
        # A pause is cut out of the window, and the last window ends with its iteration.
        between_s = 0.0 if row.is_paused or row.next_s is None else row.next_s - row.end_s
        window_s = row.time_s + between_s
        used_j = row.energy_j or 0.0
        # The energy of a window is known only with what was used after its iteration.
        is_whole = row.energy_j is not None and (not between_s or row.between_j is not None)
        between_j = (row.between_j or 0.0) if between_s and is_whole else 0.0
        # Requested and achieved clocks are compared over the same seconds.
        clocked_s = row.busy_s if row.achieved_mhz is not None and row.clock is not None else 0.0
        sums = {
            # An iteration of the job counts once, on its first rank.
            "iterations": int(is_first),
            "time_s": window_s * is_first,
            "windows": 1,
            "gpu_s": window_s,
            "between_s": between_s,
            "as_planned": int(row.is_as_planned),
            "metered_s": window_s if is_whole else row.time_s * (row.energy_j is not None),
            "energy_j": used_j + between_j,
            "between_j": between_j,
            "lowered": int(row.lowered > 0),
            "clocked_s": clocked_s,
            "clock_s": clocked_s * (row.clock or 0.0),
            "achieved_mhz_s": clocked_s * (row.achieved_mhz or 0.0),
            "overloaded": int((row.host_load or 0.0) > 1.0),
        }
        # Times by the plan are compared with iterations that ran by it.
        if row.is_as_planned and row.planned_s is not None:
            sums["planned_s"] = row.planned_s
            sums["planned_busy_s"] = row.planned_busy_s or 0.0
        if row.is_paused:
            sums["pause_s"] = (row.next_s or 0.0) - row.end_s
            sums["pause_j"] = row.between_j or 0.0
        # What was saved is known only where the energy is.
        if row.saved_j is not None and row.energy_j is not None:
            sums["judged_j"] = sums["energy_j"]
            sums["saved_j"] = row.saved_j
            sums["saved_error_j"] = row.saved_error_j
            # Errors of its own are independent from window to window, so their variances add up.
            sums["saved_variance_j2"] = row.saved_noise_j**2
        return cls(
            **sums,  # type: ignore[arg-type]
            **{name: getattr(row, name) for name in _OF_ROWS},
            last_iteration=row.iteration,
            energy_is=None if row.energy_j is None else row.origin,
            **key,
        )

    @classmethod
    def _of_evaluation(cls: type[A], row: IterationRecord, **key: Any) -> A:
        """Return the account of an iteration that may hold a part of an evaluation."""
        until_s = row.end_s if row.next_s is None else row.next_s
        return cls(
            pause_s=until_s - row.begin_s,
            pause_j=(row.energy_j or 0.0) + (row.between_j or 0.0),
            begin_s=row.begin_s,
            end_s=row.end_s,
            last_iteration=row.iteration,
            **key,
        )

    def __add__(self: A, other: Account) -> A:
        return replace(
            self,
            **{name: add(getattr(self, name), getattr(other, name)) for name, add in _ADDS.items()},
        )

    def since(self, earlier: Account) -> Account:
        """Return what came after `earlier`, which this account holds; its greatest and least are
        those of both.
        """
        # Sums can be taken apart again; of a greatest value nobody knows the one before.
        changed = {
            name: getattr(self, name) - getattr(earlier, name)
            for name, add in _ADDS.items()
            if add is _sum
        }
        return Account(**{**{name: getattr(self, name) for name in _ADDS}, **changed})

    @property
    def is_judged(self) -> bool:
        """Whether it is known what most of the energy has saved; else no saving is stated."""
        return self.judged_j > 0.0 and self.judged_j >= JUDGED * self.energy_j

    @property
    def saved_share(self) -> float | None:
        """`saved_j` over the energy that there would have been; None if it `is_judged` not."""
        return _share(self.saved_j, self.judged_j + self.saved_j) if self.is_judged else None

    @property
    def saved_within_j(self) -> float:
        """Half of the 95 % interval of `saved_j`, joules."""
        return QUANTILE * math.sqrt(self.saved_error_j**2 + max(0.0, self.saved_variance_j2))

    @property
    def saved_within_share(self) -> float:
        """Half of the 95 % interval of `saved_share`."""
        return _share(self.saved_within_j, self.judged_j + self.saved_j)

    @property
    def saving(self) -> SavedInterval | None:
        """What was saved, with its interval; None if it `is_judged` not."""
        share = self.saved_share
        if share is None:
            return None
        return SavedInterval(self.saved_j, self.saved_within_j, share, self.saved_within_share)

    @property
    def mean_iteration_s(self) -> float:
        """Mean seconds from the begin of an iteration to that of the next; 0 without any."""
        return _share(self.time_s, self.iterations)

    @property
    def mean_power_w(self) -> float | None:
        """Mean watts of all GPUs together in the time of windows; None if it is not known."""
        if not (self.metered_s and self.time_s):
            return None
        return self.energy_j / self.metered_s * self.gpu_s / self.time_s

    @property
    def inside_s(self) -> float:
        """Seconds of iterations themselves, from their begins to their ends."""
        return self.gpu_s - self.between_s


@dataclass(frozen=True, kw_only=True)
class Entry(Account):
    """The account of what ran by one plan in one attempt of a job."""

    attempt: Index = 0  #: Number of the attempt; 0 for several together
    version: Index | None = None  #: Version of the plan; None without one, and for several together

    def __add__(self, other: Account) -> Entry:
        sums = super().__add__(other)
        # What is of several attempts or plans together names none of them.
        if isinstance(other, Entry):
            return replace(
                sums,
                attempt=self.attempt if self.attempt == other.attempt else 0,
                version=self.version if self.version == other.version else None,
            )
        return sums

    @property
    def key(self) -> tuple[int, int | None]:
        """Attempt and version."""
        return self.attempt, self.version


_OLDER = (0, None)


def fold(entries: Iterable[Entry], most: int | None = None) -> tuple[Entry, ...]:
    """Return one entry for each attempt and plan, oldest first.

    If there are more than `most`, the oldest are added up to one, of attempt 0 without a version.
    """
    sums: dict[tuple[int, int | None], Entry] = {}

    def put(entry: Entry) -> None:
        sums[entry.key] = sums[entry.key] + entry if entry.key in sums else entry

    for entry in entries:
        put(entry)
    # The oldest one goes into the one of all older ones, until few enough are left.
    while most is not None and len(sums) > most:
        oldest = min((key for key in sums if key != _OLDER), key=_age)
        put(replace(sums.pop(oldest), attempt=0, version=None))
    return tuple(sums[key] for key in sorted(sums, key=_age))


def _age(key: tuple[int, int | None]) -> tuple[int, int]:
    return key[0], key[1] or 0


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0.0 else 0.0


def _sum(one: Any, other: Any) -> Any:
    return one + other


def _each(one: Mapping[str, float], other: Mapping[str, float]) -> Mapping[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in (*one, *other)}


def _known(choose: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def add(one: Any, other: Any) -> Any:
        # What is not known on one side is what the other side knows.
        if one is None:
            return other
        return one if other is None else choose(one, other)

    return add


_greatest = _known(max)
_least = _known(min)
_CHANGES = ("changes_asked", "changes_set", "changes_late", "changes_overtaken", "off_clock_s")
_OF_ROWS = (*_CHANGES, "busy_s", "throttled_s", "temperature_c", "begin_s", "end_s")
_OTHERWISE: dict[str, Callable[[Any, Any], Any]] = {
    "throttled_s": _each,
    "temperature_c": _greatest,
    "begin_s": _least,
    "end_s": _greatest,
    "last_iteration": _greatest,
    "energy_is": _greatest,  # "simulated" comes after "measured"
}
_ADDS = {column.name: _OTHERWISE.get(column.name, _sum) for column in fields(Account)}
"""How each field adds up."""
SUMS = tuple(name for name, add in _ADDS.items() if add is _sum)
"""The fields that are sums."""
GROWING = tuple(name for name in SUMS if name != "saved_j")
"""The sums that never fall."""
