"""A job for tests of the service: where its ranks are, and what its pipelines can do, in closed
form or solved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from perseus_planner.extensions.service.models import Place, RegisteredJob
from perseus_planner.profiles.groups import slowed
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.solver.frontier import Frontier, solve_dag

#: Three pipelines of four stages. Two ranks of each hold two stages; of the last rank it is not
#: known which.
PLACES = (
    Place(0, 0, (0, 2), "node0", "GPU-a"),
    Place(1, 0, (1, 3), "node0", "GPU-b"),
    Place(2, 1, (0, 2), "node0", "GPU-c"),
    Place(3, 1, (1, 3), "node1", "GPU-d"),
    Place(4, 2, (0, 2), "node1", "GPU-e"),
    Place(5, 2, (), "node1", ""),
)
JOB = RegisteredJob("train", 3, "f00d", PLACES, since_s=1000.0)
STAGES = 4


@dataclass(frozen=True)
class Formula:
    """A pipeline whose stages take `stages_s`, and whose iteration takes what the slowest of them
    does.

    It waits at 100 W; what it draws more falls with the square of what is left to its slowest time.
    """

    stages_s: tuple[float, ...] = (0.8, 0.9, 1.0, 0.7)
    stretch: float = 1.3

    @property
    def min_time_s(self) -> float:
        return max(self.stages_s)

    @property
    def baseline_time_s(self) -> float:
        return self.min_time_s * 1.02

    @property
    def max_time_s(self) -> float:
        return self.min_time_s * self.stretch

    waiting_w = 100.0

    def bound_j(self, deadline_s: float) -> float:
        assert deadline_s >= self.min_time_s
        return 1000.0 * max(self.max_time_s - deadline_s, 0.0) ** 2 + 100.0 * deadline_s + 50.0

    def slowed(self, stages: Mapping[int, float]) -> Formula:
        return Formula(
            tuple(s * stages.get(stage, 1.0) for stage, s in enumerate(self.stages_s)), self.stretch
        )


@dataclass(frozen=True)
class Solved:
    """A frontier as the policy asks for it; each set of slow stages is solved once."""

    frontier: Frontier
    _slowed: dict[tuple[tuple[int, float], ...], Solved] = field(default_factory=dict)

    @property
    def min_time_s(self) -> float:
        return self.frontier.min_time_s

    @property
    def baseline_time_s(self) -> float:
        return self.frontier.baseline_time_s

    @property
    def max_time_s(self) -> float:
        return self.frontier.max_time_s

    @property
    def waiting_w(self) -> float:
        return self.frontier.dag.waiting_w

    def bound_j(self, deadline_s: float) -> float:
        return self.frontier.bound_j(deadline_s)

    def slowed(self, stages: Mapping[int, float]) -> Solved:
        key = tuple(sorted(stages.items()))
        if key not in self._slowed:
            profile = slowed(self.frontier.profile, stages)
            self._slowed[key] = Solved(solve_dag(PipelineDag(profile, self.frontier.dag.iteration)))
        return self._slowed[key]
