"""Runs training under a plan, or learns one: `with planner_runtime(engine):` around the loop, on
every rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import GpuError, UsageError, how_to_install
from perseus_planner.runs.recording import RankFiles
from perseus_planner.runtime.attachment import Reattachment
from perseus_planner.runtime.autopilot.job import AutopilotSettings
from perseus_planner.runtime.autopilot.ranks.exchange import ServiceExchange
from perseus_planner.runtime.autopilot.ranks.follower import ProgramFollower
from perseus_planner.runtime.autopilot.ranks.programs import Programs
from perseus_planner.runtime.autopilot.ranks.rank import STATE_FILE, AutopilotOptions, AutopilotRank
from perseus_planner.runtime.background import BackgroundThread, BackgroundWork
from perseus_planner.runtime.controller.client import DETACH_S, Connection
from perseus_planner.runtime.hook import Hook
from perseus_planner.runtime.job import JobWarnings, this_job, wait_for_others
from perseus_planner.runtime.marks import NO_REQUEST, HostMarks, Marks
from perseus_planner.runtime.rendezvous import RuntimeSettings, check_gpu, join_job, program_of
from perseus_planner.runtime.runtime import Runtime
from perseus_planner.runtime.switching.follower import PlanFollower
from perseus_planner.runtime.switching.plans import GivenPlan, Plans
from perseus_planner.runtime.telemetry.telemetry import Telemetry

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from perseus_planner.runs.recording import Attempt
    from perseus_planner.runs.straggler import StragglerDetection
    from perseus_planner.runtime.agent.link import ServiceLink
    from perseus_planner.runtime.engines.engine import Engine
    from perseus_planner.runtime.hook import Program, RankProgram
    from perseus_planner.runtime.job import TrainingJob

MAX_CHANGES_PER_S = 100.0
"""Default limit of the clock changes of one node: a call holds the driver's lock for about 6 ms
(measured on A800).
"""

END_S = 5.0
"""How long rank 0 waits at the end, at most, until all others have ended their part."""


@contextmanager
def planner_runtime(
    engine: Any = None,
    *,
    plan: GivenPlan | None = None,
    gpu: str = "cuda",
    dry_run: bool = False,
    record: str | os.PathLike[str] | None = None,
    max_changes_per_s: float = MAX_CHANGES_PER_S,
    on_straggling: Callable[[StragglerDetection], None] | None = None,
    service: str | None = None,
    job: str | None = None,
    frontier: str | os.PathLike[str] | None = None,
    max_changes: int | None = None,
    slowdown: float = 1.0,
    max_slowdown: float = 0.005,
    learn: bool = True,
    state: str | os.PathLike[str] | None = STATE_FILE,
) -> Iterator[Runtime]:
    """Train `engine` with each computation at its clock inside the block; reset the clocks on
    leaving.

    With a plan, its clocks are set. Without one, the autopilot learns from the iterations of the
    training itself what clocks cost, and plans on it: the first iterations run at full clocks,
    which is the reference, and those after them may together be longer by `max_slowdown` than
    `slowdown` allows, and no more: each rank keeps a ledger of its own iterations, and runs at full
    clocks while more is owed.

    Enter and leave the block on every rank. Training never waits for a clock. If clocks can no
    longer be set, training goes on without them, and one warning is given through the logger
    `perseus_planner.runtime`; they are tried again after 30 s, then less and less often, down to
    every 10 minutes.

    Args:
        engine: A DeepSpeed PipelineEngine; a Megatron-core model, or the list of its chunks; or a
            schedule of torch.distributed.pipelining. None for training without a pipeline: all GPUs
            then get one clock for the whole iteration, and each is to run inside
            `with runtime.iteration():`.
        plan: A plan or its file for all pipelines, or one for each pipeline by its number; None for
            the autopilot. The plan of rank 0 counts and is sent to all ranks.
        gpu: GPU of each rank, as for `open_gpu`, or only a back-end: "cuda", "nvml", "zeusd",
            "command".
        dry_run: Do everything except setting clocks.
        record: A folder in which the ranks record the run, for `planner show` and
            `planner calibrate`. Give each job its own, and again when it is restarted: the folder
            keeps the totals of all attempts, and stays small.
        max_changes_per_s: Limit of the clock changes of one node per second.
        on_straggling: Called on a background thread when this rank's GPU turns out slow or
            throttled, and when it has recovered.
        service: Address of a planner service, such as "http://10.0.0.5:8400" or
            "unix:/run/planner.sock". Its plans are followed, and slow ranks are reported to it; the
            autopilot makes its own plans, as long as the service lets pipelines wait for a slower
            one. Only rank 0 connects to it, with the token in the environment variable
            PLANNER_TOKEN. Training goes on while the service is away.
        job: Name of this training in the service.
        frontier: The file that `planner solve` wrote, from which the service plans. Without a plan
            it plans from what the autopilot has learnt.
        max_changes: Switch budget, as for `planner plan`: how often a GPU may change its clock in
            an iteration, by the autopilot or by the service's plans. None for 8 with the autopilot,
            and for any number with the service.
        slowdown: For the autopilot: the iteration time that you accept, as a multiple of that at
            full clocks.
        max_slowdown: For the autopilot: how much longer iterations may be on average, as a share of
            the time at full clocks, while it learns and because times vary.
        learn: Whether the autopilot tries clocks that it does not know; otherwise it plans on
            `state` alone.
        state: For the autopilot: the file of what it has learnt, a profile, from which the next
            start goes on. A relative path is in the folder `record`, or else where rank 0 was
            started. None to keep nothing.

    Raises:
        PlanError: If the plan cannot be read, or is not what the engine runs; names the first
            difference.
        GpuInUse: If another job that is alive sets one of the GPUs.
        UsageError: If `engine`, `gpu` or the settings of the service cannot be used here.
        FrontierError: If the frontier cannot be read.
        RankError: If another rank has refused; names the rank and its reason.
    """
    if engine is None:
        kept = AutopilotOptions.of(
            AutopilotSettings(slowdown, max_slowdown),
            state,
            None if record is None else Path(record),
        ).state
        if record is not None:
            text = "only runs of pipelines are recorded; leave out record="
            JobWarnings(this_job()).warn("record", text, by="rank 0")
        with _without_engine(
            gpu, plan, kept, dry_run=dry_run, slowdown=slowdown, max_slowdown=max_slowdown
        ) as iterations:
            yield iterations
        return
    this, process = this_job(), os.getpid()
    warnings = JobWarnings(this)
    folder = None if record is None else Path(record)
    changes = AutopilotSettings.max_changes if max_changes is None else max_changes
    link = None
    if service is not None:
        budget = changes if plan is None else max_changes
        served = (service, job, frontier, budget, plan is None, slowdown)
        link = _service_link(served, this, warnings)
    options = AutopilotOptions.of(
        AutopilotSettings(slowdown, max_slowdown, changes, learn), state, folder
    )
    settings = RuntimeSettings(
        plan, gpu, dry_run, max_changes_per_s, folder, None if link is None else link.settings
    )
    with ExitStack() as stack:
        context = join_job(engine, this, settings, warnings, stack)
        adapter = context.engine
        telemetry = Telemetry(
            this.rank,
            replace(adapter.pipeline_rank, pipeline=context.pipeline),
            _files(folder, this, context.attempt, warnings),
            own_plans=context.pipelines > 1,
            warn=lambda text: warnings.warn("record", text),
        )
        attachment = context.attachment
        connection, gpu_reply = attachment.connection, attachment.gpu
        telemetry.update([], [] if gpu_reply is None else [gpu_reply])
        background = BackgroundThread()
        source = (
            ProgramFollower(is_first=adapter.pipeline_rank.rank == 0)
            if context.has_autopilot
            else None
        )

        def make_program(version: int, data: bytes) -> RankProgram:
            if source is not None:
                place = adapter.pipeline_rank.rank
                return Programs.program_of(data, version, context.pipeline, place, source.orders)
            return plan_program(version, Plans.loads(data))

        def plan_program(version: int, plans: Plans) -> Program:
            program = program_of(adapter, plans, version, context.pipeline)
            if gpu_reply is not None:
                check_gpu(program, gpu_reply, context.control)
            return program

        def check(plans: Plans) -> None:
            plan_program(0, plans)
            for pipeline in range(context.pipelines):
                program_of(adapter, plans, 0, pipeline)

        follower = PlanFollower(
            this, context.share, make_program, telemetry.on_end, is_prompt=source is not None
        )
        follower.start(context.program)
        marks, problem = _make_marks(adapter, connection, warnings, stack)
        follower.problem = attachment.problem or problem
        autopilot = exchange = None
        if source is not None:
            source.follow(follower, marks.ended_s)
            exchange = None if link is None else ServiceExchange()
            autopilot = AutopilotRank.begin(
                context,
                this,
                source,
                follower.agreement,
                warnings,
                options,
                exchange,
                dry_run=dry_run,
            )
            if autopilot.coordinator is not None:
                autopilot.coordinator.on_status = telemetry.on_status
        hook = Hook(marks, source or follower, context.program)
        on_slow = on_straggling if link is None else link.on_straggling(on_straggling)
        on_counts = None if link is None else link.counted
        reattachment = (
            None if connection is None else Reattachment(attachment.controller, connection)
        )
        work = BackgroundWork(
            follower,
            hook,
            marks,
            telemetry,
            warnings,
            connection,
            reattachment,
            on_slow,
            on_counts,
            autopilot,
        )
        end_s = 0.0  # after an exception nobody is waited for
        try:
            with adapter.attached(hook):
                background.start(work.run_round, work.descriptors)
                runtime = Runtime(
                    context.pipeline, follower, telemetry, check, background.wake, autopilot
                )
                if link is not None:
                    link.begin(context, runtime.plan, runtime.switch_to, exchange)
                yield runtime
                end_s = END_S
        finally:
            if os.getpid() == process:  # a forked child leaves everything to its parent
                if link is not None:
                    link.stop()
                _leave(connection, background, follower, work, warnings)
                wait_for_others(this, "training", this.ranks, end_s)
                if link is not None:
                    link.close()


def _without_engine(
    gpu: str,
    plan: GivenPlan | None,
    state: Path | None,
    *,
    dry_run: bool,
    slowdown: float,
    max_slowdown: float,
) -> AbstractContextManager[Runtime]:
    from perseus_planner.runtime.whole.session import training_device, whole_iterations

    if plan is not None:
        raise UsageError(
            "plan= is for pipelines; give planner_runtime the engine that runs it, or leave out "
            "the plan"
        )
    return whole_iterations(
        gpu, training_device(), state, dry_run=dry_run, slowdown=slowdown, max_slowdown=max_slowdown
    )


def _service_link(served: tuple[Any, ...], job: TrainingJob, warnings: JobWarnings) -> ServiceLink:
    """Return the link to the service; `served` are the values of `ServiceSettings`."""
    try:  # loaded here with pydantic, because most jobs have no service
        from perseus_planner.runtime.agent.link import ServiceLink
        from perseus_planner.runtime.agent.settings import ServiceSettings
    except ModuleNotFoundError as error:
        raise UsageError(
            f"service={served[0]!r} needs {error.name}, which is not installed; "
            f"{how_to_install('service')} on every rank"
        ) from error

    return ServiceLink(ServiceSettings(*served), job, warnings)


def _files(
    folder: Path | None, job: TrainingJob, attempt: Attempt | None, warnings: JobWarnings
) -> RankFiles | None:
    if folder is not None and attempt is None:
        warnings.warn("record", f"{folder}: rank 0 is missing; training goes on without recording")
    return (
        None
        if folder is None or attempt is None
        else RankFiles(folder, job.rank, job.ranks, attempt)
    )


def _leave(
    connection: Connection | None,
    background: BackgroundThread,
    follower: PlanFollower,
    work: BackgroundWork,
    warnings: JobWarnings,
) -> None:
    """Reset this rank's GPU, before an exception of the training propagates; then finish the
    record.
    """
    if connection is not None:
        connection.request[0] = NO_REQUEST
    is_stopped = background.stop()
    if connection is not None:
        problem = connection.detach(DETACH_S)
        if problem is not None and follower.problem is None:  # otherwise the user was warned before
            warnings.warn("controller", problem)
    if is_stopped:
        work.close()
        follower.agreement.end()


def _make_marks(
    engine: Engine, connection: Connection | None, warnings: JobWarnings, stack: ExitStack
) -> tuple[Marks, str | None]:
    """Return the marks of this rank, which request nothing if there is no controller, and the
    problem if one arose.
    """
    unconnected = HostMarks(memoryview(bytearray(8)).cast("Q"))
    if connection is None:
        return unconnected, None
    if engine.device.type != "cuda":
        return HostMarks(connection.request), None
    from perseus_planner.runtime.cuda_marks import CudaMarks

    try:
        return stack.enter_context(CudaMarks(connection.memory, engine.device)), None
    except GpuError as error:
        problem = f"no clock can be set: {error}"
        warnings.warn("marks", f"{problem}; training goes on without setting clocks")
        return unconnected, problem
