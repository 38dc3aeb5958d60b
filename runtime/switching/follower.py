"""Decides what each iteration of a rank runs by: the plan that all ranks agreed on or, if anything fails, no clocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from perseus_planner.errors import PlannerError
from perseus_planner.runtime.hook import Program
from perseus_planner.runtime.switching.agreement import Agreement
from perseus_planner.runtime.switching.plans import Plans

if TYPE_CHECKING:
    from perseus_planner.runtime.job import TrainingJob
    from perseus_planner.runtime.switching.node_plans import NodeShare

MakeProgram = Callable[[int, Plans], Program]
OnIterationEnd = Callable[[int, Program | None, str | None], None]


class PlanFollower:
    """The `ProgramSource` of a rank whose job agrees on plans through its store.

    The training thread calls the methods of `ProgramSource`; the background thread calls all others.

    Attributes:
        agreement: This rank's part in the agreement.
        problem: Why no clocks are set now; None while they are.
        misfit: The newest plan that this rank cannot run, and why.
        deviation: What an engine ran that was not in the plan.

    Args:
        job: The job.
        share: This rank's part in the looks of its node.
        make_program: Returns this rank's program of a version, given the plans of all pipelines; raises a PlannerError
            if the plan does not fit.
        on_iteration_end: Called for every iteration that has ended, with the arguments of `ProgramSource.on_end`.
    """

    def __init__(
        self,
        job: TrainingJob,
        share: NodeShare,
        make_program: MakeProgram,
        on_iteration_end: OnIterationEnd,
    ) -> None:
        self.agreement = Agreement(job.own_store, self._prepare, share)
        self.problem: str | None = None
        self.misfit: str | None = None
        self.deviation: str | None = None
        self._make_program, self._on_iteration_end = make_program, on_iteration_end
        self._programs: dict[int, Program] = {}
        self._current: Program | None = None

    @property
    def program(self) -> Program | None:
        """The program of the last iteration that was to have clocks; None if this rank cannot run its plan."""
        return self._current

    def start(self, first: Program | None) -> None:
        """Begin with a program of version 1; called before training."""
        if first is not None:
            self._programs[1] = first
        self._current = first

    def program_for(self, iteration: int) -> Program | None:
        """See `ProgramSource.program_for`."""
        version = self.agreement.version_at(iteration)
        if self.problem is not None:
            return None
        self._current = self._programs.get(version)
        return self._current

    def on_end(self, iteration: int, program: Program | None, deviation: str | None) -> None:
        """See `ProgramSource.on_end`."""
        if deviation is not None:
            self.deviation = f"iteration {iteration} ran {deviation}"
        self._on_iteration_end(iteration, program, deviation)

    def look(self) -> None:
        """Take part in the agreement once."""
        self.agreement.look()
        for version in [version for version in self._programs if version < self.agreement.version]:
            del self._programs[version]

    def _prepare(self, version: int, data: bytes) -> None:
        try:
            self._programs[version] = self._make_program(version, Plans.loads(data))
        except PlannerError as error:
            self.misfit = f"plan {version} is not for this rank: {error}"
