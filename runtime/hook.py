"""Follows an engine through its iterations on the training thread, and requests the clock of each
computation.

The rules:

- The clock of a computation is requested when the computation before it ends; the first clock of an
  iteration, when the last computation of the iteration before it ends.
- A new plan takes effect at the begin of an iteration, and so does a return to the plan after a
  deviation.
- If an engine runs something that is not in the plan, the GPU is reset for the rest of the
  iteration. The plan is followed again after an iteration that ran as planned.
- What an iteration runs is noted if it has no program or deviates from it, so that a program can be
  made for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from perseus_planner.base.errors import PlanError
from perseus_planner.profiles.measurement import changes_per_rank, with_fewer_changes
from perseus_planner.runtime.marks import Marks, clock_request
from perseus_planner.schedules import Computation

if TYPE_CHECKING:
    from perseus_planner.plans.plan import Plan

_NO_REQUEST_INDEX = -1


class RankProgram(Protocol):
    """What one rank runs in an iteration, and the clock of each computation."""

    @property
    def version(self) -> int:
        """Number of the program in this job: 1 for the first, 2 for the next, and so on."""

    @property
    def plan(self) -> Plan | None:
        """The plan that it is a part of; None for a program of the autopilot."""

    @property
    def computations(self) -> tuple[Computation, ...]:
        """What the rank runs, in order."""

    @property
    def clocks(self) -> tuple[int, ...]:
        """The value for each computation: MHz, or watts of a power limit."""

    @property
    def changes(self) -> int:
        """How often the clock changes in an iteration, including the change back to the first
        one.
        """

    @property
    def microbatches(self) -> int:
        """Number of microbatches of an iteration."""

    @property
    def time_s(self) -> float:
        """Expected time of an iteration, seconds."""

    @property
    def control(self) -> str:
        """What the values set, as `Plan.control`."""

    def with_changes(self, most: int) -> RankProgram:
        """Return the program with at most so many changes in an iteration, at the same clocks or
        higher ones.
        """


@dataclass(frozen=True)
class Program:
    """The part of a plan that one rank runs in an iteration; see `RankProgram`.

    Raises:
        PlanError: If the schedule has no such rank.
    """

    version: int  #: Number of the plan in this job: 1 for the first, 2 for the next, and so on
    plan: Plan  #: The plan
    rank: int  #: Rank of the plan's schedule
    #: How many clock changes an iteration may have, for a node that cannot make those of the plan.
    #: None for the plan's clocks.
    max_changes: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < len(self.plan.schedule.ranks):
            raise PlanError(
                f"the plan is for pipelines of {len(self.plan.schedule.ranks)} ranks, and this is "
                f"rank {self.rank} of a pipeline; make the plan for the schedule that you train "
                "with"
            )

    @cached_property
    def computations(self) -> tuple[Computation, ...]:
        """What the rank runs, in order."""
        return self.plan.schedule.ranks[self.rank]

    @cached_property
    def clocks(self) -> tuple[int, ...]:
        """The value for each computation, the plan's or a higher one: MHz, or watts of a power
        limit.
        """
        planned = tuple(self.plan.clocks[str(computation)] for computation in self.computations)
        return (
            planned if self.max_changes is None else with_fewer_changes(planned, self.max_changes)
        )

    @cached_property
    def changes(self) -> int:
        """How often the clock changes in an iteration, including the change back to the first
        one.
        """
        return changes_per_rank(self.clocks)

    @property
    def microbatches(self) -> int:
        """Number of microbatches of the plan."""
        return self.plan.schedule.microbatches

    @property
    def time_s(self) -> float:
        """Time of an iteration by the plan, seconds."""
        return self.plan.time_s

    @property
    def control(self) -> str:
        """The plan's control."""
        return self.plan.control

    def with_changes(self, most: int) -> Program:
        """Return the program with at most so many changes in an iteration."""
        return replace(self, max_changes=most)

    def check_order(self, order: tuple[Computation, ...], engine: str) -> None:
        """Refuse a plan whose order of computations is not that of the engine.

        Args:
            order: What the engine runs on this rank.
            engine: Name of the engine.

        Raises:
            PlanError: If the orders differ; names the first difference.
        """
        if order == self.computations:
            return
        pairs = list(zip(order, self.computations, strict=False))
        position = next(
            (i for i, (actual, planned) in enumerate(pairs) if actual != planned), len(pairs)
        )
        raise PlanError(
            f"the plan ({self.plan.schedule}) is not what {engine} runs on rank {self.rank} of "
            f"the pipeline: computation {position + 1} is {_at(order, position)} there and "
            f"{_at(self.computations, position)} in the plan; solve for the schedule and the "
            "number of microbatches that you train with"
        )


