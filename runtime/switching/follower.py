"""Decides what each iteration of a rank runs by: the plan that all ranks agreed on or, if anything fails, no clocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from perseus_planner.errors import PlannerError
from perseus_planner.runtime.hook import Program
from perseus_planner.runtime.switching.agreement import Agreement
from perseus_planner.runtime.switching.plans import Plans

if TYPE_CHECKING:
    from perseus_planner.runtime.job import TrainingJob

PATIENCE_S = 0.5
"""How long the begin of an iteration may wait, once, for this rank to learn what the others decided."""

_AHEAD_S = 0.05  #: how far ahead this rank asks which iterations it may begin

MakeProgram = Callable[[int, Plans], Program]
OnIterationEnd = Callable[[int, Program | None, str | None], None]


class PlanFollower:
    """The `ProgramSource` of a rank whose job agrees on plans through its store.

    The training thread calls the methods of `ProgramSource`; the background thread calls all others.

    Attributes:
        agreement: This rank's part in the agreement.
        problem: Why no clocks are set now; None while they are.
        out_of_step: Why there were no clocks for one or more iterations.
        deviation: What an engine ran that was not in the plan.

    Args:
        job: The job.
        make_program: Returns this rank's program of a version, given the plans of all pipelines; raises a PlannerError
            if the plan does not fit.
        on_iteration_end: Called for every iteration that has ended, with the arguments of `ProgramSource.on_end`.
        wake: Called on the training thread when the background thread has something to do; must not wait.
    """

    def __init__(
        self,
        job: TrainingJob,
        make_program: MakeProgram,
        on_iteration_end: OnIterationEnd,
        wake: Callable[[], None],
    ) -> None:
        self.agreement = Agreement(job.store, job.rank, job.ranks, self._accept)
        self.problem: str | None = None
        self.out_of_step: str | None = None
        self.deviation: str | None = None
        self._make_program, self._on_iteration_end, self._wake = make_program, on_iteration_end, wake
        self._programs: dict[int, Program] = {}
        self._current: Program | None = None
        self._looked = threading.Condition()
        self._may_wait = True
        self._through = 0
        self._begun_s = (0.0, 0.0)  #: when the last two iterations began

    @property
    def program(self) -> Program | None:
        """The program of the last iteration that had one."""
        return self._current

    def start(self, first: Program | None) -> None:
        """Begin with a program of version 1; called before training."""
        if first is not None:
            self._programs[1] = first
        self._current = first
        self.look()

    def program_for(self, iteration: int) -> Program | None:
        """See `ProgramSource.program_for`."""
        self._begun_s = (self._begun_s[1], time.monotonic())
        if self.problem is not None:
            return None
        version = self._version_of(iteration)
        if not version:
            self.out_of_step = f"iteration {iteration} began before this rank had learned which plan it runs by"
            return None
        self._current = self._programs.get(version)
        return self._current

    def on_nearly_done(self, iteration: int) -> None:
        """See `ProgramSource.on_nearly_done`."""
        lasts_s = max(self._begun_s[1] - self._begun_s[0], 1e-3)
        self._through = iteration + 1 + int(_AHEAD_S / lasts_s)
        self._wake()

    def on_end(self, iteration: int, program: Program | None, deviation: str | None) -> None:
        """See `ProgramSource.on_end`."""
        if deviation is not None:
            self.deviation = f"iteration {iteration} ran {deviation}"
        self._on_iteration_end(iteration, program, deviation)

    def look(self) -> None:
        """Take part in the agreement once."""
        self.agreement.look(self._through)
        if self._current is not None:
            for version in [version for version in self._programs if version < self._current.version]:
                del self._programs[version]
        with self._looked:
            self._looked.notify_all()

    def _version_of(self, iteration: int) -> int:
        """Return the version of the plan, or 0 if it is not known.

        Waits if it must; after a wait in vain it does not wait again until this rank is in step.
        """
        version = self.agreement.version_at(iteration)
        if not version and self._may_wait and self.agreement.lost is None:
            self._through = max(self._through, iteration)
            self._wake()
            with self._looked:
                self._looked.wait_for(lambda: self.agreement.may_begin(iteration), PATIENCE_S)
            version = self.agreement.version_at(iteration)
        self._may_wait = version > 0
        return version

    def _accept(self, version: int, data: bytes) -> str | None:
        """Prepare the program of a proposed version; return the reason if this rank cannot run it."""
        try:
            self._programs[version] = self._make_program(version, Plans.loads(data))
        except PlannerError as error:
            return str(error)
        return None
