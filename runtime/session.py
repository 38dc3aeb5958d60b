"""Runs training under a plan: `with planner_runtime(engine, plan="plan.yaml"):` around the loop, on every rank."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perseus_planner.errors import GpuError
from perseus_planner.runtime.agent.link import ServiceLink
from perseus_planner.runtime.agent.settings import ServedJob
from perseus_planner.runtime.controller.client import LEAVE_S, Connection
from perseus_planner.runtime.hook import Hook
from perseus_planner.runtime.job import this_job
from perseus_planner.runtime.marks import NOTHING, HostMarks, Marks
from perseus_planner.runtime.monitor import Background, Rounds
from perseus_planner.runtime.notices import Notices
from perseus_planner.runtime.rendezvous import Settings, check_gpu, join, program_of
from perseus_planner.runtime.switching.controller import JobPilot
from perseus_planner.runtime.switching.plans import GivenPlan, Plans
from perseus_planner.runtime.telemetry.telemetry import Telemetry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from perseus_planner.plans.plan import Plan
    from perseus_planner.runs import IterationRecord
    from perseus_planner.runs.straggler import Straggling
    from perseus_planner.runtime.engines.engine import Engine
    from perseus_planner.runtime.program import Program
    from perseus_planner.runtime.switching.agreement import Proposal

MAX_CHANGES_PER_S = 100.0
"""Clock changes of one node in a second, at most: a call holds the driver's lock for about 6 ms (facts of an A800)."""


class Runtime:
    """What is under way inside the block of `planner_runtime`, on this rank."""

    def __init__(
        self,
        pipeline: int,
        pilot: JobPilot,
        telemetry: Telemetry,
        accepts: Callable[[int, Plans], Program],
        wake: Callable[[], None],
    ) -> None:
        self._pipeline, self._pilot, self._telemetry = pipeline, pilot, telemetry
        self._accepts, self._wake = accepts, wake

    @property
    def plan(self) -> Plan | None:
        """The plan that this rank's pipeline runs by; None where there is none."""
        program = self._pilot.program
        return None if program is None else program.plan

    @property
    def pipeline(self) -> int:
        """Which data-parallel pipeline this rank is in, from 0."""
        return self._pipeline

    @property
    def problem(self) -> str | None:
        """Why no clocks are set, if that has a reason beside the plan; None: they are."""
        return self._pilot.problem

    @property
    def iterations(self) -> tuple[IterationRecord, ...]:
        """The last iterations of this rank, as measured."""
        return self._telemetry.iterations

    def switch_to(self, plan: GivenPlan) -> Proposal:
        """Let all ranks of all pipelines go over to another plan at the same iteration; called on any one rank.

        Returns at once. The plan takes effect at an iteration's begin, when every rank has read it and found that it
        fits; a newer one that is proposed before takes its place.

        Args:
            plan: for all pipelines, or by the number of each.

        Raises:
            PlanError: it cannot be read, or is not what the engine runs.
        """
        plans = Plans.given(plan)
        self._accepts(0, plans)
        proposal = self._pilot.agreement.propose(plans.dumps())
        self._wake()
        return proposal