def _at(order: tuple[Computation, ...], position: int) -> str:
    return str(order[position]) if position < len(order) else "missing"


Order = Sequence[tuple[int, str, int]]
"""What a rank ran in an iteration: stage, kind and microbatch of each computation."""


class ProgramSource(Protocol):
    """Decides at each iteration which program this rank runs by; all methods are called on the
    training thread.
    """

    def program_for(self, iteration: int) -> RankProgram | None:
        """Return the program of an iteration, or None to run without clocks; must not wait long,
        or raise.
        """

    def on_end(
        self,
        iteration: int,
        program: RankProgram | None,
        deviation: str | None,
        order: Order | None = None,
    ) -> None:
        """The iteration has ended.

        Args:
            iteration: Its number.
            program: What it ran by, as planned or not.
            deviation: What the engine ran that is not in the program, if anything.
            order: What it ran, if that is not the program's; None if it was not noted.
        """


class Hook:
    """Receives the begin and the end of each iteration and computation of one rank.

    Args:
        marks: Requests clocks and takes times.
        source: Decides which program each iteration runs by.
        first: Program of the first iteration; its first clock is requested at once.
    """

    def __init__(self, marks: Marks, source: ProgramSource, first: RankProgram | None) -> None:
        self._marks, self._source = marks, source
        self._iteration = -1
        self._is_inside = False
        self._position = 0
        self._is_unclocked = True  #: no clock is requested
        self._deviation: str | None = None
        self._noted: list[tuple[int, str, int]] = []  #: what ran that is not as in a program
        self._load(first)

    @property
    def iteration(self) -> int:
        """Number of the current or last iteration, from 0; -1 before the first."""
        return self._iteration

    @property
    def progress(self) -> tuple[int, int]:
        """The iteration and how many of its computations have ended; may be read by any thread."""
        return self._iteration, self._position

    def begin_iteration(self, microbatches: int | None = None) -> None:
        """Begin a training iteration, of this many microbatches if the engine knows."""
        if self._is_inside:
            self.end_iteration()
        self._is_inside = True
        self._iteration += 1
        program = self._source.program_for(self._iteration)
        if program is not self._program:
            self._load(program)
        elif self._deviation is not None and program is not None:
            self._order, self._count = program.computations, len(program.computations)
        self._position, self._deviation, self._noted = 0, None, []
        self._marks.begin_iteration(self._iteration)
        if (
            program is not None
            and microbatches is not None
            and microbatches != program.microbatches
        ):
            self._deviate(f"{microbatches} microbatches, and the plan has {program.microbatches}")

    def begin(self, stage: int, kind: str, microbatch: int) -> None:
        """Begin a computation."""
        self._marks.begin()
        position = self._position
        planned = self._order[position] if position < self._count else None
        if planned != (stage, kind, microbatch):
            if self._deviation is None and self._program is not None:
                self._deviate(
                    f"{Computation(stage, kind, microbatch)}, where the plan has "
                    f"{planned or 'nothing more'}"
                )
            self._noted.append((stage, kind, microbatch))

    def end(self) -> None:
        """End the computation, and request the next clock."""
        self._marks.end()
        self._position = position = self._position + 1
        if not self._is_unclocked:
            self._marks.request(position if position < self._count else 0)

    def end_iteration(self) -> None:
        """End the iteration, including all that the engine does after its last computation."""
        if not self._is_inside:
            return
        self._is_inside = False
        if self._deviation is None and self._program is not None and self._position != self._count:
            self._deviate(f"{self._position} computations, and the plan has {self._count}")
        self._marks.end_iteration()
        order = self._noted if self._deviation is not None or self._program is None else None
        self._source.on_end(self._iteration, self._program, self._deviation, order)
        if self._deviation is None and self._is_unclocked and self._program is not None:
            self._is_unclocked = False
            self._marks.request(0)

    def abandon_iteration(self) -> None:
        """End the iteration because it raises, which is no deviation; the next one begins with
        the plan again.
        """
        if not self._is_inside:
            return
        self._is_inside = False
        self._load(None)
        self._marks.end_iteration()
        self._source.on_end(self._iteration, None, None, None)

    def _load(self, program: RankProgram | None) -> None:
        self._program = program
        self._order = program.computations if program is not None else ()
        self._count = len(self._order)
        self._is_unclocked = program is None
        self._marks.load(
            [clock_request(i, clock) for i, clock in enumerate(program.clocks)] if program else []
        )
        self._marks.request(_NO_REQUEST_INDEX if program is None else 0)

    def _deviate(self, what: str) -> None:
        self._deviation, self._is_unclocked = what, True
        self._noted = list(self._order[: self._position])
        self._order, self._count = (), 0  # so that all that follows is noted
        self._marks.request(_NO_REQUEST_INDEX)
