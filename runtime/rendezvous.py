"""How the ranks of a job begin together: they exchange who they are, check rank 0's plan, and
attach to a controller.

This happens before training, so it may wait. What a user can correct is refused, on all ranks at
once: a plan that does not fit the engine, or a GPU that another job holds. What training can go on
without becomes a warning and no clocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from perseus_planner.base.errors import PlanError, RankError
from perseus_planner.gpu.torch_device import gpu_text
from perseus_planner.runs.recording import Attempt
from perseus_planner.runtime import attachment
from perseus_planner.runtime.engines import engine_of
from perseus_planner.runtime.hook import Program
from perseus_planner.runtime.job import TrainingJob, exchange, node, wait_for_others
from perseus_planner.runtime.switching.node_plans import NodePlans, NodeShare
from perseus_planner.runtime.switching.plans import GivenPlan, Plans

if TYPE_CHECKING:
    from perseus_planner.runtime.agent.settings import ServiceSettings
    from perseus_planner.runtime.controller.protocol import AttachReply, Control
    from perseus_planner.runtime.engines.engine import Engine
    from perseus_planner.runtime.job import JobWarnings

RENDEZVOUS_S = 300.0
"""How long the ranks wait for each other before training; one of them may still be solving and
planning.
"""
REFUSAL_S = 10.0
"""How long rank 0 waits, at most, until all others have read why the job does not begin."""


@dataclass(frozen=True)
class RuntimeSettings:
    """What the caller of `planner_runtime` chose."""

    #: The plan or its file, or None for the autopilot; that of rank 0 counts.
    plan: GivenPlan | None
    gpu: str  #: The GPU, as for `gpu_text`
    dry_run: bool  #: See `planner_runtime`
    max_changes_per_s: float  #: See `planner_runtime`
    record: Path | None = None  #: The run folder; None to record nothing
    #: The job as a service should know it; None without a service. That of rank 0 counts.
    served: ServiceSettings | None = None


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


@dataclass(frozen=True)
class _RankInfo:
    """What a rank tells the others first."""

    node: str
    pipeline: int | None
    peers: tuple[int, ...]
    plans: str | None = None  #: of rank 0; None if the autopilot makes the programs
    attempt: Attempt | None = None  #: of rank 0

    @classmethod
    def loads(cls, data: bytes) -> _RankInfo:
        values = json.loads(data)
        attempt = None if values["attempt"] is None else Attempt(*values["attempt"])
        return cls(**{**values, "peers": tuple(values["peers"]), "attempt": attempt})


class _Step:
    """A step that a rank takes by itself before all ranks exchange how they fared.

    Attributes:
        value: What this rank sends to the others.
    """

    value = b""
    #: What each rank has sent; None for a rank that was too late.
    responses: Sequence[bytes | None] = ()


def join_job(
    engine: Any,
    job: TrainingJob,
    settings: RuntimeSettings,
    warnings: JobWarnings,
    stack: ExitStack,
) -> RankContext:
    """Begin together with all other ranks.

    Args:
        engine: The training engine, as for `engine_of`.
        job: The job.
        settings: Settings of this rank.
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
        adapter = engine_of(engine)
        text = gpu_text(settings.gpu, adapter.device)
        info = _rank_info(adapter, job, settings)
        step.value = json.dumps(asdict(info)).encode()
    infos = [None if response is None else _RankInfo.loads(response) for response in step.responses]
    present = [rank for rank in everyone if infos[rank] is not None]
    infos[job.rank] = info  # a rank that is too late for the others still goes on
    _warn_of_absent(job, present, warnings)
    with _step(job, "plans", present, RENDEZVOUS_S):
        pipeline, pipelines = _pipelines(info, infos)
        plans = infos[0].plans if infos[0] is not None else None
        program = (
            None if plans is None else program_of(adapter, Plans.loads(plans.encode()), 1, pipeline)
        )
        places = _places(infos)
    if infos[0] is None:
        warnings.warn(
            "no plan",
            "there is no plan: rank 0 is missing; training goes on without setting clocks",
        )
    with _step(job, "gpus", present, 2 * attachment.ATTACH_S) as step:
        if settings.dry_run and not text.startswith("dry-run:"):
            text = f"dry-run:{text}"
        neighbours = [
            rank for rank, each in enumerate(infos) if each is not None and each.node == info.node
        ]
        controller = attachment.NodeController(job, neighbours, settings.max_changes_per_s)
        control = "clock" if program is None else cast("Control", program.control)
        attached = attachment.attach(controller, text, control, stack)
        if program is not None and attached.gpu is not None:
            check_gpu(program, attached.gpu, control)
        written = NodePlans.create() if job.rank == neighbours[0] else None
        if written is not None:
            stack.callback(written.close)
            step.value = written.address.encode()
    # A rank that was too late for the others has no responses, and looks for itself.
    addresses = dict(zip(present, step.responses, strict=False))
    share = _node_share(infos, written, addresses.get(neighbours[0]), stack)
    if attached.problem is not None:
        warnings.warn("attach", f"{attached.problem}; training goes on without setting clocks")
    attempt = None if infos[0] is None else infos[0].attempt
    has_autopilot = infos[0] is not None and plans is None
    autopilot = has_autopilot, len(neighbours)
    return RankContext(
        adapter, pipeline, pipelines, program, control, attached, attempt, share, places, *autopilot
    )


