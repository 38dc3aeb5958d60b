"""Schedule x Profile -> PipelineDag: the computations of one iteration and what each one waits for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from perseus_planner.curve import Option, worthwhile
from perseus_planner.errors import ProfileError, ScheduleError
from perseus_planner.profiles import Profile
from perseus_planner.schedules import Computation, Schedule

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True)
class PipelineDag:
    """One iteration as a directed acyclic graph of computations.

    Attributes:
        profile: what each (stage, kind) costs at each clock.
        schedule: the computations, rank by rank.
        predecessors: for each computation, by its place in `schedule.computations()`, the places of those that
            must be done before it starts.

    Raises:
        ScheduleError: a computation waits for itself, through whatever chain, or for one that is not there.
        ProfileError: the profile has not the schedule's stages.
    """

    profile: Profile
    schedule: Schedule
    predecessors: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        stages = self.schedule.stages
        if self.profile.stages != stages:
            raise ProfileError(
                f"the profile has {self.profile.stages} stages and the schedule {stages}; "
                f"profile the stages of this schedule, or make the schedule for {self.profile.stages}"
            )
        places = range(len(self.computations))
        if len(self.predecessors) != len(places):
            raise ScheduleError(f"predecessors: {len(self.predecessors)} for {len(places)} computations; give as many")
        for computation, before in zip(self.computations, self.predecessors, strict=True):
            for other in before:
                if other not in places:
                    raise ScheduleError(f"{computation} waits for place {other}; places are 0 to {len(places) - 1}")
        _ = self.order  # refuses a cycle

    @classmethod
    def from_schedule(cls, profile: Profile, schedule: Schedule) -> PipelineDag:
        """The graph that a pipeline engine runs: program order on each rank, activations and gradients between."""
        return cls(profile, schedule, pipeline_predecessors(schedule))

    @cached_property
    def computations(self) -> tuple[Computation, ...]:
        """All computations, in the order of `schedule.computations()`."""
        return tuple(self.schedule.computations())

    @cached_property
    def order(self) -> tuple[int, ...]:
        """A topological order of the places in `computations`, breadth first, so that neighbours are near."""
        return topological_order(self.computations, self.predecessors)

    @cached_property
    def options(self) -> dict[tuple[int, str], tuple[Option, ...]]:
        """(stage, kind) -> its worthwhile options, fastest first."""
        power_w = self.profile.blocking_power_w
        return {key: worthwhile(points, power_w) for key, points in self.profile.measurements.items()}

    def to_networkx(self) -> nx.DiGraph[Computation]:
        """The graph as networkx sees it: computations as nodes, an edge to each one that waits for it."""
        import networkx as nx

        graph = nx.DiGraph()
        graph.add_nodes_from(self.computations)
        for place, before in enumerate(self.predecessors):
            graph.add_edges_from((self.computations[i], self.computations[place]) for i in before)
        return graph


def pipeline_predecessors(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """What each computation of a pipeline waits for, as places in `schedule.computations()`.

    Program order on its rank; the forward of the stage before, or the backward of the stage behind; on the last
    stage, a backward for its own forward.

    Raises:
        ScheduleError: one of those is not in the schedule.
    """
    computations = tuple(schedule.computations())
    place = {computation: i for i, computation in enumerate(computations)}
    last = schedule.stages - 1
    predecessors: list[tuple[int, ...]] = []
    for rank in schedule.ranks:
        for position, computation in enumerate(rank):
            before = [rank[position - 1]] if position else []
            needed = _needed(computation, last)
            if needed is not None and needed not in before:
                before.append(needed)
            for other in before:
                if other not in place:
                    raise ScheduleError(f"{computation} needs {other}, which is not in the schedule; add {other}")
            predecessors.append(tuple(place[other] for other in before))
    return tuple(predecessors)


def _needed(computation: Computation, last_stage: int) -> Computation | None:
    """The computation whose output `computation` works on."""
    stage, kind, microbatch = computation
    if kind == "F":
        return Computation(stage - 1, "F", microbatch) if stage else None
    return Computation(stage + 1, "B", microbatch) if stage < last_stage else Computation(stage, "F", microbatch)


def topological_order(
    computations: tuple[Computation, ...], predecessors: tuple[tuple[int, ...], ...]
) -> tuple[int, ...]:
    """Places of `computations` such that each comes after its `predecessors` (Kahn 1962).

    Raises:
        ScheduleError: there is a cycle; names the first computation that can never start.
    """
    successors: list[list[int]] = [[] for _ in computations]
    waiting = [len(before) for before in predecessors]
    for place, before in enumerate(predecessors):
        for other in before:
            successors[other].append(place)
    ready = deque(place for place, count in enumerate(waiting) if count == 0)
    order: list[int] = []
    while ready:
        place = ready.popleft()
        order.append(place)
        for other in successors[place]:
            waiting[other] -= 1
            if waiting[other] == 0:
                ready.append(other)
    if len(order) < len(computations):
        stuck = next(place for place, count in enumerate(waiting) if count)
        awaited = next(other for other in predecessors[stuck] if waiting[other])
        raise ScheduleError(
            f"{computations[stuck]} can never start: it waits for {computations[awaited]}, which in the end "
            "waits for it; reorder the schedule"
        )
    return tuple(order)
