"""How a rank begins: the steps that all take in one order, with a `Rendezvous` after each; and what
follows its engine and decides its clocks, by what the user asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from perseus_planner.base import extensions
from perseus_planner.base.errors import GpuInUse, PlannerError, UsageError, did_you_mean
from perseus_planner.engines import engine_of
from perseus_planner.engines.edges import EdgesOnly
from perseus_planner.engines.engine import WholeTraining, as_tested
from perseus_planner.engines.releases import name_untested
from perseus_planner.gpu import check_gpu_text
from perseus_planner.runs.recording import Attempt
from perseus_planner.runtime import attachment, rendezvous
from perseus_planner.runtime.captured_plan import CapturedPlan
from perseus_planner.runtime.context import RankContext
from perseus_planner.runtime.decider import Decider, Seat
from perseus_planner.runtime.fixed_plan import FixedPlan, check_gpu, program_of
from perseus_planner.runtime.job import node_name
from perseus_planner.runtime.options import GRAPH, HOOKS, TIME
from perseus_planner.runtime.rendezvous import RankInfo, Rendezvous
from perseus_planner.runtime.sending import Plans, pack, unpack
from perseus_planner.runtime.switching import NodeShare
from perseus_planner.runtime.timed_plan import TimedPlan

if TYPE_CHECKING:
    from perseus_planner.engines.engine import Engine
    from perseus_planner.runtime.attachment import Attachment
    from perseus_planner.runtime.controller.protocol import Control
    from perseus_planner.runtime.job import JobWarnings, TrainingJob
    from perseus_planner.runtime.link import Link
    from perseus_planner.runtime.options import Options
    from perseus_planner.runtime.program import Program
    from perseus_planner.runtime.sending import GivenPlan

_PLANS = {HOOKS: FixedPlan, TIME: TimedPlan, GRAPH: CapturedPlan}
"""What follows a plan, by how it is to be followed."""


def join_job(
    engine: Any,
    job: TrainingJob,
    options: Options,
    link: Link | None,
    warnings: JobWarnings,
    stack: ExitStack,
) -> RankContext:
    """Begin together with all other ranks.

    Args:
        engine: The training engine, as for `engine_of`; None for training without a pipeline.
        job: The job.
        options: Options of this rank.
        link: This rank's part in a service; None without a service. That of rank 0 counts.
        warnings: Gives warnings.
        stack: Closes what is opened here.

    Raises:
        PlanError: If the plan cannot be read or does not fit the engine.
        GpuInUse: If another job holds this rank's GPU.
        UsageError: If the engine, the GPU, or the options cannot be used.
        ProfileError: If the profile for `work` cannot be read, or is of something else.
        FrontierError: If the frontier for the service cannot be read.
        RankError: If another rank has refused.
    """
    meeting = Rendezvous(job, warnings, stack)
    attempt = packed = None
    # Each step that may refuse stands before a barrier: so all ranks begin, or none, with the
    # reason of the one that refused.
    with meeting.refusing("ranks"):
        rank = _Rank.of(engine, job, options)
        if job.rank == 0:
            attempt, packed = _begun(options, link)
    # Rank 0 has read the plan alone and sends it, so that no other rank needs the file.
    meeting.finish("ranks", meeting.meet(rank.info, attempt, packed))
    part = meeting.part
    node = meeting.node
    with meeting.refusing("plans"):
        decider = rank.decider_in(meeting)
        program = rank.program_in(meeting, decider)
    # Without a plan nothing was read that may not fit.
    if part.has_plan:
        meeting.finish("plans", meeting.wait_at("plans", rendezvous.RENDEZVOUS_S))
    with meeting.refusing("gpus"):
        rank.check_modes(part.modes, has_plan=part.has_plan)
        plan = None if program is None else program.expected.plan
        control = rank.control_by(None if plan is None else plan.control)
        ranks = len(part.ranks) or job.ranks
        controller = attachment.NodeController(job.rank, node, ranks, options.max_changes_per_s)
        attached = rank.attach(controller, control, stack)
        # The name of the GPU is known from the controller alone, which had to be attached first.
        if plan is not None and attached.gpu is not None:
            check_gpu(plan, attached.gpu, control)
        seat = Seat(rank.adapter, job, meeting.own, part, control, attached.gpu, options, warnings)
        decider.join(seat)
    # Longer than one attachment, as a node's first rank starts its controller before.
    meeting.finish("gpus", meeting.wait_at("gpus", 2 * attachment.ATTACH_S))
    # A GPU that cannot be set is no reason not to train.
    if attached.problem is not None:
        warnings.warn("attach", f"{attached.problem}; training goes on without setting clocks")
    return RankContext(
        seat=seat,
        decider=decider,
        program=program,
        attachment=attached,
        share=NodeShare(part.nodes, looks=node.leads or node.plans is None, plans=node.plans),
        positions=meeting.positions,
    )


def _begun(options: Options, link: Link | None) -> tuple[Attempt, bytes | None]:
    """Return what rank 0 brings to all: the attempt of the job, and the plan as it is sent."""
    if link is not None:
        link.check()
    if options.follow in (TIME, GRAPH) and options.plan is None:
        raise UsageError(
            f"follow={options.follow!r}: there is no plan to follow; give planner_runtime plan="
        )
    packed = None
    if options.plan is not None:
        given = Plans.load(options.plan)
        given.check_trusted(options.trust_traced)
        packed = pack(given.dumps())
    return Attempt.next_in(options.folder), packed


@dataclass(frozen=True)
class _Rank:
    """What a rank knows of itself before it meets the others."""

    options: Options
    decider: Decider  #: What decides its clocks, if rank 0 was given the same
    adapter: Engine  #: Of its engine
    has_engine: bool  #: Whether there is a pipeline
    gpu: str  #: What opens its GPU
    info: RankInfo  #: What it tells rank 0

    @classmethod
    def of(cls, engine: Any, job: TrainingJob, options: Options) -> _Rank:
        """Return this rank, whose engine, GPU and options can be used."""
        decider = decider_of(options, has_plan=options.plan is not None)
        decider.check(options, job)
        with as_tested():
            adapter = adapter_of(engine, options)
            adapter.check()
            gpu = options.gpu_of(adapter.device)
            check_gpu_text(gpu)
            position = adapter.pipeline_rank
            with suppress(PlannerError):  # what it runs will show
                adapter.order()
        if job.rank == 0:
            name_untested(adapter.packages)
        position_in_job = position.pipeline, position.peers[0], position.rank
        info = RankInfo(node_name(), *position_in_job, tuple(sorted(options.modes)))
        return cls(options, decider, adapter, engine is not None, gpu, info)

    def decider_in(self, meeting: Rendezvous) -> Decider:
        """Return what decides the clocks in the job; whether rank 0 has a plan counts."""
        part = meeting.part
        decider = self.decider
        if part.has_plan != (self.options.plan is not None):
            decider = decider_of(self.options, has_plan=part.has_plan)
        return FixedPlan() if decider.needs_rank_0 and part.attempt is None else decider

    def program_in(self, meeting: Rendezvous, decider: Decider) -> Program | None:
        """Return this rank's part of rank 0's plan; None if there is none."""
        if meeting.plan is None:
            return None
        plans = Plans.loads(unpack(meeting.plan))
        pipeline = meeting.own.pipeline
        program = program_of(self.adapter, plans, 1, pipeline, self.options.modes)
        return decider.followed(program)

    def check_modes(self, of_job: Sequence[str], *, has_plan: bool) -> None:
        """Refuse modes that others do not have, where no plan says what each rank enters."""
        names = self.info.modes
        if not has_plan and of_job != names:
            raise UsageError(
                f"modes: this rank has {', '.join(names) or 'none'}, and others have "
                f"{', '.join(of_job) or 'none'}; give all ranks the same"
            )

    def control_by(self, planned: str | None) -> Control:
        """Return what is set on its GPU, by the plan's word if there is one."""
        if planned is not None:
            return cast("Control", planned)
        return "clock" if self.has_engine else attachment.control_of(self.gpu)

    def attach(
        self, controller: attachment.NodeController, control: Control, stack: ExitStack
    ) -> Attachment:
        """Attach its GPU to the node's controller."""
        try:
            return attachment.attach(controller, self.gpu, control, stack)
        except GpuInUse as error:
            if not attachment.is_attached():
                raise
            raise UsageError(
                "this process plans another engine already, on the same GPU; leave the block of "
                "planner_runtime for that engine before you enter another"
            ) from error