def _node_share(
    infos: Sequence[_RankInfo | None],
    written: NodePlans | None,
    address: bytes | None,
    stack: ExitStack,
) -> NodeShare:
    """Return this rank's part in the looks of its node, given what it writes or the address of
    what it reads.
    """
    nodes = len({each.node for each in infos if each is not None})
    if written is None and address:
        with suppress(OSError):  # the first rank of the node has ended
            plans = NodePlans.open(address.decode())
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
    program = Program(version, plan, position.rank)
    order = engine.order()
    if order is not None:
        program.check_order(order, engine.name)
    return program


def check_gpu(program: Program, gpu: AttachReply, control: Control) -> None:
    """Refuse a plan that was made for another kind of GPU or for another control.

    Raises:
        PlanError: If the plan does not fit; names the difference.
    """
    planned = program.plan.gpu
    if program.plan.control != control:
        raise PlanError(
            f"the plan's control is {program.plan.control!r}, and this training began with "
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
            _exchange(
                job, name, ranks, json.dumps({"refused": str(error) or repr(error)}).encode(), 0.0
            )
        wait_for_others(job, name, len(ranks), REFUSAL_S)
        raise
    step.responses = _exchange(job, name, ranks, step.value, timeout_s)
    for rank, response in zip(ranks, step.responses, strict=False):
        if response is not None and response.startswith(b'{"refused"'):
            wait_for_others(job, name, len(ranks), REFUSAL_S)
            raise RankError(f"rank {rank} does not begin: {json.loads(response)['refused']}")


def _exchange(
    job: TrainingJob, name: str, ranks: Sequence[int], value: bytes, timeout_s: float
) -> list[bytes | None]:
    import torch.distributed as dist

    if job.rank not in ranks:
        return []
    return exchange(
        dist.PrefixStore(name, job.store), ranks.index(job.rank), len(ranks), value, timeout_s
    )


def _rank_info(engine: Engine, job: TrainingJob, settings: RuntimeSettings) -> _RankInfo:
    position = engine.pipeline_rank
    plans = attempt = None
    if job.rank == 0:
        if settings.served is not None:
            settings.served.check()
        plans = None if settings.plan is None else Plans.load(settings.plan).dumps().decode()
        attempt = Attempt.next_in(settings.record)
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
    everyone = sorted(
        {
            each.peers if each.pipeline is None else (each.pipeline,)
            for each in infos
            if each is not None
        }
    )
    return everyone.index(info.peers) if info.pipeline is None else info.pipeline, len(everyone)


def _places(infos: Sequence[_RankInfo | None]) -> list[tuple[int, int] | None]:
    """Return the pipeline of each rank, and its rank there; None for absent ranks."""
    return [
        None if each is None else (_pipelines(each, infos)[0], each.peers.index(rank))
        for rank, each in enumerate(infos)
    ]
