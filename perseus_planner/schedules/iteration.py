"""The dependency graph of one training iteration: its nodes and what each waits for, without
times and energies.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.base.errors import ScheduleError, shown
from perseus_planner.base.units import ENERGY, TIME, WAIT
from perseus_planner.profiles.keys import Key
from perseus_planner.profiles.modes import OWN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.schedules import Computation, Schedule

_OPERATION = re.compile(r"(\d+)([a-z][a-z-]*)(\d+)?")


class Operation(NamedTuple):
    """An operation of fixed time and energy on a rank's GPUs, such as data loading, all-reduce or
    optimizer step.

    Its `str()` is its name in an iteration: `0load17` belongs to microbatch 17, `3optimizer` to no
    microbatch.
    """

    #: the number before its name: the stage if it belongs to a microbatch, else the rank.
    number: int
    name: str  #: lower-case letters and hyphens
    microbatch: int | None  #: the number of its microbatch, or None
    rank: int  #: the rank whose GPUs it uses
    time_s: float  #: seconds, at any clock
    #: joules over the GPUs of the rank; None for what they draw while they wait.
    energy_j: float | None = None

    def __str__(self) -> str:
        return f"{self.number}{self.name}{'' if self.microbatch is None else self.microbatch}"


@dataclass(frozen=True)
class Iteration:
    """The nodes of one iteration, computations and fixed operations, and what each one waits for.

    A node is identified by its place: computations are counted from 0 in the order of
    `schedule.computations()`, then operations.

    Raises:
        ScheduleError: If a node directly or indirectly waits for itself, for a missing node, or for
            one twice, if two nodes have one name, or if a lag or operation is malformed.
    """

    schedule: Schedule  #: the computations, rank by rank
    #: for each node, the places of the nodes that must end before it starts.
    predecessors: tuple[tuple[int, ...], ...]
    #: aligned with `predecessors`: least seconds from the end of the predecessor to the start of
    #: the node; empty if all are 0.
    lags_s: tuple[tuple[float, ...], ...] = ()
    operations: tuple[Operation, ...] = ()  #: the nodes that are neither forward nor backward
    #: the kind of each computation in the profile, such as "B.sync"; empty if they are those of the
    #: schedule.
    kinds: tuple[str, ...] = ()
    #: the mode that a plan has chosen for each computation; empty if all run in the training's own
    #: way.
    modes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = self.names
        places = range(len(self.names))
        # Operations are found by their names, so no two may have one.
        if len(set(names)) < len(names):
            twice = next(name for i, name in enumerate(names) if name in names[:i])
            raise ScheduleError(f"{twice} is there twice; give each operation a different name")
        operations = tuple(
            _checked_operation(operation, len(self.schedule.ranks)) for operation in self.operations
        )
        object.__setattr__(self, "operations", operations)
        if len(self.predecessors) != len(places):
            raise ScheduleError(
                f"predecessors: {len(self.predecessors)} for {len(places)} computations; give as "
                "many"
            )
        # Places and lags come from files and graphs too, so each is checked.
        for name, before in zip(names, self.predecessors, strict=True):
            for predecessor in before:
                if predecessor not in places:
                    raise ScheduleError(
                        f"{name} waits for place {predecessor}; places are 0 to {len(places) - 1}"
                    )
            if len(set(before)) < len(before):
                raise ScheduleError(
                    f"{name} waits for the same computation twice; keep one, with the longer lag"
                )
        if self.lags_s and [*map(len, self.lags_s)] != [*map(len, self.predecessors)]:
            raise ScheduleError(
                "lags_s: is not aligned with predecessors; give a lag for each, or leave them out"
            )
        # Equal iterations must compare equal, so defaults are stored as nothing.
        object.__setattr__(self, "lags_s", self._checked_lags_s())
        # Suffixes are added to kinds, and never change them.
        kinds_of_schedule = tuple(c.kind for c in self.computations)
        if (
            self.kinds
            and tuple(str(kind).partition(".")[0] for kind in self.kinds) != kinds_of_schedule
        ):
            raise ScheduleError(
                "kinds: are not those of the computations, with or without a suffix such as .sync"
            )
        object.__setattr__(self, "kinds", () if self.kinds == kinds_of_schedule else self.kinds)
        if self.modes and len(self.modes) != len(self.computations):
            raise ScheduleError(
                f"modes: {len(self.modes)} for {len(self.computations)} computations; give as many"
            )
        if all(mode == OWN for mode in self.modes):
            object.__setattr__(self, "modes", ())
        _ = self.order  # refuses a cycle

    def _checked_lags_s(self) -> tuple[tuple[float, ...], ...]:
        """Return the lags as plain floats, or nothing if all are 0, so that equal iterations
        compare equal.
        """
        checked = []
        for name, (before, lags_s) in zip(
            self.names, zip(self.predecessors, self.lags_s, strict=False), strict=False
        ):
            for predecessor, lag_s in zip(before, lags_s, strict=True):
                WAIT.check(lag_s, f"lag_s of {self.names[predecessor]} -> {name}", ScheduleError)
            checked.append(tuple(map(WAIT.accept, lags_s)))
        return tuple(checked) if any(map(any, checked)) else ()

    @cached_property
    def computations(self) -> tuple[Computation, ...]:
        """All computations, in the order of `schedule.computations()`."""
        return tuple(self.schedule.computations())

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The text of every node, computations first."""
        return (*map(str, self.computations), *map(str, self.operations))

    @cached_property
    def keys(self) -> tuple[Key, ...]:
        """The key by which the profile knows each computation."""
        # No kinds stand for those of the schedule, and no modes for the training's own way.
        kinds = self.kinds or tuple(c.kind for c in self.computations)
        modes = self.modes or (OWN,) * len(self.computations)
        stages = (c.stage for c in self.computations)
        # One object for all equal keys: a dictionary finds what it holds without comparing it.
        made = dict[tuple[int, str, str], Key]()
        return tuple(
            made.get(each) or made.setdefault(each, Key(*each))
            for each in zip(stages, kinds, modes, strict=True)
        )

    @property
    def without_modes(self) -> Iteration:
        """The same iteration with each computation in the training's own way."""
        return replace(self, modes=())

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of every node."""
        ranks = tuple(number for number, rank in enumerate(self.schedule.ranks) for _ in rank)
        return (*ranks, *(operation.rank for operation in self.operations))

    @cached_property
    def waits(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """For each node, the places of its predecessors, each with its lag in seconds."""
        # No lags stand for zeros.
        lags = self.lags_s or tuple((0.0,) * len(before) for before in self.predecessors)
        return tuple(
            tuple(zip(before, lag, strict=True))
            for before, lag in zip(self.predecessors, lags, strict=True)
        )

    @cached_property
    def order(self) -> tuple[int, ...]:
        """A topological order of the places, breadth first, so that neighbours are close
        together (Kahn 1962).
        """
        return _topological_order(self.names, self.predecessors)

    @cached_property
    def programs(self) -> tuple[tuple[int, ...], ...]:
        """For each rank, the places of its nodes in the order in which they run."""
        programs: list[list[int]] = [[] for _ in self.schedule.ranks]
        for node in self.order:
            programs[self.rank_of[node]].append(node)
        return tuple(map(tuple, programs))


def parse_operation(text: str, rank: int, time_s: float, energy_j: float | None) -> Operation:
    """Return the operation that `text`, such as `0load17`, names.

    Raises:
        ScheduleError: If the text does not name an operation.
    """
    match = _OPERATION.fullmatch(text)
    if match is None:
        raise ScheduleError(
            f"{shown(text)} is not an operation; write rank or stage, a lower-case name and any "
            "microbatch"
        )
    return Operation(
        int(match[1]), match[2], int(match[3]) if match[3] else None, rank, time_s, energy_j
    )


def _checked_operation(operation: Operation, ranks: int) -> Operation:
    """Return `operation` with plain numbers, if they are right."""
    if not _OPERATION.fullmatch(str(operation)) or operation.rank not in range(ranks):
        text = shown(str(operation))
        raise ScheduleError(
            f"{text}: name it with lower-case letters, on a rank from 0 to {ranks - 1}"
        )
    time_s = TIME.check(operation.time_s, str(operation), ScheduleError)
    energy_j = operation.energy_j
    if energy_j is not None:
        energy_j = ENERGY.check(energy_j, str(operation), ScheduleError)
    return operation._replace(rank=int(operation.rank), time_s=time_s, energy_j=energy_j)


def _topological_order(
    names: Sequence[str], predecessors: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    # Kahn's algorithm: a node is ready once all that it waits for are in the order.
    successors: list[list[int]] = [[] for _ in names]
    waiting = [len(before) for before in predecessors]
    for node, before in enumerate(predecessors):
        for other in before:
            successors[other].append(node)
    ready = deque(node for node, count in enumerate(waiting) if count == 0)
    order: list[int] = []
    while ready:
        node = ready.popleft()
        order.append(node)
        for other in successors[node]:
            waiting[other] -= 1
            if waiting[other] == 0:
                ready.append(other)
    # What is left waits in a ring, so any node of it has a predecessor that is left too.
    if len(order) < len(names):
        stuck = next(node for node, count in enumerate(waiting) if count)
        predecessor = next(other for other in predecessors[stuck] if waiting[other])
        raise ScheduleError(
            f"{names[stuck]} can never start: it waits for {names[predecessor]}, which in the end "
            "waits for it; reorder the schedule"
        )
    return tuple(order)
