"""The plans of all pipelines of a job, as one value that is sent to all ranks; and what decides
what each iteration of a rank runs by: the plan that all ranks agreed on or, if anything fails, no
clocks.

Where a GPU's clock changes cannot keep up, its rank runs the plan with fewer of them: neighbours at
the higher of their clocks, so that it is no later. The plan as it is gets tried again after a pause
(`backoff`), and so does every new one, but for those of the autopilot, which come one after the
other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from perseus_planner.base.errors import PlanError, PlannerError
from perseus_planner.base.loops import Backoff
from perseus_planner.base.wires import decode, encode
from perseus_planner.plans.plan import Plan
from perseus_planner.runtime.hook import Order, RankProgram
from perseus_planner.runtime.switching.agreement import Agreement

if TYPE_CHECKING:
    from perseus_planner.runtime.job import TrainingJob
    from perseus_planner.runtime.switching.agreement import NodeShare


OnePlan = Plan | str | os.PathLike[str]
GivenPlan = OnePlan | Mapping[int, OnePlan]

_COMMON = ""  #: key of the common plan in the bytes that are sent


@dataclass(frozen=True)
class Plans:
    """One plan for all pipelines, or one for each."""

    #: Plan of each pipeline that is not in `by_pipeline`; None if there is no such plan.
    common: Plan | None
    by_pipeline: Mapping[int, Plan]  #: Number of a pipeline -> its plan

    @classmethod
    def load(cls, plan: GivenPlan) -> Plans:
        """Load what a user gives: a plan or its file, or one for each pipeline by its number.

        Raises:
            PlanError: If a file cannot be read, or is not a plan.
        """
        if isinstance(plan, Mapping):
            return cls(
                None,
                MappingProxyType(
                    {int(number): _load(pipeline_plan) for number, pipeline_plan in plan.items()}
                ),
            )
        return cls(_load(plan), MappingProxyType({}))

    def of_pipeline(self, pipeline: int) -> Plan:
        """Return the plan of one pipeline.

        Raises:
            PlanError: If the pipeline has no plan.
        """
        plan = self.by_pipeline.get(pipeline, self.common)
        if plan is None:
            numbers = ", ".join(map(str, self.by_pipeline))
            raise PlanError(f"pipeline {pipeline} has no plan; there are plans for {numbers}")
        return plan

    def dumps(self) -> bytes:
        """Return the plans as bytes, for other processes."""
        texts = {str(number): plan.dumps() for number, plan in self.by_pipeline.items()}
        if self.common is not None:
            texts[_COMMON] = self.common.dumps()
        return encode(texts)

    @classmethod
    def loads(cls, data: bytes) -> Plans:
        """Load what `dumps` returned.

        Raises:
            PlanError: If the data is anything else.
        """
        try:
            texts = decode(data, dict[str, str])
            plans = {key: Plan.loads(text) for key, text in texts.items()}
            by_pipeline = {int(key): plan for key, plan in plans.items() if key != _COMMON}
        except ValueError as error:
            raise PlanError(
                f"the plans that were sent cannot be read: {error}; use the same version of the "
                "planner on all ranks"
            ) from error
        return cls(plans.get(_COMMON), MappingProxyType(by_pipeline))


def _load(plan: OnePlan) -> Plan:
    return plan if isinstance(plan, Plan) else Plan.load(Path(plan))


MakeProgram = Callable[[int, bytes], RankProgram]
OnIterationEnd = Callable[[int, RankProgram | None, str | None], None]


class PlanFollower:
    """The `ProgramSource` of a rank whose job agrees on plans through its store.

    The training thread calls the methods of `ProgramSource`; the background thread calls all
    others.

    Attributes:
        agreement: This rank's part in the agreement.
        problem: Why no clocks are set now; None while they are.
        misfit: The newest plan that this rank cannot run, and why.
        deviation: What an engine ran that was not in the plan.
        is_prompt: As for `Agreement`. What does not fit is not a problem then: the next plan will.

    Args:
        job: The job.
        share: This rank's part in the looks of its node.
        make_program: Returns this rank's program of a version, given what was proposed; raises a
            PlannerError if that does not fit.
        on_iteration_end: Called for every iteration that has ended, with the arguments of
            `ProgramSource.on_end`.
        is_prompt: As for `Agreement`.
        now_s: A clock, in seconds.
    """

    def __init__(
        self,
        job: TrainingJob,
        share: NodeShare,
        make_program: MakeProgram,
        on_iteration_end: OnIterationEnd,
        *,
        is_prompt: bool = False,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_prompt = is_prompt
        self.agreement = Agreement(job.own_store, self._prepare, share, is_prompt=is_prompt)
        self.problem: str | None = None
        self.misfit: str | None = None
        self.deviation: str | None = None
        self._make_program, self._on_iteration_end, self._now_s = (
            make_program,
            on_iteration_end,
            now_s,
        )
        self._programs: dict[int, RankProgram] = {}
        self._fewer: RankProgram | None = None  #: replaces the program of its version
        self._backoff = Backoff()  #: of the program that it replaces
        self._current: RankProgram | None = None

    @property
    def program(self) -> RankProgram | None:
        """The program of the last iteration that was to have clocks; None if this rank cannot
        run its plan.
        """
        return self._current

    @property
    def planned(self) -> RankProgram | None:
        """The program of the last iteration with all its changes, also if it ran with fewer."""
        return self._programs.get(self.agreement.version)

    def start(self, first: RankProgram | None) -> None:
        """Begin with a program of version 1; called before training."""
        if first is not None:
            self._programs[1] = first
        self._current = first

    def program_for(self, iteration: int) -> RankProgram | None:
        """See `ProgramSource.program_for`."""
        version = self.agreement.version_at(iteration)
        if self.problem is not None:
            return None
        fewer = self._fewer
        self._current = (
            fewer if fewer is not None and fewer.version == version else self._programs.get(version)
        )
        return self._current

    def on_end(
        self,
        iteration: int,
        program: RankProgram | None,
        deviation: str | None,
        order: Order | None = None,
    ) -> None:
        """See `ProgramSource.on_end`."""
        if deviation is not None and not self.is_prompt:
            self.deviation = f"iteration {iteration} ran {deviation}"
        self._on_iteration_end(iteration, program, deviation)

    def keep_changes(self, most: int) -> RankProgram | None:
        """Run the plan with half its changes from the next iteration on, or with half of those,
        until at most `most`.

        Returns:
            The program with fewer changes; None if there are no more than so many already.
        """
        program = self._current
        if program is None:
            return None
        if self._fewer is not None and self._fewer.version == program.version:
            program = self._fewer
        changes = program.changes
        while changes > most:
            changes //= 2
        fewer = program.with_changes(changes)
        if fewer.changes == program.changes:  # the message is older than the program
            return None
        self._backoff.fail(self._now_s())
        self._fewer = fewer
        return fewer

    def look(self) -> None:
        """Take part in the agreement once, and go back to all changes of the plan when their
        pause is over.
        """
        self.agreement.look()
        if self._fewer is not None and self._backoff.is_due(self._now_s()):
            self._fewer = None
        for version in [version for version in self._programs if version < self.agreement.version]:
            del self._programs[version]

    def _prepare(self, version: int, data: bytes) -> None:
        try:
            program, fewer = self._make_program(version, data), self._fewer
            self._programs[version] = (
                program.with_changes(fewer.changes)
                if self.is_prompt and fewer is not None
                else program
            )
        except PlannerError as error:
            if not self.is_prompt:
                self.misfit = f"plan {version} is not for this rank: {error}"
