"""What a rank runs while the autopilot plans: its newest program, or full clocks while its
ledger is overdrawn.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perseus_planner.runtime.autopilot.ranks.programs import (
    AutopilotProgram,
    order_number,
    order_of,
)

if TYPE_CHECKING:
    from perseus_planner.runtime.autopilot.ledger import Ledger
    from perseus_planner.runtime.hook import Order, RankProgram
    from perseus_planner.runtime.switching.follower import PlanFollower
    from perseus_planner.schedules import Computation

PHASE = 0.02
"""Share of an iteration by which that of a rank may seem longer than that of its pipeline."""

_KEPT_ORDERS = 8
_KEPT_ENDS = 64  #: iterations whose times may become known late


@dataclass(frozen=True)
class Ended:
    """An iteration that has ended on the training thread."""

    iteration: int  #: Its number
    #: The program that it ran as planned; None if it ran without one or deviated.
    program: AutopilotProgram | None
    order: int  #: Number of the order of what it ran; 0 if that is not known


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


class ProgramFollower:
    """The `ProgramSource` of a rank whose clocks the autopilot decides; see `PlanFollower`.

    Args:
        is_first: Whether this is the first rank of a pipeline.

    Attributes:
        ledger: The rank's ledger.
        orders: By number, the last orders of computations that the rank has run; replaced, never
            changed.
        ended: Iterations that have ended, for the `Observer`.
    """

    def __init__(self, *, is_first: bool = True) -> None:
        self.ledger = RankLedger(is_first=is_first)
        self.orders: dict[int, tuple[Computation, ...]] = {}
        self.ended: deque[Ended] = deque(maxlen=_KEPT_ENDS)
        self._time_s: Callable[[], float | None] = lambda: None
        self._follower: PlanFollower | None = None
        self._noted: Order = ()  #: the order that ran last without being a program's
        self._number = 0  #: of the order that ran last

    def follow(self, follower: PlanFollower, time_s: Callable[[], float | None]) -> None:
        """Begin with the rank's follower, and `Marks.ended_s` of its marks."""
        self._follower, self._time_s = follower, time_s

    def program_for(self, iteration: int) -> RankProgram | None:
        """See `ProgramSource.program_for`."""
        assert self._follower is not None  # set before training
        program = self._follower.program_for(iteration)
        if isinstance(program, AutopilotProgram):
            self.ledger.renew(program.ledger)
            return program.at_full_clocks if self.ledger.is_overdrawn else program
        return program

    def on_end(
        self,
        iteration: int,
        program: RankProgram | None,
        deviation: str | None,
        order: Order | None = None,
    ) -> None:
        """See `ProgramSource.on_end`."""
        assert self._follower is not None  # set before training
        if order:
            self._note(order)
        followed = program if isinstance(program, AutopilotProgram) and deviation is None else None
        if followed is not None:
            self._number = followed.order
            if (time_s := self._time_s()) is not None:
                self.ledger.add(iteration, time_s, full_clocks=followed.decision == 0)
        self.ended.append(Ended(iteration, followed, self._number))
        self._follower.on_end(iteration, program, deviation)

    def _note(self, order: Order) -> None:
        if order != self._noted:
            self._noted = order
            self._number = order_number(order)
            kept = {
                number: found for number, found in self.orders.items() if number != self._number
            }
            newest = list(kept.items())[1 - _KEPT_ORDERS :]
            self.orders = {**dict(newest), self._number: order_of(order)}
