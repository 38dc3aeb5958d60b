"""The arguments of `planner_runtime` that concern the service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perseus_planner.errors import UsageError
from perseus_planner.runtime.agent.embedded import Embedding
from perseus_planner.service.client.client import Client
from perseus_planner.service.model import Place
from perseus_planner.service.schemas import Registration
from perseus_planner.solver.frontier import Frontier

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from perseus_planner.plans.plan import Plan
    from perseus_planner.runtime.agent.store import RankLocation


@dataclass(frozen=True)
class ServiceSettings:
    """The service of a training job, as the caller of `planner_runtime` gave it.

    Attributes:
        address: Of the service, as for `Client`, or where an embedded service is to listen, as for `Embedding`.
        name: Name of the job. Like `frontier`, it is not None after `check`.
        frontier: The frontier file.
        max_changes: Switch budget of the plans, as for `Frontier.plan_for`.
    """

    address: str
    name: str | None
    frontier: str | os.PathLike[str] | None
    max_changes: int | None = None

    def check(self) -> None:
        """Check that the job can be registered, without asking the service.

        Raises:
            UsageError: If the name or the frontier is missing, or the address is malformed.
            FrontierError: If the file cannot be read.
        """
        if not self.name or self.frontier is None:
            missing = (
                "frontier=, the file that `planner solve` wrote" if self.name else "job=, a name for this training"
            )
            raise UsageError(f"service={self.address!r} needs {missing}; give it to planner_runtime")
        if Embedding.parse(self.address) is None:
            Client(self.address).close()
        Frontier.load(self.frontier)

    def registration(self, locations: Iterable[RankLocation], pipelines: int, plan: Plan | None) -> Registration:
        """Return the registration of the job.

        Args:
            locations: The locations of its ranks.
            pipelines: Number of data-parallel pipelines.
            plan: The plan it starts with, which gives deadline, dwell time and the probability of being on time.

        Raises:
            FrontierError: If the file can no longer be read.
        """
        assert self.name is not None  # as checked
        assert self.frontier is not None
        frontier = Frontier.load(self.frontier)
        programs, sure = frontier.dag.schedule.ranks, None if plan is None else plan.on_time
        deadline_s = None if plan is None else plan.deadline_s
        if sure is not None and sure.limit_ratio is not None:  # the plan's own is that of estimated times
            deadline_s = sure.limit_ratio * frontier.baseline_time_s
        stages = [tuple(sorted({computation.stage for computation in program})) for program in programs]
        return Registration(
            name=self.name,
            pipelines=pipelines,
            frontier=Path(self.frontier).read_bytes(),
            places=tuple(
                Place(each.rank, each.pipeline, stages[each.pipeline_rank], each.node, each.gpu)
                for each in locations
                if each.pipeline_rank < len(stages)
            ),
            deadline_s=deadline_s,
            max_changes=self.max_changes,
            min_dwell_s=None if plan is None else plan.min_dwell_s,
            on_time=None if sure is None else sure.probability,
        )
