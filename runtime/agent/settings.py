"""The training job as its service is to know it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perseus_planner.errors import UsageError
from perseus_planner.runtime.agent.embedded import Embedding
from perseus_planner.service.client.client import Client
from perseus_planner.service.model import Place
from perseus_planner.service.requests import Registration
from perseus_planner.solver.frontier import Frontier

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from perseus_planner.plans.plan import Plan
    from perseus_planner.runtime.agent.store import Card


@dataclass(frozen=True)
class ServedJob:
    """What the caller of `planner_runtime` said of the service.

    Attributes:
        address: of the service, as for `Client`, or where one of the job's own is to listen, as for `Embedding`.
        name: of the job.
        frontier: its file; as the name, it is not None where it was checked.
        max_changes: switch budget of the plans, as for `Frontier.plan_for`.
    """

    address: str
    name: str | None
    frontier: str | os.PathLike[str] | None
    max_changes: int | None = None

    def check(self) -> None:
        """Refuse what cannot be registered; nothing is asked of the service.

        Raises:
            UsageError: the name or the frontier is missing, or the address is none.
            FrontierError: the file cannot be read.
        """
        if not self.name or self.frontier is None:
            missing = (
                "frontier=, the file that `planner solve` wrote" if self.name else "job=, a name for this training"
            )
            raise UsageError(f"service={self.address!r} needs {missing}; give it to planner_runtime")
        if Embedding.parse(self.address) is None:
            Client(self.address).close()
        Frontier.load(self.frontier)

    def registration(self, cards: Iterable[Card], pipelines: int, plan: Plan | None) -> Registration:
        """As it is sent.

        Args:
            cards: where its ranks are.
            pipelines: how many data-parallel pipelines there are.
            plan: what it begins by: its deadline and its dwell time are wanted.

        Raises:
            FrontierError: the file cannot be read any more.
        """
        assert self.name is not None  # as checked
        assert self.frontier is not None
        programs = Frontier.load(self.frontier).dag.schedule.ranks
        stages = [tuple(sorted({computation.stage for computation in program})) for program in programs]
        return Registration(
            name=self.name,
            frontier=Path(self.frontier).read_bytes(),
            pipelines=pipelines,
            places=tuple(
                Place(card.rank, card.pipeline, stages[card.seat], card.node, card.gpu)
                for card in cards
                if card.seat < len(stages)
            ),
            deadline_s=None if plan is None else plan.deadline_s,
            max_changes=self.max_changes,
            min_dwell_s=None if plan is None else plan.min_dwell_s,
        )