@contextmanager
def planner_runtime(
    engine: Any,
    *,
    plan: GivenPlan,
    gpu: str = "cuda",
    dry_run: bool = False,
    record: str | os.PathLike[str] | None = None,
    max_changes_per_s: float = MAX_CHANGES_PER_S,
    on_straggling: Callable[[Straggling], None] | None = None,
    service: str | None = None,
    job: str | None = None,
    frontier: str | os.PathLike[str] | None = None,
    max_changes: int | None = None,
) -> Iterator[Runtime]:
    """Train `engine` by a plan inside the block: every computation at its clock; on leaving, clocks are reset.

    Every rank enters and leaves it. Training never waits for a clock, and goes on without them, with one notice through
    the logger `perseus_planner.runtime`, whatever happens to what sets them.

    Args:
        engine: a DeepSpeed PipelineEngine; a Megatron-core model, or the list of its chunks; or a schedule of
            torch.distributed.pipelining.
        plan: the plan or its file, or such for each pipeline by its number; that of rank 0 counts, and is sent to all.
        gpu: each rank's GPU, as for `open_gpu`, or a back-end alone: "cuda", "nvml", "zeusd", "command".
        dry_run: do all but set clocks.
        record: a folder in which the ranks write what ran, for `planner show` and `planner calibrate`.
        max_changes_per_s: clock changes of one node in a second, at most.
        on_straggling: told, on a thread of the runtime's own, when this rank's GPU turns out slow or throttled, and
            when that is over.
        service: address of a planner's service, such as "http://10.0.0.5:8400" or "unix:/run/planner.sock", whose plans
            are taken as they come, and which is told what ranks turn out slow. Rank 0 alone reaches it, and shows it
            the token in the environment variable PLANNER_TOKEN. Training goes on where it is away. With "embedded",
            rank 0 starts one of the job's own, a process that ends with it, and says once where it listens: at a free
            port of loopback, or as in "embedded:8400" or "embedded:0.0.0.0:8400", which needs PLANNER_SERVICE_TOKENS.
        job: the name by which that knows this training.
        frontier: the file that `planner solve` wrote, from which that plans.
        max_changes: the switch budget of its plans, as for `planner plan`; None: any number of changes.

    Raises:
        PlanError: the plan is none, or not what the engine runs: names the first difference.
        GpuInUse: another job that lives sets one of the GPUs.
        UsageError, FrontierError: `engine`, `gpu`, or what is said of the service, cannot be used here.
        RankError: another rank has refused, and says why.
    """
    everyone, process = this_job(), os.getpid()
    notices = Notices(everyone)
    link = None if service is None else ServiceLink(ServedJob(service, job, frontier, max_changes), everyone, notices)
    settings = Settings(plan, gpu, dry_run, max_changes_per_s, None if link is None else link.served)
    with ExitStack() as stack:
        joined = join(engine, everyone, settings, notices, stack)
        adapter = joined.engine
        telemetry = Telemetry(
            everyone.rank,
            replace(adapter.seat, pipeline=joined.pipeline),
            None if record is None else Path(record),
            own_plans=joined.pipelines > 1,
            say=lambda text: notices.say("record", text),
        )
        telemetry.update([], [] if joined.gpu is None else [joined.gpu])
        background = Background()

        def accepts(version: int, plans: Plans) -> Program:
            program = program_of(adapter, plans, version, joined.pipeline)
            if joined.gpu is not None:
                check_gpu(program, joined.gpu, joined.control)
            return program

        pilot = JobPilot(everyone, accepts, telemetry.ended, background.wake)
        pilot.start(joined.program)
        marks, problem = _marks(adapter, joined.connection, notices, stack)
        pilot.problem = joined.problem or problem
        hook = Hook(marks, pilot, joined.program)
        told = on_straggling if link is None else link.told(on_straggling)
        counted = None if link is None else link.counted
        rounds = Rounds(pilot, hook, marks, telemetry, notices, joined.connection, told, counted)
        try:
            with adapter.attached(hook):
                background.start(rounds.once, rounds.descriptors)
                runtime = Runtime(joined.pipeline, pilot, telemetry, accepts, background.wake)
                if link is not None:
                    link.begin(joined, runtime.plan, runtime.switch_to)
                yield runtime
        finally:
            if os.getpid() == process:  # what a forked child leaves is its parent's
                if link is not None:
                    link.stop()
                _leave(joined.connection, background, pilot, rounds, notices)
                if link is not None:
                    link.close()


def _leave(
    connection: Connection | None, background: Background, pilot: JobPilot, rounds: Rounds, notices: Notices
) -> None:
    """Reset this rank's GPU, before an exception of the training goes on its way; then close the books."""
    if connection is not None:
        connection.word[0] = NOTHING
    stopped = background.stop()
    if connection is not None:
        problem = connection.leave(LEAVE_S)
        if problem is not None and pilot.problem is None:  # else it has been said
            notices.say("controller", problem)
    if stopped:
        rounds.close()
        pilot.agreement.end()


def _marks(
    engine: Engine, connection: Connection | None, notices: Notices, stack: ExitStack
) -> tuple[Marks, str | None]:
    """How this rank tells its controller; where there is none it tells nobody, and where it cannot, why."""
    nobody = HostMarks(memoryview(bytearray(8)).cast("Q"))
    if connection is None:
        return nobody, None
    if engine.device.type != "cuda":
        return HostMarks(connection.word), None
    from perseus_planner.runtime.cuda_marks import CudaMarks

    try:
        return stack.enter_context(CudaMarks(connection.page, engine.device)), None
    except GpuError as error:
        problem = f"no clock can be set: {error}"
        notices.say("marks", f"{problem}; training goes on without")
        return nobody, problem
