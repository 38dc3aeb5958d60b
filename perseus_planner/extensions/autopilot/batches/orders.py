"""What a rank runs, for each number of microbatches that it has had."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perseus_planner.base.errors import ProfileError, UsageError
from perseus_planner.extensions.autopilot.batches.leader import MOST_COUNTS
from perseus_planner.profiles.keys import Key
from perseus_planner.runtime.program import Expected, Program
from perseus_planner.schedules import cell_of

if TYPE_CHECKING:
    from perseus_planner.profiles.profiles import Profile
    from perseus_planner.schedules import Computation


class Orders:
    """The orders of a rank's computations, each as the program at full clocks that is run until
    more is known.

    One thread adds them, and any may read them.

    Args:
        profile: The cost of clocks.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        #: number of microbatches -> program, the newest first. It is replaced, never changed, as
        #: other threads read it meanwhile.
        self._programs: dict[int, Program] = {}

    def add(self, order: tuple[Computation, ...]) -> None:
        """Add what the rank runs with another number of microbatches.

        Raises:
            ProfileError: If the profile does not have it all.
            UsageError: If there are orders for as many numbers as can be planned.
        """
        # The profile must cover the order, because clocks are chosen by its rows.
        rows = self._profile.measurements
        pair = next((each for each in order if len(cell_of(each)) > 1), None)
        if pair is not None:
            raise ProfileError(
                f"{pair} is a pair of two microbatches, and what a pair needs is not known from "
                "the work of each; leave work= out"
            )
        missing = next((c for c in order if Key(c.stage, c.kind) not in rows), None)
        if missing is not None:
            raise ProfileError(
                f"the profile has no {missing.kind} of stage {missing.stage}, which this training "
                "runs; profile the stages that you train"
            )
        # The highest clock that was measured counts as full clocks.
        top = max(each[0].clock_mhz for each in rows.values())
        clocks = (top,) * len(order)
        program = Program(1, order, clocks, awaits=True, expected=Expected(top=top))
        if program.microbatches in self._programs:
            return
        # Each number needs a planner of its own, which takes long to lay out.
        if len(self._programs) == MOST_COUNTS:
            raise UsageError(
                f"clocks follow the batch for the first {MOST_COUNTS} numbers of microbatches that "
                f"a training runs, and {program.microbatches} is one more"
            )
        self._programs = {program.microbatches: program, **self._programs}

    def of(self, microbatches: int | None) -> Program | None:
        """Return the program for so many microbatches; None if it is not known. If their number is
        not known, the only program there is.
        """
        programs = self._programs
        if microbatches is not None:
            return programs.get(microbatches)
        return next(iter(programs.values())) if len(programs) == 1 else None

    @property
    def newest(self) -> Program | None:
        """The program that was added last; None if there is none."""
        return next(iter(self._programs.values()), None)

    @property
    def all(self) -> list[tuple[Computation, ...]]:
        """All orders, the newest first."""
        return [program.computations for program in self._programs.values()]
