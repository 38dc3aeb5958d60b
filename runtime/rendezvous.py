"""How the ranks of a job begin together: everyone's place, rank 0's plan, a clock controller on each node.

This is before training, so it may wait; and it may refuse, on all ranks at once, what a user can correct: a plan that
is not for this engine, a GPU that another job holds. What training can go on without ends in a notice and no clocks.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

from perseus_planner.errors import GpuError, GpuInUse, PlanError, RankError
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.torch_device import gpu_text
from perseus_planner.runtime.controller.client import Connection, started
from perseus_planner.runtime.controller.protocol import Attached, Hello, Knob
from perseus_planner.runtime.engines.selection import engine_of
from perseus_planner.runtime.entry import entered
from perseus_planner.runtime.job import Job, launcher, node
from perseus_planner.runtime.program import Program
from perseus_planner.runtime.switching.plans import GivenPlan, Plans, missing_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from perseus_planner.runtime.agent.settings import ServedJob
    from perseus_planner.runtime.engines.engine import Engine
    from perseus_planner.runtime.notices import Notices

ENTRY_S = 300.0
"""How long the ranks wait for each other before training: one of them may still solve and plan."""

_CONTROLLER_S = 60.0  #: for a controller to start, hold its GPUs and answer
_LOOK_S = 0.01


@dataclass(frozen=True)
class Settings:
    """What the caller of `planner_runtime` chose.

    Attributes:
        plan: the plan, or its file; rank 0's counts.
        gpu: as for `gpu_text`.
        dry_run, max_changes_per_s: as for `planner_runtime`.
        served: the job, as a service is to know it; None: none is. Rank 0's counts.
    """

    plan: GivenPlan
    gpu: str
    dry_run: bool
    max_changes_per_s: float
    served: ServedJob | None = None


@dataclass(frozen=True)
class Joined:
    """What a rank knows when it begins.

    Attributes:
        engine: what follows the engine.
        pipeline: which data-parallel pipeline it is in, from 0.
        pipelines: how many there are.
        program: what it runs by; None where there is no plan.
        control: what is set of its GPU, whatever plan comes.
        connection: to its node's controller; None where there is none.
        gpu: what the controller said of its GPU.
        problem: why no clock can be set; None: they are, if there is a plan.
    """

    engine: Engine
    pipeline: int
    pipelines: int
    program: Program | None
    control: Knob
    connection: Connection | None
    gpu: Attached | None
    problem: str | None


@dataclass(frozen=True)
class _Card:
    """What a rank tells the others first."""

    node: str
    pipeline: int | None
    peers: tuple[int, ...]
    plans: str | None = None  #: of rank 0
    gone: str | None = None  #: why rank 0 has no plan

    @classmethod
    def loads(cls, data: bytes) -> _Card:
        values = json.loads(data)
        return cls(**{**values, "peers": tuple(values["peers"])})


class _Step:
    """What a rank does by itself on its way in, before it hears how all others fared.

    Attributes:
        says: to the others.
        heard: what each rank said; None where it had not come in time.
    """

    says = b"{}"
    heard: Sequence[bytes | None] = ()


def join(engine: Any, job: Job, settings: Settings, notices: Notices, stack: ExitStack) -> Joined:
    """Begin with all other ranks; what was opened is closed with `stack`.

    Args:
        engine: as for `engine_of`.
        job: all ranks.
        settings: of this rank.
        notices: that it gives.
        stack: closes what is opened.

    Raises:
        PlanError: the plan cannot be used, or is not for this engine.
        GpuInUse: another job sets this rank's GPU.
        UsageError, FrontierError: the engine, the GPU, or what is said of a service, is not one that can be used.
        RankError: another rank has refused.
    """
    everyone = range(job.ranks)
    with _step(job, "cards", everyone, ENTRY_S) as step:
        adapter = engine_of(engine)
        text = gpu_text(settings.gpu, adapter.device)
        card = _card(adapter, job, settings)
        step.says = json.dumps(asdict(card)).encode()
    cards = [None if each is None else _Card.loads(each) for each in step.heard]
    here = [rank for rank in everyone if cards[rank] is not None]
    cards[job.rank] = card  # a rank that comes too late for the others to know of it still goes on
    _tell_of_absent(job, here, notices)
    with _step(job, "plans", here, ENTRY_S):
        pipeline, pipelines = _pipelines(job, cards)
        plans = cards[0].plans if cards[0] is not None else None
        program = None if plans is None else program_of(adapter, Plans.loads(plans.encode()), 1, pipeline)
    if program is None:
        why = "rank 0 has not come" if cards[0] is None else cards[0].gone
        notices.say("no plan", f"there is no plan: {why}; training goes on without clocks being set")
    with _step(job, "gpus", here, 2 * _CONTROLLER_S):
        connection, gpu, problem = _attached(job, settings, cards, text, program, stack)
        if program is not None and gpu is not None:
            check_gpu(program, gpu, _control(program))
    if problem is not None:
        notices.say("joining", f"{problem}; training goes on without")
    return Joined(adapter, pipeline, pipelines, program, _control(program), connection, gpu, problem)


def program_of(engine: Engine, plans: Plans, version: int, pipeline: int) -> Program:
    """This rank's part of `plans`.

    Raises:
        PlanError: there is none, or it is not what the engine runs.
    """
    seat = engine.seat
    plan = plans.of_pipeline(pipeline)
    if len(plan.schedule.ranks) != seat.ranks:
        raise PlanError(
            f"the plan is for pipelines of {len(plan.schedule.ranks)} ranks, and {engine.name} runs pipelines of "
            f"{seat.ranks}; solve for the schedule that is trained with"
        )
    program = Program(version, plan, seat.rank)
    order = engine.order()
    if order is not None:
        program.check_order(order, engine.name)
    return program


def check_gpu(program: Program, gpu: Attached, control: Knob) -> None:
    """Refuse a plan that was made for another kind of GPU, or sets another `control` than the one that is set.

    Raises:
        PlanError: names the difference.
    """
    planned = program.plan.gpu
    if program.plan.control != control:
        raise PlanError(
            f"the plan's control is {program.plan.control!r}, and this training began with {control!r}; begin it anew"
        )
    if planned is not None and gpu.name != planned:
        raise PlanError(
            f"the plan is for the GPU {planned!r}, and this rank has {gpu.name!r} ({gpu.gpu}); profile that kind "
            "of GPU and plan on it"
        )


@contextmanager
def _step(job: Job, name: str, ranks: Sequence[int], timeout_s: float) -> Iterator[_Step]:
    """One step of this rank among `ranks`, which take it too; what fails on one of them ends it on all.

    Raises:
        RankError: it has failed on another rank, which is named.
    """
    step = _Step()
    try:
        yield step
    except Exception as error:
        with suppress(RankError):  # the store is gone: nobody can be told
            _gathered(job, name, ranks, json.dumps({"refused": str(error) or repr(error)}).encode(), 0.0)
        raise
    step.heard = _gathered(job, name, ranks, step.says, timeout_s)
    for rank, word in zip(ranks, step.heard, strict=False):
        if word is not None and word.startswith(b'{"refused"'):
            raise RankError(f"rank {rank} does not begin: {json.loads(word)['refused']}")


def _gathered(job: Job, name: str, ranks: Sequence[int], mine: bytes, timeout_s: float) -> list[bytes | None]:
    import torch.distributed as dist

    if job.rank not in ranks:
        return []
    return entered(dist.PrefixStore(name, job.store), ranks.index(job.rank), len(ranks), mine, timeout_s)


def _card(engine: Engine, job: Job, settings: Settings) -> _Card:
    seat = engine.seat
    plans = gone = None
    if job.rank == 0:
        if settings.served is not None:
            settings.served.check()
        missing = missing_file(settings.plan)
        gone = None if missing is None else f"{missing}: no such file"
        plans = Plans.given(settings.plan).dumps().decode() if missing is None else None
    return _Card(node(), seat.pipeline, seat.peers, plans, gone)


def _tell_of_absent(job: Job, here: Sequence[int], notices: Notices) -> None:
    absent = [str(rank) for rank in range(job.ranks) if rank not in here]
    if absent:
        notices.say("late", f"rank {', '.join(absent)} had not come within {ENTRY_S:g} s; begun without waiting longer")


def _pipelines(job: Job, cards: Sequence[_Card | None]) -> tuple[int, int]:
    """Which pipeline this rank is in, as its engine says or else by its first rank; how many there are."""
    mine = cards[job.rank]
    assert mine is not None  # a rank knows its own
    everyone = sorted({card.peers if card.pipeline is None else (card.pipeline,) for card in cards if card is not None})
    return everyone.index(mine.peers) if mine.pipeline is None else mine.pipeline, len(everyone)


def _attached(
    job: Job, settings: Settings, cards: Sequence[_Card | None], text: str, program: Program | None, stack: ExitStack
) -> tuple[Connection | None, Attached | None, str | None]:
    """The connection to this node's controller and what that said of the GPU; or why there is none."""
    try:
        address = _address(job, settings, cards)  # before all else that may fail here, as others wait for it
        hello = Hello(
            rank=job.rank,
            gpu=_anywhere(f"dry-run:{text}" if settings.dry_run and not text.startswith("dry-run:") else text),
            control=_control(program),
            launcher=launcher(),
            min_dwell_s=0.0 if program is None else program.plan.min_dwell_s,
        )
        connection = stack.enter_context(Connection(address, hello))
        return connection, connection.attach(_CONTROLLER_S), None
    except GpuInUse:
        raise
    except GpuError as error:
        return None, None, f"no clock can be set: {error}"


