"""The computations of one iteration, rank by rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from perseus_planner.errors import ScheduleError
from perseus_planner.schedules.checks import Flaw, find_layout_flaw, find_pipeline_flaw
from perseus_planner.schedules.computation import KINDS, Computation

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Schedule:
    """The computations of one iteration, in program order, one tuple per rank.

    Whether they are a pipeline that can run is another question: `check_pipeline` answers it.

    Attributes:
        name: what generated it, e.g. "1f1b".
        ranks: `ranks[r]` is what rank r runs, first to last; at least one computation each, none twice. A rank may hold
            several stages, a stage is on one rank, and stages are numbered from 0 without a hole.

    Raises:
        ScheduleError: one of these is not so; names the rank and the computation.
    """

    name: str
    ranks: tuple[tuple[Computation, ...], ...]

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ScheduleError(f"schedule {self.name}: has no rank; give it at least one")
        flaw = find_layout_flaw(self.ranks)
        if flaw is not None:
            raise ScheduleError(f"schedule {self.name}, {flaw.where}: {flaw.text}")

    @cached_property
    def stage_ranks(self) -> tuple[int, ...]:
        """`stage_ranks[s]` is the rank that holds stage s."""
        holder = {computation.stage: rank for rank, order in enumerate(self.ranks) for computation in order}
        return tuple(holder[stage] for stage in sorted(holder))

    @property
    def stages(self) -> int:
        """How many pipeline stages there are."""
        return len(self.stage_ranks)

    @cached_property
    def microbatches(self) -> int:
        """How many microbatches one iteration has."""
        return 1 + max(computation.microbatch for computation in self.computations())

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Which of `KINDS` there are, in that order."""
        found = {computation.kind for computation in self.computations()}
        return tuple(kind for kind in KINDS if kind in found)

    @cached_property
    def _unrunnable(self) -> Flaw | None:
        """Kept, as a schedule is checked wherever a graph is made of it."""
        return find_pipeline_flaw(self.ranks)

    def computations(self) -> Iterator[Computation]:
        """All computations, rank by rank in program order."""
        for rank in self.ranks:
            yield from rank

    def __str__(self) -> str:
        ranks = "" if len(self.ranks) == self.stages else f" on {len(self.ranks)} ranks"
        return f"{self.name}, {self.stages} stages{ranks} x {self.microbatches} microbatches"


def check_pipeline(schedule: Schedule) -> None:
    """Refuse a schedule that is not a whole pipeline, or in which an engine would wait for ever.

    Whole: each stage runs, for each microbatch, F and either B or both I and W; microbatches are numbered from 0
    without a hole. It runs when each computation has, before it on its rank, nothing that waits for it through whatever
    chain (`dependency_of` says what waits for what).

    Raises:
        ScheduleError: names the first computation that cannot run and what it waits for, or the one that lacks its
            counterpart.
    """
    flaw = schedule._unrunnable
    if flaw is not None:
        raise ScheduleError(f"schedule {schedule.name}, {flaw.where}: {flaw.text}")
