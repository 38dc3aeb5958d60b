"""Schedules: the computations of one iteration, rank by rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from perseus_planner.base.errors import ScheduleError
from perseus_planner.schedules.checks import Flaw, find_layout_flaw, find_pipeline_flaw
from perseus_planner.schedules.computation import KINDS, Computation

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Schedule:
    """The computations of one iteration, in program order, one tuple per rank.

    A schedule need not be a pipeline that can run; `check_pipeline` checks that.

    Raises:
        ScheduleError: If the ranks are not like that; names the rank and the computation.
    """

    name: str  #: the name of its generator, such as "1f1b"
    #: `ranks[r]` holds the computations of rank r, first to last; at least one each, and each only
    #: once. A rank may hold several stages, a stage is on one rank, and stages are numbered from 0
    #: without a hole.
    ranks: tuple[tuple[Computation, ...], ...]

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ScheduleError(f"schedule {self.name}: has no ranks; give at least one")
        flaw = find_layout_flaw(self.ranks)
        if flaw is not None:
            raise ScheduleError(f"schedule {self.name}, {flaw.where}: {flaw.text}")

    @cached_property
    def stage_ranks(self) -> tuple[int, ...]:
        """`stage_ranks[s]` is the rank that holds stage s."""
        holder = {
            computation.stage: rank
            for rank, order in enumerate(self.ranks)
            for computation in order
        }
        return tuple(holder[stage] for stage in sorted(holder))

    @property
    def stages(self) -> int:
        """The number of pipeline stages."""
        return len(self.stage_ranks)

    @cached_property
    def microbatches(self) -> int:
        """The number of microbatches of one iteration."""
        return 1 + max(computation.microbatch for computation in self.computations())

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The `KINDS` that the schedule has, in their order."""
        found = {computation.kind for computation in self.computations()}
        return tuple(kind for kind in KINDS if kind in found)

    @cached_property
    def _pipeline_flaw(self) -> Flaw | None:
        """The flaw that `check_pipeline` reports; kept, as a schedule is checked often."""
        return find_pipeline_flaw(self.ranks)

    def computations(self) -> Iterator[Computation]:
        """Yield all computations, rank by rank in program order."""
        for rank in self.ranks:
            yield from rank

    def __str__(self) -> str:
        ranks = "" if len(self.ranks) == self.stages else f" on {len(self.ranks)} ranks"
        return f"{self.name}, {self.stages} stages{ranks} x {self.microbatches} microbatches"


def check_pipeline(schedule: Schedule) -> None:
    """Refuse a schedule that is not a complete pipeline, or in which an engine would wait for ever.

    In a complete pipeline each stage runs, for each microbatch, F and either B or both I and W;
    microbatches are numbered from 0 without a hole. It runs to its end if no computation comes, on
    its rank, after one that directly or indirectly depends on it (see `dependency_of`).

    Raises:
        ScheduleError: If a computation can never run or lacks its counterpart; names it and what it
            waits for.
    """
    flaw = schedule._pipeline_flaw
    if flaw is not None:
        raise ScheduleError(f"schedule {schedule.name}, {flaw.where}: {flaw.text}")
