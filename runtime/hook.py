"""What an engine's adapter tells on the training thread, and what follows from it: the next clock is asked for.

The rules:

- The clock of the next computation is asked for when the one before it ends, the first one's of the next iteration when
  the last one ends.
- A new plan begins with an iteration, and so does going back to the plan after it was left.
- Where an engine runs what is not in the plan, the GPU is reset for the rest of the iteration; the plan is taken up
  again after an iteration that ran as it says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from perseus_planner.runtime.marks import Marks, word
from perseus_planner.schedules import Computation

if TYPE_CHECKING:
    from perseus_planner.runtime.program import Program

RESET = -1
"""Index of the word that asks for no clock."""


class Pilot(Protocol):
    """Decides, at the boundary of iterations, what this rank runs by."""

    def program_for(self, iteration: int) -> Program | None:
        """What iteration `iteration` runs by; None: without clocks. May not wait for long, or raise."""

    def three_quarters(self, iteration: int) -> None:
        """Most of the iteration is done."""

    def ended(self, iteration: int, program: Program | None, deviation: str | None) -> None:
        """An iteration has ended; `deviation` says what the engine did that is not in the program, if anything."""


class Hook:
    """One rank's way through its iterations.

    Args:
        marks: how the controller is told.
        pilot: what is asked at every iteration.
        first: what is run by at first, whose first clock is asked for at once.
    """

    def __init__(self, marks: Marks, pilot: Pilot, first: Program | None) -> None:
        self._marks, self._pilot = marks, pilot
        self._iteration = -1
        self._inside = False
        self._place = 0
        self._is_open = True  #: no clock is asked for
        self._deviation: str | None = None
        self._load(first)

    @property
    def iteration(self) -> int:
        """Number of the iteration that runs, or ran last; from 0, -1 before the first."""
        return self._iteration

    @property
    def progress(self) -> tuple[int, int]:
        """The iteration, and how many of its computations have ended; for any thread."""
        return self._iteration, self._place

    def begin_iteration(self, microbatches: int | None = None) -> None:
        """A training iteration begins, of so many microbatches where the engine says it."""
        if self._inside:
            self.end_iteration()
        self._inside = True
        self._iteration += 1
        program = self._pilot.program_for(self._iteration)
        if program is not self._program:
            self._load(program)
        self._place, self._deviation = 0, None
        self._marks.begin_iteration(self._iteration)
        if program is not None and microbatches is not None and microbatches != program.plan.schedule.microbatches:
            self._leave(f"{microbatches} microbatches, and the plan has {program.plan.schedule.microbatches}")

    def begin(self, stage: int, kind: str, microbatch: int) -> None:
        """A computation begins."""
        self._marks.begin()
        place = self._place
        planned = self._order[place] if place < self._count else None
        if planned != (stage, kind, microbatch) and self._deviation is None and self._program is not None:
            self._leave(f"{Computation(stage, kind, microbatch)}, where the plan has {planned or 'nothing more'}")

    def end(self) -> None:
        """It has ended: what follows it needs its clock."""
        self._marks.end()
        self._place = place = self._place + 1
        if not self._is_open:
            self._marks.want(place if place < self._count else 0)
        if place == self._mark:
            self._pilot.three_quarters(self._iteration)

    def end_iteration(self) -> None:
        """The iteration has ended, with all that the engine does in it."""
        if not self._inside:
            return
        self._inside = False
        if self._deviation is None and self._program is not None and self._place != self._count:
            self._leave(f"{self._place} computations, and the plan has {self._count}")
        self._marks.end_iteration()
        self._pilot.ended(self._iteration, self._program, self._deviation)
        if self._deviation is None and self._is_open and self._program is not None:
            self._is_open = False
            self._marks.want(0)

    def _load(self, program: Program | None) -> None:
        self._program = program
        self._order = program.computations if program is not None else ()
        self._count = len(self._order)
        self._mark = max(1, 3 * self._count // 4)
        self._is_open = program is None
        self._marks.load([word(i, clock) for i, clock in enumerate(program.clocks)] if program is not None else [])
        self._marks.want(RESET if program is None else 0)

    def _leave(self, what: str) -> None:
        self._deviation, self._is_open = what, True
        self._marks.want(RESET)
