"""The arguments of `planner_runtime` that concern the service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perseus_planner.base.errors import UsageError
from perseus_planner.base.units import ON_TIME
from perseus_planner.schedules.grid import parse_grid
from perseus_planner.service.client import Client
from perseus_planner.service.models import Place, Registration
from perseus_planner.solver.frontier import Frontier

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from perseus_planner.plans.plan import Plan
    from perseus_planner.runtime.agent.outbox import RankLocation
    from perseus_planner.runtime.autopilot.ranks.messages import Learnt
    from perseus_planner.schedules import Schedule


@dataclass(frozen=True)
class ServiceSettings:
    """The service of a training job, as the caller of `planner_runtime` gave it."""

    address: str  #: Of the service, as for `Client`
    name: str | None  #: Name of the job. Like `frontier`, it is not None after `check`.
    frontier: str | os.PathLike[str] | None  #: The frontier file
    max_changes: int | None = None  #: Switch budget of the plans, as for `Frontier.plan_for`
    #: Whether there is no plan: training makes its own, and says what it knows of clocks.
    is_learning: bool = False
    slowdown: float = 1.0  #: That the autopilot may plan for

    def check(self) -> None:
        """Check that the job can be registered, without asking the service.

        Raises:
            UsageError: If the name or the frontier is missing, there is a frontier without a plan,
                or the address is malformed.
            FrontierError: If the file cannot be read.
        """
        if self.is_learning and self.frontier is not None:
            raise UsageError(
                "frontier= is for training with plan=; without a plan the frontier is learnt, so "
                "leave it out"
            )
        if not self.name or (self.frontier is None and not self.is_learning):
            missing = (
                "frontier=, the file that `planner solve` wrote"
                if self.name
                else "job=, a name for this training"
            )
            raise UsageError(
                f"service={self.address!r} needs {missing}; give it to planner_runtime"
            )
        Client(self.address).close()
        if self.frontier is not None:
            Frontier.load(self.frontier)

    def registration(
        self, locations: Iterable[RankLocation], pipelines: int, plan: Plan | None
    ) -> Registration:
        """Return the registration of the job.

        Args:
            locations: The locations of its ranks.
            pipelines: Number of data-parallel pipelines.
            plan: The plan it starts with, which gives deadline and the probability of being
                on time.

        Raises:
            FrontierError: If the file can no longer be read.
        """
        assert self.name is not None  # as checked
        assert self.frontier is not None
        frontier = Frontier.load(self.frontier)
        sure = None if plan is None else plan.on_time
        deadline_s = None if plan is None else plan.deadline_s
        if (
            sure is not None and sure.limit_ratio is not None
        ):  # the plan's own is that of estimated times
            deadline_s = sure.limit_ratio * frontier.baseline_time_s
        return Registration(
            name=self.name,
            pipelines=pipelines,
            frontier=Path(self.frontier).read_bytes(),
            places=_places(locations, frontier.dag.schedule),
            deadline_s=deadline_s,
            max_changes=self.max_changes,
            on_time=ON_TIME if plan is None else None if sure is None else sure.probability,
        )

    def learnt_registration(
        self, locations: Iterable[RankLocation], pipelines: int, learnt: Learnt
    ) -> Registration:
        """Return the registration of the job with what its autopilot has learnt.

        Args:
            locations: The locations of its ranks.
            pipelines: Number of data-parallel pipelines.
            learnt: What was learnt.
        """
        assert self.name is not None  # as checked
        return Registration(
            name=self.name,
            pipelines=pipelines,
            places=_places(locations, parse_grid(learnt.schedule, "as trained", "the schedule")),
            deadline_s=None if self.slowdown == 1.0 else self.slowdown * learnt.time_s,
            max_changes=self.max_changes,
            profile_csv=learnt.profile_csv,
            profile_yaml=learnt.profile_yaml,
            schedule=learnt.schedule,
            take_over=True,
        )


def _places(locations: Iterable[RankLocation], schedule: Schedule) -> tuple[Place, ...]:
    stages = [
        tuple(sorted({computation.stage for computation in program})) for program in schedule.ranks
    ]
    return tuple(
        Place(
            location.rank,
            location.pipeline,
            stages[location.pipeline_rank],
            location.node,
            location.gpu,
        )
        for location in locations
        if location.pipeline_rank < len(stages)
    )