def peers_in(plan: GivenPlan, job: TrainingJob) -> tuple[int, ...] | None:
    """Return the ranks of this rank's pipeline in the whole job, if stages are as far apart as can
    be, which is how engines number them; None if the plan is for single ranks, or cannot be read
    here.
    """
    try:
        ranks = len(Plans.load(plan).of_pipeline(0).schedule.ranks)
    except PlannerError:  # rank 0 says so, or this rank runs what rank 0 has read
        return None
    if ranks == 1 or job.ranks % ranks:
        return None
    # Stage s of a pipeline stands `apart` ranks behind stage s - 1.
    apart = job.ranks // ranks
    return tuple(range(job.rank % apart, job.ranks, apart))


def shows_edges_only(engine: Any, plan: GivenPlan | None) -> bool:
    """Return whether a plan of an engine can only be followed by time."""
    if engine is None or plan is None:
        return False
    # What is wrong with an engine is said when all ranks can hear it.
    with suppress(PlannerError, AttributeError, ImportError):
        return bool(getattr(engine_of(engine), "shows_edges_only", False))
    return False


def adapter_of(engine: Any, options: Options) -> Engine:
    """Return the adapter of a training engine, as it is followed.

    Args:
        engine: The training engine; None for training without one.
        options: What the user asks for; `session` has filled in its `follow`.

    Raises:
        UsageError: If the engine is not supported.
    """
    if engine is None:
        return WholeTraining(options.peers)
    adapter = engine_of(engine)
    if options.follow == GRAPH and not getattr(adapter, "shows_edges_only", False):
        raise UsageError(
            "follow='graph' is for Megatron-core with cuda_graph_impl='full_iteration', in whose "
            "graph marks can be captured; leave out follow="
        )
    return adapter if options.follow == HOOKS else EdgesOnly(adapter)


