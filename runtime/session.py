"""Runs training under a plan, or learns one: `with planner_runtime(engine):` around the loop, on
every rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perseus_planner.base import extensions
from perseus_planner.base.errors import (
    EngineChanged,
    UsageError,
    fault_text,
    how_to_install,
)
from perseus_planner.base.loops import Loop
from perseus_planner.engines import blocks
from perseus_planner.engines.engine import as_tested, sharded_torch
from perseus_planner.profiles.modes import OWN
from perseus_planner.profiles.sharding import difference
from perseus_planner.runs.recording import RankFiles
from perseus_planner.runtime.attachment import Reattachment
from perseus_planner.runtime.background import PERIOD_S, REST_S, STOP_S, BackgroundWork
from perseus_planner.runtime.by_time import MAX_CHANGES
from perseus_planner.runtime.controller.client import DETACH_S, Connection
from perseus_planner.runtime.decider import Context, Decider, ServiceExchange
from perseus_planner.runtime.follower import Follower
from perseus_planner.runtime.hook import Hook
from perseus_planner.runtime.job import JobWarnings, this_job, wait_for_others
from perseus_planner.runtime.joining import join_job, peers_in, shows_edges_only
from perseus_planner.runtime.marks import NO_REQUEST, Marks
from perseus_planner.runtime.modes import ModeSwitch, learnt_modes
from perseus_planner.runtime.options import HOOKS, TIME, OptionKeywords, Options
from perseus_planner.runtime.runtime import Runtime, UnfollowedRuntime
from perseus_planner.runtime.telemetry import Telemetry
from perseus_planner.runtime.trackers import Trackers, log_functions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from perseus_planner.engines.engine import Engine
    from perseus_planner.runs.status import DeciderStatus
    from perseus_planner.runtime.context import RankContext
    from perseus_planner.runtime.job import TrainingJob
    from perseus_planner.runtime.link import Link, MakeLink
    from perseus_planner.runtime.program import Program
    from perseus_planner.runtime.sending import GivenPlan, Plans

END_S = 5.0
"""How long rank 0 waits at the end, at most, until all others have ended their part."""


@contextmanager
def planner_runtime(
    engine: Any = None,
    *,
    plan: GivenPlan | None = None,
    decider: Decider | str | None = None,
    options: Options | None = None,
    **others: Unpack[OptionKeywords],
) -> Iterator[Runtime]:
    """Train `engine` with each computation at its clock inside the block; reset the clocks on
    leaving.

    With a plan, its clocks are set. Without one, the autopilot learns from the iterations of the
    training itself what clocks cost, and plans on it: the first iterations run at full clocks,
    which is the reference, and those after them may together be longer by `max_slowdown` than
    `slowdown` allows: each rank keeps a ledger of its own iterations, and runs at full clocks while
    more is owed. That holds at once for what clocks do to computations. What they do to whole
    iterations beyond that counts once it is told from noise; `planner status` and `planner show`
    say how large an effect cannot be told by now, and the bound that follows.

    Enter and leave the block on every rank. Training never waits for a clock. If clocks can no
    longer be set, training goes on without them, and one warning is given through the logger
    `perseus_planner.runtime`; they are tried again after 30 s, then less and less often, down to
    every 10 minutes.

    Args:
        engine: A DeepSpeed PipelineEngine; a Megatron-core model, or the list of its chunks; or a
            schedule of torch.distributed.pipelining. None for training without a pipeline: without
            a plan all GPUs then get one clock for the whole iteration, and each iteration is to run
            inside `with runtime.iteration():`. None also for a pipeline of another engine, with a
            plan: its iterations are shown the same way, and each rank follows its part by time.
        plan: A plan or its file for all pipelines, or one for each pipeline by its number; None for
            the autopilot. The plan of rank 0 counts and is sent to all ranks.
        decider: What decides the clocks instead, on all ranks: the name of one that an extension
            brings, or a `runtime.decider.Decider` of each rank's own.
        options: All options as one value.
        others: Options one by one, by the names of the fields of `Options`, which describes them;
            they replace those of `options`.

    Raises:
        PlanError: If the plan cannot be read, or is not what the engine runs; names the first
            difference.
        EngineChanged: If the engine lacks a name that the planner uses, and `strict`.
        GpuInUse: If another job that is alive sets one of the GPUs.
        UsageError: If `engine`, `gpu`, `log` or the settings of the service cannot be used here.
        FrontierError: If the frontier cannot be read.
        ProfileError: If the profile for `work` cannot be read, or is of something else.
        RankError: If another rank has refused; names the rank and its reason.
    """
    given: dict[str, Any] = {**others}
    if plan is not None:
        given["plan"] = plan
    if decider is not None:
        given["decider"] = decider
    training = this_job()
    options = _settled(replace(options or Options(), **given), engine, training)
    process = os.getpid()
    warnings = JobWarnings(training)
    link = None if options.service is None else _service_link(options, training, warnings)
    with ExitStack() as stack:
        stack.enter_context(blocks.opened("runtime"))
        context = problem = None
        try:
            context = join_job(engine, training, options, link, warnings, stack)
        except EngineChanged as error:
            if options.strict:
                raise
            problem = str(error)
            text = f"{problem}; training goes on at full clocks, without the planner"
            warnings.warn("engine", text)
        if context is None:
            yield UnfollowedRuntime(problem or "")
            return
        session = _Session(context, training, options, link, warnings, stack)
        end_s = 0.0  # after an exception nobody is waited for
        attached = ExitStack()
        try:
            try:
                with as_tested():
                    attached.enter_context(context.engine.attached(session.hook))
            except EngineChanged as error:
                if options.strict:
                    raise
                session.hook.stop_following(str(error))
            yield session.begin()
            end_s = END_S
        finally:
            session.attempt(attached.close)
            if os.getpid() == process:  # a forked child leaves everything to its parent
                session.end(end_s)


def _settled(options: Options, engine: Any, training: TrainingJob) -> Options:
    """Return options as the runtime uses them: what is called is checked and wrapped.

    Raises:
        UsageError: If options exclude each other, or nothing can log where `log` says.
    """
    # A number out of range is refused before ranks meet.
    options.autopilot  # noqa: B018
    modes = options.modes or {}
    if modes and options.plan is None:
        if engine is None or options.work is not None or options.service is not None:
            raise UsageError(
                "modes: training without a pipeline, clocks that follow the batch, and a job whose "
                "profile the service plans on are for one way of running; leave modes out, or give "
                "a plan made from a profile with modes"
            )
        modes = learnt_modes(modes, may_reorder=options.may_reorder)
    peers = options.peers
    if engine is None and peers is None and options.plan is not None:
        peers = peers_in(options.plan, training)
    follow = options.follow
    if follow is None:
        is_by_time = peers is not None or shows_edges_only(engine, options.plan)
        follow = TIME if is_by_time else HOOKS
    max_changes = options.max_changes
    if follow == TIME and max_changes is None:
        max_changes = MAX_CHANGES  # of the service's plans
    return replace(
        options,
        modes=modes,
        log=log_functions(options.log),
        peers=peers,
        follow=follow,
        max_changes=max_changes,
    )


class _Session:
    """The parts of one rank's runtime, which begin and end together. The constructor makes them one
    after the other, as each needs those before it.

    Attributes:
        hook: What its engine calls.
    """

    def __init__(
        self,
        context: RankContext,
        job: TrainingJob,
        options: Options,
        link: Link | None,
        warnings: JobWarnings,
        stack: ExitStack,
    ) -> None:
        self._context = context
        self._job = job
        self._link = link
        self._warnings = warnings
        self._decider = context.decider
        attachment = context.attachment
        self._is_stopped = False  #: the background thread
        self._connection = attachment.connection
        self._telemetry = self._new_telemetry(options)
        gpus = [] if attachment.gpu is None else [attachment.gpu]
        self._telemetry.update([], gpus)

        # What runs on the training thread: marks, what follows the decider, and the hook.
        self._marks = _make_marks(context.engine, self._connection, stack)
        self._follower = Follower(job, context.share, self._decider, self._telemetry.on_end)
        self._follower.start(context.program)
        if context.program is not None:
            self._warn_of_torch(context.program)
        self._follower.problem = attachment.problem
        self._switch = self._new_switch(options)
        self.hook = Hook(
            self._marks,
            self._follower,
            context.program,
            self._decider.show if self._decider.wants_batches else None,
            self._switch,
            keeps_modes=self._decider.keeps_modes,
        )

        # What runs beside it.
        makes_plans = link is not None and self._decider.makes_plans
        self._exchange = ServiceExchange() if makes_plans else None
        self._trackers = Trackers(options.log, warnings.warn)
        self._work = self._new_work(options)
        self._background = Loop(
            self._work.run_round,
            "perseus-planner runtime",
            PERIOD_S,
            descriptors=self._work.descriptors,
            rest_s=REST_S,
        )

    def _new_telemetry(self, options: Options) -> Telemetry:
        """Return what takes the measurements of this rank."""
        context = self._context
        return Telemetry(
            self._job.rank,
            replace(context.engine.pipeline_rank, pipeline=context.own.pipeline),
            self._files(options.folder),
            own_plans=context.part.pipelines > 1,
            warn=lambda text: self._warnings.warn("record", text),
            planned_busy_s=self._decider.busy_s,
            sharded_torch=sharded_torch(context.engine),
            control=context.control,
        )

    def _new_switch(self, options: Options) -> ModeSwitch | None:
        """Return what enters the modes of this rank; None if there are none."""
        if not options.modes:
            return None
        switch = ModeSwitch(options.modes, self._lose_modes)
        self._decider.take_switch(switch)
        return switch

    def _new_work(self, options: Options) -> BackgroundWork:
        """Return what the background thread does."""
        link = self._link
        on_slow = options.on_straggling
        return BackgroundWork(
            self._follower,
            self.hook,
            self._marks,
            self._telemetry,
            self._warnings,
            connection=self._connection,
            reattachment=(
                None
                if self._connection is None
                else Reattachment(self._context.attachment.controller, self._connection)
            ),
            on_straggling=on_slow if link is None else link.on_straggling(on_slow),
            on_counts=None if link is None else link.counted,
            decider=self._decider,
            on_records=self._trackers.add,
        )

    def _warn_of_torch(self, program: Program) -> None:
        plan = program.expected.plan
        if plan is None:
            return
        text = difference(plan.torch, sharded_torch(self._context.engine))
        if text is not None:
            self._warnings.warn("torch", f"the plan may not fit: {text}; profile again")

    def _lose_modes(self, text: str) -> None:
        self._decider.lose_modes()
        self._warnings.warn("modes", text)

    def begin(self) -> Runtime:
        """Begin what runs beside the training."""
        connection = self._connection
        self._decider.begin(
            Context(
                seat=self._context.seat,
                positions=self._context.positions,
                agreement=self._follower.agreement,
                ended_s=self._marks.ended_s,
                latest=None if connection is None else connection.latest,
                service=self._exchange,
                on_status=self._on_status,
            )
        )
        self._background.start()
        runtime = Runtime(
            self._context,
            self._follower,
            self._telemetry,
            self._check,
            self._background.wake,
            self._take_fault,
        )
        if self._link is not None:
            self._link.begin(self._context, runtime.plan, runtime.switch_to, self._exchange)
        return runtime

    def _on_status(self, status: DeciderStatus) -> None:
        name = self._decider.name or type(self._decider).__name__
        self._telemetry.on_status(replace(status, name=name))

    def end(self, end_s: float) -> None:
        """Reset this rank's GPU, before an exception of the training propagates; then finish the
        record, and on rank 0 wait up to `end_s` seconds for the others. Never raises: each step is
        tried, whatever became of those before.
        """
        steps: list[Callable[[], object]] = []
        if self._switch is not None:
            steps.append(partial(self._switch.enter, OWN))
        if self._link is not None:
            steps.append(self._link.stop)
        steps.append(self._reset)
        steps.append(partial(self._decider.stop, STOP_S))
        steps += [self._stop_background, self._detach, self._close]
        # Others are waited for once the GPU is free: they may take as long as `end_s`.
        steps.append(partial(wait_for_others, self._job, "training", self._job.ranks, end_s))
        if self._link is not None:
            steps.append(self._link.close)
        for step in steps:
            self.attempt(step)

    def attempt(self, step: Callable[[], object]) -> None:
        """Take a step at the end; say what it raises."""
        try:
            step()
        except Exception as error:
            self._take_fault(error)

    def _take_fault(self, error: Exception) -> None:
        self._warnings.warn("fault", fault_text(error))

    def _reset(self) -> None:
        if self._connection is not None:
            self._connection.request[0] = NO_REQUEST

    def _stop_background(self) -> None:
        self._is_stopped = self._background.stop(STOP_S)

    def _detach(self) -> None:
        if self._connection is None:
            return
        problem = self._connection.detach(DETACH_S)
        # Of another problem the user was warned before.
        if problem is not None and self._follower.problem is None:
            self._warnings.warn("controller", problem)

    def _close(self) -> None:
        if self._is_stopped:
            self._work.close()
            self._follower.agreement.end()
            self._trackers.close()

    def _check(self, plans: Plans) -> None:
        """Refuse plans that do not fit this rank, or not all pipelines."""
        plans.check_trusted(self._context.seat.options.trust_traced)
        self._warn_of_torch(self._decider.program_of_plans(0, plans))
        self._decider.check_pipelines(plans)

    def _files(self, folder: Path | None) -> RankFiles | None:
        if folder is None:
            return None
        attempt = self._context.part.attempt
        if attempt is None:
            text = f"{folder}: rank 0 is missing; training goes on without recording"
            self._warnings.warn("record", text)
            return None
        return RankFiles(folder, self._job.rank, self._job.ranks, attempt)


def _service_link(options: Options, job: TrainingJob, warnings: JobWarnings) -> Link:
    try:  # loaded here with pydantic, because most jobs have no service
        make_link: MakeLink = extensions.offer("service link")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"service={options.service!r} needs {error.name}, which is not installed; "
            f"{how_to_install('service')} on every rank"
        ) from error
    return make_link(options, job, warnings)


def _make_marks(engine: Engine, connection: Connection | None, stack: ExitStack) -> Marks:
    """Return the marks of this rank, which request nothing if there is no controller."""
    if connection is None or engine.device.type != "cuda":
        none = memoryview(bytearray(8)).cast("Q")
        return Marks(none if connection is None else connection.request)
    from perseus_planner.runtime.cuda_marks import CudaMarks

    return stack.enter_context(CudaMarks(connection.memory, engine.device))
