"""PipelineDag: the graph of one iteration, joined with what each node costs at each clock."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import ProfileError, ScheduleError, shown
from perseus_planner.base.units import STAGE
from perseus_planner.profiles.csv_file import word_of
from perseus_planner.profiles.keys import ByKey, Key
from perseus_planner.profiles.measurement import OperatingPoint, pareto_front, undominated
from perseus_planner.profiles.modes import OWN
from perseus_planner.schedules import Computation, Schedule
from perseus_planner.schedules.iteration import Iteration, Operation, parse_operation
from perseus_planner.schedules.pipeline import pipeline_iteration

if TYPE_CHECKING:
    import networkx as nx

    from perseus_planner.profiles.measurement import Measurement
    from perseus_planner.profiles.profiles import Profile

_NO_CLOCK = 0  #: the clock in the only operating point of a fixed operation


@dataclass(frozen=True)
class PipelineDag:
    """One iteration as a directed acyclic graph of computations and fixed operations, with their
    costs.

    Raises:
        ProfileError: If the profile has other stages than the iteration, lacks one of its kinds, or
            the stages of a rank wait at different powers.
    """

    profile: Profile  #: the cost of each (stage, kind) at each clock
    iteration: Iteration  #: the nodes, and what they wait for
    #: the iteration that a saving is compared with, once the iteration says the mode of each
    #: computation; None while modes are open, or if the profile has none.
    base: Iteration | None = None

    def __post_init__(self) -> None:
        stages = self.schedule.stages
        if self.profile.stages != stages:
            raise ProfileError(
                f"the profile has {self.profile.stages} stages and the schedule {stages}; "
                "profile the stages of this schedule, or make the schedule for "
                f"{self.profile.stages}"
            )
        # Each computation has to have a cost, so the first one without is named with its remedy.
        for key, computation in zip(self.iteration.keys, self.computations, strict=True):
            if key not in self.profile.measurements:
                remedy = f"use a schedule without {key.name}"
                if "." in key.kind:
                    remedy = "leave that variant out"
                if computation in self.schedule.forward_of:
                    # `planner profile` does not measure pairs, so rows come in elsewhere.
                    raise ProfileError(
                        f"the profile has no {word_of(key.name)} of stage {key.stage}, which "
                        f"{self.schedule.text_of(computation)} needs; train without a plan, which "
                        "learns its rows, add them to the profile's table, or write the two in "
                        "cells of their own if they run one after the other"
                    )
                raise ProfileError(
                    f"the profile has no {key.name} of stage {key.stage}, which "
                    f"{self.schedule.text_of(computation)} needs; measure it, or {remedy}"
                )
        # A rank's GPUs wait at one power, whichever of its stages they wait for.
        for rank, program in enumerate(self.schedule.ranks):
            if len({self.profile.blocking_w(c.stage) for c in program}) > 1:
                raise ProfileError(
                    f"blocking_power_w: differs between the stages of rank {rank}, which are on "
                    "the same GPUs; give them one power"
                )

    def forward_in(self, computation: Computation) -> Computation | None:
        """Return the forward of an overlapped pair, by its backward; None if it is no pair."""
        return None if self.schedule is None else self.schedule.forward_of.get(computation)

    @property
    def has_open_modes(self) -> bool:
        """Whether each computation may run in any mode of the profile."""
        return self.profile.modes is not None and self.base is None

    @property
    def has_tied_modes(self) -> bool:
        """Whether modes are open, and those of computations depend on each other."""
        modes = self.profile.modes
        return self.has_open_modes and modes is not None and modes.are_tied

    def with_profile(self, profile: Profile) -> PipelineDag:
        """Return the same iteration, in the same modes, with other measurements."""
        return PipelineDag(profile, self.iteration, self.base)

    @classmethod
    def from_schedule(cls, profile: Profile, schedule: Schedule, **extras: Any) -> PipelineDag:
        """Return the graph that a pipeline engine runs; `extras` are keyword arguments of
        `pipeline_iteration`.
        """
        return cls(profile, pipeline_iteration(schedule, **extras))

    @classmethod
    def from_networkx(
        cls, profile: Profile, graph: nx.DiGraph[Any], name: str = "custom"
    ) -> PipelineDag:
        """Return the graph of an iteration that is given as a networkx graph.

        Args:
            profile: the profile of the stages in the graph.
            graph: an edge from each node to each that waits for it, with the attribute `lag_s`
                (seconds, default 0) if it must wait longer. A node is a `Computation` or its text,
                such as "3F17"; the attribute `rank` is the rank that runs it (default: its stage),
                `kind` its kind in the profile, such as "B.sync" (default: its kind in the
                schedule), `mode` the mode in which it runs (default: the training's own way). Other
                nodes are fixed operations, named as in `Operation`, such as
                "3optimizer", with the attributes `rank`, `time_s` and, unless its GPUs only wait,
                `energy_j`. The nodes of a rank must be in one order: a path leads from each of them
                to the next.
            name: the name of the schedule.

        Raises:
            ScheduleError: If the graph is not like that.
            ProfileError: If the profile does not fit it.
        """
        return cls(profile, iteration_of_graph(graph, name))

    @property
    def schedule(self) -> Schedule:
        """The computations, rank by rank."""
        return self.iteration.schedule

    @property
    def computations(self) -> tuple[Computation, ...]:
        """All computations, in the order of `schedule.computations()`."""
        return self.iteration.computations

    @property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the places of its predecessors."""
        return self.iteration.predecessors

    @property
    def order(self) -> tuple[int, ...]:
        """A topological order of the places of all nodes."""
        return self.iteration.order

    @cached_property
    def keys(self) -> tuple[Key, ...]:
        """The class of every node: nodes of one class have the same points. An operation is a
        class by itself.
        """
        return (
            *self.iteration.keys,
            *(Key(i, str(operation)) for i, operation in enumerate(self.iteration.operations)),
        )

    @cached_property
    def points(self) -> ByKey[tuple[OperatingPoint, ...]]:
        """The operating points of every class that are on its Pareto front, fastest first.

        Computations come in the order of the profile. An operation has one point, at clock 0.
        """
        # A profile may have kinds that this iteration does not run.
        used = set(self.iteration.keys)
        points = dict[Key, tuple[OperatingPoint, ...]]()
        for key, measurements in self.profile.measurements.items():
            if key in used:
                points[key] = pareto_front(measurements, self.profile.blocking_w(key.stage))
                # While modes are open, a point is kept if it is best in any of them.
                if self.has_open_modes:
                    points[key] = undominated(
                        point for mode in self.mode_points(key).values() for point in mode
                    )
        for key, operation in zip(
            self.keys[len(self.computations) :], self.iteration.operations, strict=True
        ):
            # An operation without an energy draws what waiting draws, and so costs nothing beside
            # that.
            power_w = self.rank_waiting_w[operation.rank]
            energy_j = (
                power_w * operation.time_s if operation.energy_j is None else operation.energy_j
            )
            effective_j = (
                0.0 if operation.energy_j is None else energy_j - power_w * operation.time_s
            )
            points[key] = (OperatingPoint(_NO_CLOCK, operation.time_s, energy_j, effective_j),)
        return ByKey(points)

    def mode_points(self, key: Key) -> dict[str, tuple[OperatingPoint, ...]]:
        """Return the Pareto front of a computation's class in each mode, fastest first."""
        modes = self.profile.modes
        assert modes is not None
        fronts = {
            mode: pareto_front(
                self.profile.measurements[key.in_mode(mode)], self.profile.blocking_w(key.stage)
            )
            for mode in modes.usable
        }
        # A point knows its mode, as fronts of several modes are mixed later.
        return {
            mode: tuple(replace(point, mode=mode) for point in front)
            for mode, front in fronts.items()
        }

    @cached_property
    def rank_waiting_w(self) -> tuple[float, ...]:
        """What the GPUs of each rank draw while they wait, watts."""
        return tuple(self.profile.blocking_w(program[0].stage) for program in self.schedule.ranks)

    @property
    def waiting_w(self) -> float:
        """What all GPUs of the pipeline draw while they wait, watts."""
        return math.fsum(self.rank_waiting_w)

    def baseline_measurements(self) -> list[Measurement]:
        """Return the measurement of every computation at its maximum clock, in the modes of `base`
        if it has one.
        """
        # What a saving is compared with runs in the modes that training has without a plan.
        keys = (self.base or self.iteration).keys
        return [self.profile.measurements[key][0] for key in keys]

    def to_networkx(self) -> nx.DiGraph[Any]:
        """Return the graph as `from_networkx` reads it; its nodes are computations and names of
        operations.
        """
        import networkx as nx

        nodes = (*self.computations, *map(str, self.iteration.operations))
        graph: nx.DiGraph[Any] = nx.DiGraph()
        # Ranks are attributes, as a graph has no order of its own.
        for node, rank in zip(nodes, self.iteration.rank_of, strict=True):
            graph.add_node(node, rank=rank)
        for computation, key in zip(self.computations, self.iteration.keys, strict=True):
            if key.kind != computation.kind:
                graph.add_node(computation, kind=key.kind)
            if key.mode != OWN:
                graph.add_node(computation, mode=key.mode)
        for operation in self.iteration.operations:
            energy = {} if operation.energy_j is None else {"energy_j": operation.energy_j}
            graph.add_node(str(operation), time_s=operation.time_s, **energy)
        # A lag of 0 is left out, as the reader takes it for 0.
        for position, waits in enumerate(self.iteration.waits):
            for predecessor, lag_s in waits:
                graph.add_edge(
                    nodes[predecessor], nodes[position], **({"lag_s": lag_s} if lag_s else {})
                )
        return graph


def iteration_of_graph(graph: nx.DiGraph[Any], name: str) -> Iteration:
    """Return the iteration of a networkx graph, as `PipelineDag.from_networkx` reads it.

    Raises:
        ScheduleError: If a node is not a computation or an operation, or the nodes of a rank are
            not in one order.
    """
    import networkx as nx

    if not isinstance(graph, nx.DiGraph) or graph.is_multigraph():
        raise ScheduleError(
            f"graph: {type(graph).__name__} is of the wrong type; give a networkx.DiGraph"
        )
    # Nodes and ranks are read first, so that a wrong node is named before the order is.
    nodes = {node: _node(node, attributes) for node, attributes in graph.nodes(data=True)}
    ranks = {node: _rank(work, graph.nodes[node], len(nodes)) for node, work in nodes.items()}
    programs: list[list[Hashable]] = [[] for _ in range(1 + max(ranks.values(), default=-1))]
    previous_of = dict[Hashable, Hashable]()
    # The order of a rank follows from the graph, in which its nodes must form a chain.
    for node, previous in _one_order(graph, ranks):
        previous_of[node] = previous
        if isinstance(nodes[node], Computation):
            programs[ranks[node]].append(node)
    computed = [node for program in programs for node in program]
    operations = {node: work for node, work in nodes.items() if isinstance(work, Operation)}
    position_of = {node: i for i, node in enumerate([*computed, *operations])}
    # The previous node of the rank first, as in `pipeline_iteration`, then the others by their
    # place.
    waits = [
        sorted(
            graph.pred[node],
            key=lambda predecessor: (predecessor != previous_of[node], position_of[predecessor]),
        )
        for node in position_of
    ]
    return Iteration(
        Schedule(name, tuple(tuple(nodes[node] for node in program) for program in programs)),  # type: ignore[misc]
        tuple(
            tuple(position_of[predecessor] for predecessor in predecessors)
            for predecessors in waits
        ),
        tuple(
            tuple(graph.edges[predecessor, node].get("lag_s", 0.0) for predecessor in predecessors)
            for node, predecessors in zip(position_of, waits, strict=True)
        ),
        tuple(operations.values()),
        tuple(graph.nodes[node].get("kind", nodes[node].kind) for node in computed),  # type: ignore[union-attr]
        tuple(graph.nodes[node].get("mode", OWN) for node in computed),
    )


def _rank(each: Computation | Operation, attributes: dict[str, Any], count: int) -> int:
    value = each.rank if isinstance(each, Operation) else attributes.get("rank", each.stage)
    rank: int | None = STAGE.accept(value)
    if rank is None or rank >= count:
        raise ScheduleError(
            f"{each}, rank: {shown(value)} is not a rank; number the ranks 0, 1, 2 and so on"
        )
    return rank


def _node(node: object, attributes: dict[str, Any]) -> Computation | Operation:
    if isinstance(node, Computation):
        return node
    text = str(node)
    # Only operations have a time of their own; a computation's is that of the profile.
    if "time_s" not in attributes:
        try:
            return Computation.parse(text)
        except ScheduleError:
            raise ScheduleError(
                f"{shown(text)} is not a computation, such as 3F17; an operation needs the "
                "attribute time_s"
            ) from None
    if "rank" not in attributes:
        raise ScheduleError(
            f"{text}: is an operation without the attribute rank; give the rank that runs it"
        )
    return parse_operation(
        text, attributes["rank"], attributes["time_s"], attributes.get("energy_j")
    )


def _one_order(
    graph: nx.DiGraph[Any], ranks: dict[Hashable, int]
) -> list[tuple[Hashable, Hashable]]:
    """Return the nodes in topological order, each with the previous one on its rank."""
    import networkx as nx

    # A cycle is shown with its nodes, as it is what the user has to break.
    try:
        order = list(nx.topological_sort(graph))
    except nx.NetworkXUnfeasible:
        edges = nx.find_cycle(graph)
        cycle = " -> ".join(str(node) for node in (*(tail for tail, _ in edges), edges[0][0]))
        raise ScheduleError(
            f"the graph has the cycle {cycle}; nothing on it can ever start"
        ) from None
    # One bit for each node, so that all that lie before a node fit into one number.
    bit = {node: 1 << i for i, node in enumerate(order)}
    # The nodes from which a path leads to a node, itself among them.
    ahead: dict[Hashable, int] = {}
    last: dict[int, Hashable] = {}
    pairs = []
    for node in order:
        ahead[node] = bit[node]
        for predecessor in graph.pred[node]:
            ahead[node] |= ahead[predecessor]
        # Two nodes of a rank without a path between them have no order, and a rank runs one at a
        # time.
        previous = last.get(ranks[node])
        if previous is not None and not ahead[node] & bit[previous]:
            raise ScheduleError(
                f"{previous} and {node} are both on rank {ranks[node]} and neither waits for the "
                "other; add an edge for the order in which it runs them"
            )
        last[ranks[node]] = node
        pairs.append((node, previous))
    return pairs
