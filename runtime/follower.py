"""What each iteration of a rank runs by: the program of its decider, which may be the one that all
ranks agreed on, or, if anything fails, no clocks.

Where a GPU's clock changes cannot keep up, its rank runs the program with fewer of them: neighbours
at the higher of their clocks, so that it is no later. The plan as it is gets tried again after a
pause (`backoff`), and so does every new one, but for those of a continual decider, which come one
after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from perseus_planner.base.errors import PlannerError
from perseus_planner.base.loops import Backoff
from perseus_planner.runtime.hook import RAISED
from perseus_planner.runtime.switching import Agreement

if TYPE_CHECKING:
    from perseus_planner.runtime.decider import Decider
    from perseus_planner.runtime.job import TrainingJob
    from perseus_planner.runtime.program import Order, Program
    from perseus_planner.runtime.switching import NodeShare

OnIterationEnd = Callable[[int, "Program | None", "str | None"], None]


class Follower:
    """The `ProgramSource` of a rank whose job agrees on programs through its store.

    The training thread calls the methods of `ProgramSource`; the background thread calls all
    others.

    Attributes:
        agreement: This rank's part in the agreement.
        problem: Why no clocks are set now; None while they are.
        misfit: The newest plan that this rank cannot run, and why.
        deviation: What an engine ran that was not in the plan.
        unfollowed: Why the engine is not followed any more; None while it is.

    Args:
        job: The job.
        share: This rank's part in the looks of its node.
        decider: Decides the programs.
        on_iteration_end: Called for every iteration that has ended, with the arguments of
            `ProgramSource.on_end`.
        now_s: A clock, in seconds.
    """

    def __init__(
        self,
        job: TrainingJob,
        share: NodeShare,
        decider: Decider,
        on_iteration_end: OnIterationEnd,
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._decider = decider
        self.agreement = Agreement(
            job.own_store, self._prepare, share, is_prompt=decider.is_continual
        )
        self.problem: str | None = None
        self.misfit: str | None = None
        self.deviation: str | None = None
        self.unfollowed: str | None = None
        self._on_iteration_end = on_iteration_end
        self._now_s = now_s
        self._programs: dict[int, Program] = {}
        #: with fewer changes; runs in place of the agreed program of its version
        self._reduced_program: Program | None = None
        #: when the agreed program is tried again with all its changes, after these failed
        self._backoff = Backoff()
        self._current: Program | None = None

    @property
    def program(self) -> Program | None:
        """The program of the last iteration that was to have clocks; None if this rank cannot
        run its plan.
        """
        return self._current

    @property
    def planned(self) -> Program | None:
        """The program of the last iteration with all its changes, also if it ran with fewer."""
        return self._programs.get(self.agreement.version)

    def start(self, first: Program | None) -> None:
        """Begin with a program of version 1; called before training."""
        if first is not None:
            self._programs[1] = first
        self._current = first

    def program_for(self, iteration: int) -> Program | None:
        """See `ProgramSource.program_for`."""
        version = self.agreement.version_at(iteration)
        agreed = self._programs.get(version)
        reduced = self._reduced_program
        if reduced is not None and reduced.version == version:
            agreed = reduced
        program = self._decider.program_for(iteration, agreed)
        # No clocks are set for now. The current program is one that was to have clocks, so the last
        # such one stays.
        if self.problem is not None:
            return None
        # The agreed program stays the current one while the decider runs single iterations at full
        # clocks. Where nothing is agreed on, it is what the decider makes for each iteration.
        self._current = agreed or program
        return program

    def on_end(
        self,
        iteration: int,
        program: Program | None,
        deviation: str | None,
        order: Order | None = None,
    ) -> None:
        """See `ProgramSource.on_end`."""
        self._decider.on_end(iteration, program, deviation, order)
        if deviation not in (None, RAISED) and not self._decider.is_continual:
            self.deviation = f"iteration {iteration} ran {deviation}"
        self._on_iteration_end(iteration, program, deviation)

    def on_unfollowed(self, problem: str) -> None:
        """See `ProgramSource.on_unfollowed`."""
        self.unfollowed = problem

    def keep_changes(self, most: int) -> Program | None:
        """Run the plan with half its changes from the next iteration on, or with half of those,
        until at most `most`.

        Returns:
            The program with fewer changes; None if there are no more than so many already.
        """
        program = self._current
        if program is None:
            return None
        reduced = self._reduced_program
        if reduced is not None and reduced.version == program.version:
            program = reduced
        changes = program.changes
        # By halves: `most` is what the node could make of the program that failed, and was seen of
        # its last changes alone. A program with just so many would be at the limit.
        while changes > most:
            changes //= 2
        # Made from the whole plan, as merging again what was merged would raise more clocks.
        planned = self._programs.get(program.version) or program
        reduced = planned.with_changes(changes)
        if reduced.changes == program.changes:  # the message is older than the program
            return None
        self._backoff.fail(self._now_s())
        self._reduced_program = reduced
        return reduced

    def look(self) -> None:
        """Take part in the agreement once, and go back to all changes of the plan when their
        pause is over.
        """
        self.agreement.look()
        if self._reduced_program is not None and self._backoff.is_due(self._now_s()):
            self._reduced_program = None
        for version in [version for version in self._programs if version < self.agreement.version]:
            del self._programs[version]

    def _prepare(self, version: int, data: bytes) -> None:
        try:
            program = self._decider.program_of(version, data)
            reduced = self._reduced_program
            # Programs of a continual decider come too often to try each with all its changes.
            if self._decider.is_continual and reduced is not None:
                program = program.with_changes(reduced.changes)
            _ = program.requests  # not on the training thread
            self._programs[version] = program
        except PlannerError as error:
            if not self._decider.is_continual:
                self.misfit = f"plan {version} is not for this rank: {error}"
