"""Runs training under a plan, or learns one: `with planner_runtime(engine):` around the loop, on
every rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
from perseus_planner.profiles.modes import OWN, ModeFunctions
from perseus_planner.profiles.sharding import difference
from perseus_planner.runs.recording import RankFiles
from perseus_planner.runs.status import STATE_FILE
from perseus_planner.runtime.attachment import Reattachment
from perseus_planner.runtime.background import PERIOD_S, REST_S, STOP_S, BackgroundWork
from perseus_planner.runtime.by_time import MAX_CHANGES
from perseus_planner.runtime.controller.client import DETACH_S, Connection
from perseus_planner.runtime.decider import Context, Decider, ServiceExchange
from perseus_planner.runtime.fixed_plan import FixedPlan, program_of
from perseus_planner.runtime.follower import Follower
from perseus_planner.runtime.hook import Hook
from perseus_planner.runtime.job import JobWarnings, this_job, wait_for_others
from perseus_planner.runtime.marks import NO_REQUEST, Marks
from perseus_planner.runtime.modes import ModeSwitch, learnt_modes
from perseus_planner.runtime.options import (
    TIME,
    AutopilotSettings,
    RuntimeOptions,
    WorkFunction,
)
from perseus_planner.runtime.rendezvous import join_job, peers_in, shows_edges_only
from perseus_planner.runtime.runtime import Runtime, UnfollowedRuntime
from perseus_planner.runtime.telemetry import Telemetry
from perseus_planner.runtime.trackers import Trackers, log_functions

if TYPE_CHECKING:
    from perseus_planner.engines.engine import Engine
    from perseus_planner.runs.verdict import StragglerDetection
    from perseus_planner.runtime.context import RankContext
    from perseus_planner.runtime.hook import Program
    from perseus_planner.runtime.job import TrainingJob
    from perseus_planner.runtime.link import Link, MakeLink
    from perseus_planner.runtime.switching import GivenPlan, Plans

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
    work: WorkFunction | str | None = None,
    modes: ModeFunctions | None = None,
    may_reorder: bool = False,
    log: Any = None,
    strict: bool = True,
    trust_traced: bool = False,
    decider: Decider | str | None = None,
    follow: Literal["hooks", "time", "graph"] | None = None,
    peers: Sequence[int] | None = None,
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
            one. Training whose clocks follow the batch does so too, as slow as a budget or a
            deadline lets it be. Only rank 0 connects to it, with the token in the environment
            variable PLANNER_TOKEN. Training goes on while the service is away.
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
        work: Where microbatches differ: returns the work of one, a number or a few of 0 or more,
            such as `sequence_work`; or the name of such a function, "module:function". Clocks then
            follow each batch, and neither a plan nor the autopilot: a pipeline that has less to do
            than the slowest one runs at lower clocks, in that iteration. It is called with each
            microbatch before an iteration, on the first rank of a pipeline; data are read ahead for
            it, in their order. Give `learn=False` and a profile as `state`.
        modes: For a plan with modes: mode -> a function that has the next computations run in it,
            such as `Recompute(engine).off`; with "own" for the way in which training runs without a
            plan. It is called on the training thread before a computation whose mode differs from
            that of the one before. Between iterations training runs in its own way, unless all
            computations of a rank run in one mode. For the autopilot: "own" and one other mode,
            which it tries as it tries clocks; all ranks give the same. Each computation may then
            have a mode of its own, unless a `ModeFunction` says `shared_by="microbatch"`.
        may_reorder: For the autopilot: whether it may try a mode that may change the order of a sum
            (`ModeFunction.reorders`), and so the last bits of losses.
        log: Where the seconds, joules, watts, saving and verdict of each iteration of this rank's
            GPU go: a SummaryWriter of TensorBoard, a run of wandb, the module `mlflow` with an
            active run, a function of the number of the iteration and its values by name, or a list
            of these. Each rank may give its own, or None. They are called on a thread of their own,
            some iterations later; a fault of theirs is one warning.
        strict: Whether an engine that lacks a name which the planner uses, as another release may,
            is refused. Otherwise, as by `planner run`, one warning is given and training goes on at
            full clocks.
        trust_traced: Whether a plan of a traced profile is applied, which is an expectation: its
            rows at all clocks but one are estimates (`planner trace`). Otherwise it is refused.
        decider: What decides the clocks instead, on all ranks: the name of one that an extension
            brings, or a `runtime.decider.Decider` of each rank's own.
        follow: How a plan is followed: "hooks" sets the clock of each computation as the engine
            comes to it. "time" needs no more than the begin and the end of an iteration: it changes
            clocks at offsets from the begin, at most 4 times, and runs each rank at one clock where
            iterations are too short for that. None for "hooks", unless the engine shows only whole
            iterations, as Megatron-core's graphs of them do, or there is none. "graph" captures
            marks in these graphs, so that each computation has its clock again; it has not been
            tried on a GPU yet.
        peers: Without an engine: the ranks of this rank's pipeline in the whole job, first stage to
            last, such as `torch.distributed.get_process_group_ranks` returns. None if the stages of
            a pipeline are as far apart as can be: with a plan of 4 ranks and a job of 8, ranks 0,
            2, 4 and 6 are one, and 1, 3, 5 and 7 the other.

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
    if modes and plan is None:
        if engine is None or work is not None or service is not None:
            raise UsageError(
                "modes: training without a pipeline, clocks that follow the batch, and a job whose "
                "profile the service plans on are for one way of running; leave modes out, or give "
                "a plan made from a profile with modes"
            )
        modes = learnt_modes(modes, may_reorder=may_reorder)
    training = this_job()
    if engine is None and peers is None and plan is not None:
        peers = peers_in(plan, training)
    if follow is None:
        follow = "time" if peers is not None or shows_edges_only(engine, plan) else "hooks"
    if follow == TIME and max_changes is None:
        max_changes = MAX_CHANGES  # of the service's plans
    options = RuntimeOptions(
        plan=plan,
        gpu=gpu,
        dry_run=dry_run,
        record=None if record is None else Path(record),
        max_changes_per_s=max_changes_per_s,
        on_straggling=on_straggling,
        service=service,
        job=job,
        frontier=frontier,
        max_changes=max_changes,
        autopilot=AutopilotSettings(
            slowdown,
            max_slowdown,
            AutopilotSettings.max_changes if max_changes is None else max_changes,
            learn,
        ),
        state=state,
        work=work,
        modes=modes or {},
        log=log_functions(log),
        strict=strict,
        trust_traced=trust_traced,
        decider=decider,
        follow=follow,
        peers=peers,
    )
    process = os.getpid()
    warnings = JobWarnings(training)
    link = None if options.service is None else _service_link(options, training, warnings)
    with ExitStack() as stack:
        stack.enter_context(blocks.opened("runtime"))
        context = problem = None
        try:
            context = join_job(engine, training, options, link, warnings, stack)
        except EngineChanged as error:
            if strict:
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
                if strict:
                    raise
                session.hook.stop_following(str(error))
            yield session.begin()
            end_s = END_S
        finally:
            session.attempt(attached.close)
            if os.getpid() == process:  # a forked child leaves everything to its parent
                session.end(end_s)


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
        options: RuntimeOptions,
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
        self._telemetry = Telemetry(
            job.rank,
            replace(context.engine.pipeline_rank, pipeline=context.own.pipeline),
            self._files(options.record),
            own_plans=context.part.pipelines > 1,
            warn=lambda text: warnings.warn("record", text),
            planned_busy_s=self._decider.busy_s,
            sharded_torch=sharded_torch(context.engine),
            control=context.control,
        )
        gpus = [] if attachment.gpu is None else [attachment.gpu]
        self._telemetry.update([], gpus)

        # What runs on the training thread: marks, what follows the decider, and the hook.
        self._marks = _make_marks(context.engine, self._connection, stack)
        self._follower = Follower(job, context.share, self._decider, self._telemetry.on_end)
        self._follower.start(context.program)
        if context.program is not None:
            self._warn_of_torch(context.program)
        self._follower.problem = attachment.problem
        self._switch: ModeSwitch | None = None
        if options.modes:
            self._switch = ModeSwitch(options.modes, self._lose_modes)
            self._decider.take_switch(self._switch)
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
        on_slow = options.on_straggling
        self._trackers = Trackers(options.log, warnings.warn)
        self._work = BackgroundWork(
            self._follower,
            self.hook,
            self._marks,
            self._telemetry,
            warnings,
            connection=self._connection,
            reattachment=(
                None
                if self._connection is None
                else Reattachment(attachment.controller, self._connection)
            ),
            on_straggling=on_slow if link is None else link.on_straggling(on_slow),
            on_counts=None if link is None else link.counted,
            decider=self._decider,
            on_records=self._trackers.add,
        )
        self._background = Loop(
            self._work.run_round,
            "perseus-planner runtime",
            PERIOD_S,
            descriptors=self._work.descriptors,
            rest_s=REST_S,
        )

    def _warn_of_torch(self, program: Program) -> None:
        if program.plan is None:
            return
        text = difference(program.plan.torch, sharded_torch(self._context.engine))
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
                on_status=self._telemetry.on_status,
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
        decider = self._decider
        assert isinstance(decider, FixedPlan)  # no other takes plans
        self._warn_of_torch(decider.program_of_plans(0, plans))
        modes = self._context.seat.options.modes
        for pipeline in range(self._context.part.pipelines):
            program_of(self._context.engine, plans, 0, pipeline, modes)

    def _files(self, folder: Path | None) -> RankFiles | None:
        if folder is None:
            return None
        attempt = self._context.part.attempt
        if attempt is None:
            text = f"{folder}: rank 0 is missing; training goes on without recording"
            self._warnings.warn("record", text)
            return None
        return RankFiles(folder, self._job.rank, self._job.ranks, attempt)


def _service_link(options: RuntimeOptions, job: TrainingJob, warnings: JobWarnings) -> Link:
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
