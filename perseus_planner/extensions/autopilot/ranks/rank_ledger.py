"""What a rank notes of its own iterations: how each has ended, and a ledger of what it owes for
those that clocks made longer than agreed.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perseus_planner.runtime.guarantee import Ledger
    from perseus_planner.runtime.program import Program

PHASE = 0.02
"""Share of an iteration by which that of a rank may seem longer than that of its pipeline."""


class RankLedger:
    """The ledger of this rank: times are added as soon as they are known, in the order in which
    iterations ended.

    The first rank of a pipeline begins an iteration first and ends it last, so its ledger is that
    of the pipeline. Other ranks begin early and wait, and when programs change, their iterations
    seem longer or shorter for once than those of the pipeline. So they overlook `PHASE` of an
    iteration until the autopilot's ledger, which comes with its programs, says what is really owed.

    The training thread calls `renew` and `is_overdrawn`, any thread `add`.

    Args:
        is_first: Whether this is the first rank of a pipeline.
    """

    def __init__(self, *, is_first: bool = True) -> None:
        self._overlooked = 0.0 if is_first else PHASE
        self._lock = threading.Lock()
        self._ledger: Ledger | None = None
        self._terms: Ledger | None = None  #: taken last
        self._last = -1  #: iteration that was added last

    @property
    def ledger(self) -> Ledger | None:
        """The ledger; None before the reference is known."""
        return self._ledger

    @property
    def is_overdrawn(self) -> bool:
        """Whether the next iteration has to run at full clocks."""
        ledger = self._ledger
        return (
            ledger is not None
            and ledger.owed_s > ledger.burst_s + self._overlooked * ledger.reference_s
        )

    def renew(self, ledger: Ledger | None) -> None:
        """Take reference, limits, and what is owed at the autopilot; what this rank has run
        since is added.
        """
        if ledger is not None and ledger is not self._terms:
            with self._lock:
                self._terms = ledger
                self._ledger = ledger if self._ledger is None else self._ledger.renewed(ledger)

    def add(self, iteration: int, time_s: float, *, full_clocks: bool) -> None:
        """Add an iteration that ran by a program, unless it was added before."""
        with self._lock:
            if self._ledger is not None and iteration > self._last:
                self._last = iteration
                self._ledger = self._ledger.add(
                    time_s, full_clocks=full_clocks, iteration=iteration
                )


@dataclass(frozen=True)
class Ended:
    """An iteration that has ended on the training thread."""

    iteration: int  #: Its number
    program: Program | None  #: What it ran as planned; None if it ran without one or deviated
    order: int  #: Number of the order of what it ran; 0 if that is not known
