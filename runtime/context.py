"""What a rank knows when it begins to train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perseus_planner.engines.engine import Engine
    from perseus_planner.runtime.attachment import Attachment
    from perseus_planner.runtime.controller.protocol import Control
    from perseus_planner.runtime.decider import Decider, Seat
    from perseus_planner.runtime.job import NodePart, RankPart
    from perseus_planner.runtime.program import Program
    from perseus_planner.runtime.switching import NodeShare


@dataclass(frozen=True)
class RankContext:
    """What a rank knows when it begins to train."""

    seat: Seat  #: Where it trains
    decider: Decider  #: Decides its clocks
    program: Program | None  #: What it runs by at first; None if there is no plan
    attachment: Attachment  #: Its part in the clock controller of its node
    share: NodeShare  #: Its part in the looks of its node for new plans
    #: On rank 0, for each rank of the job its pipeline and its rank there; None for absent ranks.
    positions: Sequence[tuple[int, int] | None]

    @property
    def engine(self) -> Engine:
        """The adapter of its engine."""
        return self.seat.engine

    @property
    def own(self) -> RankPart:
        """What rank 0 has told it."""
        return self.seat.own

    @property
    def part(self) -> NodePart:
        """What rank 0 has told its node."""
        return self.seat.part

    @property
    def control(self) -> Control:
        """What is set on its GPU, whichever plan comes later."""
        return self.seat.control
