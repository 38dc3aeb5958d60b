"""What a rank does in the windows of a search: it times its iterations and keeps its ledger.
Pure, like the search.
"""

from __future__ import annotations

from dataclasses import dataclass

from perseus_planner.runtime.autopilot.job import Ledger
from perseus_planner.runtime.whole.search import SETTLING, Window

BURST = 0.1
"""How much a rank may owe before it runs at the highest value, as a share of the reference."""
PAUSE = 2.0
"""A time of more than this many references is a pause, such as a checkpoint, unless the one
before was as long.
"""


@dataclass(frozen=True)
class Terms:
    """A window as all ranks know it."""

    window: Window  #: What is measured
    value: int  #: The clock, MHz, or power limit, watts
    begins_at: int  #: Number of the first iteration that runs at the value on all ranks
    #: Seconds of an iteration at the highest value; None while that is unknown.
    reference_s: float | None
    top: int  #: The highest value


class RankPart:
    """The part of one rank. `end` is called on the training thread, all else on another.

    Args:
        slowdown: As for `Ledger`.
        max_slowdown: As for `Ledger`.
    """

    def __init__(self, slowdown: float, max_slowdown: float) -> None:
        self._slowdown, self._max_slowdown = slowdown, max_slowdown
        self.iteration = 0  #: number of the current iteration
        self.ledger: Ledger | None = None
        #: position of the value that is set; the caller keeps it, 0 before the change to it begins
        self.set_index = 0
        self._terms: Terms | None = None
        self._times_s: list[float] = []
        self._is_disturbed = self._was_long = False

    def follow(self, terms: Terms) -> None:
        """Begin a window."""
        self._times_s, self._is_disturbed, self._terms = [], False, terms
        if terms.reference_s is not None:
            new = Ledger(
                terms.reference_s, self._slowdown, self._max_slowdown, BURST * terms.reference_s
            )
            self.ledger = new if self.ledger is None else self.ledger.renewed(new)

    @property
    def wanted(self) -> int:
        """Position of the value to set: the highest while the ledger is overdrawn."""
        if self._terms is None or (self.ledger is not None and self.ledger.is_overdrawn):
            return 0
        return self._terms.window.index

    @property
    def is_measuring(self) -> bool:
        """Whether the iterations that are measured have begun."""
        return self._terms is not None and self.iteration >= self._terms.begins_at + SETTLING

    @property
    def has_ended(self) -> bool:
        """Whether the window has ended."""
        terms = self._terms
        return (
            terms is not None
            and self.iteration >= terms.begins_at + SETTLING + terms.window.iterations
        )

    def result(self) -> tuple[float | None, bool]:
        """Return the mean seconds of an iteration in the window, and whether all ran at the
        window's value.
        """
        times_s = self._times_s
        return (sum(times_s) / len(times_s) if times_s else None), not self._is_disturbed

    def end(self, time_s: float, *, at_top: bool) -> bool:
        """End an iteration; return whether another value is wanted now, or the window has begun or
        ended.

        Args:
            time_s: Seconds that it took.
            at_top: Whether all of it ran at the highest value.
        """
        before, was_measuring = self.wanted, self.is_measuring
        is_long = self.ledger is not None and time_s > PAUSE * self.ledger.reference_s
        if not is_long or self._was_long:
            self._add(time_s, at_top=at_top)
        self._was_long = is_long
        self.iteration += 1
        return self.wanted != before or self.is_measuring != was_measuring or self.has_ended

    def _add(self, time_s: float, *, at_top: bool) -> None:
        if self.ledger is not None:
            self.ledger = self.ledger.add(time_s, full_clocks=at_top)
        if self._terms is not None and self.is_measuring and not self.has_ended:
            index = self._terms.window.index
            if at_top if index == 0 else self.set_index == index:
                self._times_s.append(time_s)
            else:
                self._is_disturbed = True
