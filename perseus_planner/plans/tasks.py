"""What the ranks of a pipeline run in one iteration, as plain values: tasks, their costs, and what waits for what."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

from perseus_planner.errors import ScheduleError, UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


class Cost(Protocol):
    """Seconds and joules of one computation or operation; a `Measurement` is one."""

    @property
    def time_s(self) -> float:
        """Seconds, finite, 0 or more."""

    @property
    def energy_j(self) -> float:
        """Joules."""


class Fixed(NamedTuple):
    """The cost of an operation."""

    time_s: float
    energy_j: float


def nearest_clock(measured: Collection[int], clock_mhz: int) -> int:
    """That clock if it was measured, else the next lower one that was, else the lowest."""
    if clock_mhz in measured:
        return clock_mhz
    return max((each for each in measured if each < clock_mhz), default=min(measured))


class Task(NamedTuple):
    """One computation at its planned clock, or one operation of fixed time."""

    costs: Mapping[int, Cost]  #: MHz -> what it takes; tasks may share one. Of an operation one entry, of whatever key
    clock_mhz: int | None  #: planned clock, one of `costs`; None for an operation

    @classmethod
    def operation(cls, cost: Cost) -> Task:
        """An operation that takes the same at any clock, and for which no clock is set."""
        return cls({0: cost}, None)

    @property
    def planned(self) -> Cost:
        """What it takes as planned."""
        return next(iter(self.costs.values())) if self.clock_mhz is None else self.costs[self.clock_mhz]

    def at(self, clock_mhz: int) -> Cost:
        """What it takes at any clock: as at the next lower one that was measured, or below all, as at the lowest."""
        return self.costs[nearest_clock(self.costs, clock_mhz)]


@dataclass(frozen=True)
class TaskGraph:
    """The tasks of one iteration. A place is the number of a task in all ranks one after another.

    Attributes:
        ranks: the tasks of each rank in program order; they run one at a time, in this order.
        waits: for each task, by place, what it waits for beside the one before it on its rank: places, and by how many
            seconds at least it starts after the end of each.

    Raises:
        ScheduleError: a rank has no task, or one waits for itself, through whatever chain, or for a place without task.
        UsageError: a task has no cost at its clock, or a time or lag is none.
    """

    ranks: Sequence[Sequence[Task]]
    waits: Sequence[Sequence[tuple[int, float]]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(map(tuple, self.ranks)))
        object.__setattr__(self, "waits", tuple(map(tuple, self.waits)))
        if not self.ranks or not all(self.ranks):
            raise ScheduleError("ranks: one has no task; give each rank at least one")
        if len(self.waits) != len(self.tasks):
            raise ScheduleError(f"waits: {len(self.waits)} for {len(self.tasks)} tasks; give as many")
        for place, (task, before) in enumerate(zip(self.tasks, self.waits, strict=True)):
            self._check_task(place, task)
            for other, lag_s in before:
                self._check_wait(place, other, lag_s)
        _ = self.planned_ends_s  # refuses a cycle

    def _check_task(self, place: int, task: Task) -> None:
        if not (task.costs if task.clock_mhz is None else task.clock_mhz in task.costs):
            raise UsageError(f"{self.named(place)}: has no cost at its planned clock; give it")
        if not 0 <= task.planned.time_s < math.inf:
            raise UsageError(f"{self.named(place)}: takes {task.planned.time_s} s; give finite seconds of 0 or more")

    def _check_wait(self, place: int, other: int, lag_s: float) -> None:
        if not 0 <= other < len(self.tasks):
            raise ScheduleError(f"{self.named(place)}: waits for place {other}; places are 0 to {len(self.tasks) - 1}")
        if not 0 <= lag_s < math.inf:
            raise UsageError(f"{self.named(place)}: has a lag of {lag_s} s; give finite seconds of 0 or more")

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks, by place."""
        return tuple(task for rank in self.ranks for task in rank)

    @cached_property
    def rank_of_task(self) -> tuple[int, ...]:
        """The rank of each task, by place."""
        return tuple(number for number, rank in enumerate(self.ranks) for _ in rank)

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """The place of the first task of each rank."""
        return tuple(sum(map(len, self.ranks[:number])) for number in range(len(self.ranks)))

    @cached_property
    def lasts(self) -> tuple[int, ...]:
        """The place of the last task of each rank."""
        return tuple(first + len(rank) - 1 for first, rank in zip(self.firsts, self.ranks, strict=True))

    @cached_property
    def successors(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """The places that wait for each task, and their lags; the next one of its rank among them."""
        after: list[list[tuple[int, float]]] = [[] for _ in self.tasks]
        for place, before in enumerate(self.waits):
            for other, lag_s in before:
                after[other].append((place, lag_s))
        for first, last in zip(self.firsts, self.lasts, strict=True):
            for place in range(first, last):
                after[place].append((place + 1, 0.0))
        return tuple(map(tuple, after))

    @cached_property
    def awaited(self) -> tuple[int, ...]:
        """For how many entries of `successors` each task waits."""
        count = [len(before) + 1 for before in self.waits]
        for first in self.firsts:
            count[first] -= 1
        return tuple(count)

    @cached_property
    def planned_ends_s(self) -> tuple[float, ...]:
        """When each task ends, seconds, if clock changes take no time."""
        awaited, starts_s, ends_s = list(self.awaited), [0.0] * len(self.tasks), [0.0] * len(self.tasks)
        ready = [place for place, count in enumerate(awaited) if not count]
        for place in ready:  # grows meanwhile
            ends_s[place] = starts_s[place] + self.tasks[place].planned.time_s
            for other, lag_s in self.successors[place]:
                starts_s[other] = max(starts_s[other], ends_s[place] + lag_s)
                awaited[other] -= 1
                if not awaited[other]:
                    ready.append(other)
        if len(ready) < len(awaited):
            stuck = next(place for place, count in enumerate(awaited) if count)
            raise ScheduleError(
                f"{self.named(stuck)}: can never start, in the end it waits for itself; reorder the tasks"
            )
        return tuple(ends_s)

    def named(self, place: int) -> str:
        """The task as error messages name it."""
        rank = self.rank_of_task[place]
        return f"task {place - self.firsts[rank]} of rank {rank}"
