"""The autopilot as a decider: its programs come from rank 0's process, which learns from what all
ranks observe; each rank carries a ledger, and runs at full clocks while that is overdrawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from perseus_planner.base.errors import PlannerError
from perseus_planner.extensions.autopilot.ranks.messages import (
    Noted,
    Programs,
    at_full_clocks,
    noted,
    order_number,
    order_of,
)
from perseus_planner.extensions.autopilot.ranks.observer import AutopilotRank
from perseus_planner.extensions.autopilot.ranks.rank_ledger import Ended, RankLedger
from perseus_planner.extensions.autopilot.status import AutopilotStatus
from perseus_planner.runs.status import AUTOPILOT
from perseus_planner.runtime.decider import Context, Decider, Seat

if TYPE_CHECKING:
    from perseus_planner.runs.status import DeciderStatus
    from perseus_planner.runtime.controller.protocol import ToRank
    from perseus_planner.runtime.marks import IterationTimes
    from perseus_planner.runtime.program import Order, Program
    from perseus_planner.schedules import Computation

_KEPT_ORDERS = 8
_KEPT_ENDS = 64  #: iterations whose times may become known late


class AutopilotDecider(Decider):
    """Decides by what training has learnt.

    Attributes:
        ledger: That of this rank.
        orders: By number, the last orders of computations that the rank has run, or will run first;
            replaced, never changed.
        ended: Iterations that have ended, for the `Observer`.

    Args:
        ended_s: `Context.ended_s`, before it begins.
    """

    name = AUTOPILOT
    is_continual = True
    keeps_modes = False
    needs_rank_0 = True
    no_switch = (
        "the autopilot decides the clocks of this training; begin it with a plan to switch plans"
    )

    def __init__(self, ended_s: Callable[[], float | None] = lambda: None) -> None:
        self.ledger = RankLedger()
        self.orders: dict[int, tuple[Computation, ...]] = {}
        self.ended: deque[Ended] = deque(maxlen=_KEPT_ENDS)
        self._ended_s = ended_s
        self._seat: Seat | None = None
        self._rank: AutopilotRank | None = None
        self._newest: Program | None = None
        self._is_at_full_clocks = False  #: for good, as a mode failed
        self._noted: Order = ()  #: the order that ran last without being a program's
        self._number = 0  #: of the order that ran last

    def join(self, seat: Seat) -> None:
        """See `Decider.join`."""
        self._seat = seat
        self.ledger = RankLedger(is_first=seat.engine.pipeline_rank.rank == 0)

    def begin(self, context: Context) -> None:
        """See `Decider.begin`."""
        with suppress(PlannerError):  # what it runs will show
            order = context.seat.engine.order()
            if order is not None:
                self.expect(order)
        self._ended_s = context.ended_s
        self._rank = AutopilotRank.begin(context, self)

    def expect(self, order: tuple[Computation, ...]) -> None:
        """Take what the rank will run, before it has run it."""
        self.orders = {order_number(order): order}

    def program_of(self, version: int, data: bytes) -> Program:
        """See `Decider.program_of`."""
        seat = self._seat
        assert seat is not None  # all have met
        rank = seat.engine.pipeline_rank.rank
        return Programs.program_of(data, version, seat.own.pipeline, rank, self.orders)

    def program_for(self, iteration: int, agreed: Program | None) -> Program | None:
        """See `Decider.program_for`."""
        if agreed is None:
            return None
        self._newest = agreed
        if isinstance(agreed.note, Noted):
            self.ledger.renew(agreed.note.ledger)
        at_full = self.ledger.is_overdrawn or self._is_at_full_clocks
        return at_full_clocks(agreed) if at_full else agreed

    def on_end(
        self,
        iteration: int,
        program: Program | None,
        deviation: str | None,
        order: Order | None,
    ) -> None:
        """See `Decider.on_end`."""
        if order:
            self._note(order)
        followed = None if deviation else program
        if followed is not None:
            note = noted(followed)
            self._number = note.order
            time_s = self._ended_s()
            if time_s is not None:
                self.ledger.add(iteration, time_s, full_clocks=note.decision == 0)
        self.ended.append(Ended(iteration, followed, self._number))

    def _note(self, order: Order) -> None:
        if order != self._noted:
            self._noted = order
            number = order_number(order)
            self._number = number
            kept = [(other, known) for other, known in self.orders.items() if other != number]
            self.orders = {**dict(kept[1 - _KEPT_ORDERS :]), number: order_of(order)}

    def lose_modes(self) -> None:
        """See `Decider.lose_modes`; what was learnt of modes counts on them."""
        self._is_at_full_clocks = True

    def descriptors(self) -> list[int]:
        """See `Decider.descriptors`."""
        return [] if self._rank is None else self._rank.descriptors()

    def look(self, times: Sequence[IterationTimes], messages: Sequence[ToRank]) -> None:
        """See `Decider.look`."""
        if self._rank is not None:
            self._rank.look(times, messages)

    @property
    def status(self) -> DeciderStatus:
        """What the autopilot knows; on other ranks than 0, what it knew at their newest program."""
        if self._rank is not None and self._rank.coordinator is not None:
            return self._rank.coordinator.status
        note = None if self._newest is None else self._newest.note
        known = note.status if isinstance(note, Noted) else AutopilotStatus()
        return known.shown

    def end(self) -> None:
        """See `Decider.end`."""
        if self._rank is not None:
            self._rank.close()
