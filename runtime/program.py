"""What one rank runs in an iteration of a plan, and the clock of each computation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from perseus_planner.errors import PlanError

if TYPE_CHECKING:
    from perseus_planner.plans.plan import Plan
    from perseus_planner.schedules import Computation


@dataclass(frozen=True)
class Program:
    """One rank's part of a plan.

    Attributes:
        version: which plan of the job it is of: 1 for the first, 2 for what came next, and so on.
        plan: that plan.
        rank: which of its schedule's ranks this is.
    """

    version: int
    plan: Plan
    rank: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < len(self.plan.schedule.ranks):
            raise PlanError(
                f"the plan is for {len(self.plan.schedule.ranks)} ranks of a pipeline, and this is rank {self.rank} of "
                "one; make the plan for the schedule that is trained with"
            )

    @cached_property
    def computations(self) -> tuple[Computation, ...]:
        """What the rank runs, first to last."""
        return self.plan.schedule.ranks[self.rank]

    @cached_property
    def clocks(self) -> tuple[int, ...]:
        """What each is to run at, in the unit of the plan's control: MHz, or watts of a power limit."""
        return tuple(self.plan.clocks[str(computation)] for computation in self.computations)

    def check_order(self, order: tuple[Computation, ...], engine: str) -> None:
        """Refuse a plan whose order is not that of `engine`.

        Args:
            order: what the engine runs on this rank.
            engine: its name.

        Raises:
            PlanError: names the first difference.
        """
        if order == self.computations:
            return
        pairs = list(zip(order, self.computations, strict=False))
        place = next((i for i, (ran, planned) in enumerate(pairs) if ran != planned), len(pairs))
        raise PlanError(
            f"the plan ({self.plan.schedule}) is not what {engine} runs on rank {self.rank} of the pipeline: "
            f"computation {place + 1} is {_at(order, place)} there and {_at(self.computations, place)} in the plan; "
            "solve for the schedule and the number of microbatches that are trained with"
        )


def _at(order: tuple[Computation, ...], place: int) -> str:
    return str(order[place]) if place < len(order) else "none"