def decider_of(options: Options, *, has_plan: bool) -> Decider:
    """Return what decides the clocks of this rank.

    Args:
        options: What the user asks for; without a `follow`, a plan is followed by hooks.
        has_plan: Whether the job has a plan.

    Raises:
        UsageError: If the extension that has the decider is not installed.
    """
    if isinstance(options.decider, Decider):
        return options.decider
    # By name if one is given; else by what there is to follow: each batch, a plan, or what the
    # autopilot learns.
    if options.decider is not None:
        name = str(options.decider)
    elif options.work is not None:
        name = "batches"
    elif has_plan:
        return _PLANS[options.follow or HOOKS]()
    else:
        name = "autopilot"
    entry = extensions.places("deciders").get(name)
    if entry is not None:
        decider = extensions.load(entry)()
        assert isinstance(decider, Decider)
        return decider
    # A decider that exists elsewhere is named with what to install; one that exists nowhere may be
    # a slip.
    if name in extensions.DECIDERS:
        missing = extensions.missing_text(*extensions.DECIDERS[name])
        raise UsageError(f"{missing}, or give planner_runtime a plan")
    names = extensions.places("deciders")
    advice = did_you_mean(name, names) or f"give one of {', '.join(names)}"
    advice = extensions.remedy(advice)
    raise UsageError(f"decider: there is no decider {name!r}; {advice}")
