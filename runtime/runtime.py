"""What training sees of the runtime, and asks of it, while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import UsageError
from perseus_planner.engines.engine import WholeTraining
from perseus_planner.engines.guard import RetryingGuard
from perseus_planner.runtime.resiliency import corrected_report
from perseus_planner.runtime.sending import GivenPlan, Plans
from perseus_planner.runtime.switching import Proposal, Rejection

if TYPE_CHECKING:
    from perseus_planner.plans.plan import Plan
    from perseus_planner.runs import IterationRecord
    from perseus_planner.runs.status import DeciderStatus
    from perseus_planner.runtime.context import RankContext
    from perseus_planner.runtime.follower import Follower
    from perseus_planner.runtime.telemetry import Telemetry


class Runtime:
    """The runtime of this rank inside the block of `planner_runtime`."""

    def __init__(
        self,
        context: RankContext,
        follower: Follower,
        telemetry: Telemetry,
        check: Callable[[Plans], None],
        wake: Callable[[], None],
        on_fault: Callable[[Exception], object],
    ) -> None:
        self._context = context
        self._decider = context.decider
        self._follower = follower
        self._telemetry = telemetry
        self._check = check
        self._wake = wake
        self._highest_mhz: dict[int, float] = {}
        self._guard = RetryingGuard(on_fault)  #: of calls by the training that take no clock

    @property
    def plan(self) -> Plan | None:
        """The plan that this rank's pipeline runs by; None if there is none, or the autopilot
        makes its programs.
        """
        program = self._follower.program
        return None if program is None else program.expected.plan

    @property
    def autopilot(self) -> DeciderStatus | None:
        """What the autopilot knows; on other ranks than 0, what it knew at their newest program.
        None with a plan.
        """
        return self._decider.status

    @property
    def pipeline(self) -> int:
        """Number of this rank's data-parallel pipeline, from 0."""
        return self._context.own.pipeline

    @property
    def problem(self) -> str | None:
        """Why no clocks are set now although there is a plan; None if they are set."""
        return self._follower.problem

    @property
    def iterations(self) -> tuple[IterationRecord, ...]:
        """The last iterations of this rank, as measured."""
        return self._telemetry.iterations

    @property
    def planned_clocks(self) -> Mapping[int, float]:
        """On rank 0, for each rank of the job the clock at which it is to compute now, MHz, on
        average; empty elsewhere, and while no clocks are set.
        """
        program = self._follower.program
        if program is None or self._context.control != "clock" or self.problem is not None:
            return {}
        sent = program.expected.sent
        if sent is None:
            return {}
        return {
            rank: sent.rank_clocks(position[0])[position[1]]
            for rank, position in enumerate(self._context.positions)
            if position is not None
        }

    def corrected_report(self, report: Any) -> Any:
        """Return a straggler report of NVIDIA's resiliency extension without what planned clocks
        do to its scores, as `docs/integrations/resiliency.md` shows; call it on rank 0 with every
        report.

        Args:
            report: The report of all ranks, with `gather_on_rank0`; None elsewhere, and returned.
        """
        clocks_mhz = self.planned_clocks
        program = self._follower.program
        top_mhz = 0.0 if program is None else program.expected.top  # at which the autopilot begins
        for rank, clock_mhz in clocks_mhz.items():
            self._highest_mhz[rank] = max(self._highest_mhz.get(rank, top_mhz), clock_mhz)
        return report and corrected_report(report, clocks_mhz, self._highest_mhz)

    @contextmanager
    def iteration(self, microbatches: int | None = None) -> Iterator[None]:
        """Run one training iteration inside the block: for training without an engine, which needs
        no call else. Without a plan, that is from forward to the optimizer's step. With a plan of a
        pipeline, the forwards and backwards of all microbatches, without the optimizer's step; no
        evaluation.

        Args:
            microbatches: How many the iteration runs. Where the plan has another number, it runs at
                full clocks, and so does the next one. None if it always has the plan's.

        Raises:
            UsageError: If the runtime was given an engine, which shows its iterations by itself.
        """
        whole = self._whole_training()
        whole.begin(microbatches)
        try:
            yield
        except BaseException:
            whole.abandon()
            raise
        whole.end()

    def end_iteration(self) -> None:
        """End an iteration, and begin the next one: an alternative to `iteration`, after each step
        of the optimizer.

        Raises:
            UsageError: As in `iteration`.
        """
        whole = self._whole_training()
        whole.end()
        whole.begin()

    def batch(self, work: Sequence[Any], *, order: bool = False) -> tuple[int, ...]:
        """Say the work of each microbatch of the next iteration, instead of the function `work` of
        `planner_runtime`; call it on the first rank of each pipeline at least, as soon as the batch
        is known.

        Args:
            work: For each microbatch a number of 0 or more, or a few, always as many.
            order: Whether the iteration runs its microbatches in the order that this returns, on
                all ranks of the pipeline. It sums gradients in another order then.

        Returns:
            The indices of `work` in the order in which the iteration is to run them: with `order`,
            on the first rank of a pipeline, the one in which it is shortest at full clocks, of some
            that are tried, once it is known how long computations take; else as they are.

        Raises:
            UsageError: If the runtime has no function `work`, so that clocks do not follow batches.
        """
        if not self._decider.wants_batches:
            raise UsageError(
                "clocks do not follow the batch in this training; give planner_runtime work="
            )
        as_they_are = tuple(range(len(work)))
        return self._guard.call(partial(self._decider.take_work, work, order=order)) or as_they_are

    def _whole_training(self) -> WholeTraining:
        if isinstance(self._context.engine, WholeTraining):
            return self._context.engine
        raise UsageError("the engine shows its iterations by itself; leave out runtime.iteration()")

    def switch_to(self, plan: GivenPlan, *, number: int | None = None) -> Proposal:
        """Move all ranks of all pipelines to another plan, at the same iteration; call it on any
        one rank.

        Returns at once. The plan takes effect at the begin of an iteration that is a few ahead, so
        that all ranks have read it by then. A rank that reads it late takes it at its next
        iteration; one that it does not fit runs without clocks, and warns. A newer plan that is
        proposed before then replaces it.

        Args:
            plan: A plan or its file for all pipelines, or one for each pipeline by its number.
            number: What a service counts it by, under which `planner show` shows it.

        Raises:
            PlanError: If the plan cannot be read, is not what the engine runs, or is missing for a
                pipeline.
            UsageError: If its decider makes the programs of this training.
        """
        if self._decider.no_switch:
            raise UsageError(self._decider.no_switch)
        plans = Plans.load(plan, number)
        self._check(plans)
        proposal = self._follower.agreement.propose(plans.dumps())
        self._wake()
        return proposal


class UnfollowedRuntime(Runtime):
    """The runtime of a training that the planner does not follow, because it does not know the
    engine (`strict=False`): it sets no clocks, and takes all calls.

    Args:
        problem: Why.
    """

    plan = autopilot = None
    pipeline = 0
    problem = ""
    iterations = ()
    planned_clocks: Mapping[int, float] = MappingProxyType({})

    def __init__(self, problem: str) -> None:
        self.problem = problem

    def corrected_report(self, report: Any) -> Any:
        """See `Runtime.corrected_report`; no clock needs a correction."""
        return report

    @contextmanager
    def iteration(self, microbatches: int | None = None) -> Iterator[None]:
        """See `Runtime.iteration`."""
        yield

    def end_iteration(self) -> None:
        """See `Runtime.end_iteration`."""

    def batch(self, work: Sequence[Any], *, order: bool = False) -> tuple[int, ...]:
        """See `Runtime.batch`; microbatches stay as they are."""
        return tuple(range(len(work)))

    def switch_to(self, plan: GivenPlan, *, number: int | None = None) -> Proposal:
        """See `Runtime.switch_to`; no plan is taken."""
        proposal = Proposal()
        proposal.settle(Rejection(self.problem))
        return proposal
