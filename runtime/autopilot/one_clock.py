"""Chooses one value, a clock or a power limit, for whole iterations: the least energy that an
agreed slowdown allows.

This is what the power limit optimizer of Zeus does, with a bound on what the search costs:

1. The reference is the iteration time at the highest value. It is measured first, and audited every
   few hundred iterations. If it has changed, all that was measured is forgotten.
2. The search goes down by steps of at least `STEP`, and halves the last one as often as it can. An
   iteration at a value v takes at most its time at a measured value g > v times g / v, which holds
   for clocks, and for power limits while a lower one saves energy. So a probe of two iterations is
   made only if the ledger can pay for it at that time.
3. If the probe is as fast as agreed, a window that is long beside the steps of the energy counter
   measures the energy. The search ends between a value that is fast enough and the next one, which
   is not; or at a value that takes clearly more energy than the best one.
4. Training then runs at the value of least energy among those that are on average as fast as
   agreed. Its windows go on being measured. With each audit, the value at which the search ended is
   probed again.

It is pure: it sees no GPU and no time of day.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from perseus_planner.base.errors import UsageError
from perseus_planner.base.units import LIMIT, Count, Joules, Seconds
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.profiles.profiles import Profile
from perseus_planner.runtime.autopilot.job import AutopilotSettings, Decision, Ledger, Phase
from perseus_planner.schedules import WHOLE

if TYPE_CHECKING:
    from perseus_planner.profiles.measurement import ClockChange
    from perseus_planner.runtime.autopilot.job import AutopilotJob, RankObservation

Purpose = Literal["reference", "probe", "measure", "follow", "audit"]

STEP = 0.025
"""Relative distance of the first values that are tried."""
WINDOW_S = 5.0
"""Length of a window that measures energy: an energy counter that moves every 0.1 s is then
exact to 2 %.
"""
PROBE = 2
"""Iterations of a probe."""
SETTLING = 1
"""Iterations after a change that are not measured."""
AUDIT_EVERY = 300
"""Iterations between two audits of the reference."""

_REFERENCE = 4  #: fewest iterations of a reference
_CHANGED = 0.02  #: a reference that differs by more is another one
_DRIFTED = 0.03  #: a window that differs by more from those before it asks for an audit
_RISEN = 0.02  #: so much more energy than at the best value ends the search
_WINDOWS = 10  #: a new window counts at least as one of so many
_SHORTEST = 0.3  #: no value below this share of the highest one is tried
_ATTEMPTS = 3  #: of a value that was too slow
_BURST = 0.1  #: what the ledger may owe, as a share of the reference
_PAUSE = 2.0  #: a time of more than so many references is a pause, such as a checkpoint
_PHASES: Mapping[Purpose, Phase] = MappingProxyType(
    {
        "reference": "reference",
        "probe": "learning",
        "measure": "learning",
        "follow": "following",
        "audit": "audit",
    }
)


@dataclass(frozen=True)
class Window:
    """Iterations at one value."""

    index: int  #: Position of the value, 0 for the highest
    iterations: int  #: How many are measured, after those in which the value settles
    purpose: Purpose  #: What they are for


@dataclass
class ValueRow:
    """What is known of a value: means over its windows, per iteration."""

    time_s: Seconds
    energy_j: Joules | None = None
    windows: Count = 1

    def add(self, time_s: float, energy_j: float | None) -> None:
        """Count one more window."""
        self.windows = min(self.windows + 1, _WINDOWS)
        self.time_s += (time_s - self.time_s) / self.windows
        if energy_j is not None:
            self.energy_j = (
                energy_j
                if self.energy_j is None
                else self.energy_j + (energy_j - self.energy_j) / self.windows
            )


class ValueSearch:
    """The search over the values of all GPUs of a job, which have the same value at any time.

    Args:
        values: The values that can be set, MHz or watts.
        slowdown: The agreed iteration time, as a multiple of the reference; at least 1.
        max_slowdown: How much longer iterations may be on average, as a share of the reference.

    Raises:
        UsageError: If there is no value.
    """

    def __init__(self, values: Sequence[int], slowdown: float, max_slowdown: float) -> None:
        if not values:
            raise UsageError(
                "values: is empty; give the clocks or power limits that the GPUs support"
            )
        least = _SHORTEST * max(values)
        self.values: Sequence[int] = sorted(
            {LIMIT.check(value, "values") for value in values if value >= least}, reverse=True
        )
        self._share: float = slowdown + max_slowdown
        self._limit: float = (
            slowdown + max_slowdown / 2
        )  # of a mean, so that the ledger is not overdrawn
        self._rows: dict[int, ValueRow] = {}
        self._before: Mapping[int, ValueRow] = {}  #: from an earlier start, until it is audited
        self._next: Purpose = "reference"
        self._since_audit = self._probed = 0
        self._is_retrying = False  #: since the last audit, until a value is too slow
        self._too_slow: dict[int, int] = {}  #: how often each value was

    @property
    def reference_s(self) -> float | None:
        """Seconds of an iteration at the highest value; None before it is measured."""
        return self._rows[0].time_s if 0 in self._rows else None

    @property
    def rows(self) -> dict[int, ValueRow]:
        """What is known, by value."""
        return {self.values[index]: row for index, row in self._rows.items()}

    def begin_with(self, rows: Mapping[int, ValueRow]) -> None:
        """Use what an earlier start has learnt, by value, if the first audit finds the reference
        that it had.
        """
        known_rows = {
            index: rows[value] for index, value in enumerate(self.values) if value in rows
        }
        if 0 in known_rows:
            self._before = known_rows

    @property
    def best(self) -> int:
        """Position of the value of least energy among those that are as fast as agreed."""
        usable = [index for index in self._rows if index == 0 or self._is_fast(index)]
        metered = [index for index in usable if self._rows[index].energy_j is not None]
        return min(metered, key=lambda index: self._rows[index].energy_j or 0.0, default=0)

    @property
    def effect(self) -> tuple[float, float] | None:
        """What `best` does beside the highest value: its time as a multiple, and the share of
        energy that it saves.

        None while one of them is not measured.
        """
        rows = (self._rows.get(0), self._rows.get(self.best))
        measured = [(row.time_s, row.energy_j) for row in rows if row is not None and row.energy_j]
        if len(measured) < len(rows):
            return None
        (top_s, top_j), (best_s, best_j) = measured
        return best_s / top_s, 1.0 - best_j / top_j

    def decide(self, ledger: Ledger | None) -> Window:
        """Return the next window.

        Args:
            ledger: What the slowest rank owes now; None before there is a reference.
        """
        reference_s = self.reference_s
        if reference_s is None or ledger is None:
            return Window(0, _REFERENCE, "reference")
        long = max(_REFERENCE, math.ceil(WINDOW_S / reference_s))
        if self._next == "audit":
            return Window(0, long, "audit")
        lowest = max(index for index in self._rows if index == 0 or self._is_fast(index))
        if self._next == "measure":
            return Window(self._probed, long, "measure")
        candidate = self._candidate(lowest)
        if candidate is not None and self._can_pay(lowest, candidate, ledger):
            return Window(candidate, PROBE, "probe")
        return Window(self.best, long, "follow")

    def observe(
        self, window: Window, time_s: float | None, energy_j: float | None, *, is_whole: bool = True
    ) -> None:
        """Take in what a window measured.

        Args:
            window: The window.
            time_s: Mean seconds of its iterations on the slowest rank; None if the ledger allowed
                none at its value.
            energy_j: Mean joules of its iterations, of a rank; None if unknown.
            is_whole: Whether the ledger allowed all of its iterations.
        """
        self._since_audit += window.iterations
        row = self._rows.get(window.index)
        has_drifted = time_s is None or (
            row is not None and abs(time_s / row.time_s - 1.0) > _DRIFTED
        )
        if window.purpose == "audit":
            self._since_audit, self._is_retrying = 0, True
            if time_s is not None and row is not None and abs(time_s / row.time_s - 1.0) > _CHANGED:
                self._rows, self._too_slow, row = {}, {}, None
        if time_s is not None:
            known_j = energy_j if is_whole and window.purpose != "probe" else None
            if row is None:
                self._rows[window.index] = ValueRow(time_s, known_j)
            else:
                row.add(time_s, known_j)
        if window.purpose == "audit" and self._before:
            before, self._before = self._before, {}
            if time_s is not None and abs(time_s / before[0].time_s - 1.0) <= _CHANGED:
                self._rows = {**before, 0: self._rows[0]}
        self._next = self._after(window, has_drifted=has_drifted or not is_whole)

    def _after(self, window: Window, *, has_drifted: bool) -> Purpose:
        """Return what comes after a window that was taken in."""
        index = window.index
        if window.purpose == "reference":
            return "audit"  # whose window is long enough for the energy
        if window.purpose == "probe" and self._is_fast(index, self._share):
            self._probed = index
            return "measure"
        if window.purpose in ("probe", "measure") and not self._is_fast(index):
            self._too_slow[index] = self._too_slow.get(index, 0) + 1
            self._is_retrying = False
        if window.purpose == "follow" and (has_drifted or self._since_audit >= AUDIT_EVERY):
            return "audit"
        return "follow"

    def _is_fast(self, index: int, limit: float | None = None) -> bool:
        """Whether a value is known to be as fast as agreed, or as a limit: a multiple of the
        reference.
        """
        reference_s, row = self.reference_s, self._rows.get(index)
        if reference_s is None or row is None:
            return False
        return row.time_s <= (self._limit if limit is None else limit) * reference_s

    def _candidate(self, lowest: int) -> int | None:
        """Return the value to probe next; None while none is to be probed."""
        lowest_j, best_j = self._rows[lowest].energy_j, self._rows[self.best].energy_j
        if lowest_j is None or best_j is None or lowest_j > (1.0 + _RISEN) * best_j:
            return None
        slow = min(
            (index for index in (*self._rows, *self._too_slow) if index > lowest), default=None
        )
        if slow is None:
            below = (1.0 - STEP) * self.values[lowest]
            return next((index for index, value in enumerate(self.values) if value <= below), None)
        if slow > lowest + 1:
            return (lowest + slow) // 2
        return slow if self._is_retrying and self._too_slow.get(slow, 0) < _ATTEMPTS else None

    def _can_pay(self, lowest: int, candidate: int, ledger: Ledger) -> bool:
        """Whether a probe overdraws no ledger if it is as slow as it can be."""
        longest_s = self._rows[lowest].time_s * self.values[lowest] / self.values[candidate]
        excess_s = max(0.0, longest_s - self._share * ledger.reference_s)
        return ledger.owed_s + (PROBE + SETTLING) * excess_s <= ledger.burst_s


class OneClock:
    """Decides the one value of all GPUs of a job without a pipeline, as `Autopilot` decides the
    clocks of a pipeline: call `observe` and `decide` likewise.

    Args:
        job: The job, whose iteration is one computation.
        settings: What it may do.
        prior: A profile of the iteration, which counts if the first audit finds the same time at
            the highest value.
    """

    def __init__(
        self, job: AutopilotJob, settings: AutopilotSettings, prior: Profile | None = None
    ) -> None:
        self.job = job
        measured = () if prior is None else prior.measurements[job.iteration.keys[0]]
        rows = {row.clock_mhz: ValueRow(row.time_s, row.energy_j) for row in measured}
        top, *others = job.clocks_mhz
        known = [value for value in others if settings.learn or value in rows]
        self._limits = settings.slowdown, settings.max_slowdown
        self._search = ValueSearch([top, *known], *self._limits)
        self._search.begin_with(rows)
        self._ledger: Ledger | None = None
        self._last_s = 0.0  #: time of the last iteration
        self._window: Window | None = None
        self._decided = 0  #: the iteration for which the window was decided
        self._begins: int | None = None  #: the first that is measured; None before all run at it
        self._has_ended = True
        self._is_whole = True  #: the ledgers have allowed all iterations of the window so far
        #: Pipeline -> its iterations that were seen in the window.
        self._seen: dict[int, list[RankObservation]] = {}

    def observe(self, observations: Sequence[RankObservation]) -> None:
        """Learn from what ranks observed of one iteration."""
        if not observations:
            return
        iteration, time_s = observations[0].iteration, max(seen.time_s for seen in observations)
        ledger, before_s, self._last_s = self._ledger, self._last_s, time_s
        if ledger is not None:
            full = all(seen.version == 0 for seen in observations)
            self._ledger = ledger.add(time_s, full_clocks=full, iteration=iteration)
        window = self._window
        if window is None or self._has_ended or iteration < self._decided:
            return
        if self._begins is None:
            if any(seen.version != window.index for seen in observations):
                return
            self._begins = iteration + SETTLING
        if iteration >= self._begins and not (ledger and ledger.is_pause(time_s, before_s)):
            self._add(window.index, observations)
        # Of short iterations not all are seen.
        is_seen = bool(self._seen) or not self._is_whole
        self._has_ended = is_seen and iteration + 1 >= self._begins + window.iterations

    def _add(self, index: int, observations: Sequence[RankObservation]) -> None:
        for seen in observations:
            if seen.version != index:
                self._is_whole = False
            elif all(ran[2:4] == (self._search.values[index], None) for ran in seen.computations):
                self._seen.setdefault(seen.pipeline, []).append(seen)

    def decide(self, iteration: int) -> Decision:
        """Return what all ranks run in `iteration`, which is still ahead."""
        if self._has_ended:
            self._end_window()
            self._window = self._search.decide(self._ledger)
            self._decided, self._begins, self._has_ended = iteration, None, False
            self._is_whole, self._seen = True, {}
            if (reference_s := self._search.reference_s) is not None:
                terms = Ledger(reference_s, *self._limits, _BURST * reference_s, pause=_PAUSE)
                self._ledger = terms if self._ledger is None else self._ledger.renewed(terms)
        assert self._window is not None  # decided above at first
        index, search = self._window.index, self._search
        value, row, effect = search.values[index], search.rows, search.effect
        known = [known_value for known_value, known_row in row.items() if known_row.energy_j]
        expected_s = row[value].time_s if value in row else None
        return Decision(
            iteration,
            index,
            _PHASES[self._window.purpose],
            (((value,),),) * self.job.pipelines,
            # Ranks take over its terms, and go on with what they owe themselves.
            None if self._ledger is None else replace(self._ledger, last=-1, recent=()),
            trials=int(index > 0 and value not in known),
            unknown=len(search.values) - len(known),
            time_s=None if effect is None else expected_s or search.reference_s,
            saving=0.0 if effect is None else effect[1],
        )

    def _end_window(self) -> None:
        """Take in what the window measured, once there was one."""
        if self._window is None:
            return
        times_s, energies_j = [], []
        for iterations in self._seen.values():
            times_s.append(fmean(seen.time_s for seen in iterations))
            (first, first_j), (last, last_j) = iterations[0].metered, iterations[-1].metered
            energies_j += [(last_j - first_j) / (last - first)] if last > first else []
        is_known = energies_j and len(energies_j) == len(times_s)
        self._search.observe(
            self._window,
            max(times_s, default=None),
            fmean(energies_j) if is_known else None,
            is_whole=self._is_whole,
        )

    def wait_for(self, times_s: Sequence[float]) -> None:
        """Do nothing: all GPUs have one value, whichever of them waits for another."""

    def set_clock_change(self, change: ClockChange) -> None:
        """Know what setting a clock was measured to cost, which nothing depends on."""
        self.job = replace(self.job, clock_change=change)

    def busy_s(self) -> tuple[tuple[float, ...], ...]:
        """Return nothing: a rank that waits for another in its iteration cannot be told from one
        that computes.
        """
        return ()

    def learned(self) -> Profile:
        """Return what was learnt as a profile, with the values whose energy was measured.

        Raises:
            UsageError: If the highest value was not measured yet.
        """
        job, rows = self.job, self._search.rows
        if job.clocks_mhz[0] not in rows or rows[job.clocks_mhz[0]].energy_j is None:
            raise UsageError("no iteration at full clocks was measured; there is no profile yet")
        return Profile(
            {
                job.iteration.keys[0]: tuple(
                    Measurement(value, row.time_s, row.energy_j)
                    for value, row in rows.items()
                    if row.energy_j is not None
                )
            },
            0.0,  # what a GPU draws while it waits was not seen, and so waiting costs nothing
            gpu=job.gpu,
            clock_change=job.clock_change,
            control=job.control,
            iteration={"schedule": WHOLE.name, "microbatches": 1},
            conditions={"learnt": "while training"},
        )
