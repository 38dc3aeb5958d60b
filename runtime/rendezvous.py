"""How the ranks of a job begin together: they exchange who they are, check rank 0's plan, and
attach to a controller.

This happens before training, so it may wait. What a user can correct is refused, on all ranks at
once: a plan that does not fit the engine, or a GPU that another job holds. What training can go on
without becomes a warning and no clocks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from perseus_planner.base.errors import PlanError, RankError
from perseus_planner.base.wires import Board, Message
from perseus_planner.engines import engine_of
from perseus_planner.engines.whole import WholeTraining
from perseus_planner.gpu.torch_device import gpu_text
from perseus_planner.runs.recording import Attempt
from perseus_planner.runtime import attachment
from perseus_planner.runtime.hook import Program
from perseus_planner.runtime.job import TrainingJob, node, wait_for_others
from perseus_planner.runtime.switching.agreement import NodePlans, NodeShare
from perseus_planner.runtime.switching.plans import GivenPlan, Plans

if TYPE_CHECKING:
    import torch

    from perseus_planner.engines.engine import Engine
    from perseus_planner.plans.plan import Plan
    from perseus_planner.runs.straggler import StragglerDetection
    from perseus_planner.runtime.agent.settings import ServiceSettings
    from perseus_planner.runtime.autopilot.job import AutopilotSettings
    from perseus_planner.runtime.controller.protocol import AttachReply, Control
    from perseus_planner.runtime.job import JobWarnings

RENDEZVOUS_S = 300.0
"""How long the ranks wait for each other before training; one of them may still be solving and
planning.
"""
REFUSAL_S = 10.0
"""How long rank 0 waits, at most, until all others have read why the job does not begin."""


STATE_FILE = "autopilot.yaml"
"""Of the autopilot, in the run folder or else in the folder in which rank 0 was started."""


@dataclass(frozen=True)
class RuntimeOptions:
    """The options of `planner_runtime`, which describes them."""

    plan: GivenPlan | None
    gpu: str
    dry_run: bool
    record: Path | None
    max_changes_per_s: float
    on_straggling: Callable[[StragglerDetection], None] | None
    service: str | None
    job: str | None
    frontier: str | os.PathLike[str] | None
    max_changes: int | None
    autopilot: AutopilotSettings  #: slowdown, max_slowdown and learn, with a limit of changes
    state: str | os.PathLike[str] | None

    @property
    def state_file(self) -> Path | None:
        """The file of what is learnt; None to keep nothing."""
        return None if self.state is None else Path.cwd() / (self.record or "") / self.state

    def gpu_of(self, device: torch.device) -> str:
        """Return the text that opens the GPU of a torch device.

        Raises:
            UsageError: As in `gpu_text`.
        """
        text = gpu_text(self.gpu, device)
        return f"dry-run:{text}" if self.dry_run and not text.startswith("dry-run:") else text


@dataclass(frozen=True)
class RankContext:
    """What a rank knows when it begins to train."""

    engine: Engine  #: The adapter of its engine
    pipeline: int  #: Number of its data-parallel pipeline, from 0
    pipelines: int  #: Number of pipelines
    program: Program | None  #: What it runs by; None if there is no plan
    control: Control  #: What is set on its GPU, whichever plan comes later
    attachment: attachment.Attachment  #: Its part in the clock controller of its node
    #: The attempt of the job, for the run folder; None if rank 0 is missing.
    attempt: Attempt | None
    share: NodeShare  #: Its part in the looks of its node for new plans
    #: For each rank of the job, its pipeline and its rank there; None for absent ranks.
    places: Sequence[tuple[int, int] | None]
    has_autopilot: bool  #: Whether the autopilot makes the programs
    neighbours: int  #: Number of ranks on its node, itself included


class _RankInfo(Message, frozen=True):
    """What a rank tells the others first."""

    node: str
    pipeline: int | None
    peers: tuple[int, ...]
    plans: str | None  #: of rank 0; None if the autopilot makes the programs
    attempt: Attempt | None  #: of rank 0


class _Refusal(Message, frozen=True):
    """The rank does not begin."""

    text: str


_Response: TypeAlias = _RankInfo | _Refusal | str


class _Step:
    """A step that a rank takes by itself before all ranks exchange how they fared.

    Attributes:
        value: What this rank sends to the others.
        responses: What each rank has sent; None for a rank that was too late.
    """

    def __init__(self) -> None:
        self.value: _RankInfo | str = ""
        self.responses: Sequence[Any] = ()


def join_job(
    engine: Any,
    job: TrainingJob,
    options: RuntimeOptions,
    served: ServiceSettings | None,
    warnings: JobWarnings,
    stack: ExitStack,
) -> RankContext:
    """Begin together with all other ranks: three steps that all take in this order, and so in one
    function.

    Args:
        engine: The training engine, as for `engine_of`; None for training without a pipeline.
        job: The job.
        options: Options of this rank.
        served: The job as a service should know it; None without a service. That of rank 0 counts.
        warnings: Gives warnings.
        stack: Closes what is opened here.

    Raises:
        PlanError: If the plan cannot be read or does not fit the engine.
        GpuInUse: If another job holds this rank's GPU.
        UsageError: If the engine, the GPU, or the settings of the service cannot be used.
        FrontierError: If the frontier for the service cannot be read.
        RankError: If another rank has refused.
    """
    everyone = range(job.ranks)
    with _step(job, "infos", everyone, RENDEZVOUS_S) as step:
        adapter = WholeTraining() if engine is None else engine_of(engine)
        adapter.check()
        gpu = options.gpu_of(adapter.device)
        info = step.value = _rank_info(adapter, job, options, served)
    infos: list[_RankInfo | None] = list(step.responses)
    present = [rank for rank in everyone if infos[rank] is not None]
    infos[job.rank] = info  # a rank that is too late for the others still goes on
    _warn_of_absent(job, present, warnings)
    first, program = infos[0], None
    with _step(job, "plans", present, RENDEZVOUS_S):
        pipeline, pipelines = _pipelines(info, infos)
        if first is not None and first.plans is not None:
            program = program_of(adapter, Plans.loads(first.plans.encode()), 1, pipeline)
        places = _places(infos)
    if first is None:
        text = "there is no plan: rank 0 is missing; training goes on without setting clocks"
        warnings.warn("no plan", text)
    neighbours = [
        rank for rank, other in enumerate(infos) if other is not None and other.node == info.node
    ]
    with _step(job, "gpus", present, 2 * attachment.ATTACH_S) as step:
        controller = attachment.NodeController(job, neighbours, options.max_changes_per_s)
        plan = None if program is None else program.plan
        control: Control = "clock"
        if plan is not None:
            control = cast("Control", plan.control)
        elif engine is None:
            control = attachment.control_of(gpu)
        attached = attachment.attach(controller, gpu, control, stack)
        if plan is not None and attached.gpu is not None:
            check_gpu(plan, attached.gpu, control)
        written = NodePlans.create() if job.rank == neighbours[0] else None
        if written is not None:
            stack.callback(written.close)
            step.value = written.address
    # A rank that was too late for the others has no responses, and looks for itself.
    addresses = dict(zip(present, step.responses, strict=False))
    share = _node_share(infos, written, addresses.get(neighbours[0]), stack)
    if attached.problem is not None:
        warnings.warn("attach", f"{attached.problem}; training goes on without setting clocks")
    return RankContext(
        engine=adapter,
        pipeline=pipeline,
        pipelines=pipelines,
        program=program,
        control=control,
        attachment=attached,
        attempt=None if first is None else first.attempt,
        share=share,
        places=places,
        has_autopilot=first is not None and first.plans is None,
        neighbours=len(neighbours),
    )


def _node_share(
    infos: Sequence[_RankInfo | None],
    written: NodePlans | None,
    address: str | None,
    stack: ExitStack,
) -> NodeShare:
    """Return this rank's part in the looks of its node, given what it writes or the address of
    what it reads.
    """
    nodes = len({info.node for info in infos if info is not None})
    if written is None and address:
        with suppress(OSError):  # the first rank of the node has ended
            plans = NodePlans.open(address)
            stack.callback(plans.close)
            return NodeShare(nodes, looks=False, plans=plans)
    return NodeShare(nodes, looks=True, plans=written)


def program_of(engine: Engine, plans: Plans, version: int, pipeline: int) -> Program:
    """Return this rank's part of the plans.

    Raises:
        PlanError: If there is no plan for this pipeline, or the plan is not what the engine runs.
    """
    position = engine.pipeline_rank
    plan = plans.of_pipeline(pipeline)
    if len(plan.schedule.ranks) != position.ranks:
        raise PlanError(
            f"the plan is for pipelines of {len(plan.schedule.ranks)} ranks, and {engine.name} "
            f"runs pipelines of {position.ranks}; solve for the schedule that you train with"
        )
    program = Program.of_plan(version, plan, position.rank)
    order = engine.order()
    if order is not None:
        program.check_order(order, engine.name)
    return program


def check_gpu(plan: Plan, gpu: AttachReply, control: Control) -> None:
    """Refuse a plan that was made for another kind of GPU or for another control.

    Raises:
        PlanError: If the plan does not fit; names the difference.
    """
    planned = plan.gpu
    if plan.control != control:
        raise PlanError(
            f"the plan's control is {plan.control!r}, and this training began with "
            f"{control!r}; start the training again to change it"
        )
    if planned is not None and gpu.name != planned:
        raise PlanError(
            f"the plan is for the GPU {planned!r}, and this rank has {gpu.name!r} ({gpu.gpu}); "
            "profile that kind of GPU and plan on it"
        )


@contextmanager
def _step(job: TrainingJob, name: str, ranks: Sequence[int], timeout_s: float) -> Iterator[_Step]:
    """Take one step on each of `ranks`; if it fails on one of them, it ends on all.

    Raises:
        RankError: If it has failed on another rank; names the rank.
    """
    step = _Step()
    try:
        yield step
    except Exception as error:
        with suppress(RankError):  # if the store is gone, the others cannot be told
            _gather(job, name, ranks, _Refusal(str(error) or repr(error)), 0.0)
        wait_for_others(job, name, len(ranks), REFUSAL_S)
        raise
    step.responses = _gather(job, name, ranks, step.value, timeout_s)
    for rank, response in zip(ranks, step.responses, strict=False):
        if isinstance(response, _Refusal):
            wait_for_others(job, name, len(ranks), REFUSAL_S)
            raise RankError(f"rank {rank} does not begin: {response.text}")


def _gather(
    job: TrainingJob, name: str, ranks: Sequence[int], value: _Response, timeout_s: float
) -> Sequence[Any]:
    import torch.distributed as dist

    if job.rank not in ranks:
        return ()
    board = Board(dist.PrefixStore(name, job.store))
    return board.gather(ranks.index(job.rank), len(ranks), value, _Response, timeout_s)


def _rank_info(
    engine: Engine, job: TrainingJob, options: RuntimeOptions, served: ServiceSettings | None
) -> _RankInfo:
    position = engine.pipeline_rank
    plans = attempt = None
    if job.rank == 0:
        if served is not None:
            served.check()
        plans = None if options.plan is None else Plans.load(options.plan).dumps().decode()
        attempt = Attempt.next_in(options.record)
    return _RankInfo(node(), position.pipeline, position.peers, plans, attempt)


def _warn_of_absent(job: TrainingJob, present: Sequence[int], warnings: JobWarnings) -> None:
    absent = [str(rank) for rank in range(job.ranks) if rank not in present]
    if absent:
        named = f"rank{'s' * (len(absent) > 1)} {', '.join(absent)}"
        warnings.warn(
            "late",
            f"{named} had not joined within {RENDEZVOUS_S:g} s; training begins without waiting "
            "longer",
        )


def _pipelines(info: _RankInfo, infos: Sequence[_RankInfo | None]) -> tuple[int, int]:
    """Return this rank's pipeline, as its engine numbers it or else by its first rank, and the
    number of pipelines.
    """
    numbers = {
        other.peers if other.pipeline is None else (other.pipeline,)
        for other in infos
        if other is not None
    }
    number = sorted(numbers).index(info.peers) if info.pipeline is None else info.pipeline
    return number, len(numbers)


def _places(infos: Sequence[_RankInfo | None]) -> list[tuple[int, int] | None]:
    """Return the pipeline of each rank, and its rank there; None for absent ranks."""
    return [
        None if info is None else (_pipelines(info, infos)[0], info.peers.index(rank))
        for rank, info in enumerate(infos)
    ]