def _control(program: Program | None) -> Knob:
    return "clock" if program is None else cast("Knob", program.plan.control)


def _anywhere(text: str) -> str:
    """What opens this GPU in the controller too, whose CUDA devices may be numbered in another way."""
    if not text.removeprefix("dry-run:").startswith("cuda:"):
        return text
    with open_gpu(text) as gpu:
        return gpu.text


def _address(job: Job, settings: Settings, cards: Sequence[_Card | None]) -> str:
    """Of this node's controller, which the first of its ranks starts."""
    mine = cards[job.rank]
    assert mine is not None  # a rank knows its own
    neighbours = [rank for rank, card in enumerate(cards) if card is not None and card.node == mine.node]
    key = f"controller/{neighbours[0]}"
    if job.rank == neighbours[0]:
        try:
            address = started(len(neighbours), settings.max_changes_per_s, _CONTROLLER_S)
        except GpuError as error:
            job.store.set(key, json.dumps({"problem": str(error)}))
            raise
        job.store.set(key, json.dumps({"address": address}))
        return address
    said: dict[str, str] = json.loads(_awaited(job, key))
    if "problem" in said:
        raise GpuError(said["problem"])
    return said["address"]


def _awaited(job: Job, key: str) -> bytes:
    until_s = time.monotonic() + _CONTROLLER_S
    while not job.store.check([key]):
        if time.monotonic() > until_s:
            raise GpuError(f"the clock controller of this node was not started within {_CONTROLLER_S:g} s")
        time.sleep(_LOOK_S)
    return bytes(job.store.get(key))
