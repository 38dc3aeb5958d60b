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
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from perseus_planner.base.errors import UsageError
from perseus_planner.base.units import LIMIT, Count, Joules, Seconds

if TYPE_CHECKING:
    from perseus_planner.runtime.autopilot.job import Ledger

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


@dataclass(frozen=True)
class Window:
    """Iterations at one value."""

    number: int  #: Number of the window, from 0
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

    def to_dict(self) -> dict[str, float]:
        """Return what is known as plain values."""
        return {name: value for name, value in asdict(self).items() if value is not None}


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
        self._number = self._since_audit = 0
        self._probed = 0
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
            return self._window(0, _REFERENCE, "reference")
        long = max(_REFERENCE, math.ceil(WINDOW_S / reference_s))
        if self._next == "audit":
            return self._window(0, long, "audit")
        lowest = max(index for index in self._rows if index == 0 or self._is_fast(index))
        if self._next == "measure":
            return self._window(self._probed, long, "measure")
        candidate = self._candidate(lowest)
        if candidate is not None and self._can_pay(lowest, candidate, ledger):
            return self._window(candidate, PROBE, "probe")
        return self._window(self.best, long, "follow")

    def observe(
        self, window: Window, time_s: float | None, energy_j: float | None, *, is_whole: bool = True
    ) -> None:
        """Take in what a window measured.

        Args:
            window: The window.
            time_s: Mean seconds of its iterations on the slowest rank; None if the ledger allowed
                none at its value.
            energy_j: Mean joules of its iterations on all ranks together; None if unknown.
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

    def _window(self, index: int, iterations: int, purpose: Purpose) -> Window:
        self._number += 1
        return Window(self._number - 1, index, iterations, purpose)
