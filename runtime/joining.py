"""How the ranks of a job begin together: everyone's place, rank 0's plan, a clock controller on each node.

This is before training, so it may wait; and it may refuse, on all ranks at once, what a user can correct: a plan that
is not for this engine, a GPU that another job holds. What training can go on without ends in a notice and no clocks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn, cast

from perseus_planner.errors import GpuError, GpuHeld, PlanError, PlannerError, RankError
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.torch_device import gpu_text
from perseus_planner.runtime.controller.client import Connection, started
from perseus_planner.runtime.controller.messages import Attached, Hello, Knob
from perseus_planner.runtime.engines.engine import Engine
from perseus_planner.runtime.entry import entered
from perseus_planner.runtime.job import Job, launcher, node
from perseus_planner.runtime.notices import Notices
from perseus_planner.runtime.plans import GivenPlan, Plans
from perseus_planner.runtime.program import Program

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
        dry_run: set nothing.
        max_changes_per_s: clock changes of a node, at most.
    """

    plan: GivenPlan
    gpu: str
    dry_run: bool
    max_changes_per_s: float


@dataclass(frozen=True)
class Joined:
    """What a rank knows when it begins.

    Attributes:
        pipeline: which data-parallel pipeline it is in, from 0.
        pipelines: how many there are.
        program: what it runs by; None where there is no plan.
        connection: to its node's controller; None where there is none.
        gpu: what the controller said of its GPU.
        problem: why there is no plan, or no controller; None: there are both.
    """

    pipeline: int
    pipelines: int
    program: Program | None
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


def join(engine: Engine, job: Job, settings: Settings, notices: Notices, stack: ExitStack) -> Joined:
    """Begin with all other ranks; what was opened is closed with `stack`.

    Raises:
        PlanError: the plan cannot be used, or is not for this engine.
        GpuHeld: another job sets this rank's GPU.
        UsageError: the GPU is not what computes here.
        RankError: another rank has refused.
    """
    try:
        text = gpu_text(settings.gpu, engine.device)
        card = _card(engine, job, settings.plan)
    except PlannerError as error:
        _refuse(job, error)
    cards = _cards(job, card, notices)
    try:
        joined = _joined(engine, job, settings, cards, text, stack)
    except PlannerError as error:
        _refuse(job, error)
    _everyone_has_joined(job)
    if joined.problem is not None:
        notices.say(f"joining {joined.problem}", f"{joined.problem}; training goes on without clocks being set")
    return joined


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


def check_gpu(program: Program, gpu: Attached) -> None:
    """Refuse a plan that was made for another kind of GPU.

    Raises:
        PlanError: names the difference.
    """
    planned = program.plan.gpu
    if planned is not None and gpu.name != planned:
        raise PlanError(
            f"the plan is for the GPU {planned!r}, and this rank has {gpu.name!r} ({gpu.gpu}); profile that kind "
            "of GPU and plan on it"
        )


def _card(engine: Engine, job: Job, plan: GivenPlan) -> _Card:
    seat = engine.seat
    card = _Card(node(), seat.pipeline, seat.peers)
    if job.rank != 0:
        return card
    if isinstance(plan, (str, Path)) and not Path(plan).exists():
        return _Card(card.node, card.pipeline, card.peers, gone=f"{plan}: no such file")
    return _Card(card.node, card.pipeline, card.peers, plans=Plans.given(plan).dumps().decode())


def _cards(job: Job, card: _Card, notices: Notices) -> list[_Card | None]:
    words = _gathered(job, "cards", json.dumps(asdict(card)).encode(), ENTRY_S)
    _raise_refusal(job, words)
    absent = [str(rank) for rank, each in enumerate(words) if each is None]
    if absent:
        notices.say("late", f"rank {', '.join(absent)} had not come within {ENTRY_S:g} s; begun without waiting longer")
    cards = [None if each is None else _Card.loads(each) for each in words]
    cards[job.rank] = card  # a rank that comes too late for the others to know of it still goes on
    return cards


def _joined(
    engine: Engine, job: Job, settings: Settings, cards: Sequence[_Card | None], text: str, stack: ExitStack
) -> Joined:
    pipeline, pipelines = _pipelines(job, cards)
    program, problems = None, []
    first = cards[0]
    if first is None or first.plans is None:
        problems.append(f"there is no plan: {(first.gone if first else None) or 'rank 0 has not come'}")
    else:
        program = program_of(engine, Plans.loads(first.plans.encode()), 1, pipeline)
    connection, gpu = None, None
    try:
        hello = Hello(
            rank=job.rank,
            gpu=_anywhere(f"dry-run:{text}" if settings.dry_run and not text.startswith("dry-run:") else text),
            knob="clock" if program is None else cast(Knob, program.plan.knob),
            launcher=launcher(),
            min_dwell_s=0.0 if program is None else program.plan.min_dwell_s,
        )
        connection = stack.enter_context(_connected(job, settings, cards, hello))
        gpu = connection.attach(_CONTROLLER_S)
    except GpuHeld:
        raise
    except GpuError as error:
        connection = None
        problems.append(f"no clock can be set: {error}")
    if program is not None and gpu is not None:
        check_gpu(program, gpu)
    return Joined(pipeline, pipelines, program, connection, gpu, "; ".join(problems) or None)


def _pipelines(job: Job, cards: Sequence[_Card | None]) -> tuple[int, int]:
    """Which pipeline this rank is in, as its engine says or else by its first rank; how many there are."""
    mine = cards[job.rank]
    assert mine is not None  # a rank knows its own
    everyone = sorted({card.peers if card.pipeline is None else (card.pipeline,) for card in cards if card is not None})
    return everyone.index(mine.peers) if mine.pipeline is None else mine.pipeline, len(everyone)


def _anywhere(text: str) -> str:
    """What opens this GPU in the controller too, whose CUDA devices may be numbered in another way."""
    if not text.removeprefix("dry-run:").startswith("cuda:"):
        return text
    with open_gpu(text) as gpu:
        return gpu.text


def _connected(job: Job, settings: Settings, cards: Sequence[_Card | None], hello: Hello) -> Connection:
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
    else:
        said = json.loads(_awaited(job, key))
        if "problem" in said:
            raise GpuError(said["problem"])
        address = said["address"]
    return Connection(address, hello)


def _awaited(job: Job, key: str) -> bytes:
    until_s = time.monotonic() + _CONTROLLER_S
    while not job.store.check([key]):
        if time.monotonic() > until_s:
            raise GpuError(f"the clock controller of this node was not started within {_CONTROLLER_S:g} s")
        time.sleep(_LOOK_S)
    return bytes(job.store.get(key))


def _gathered(job: Job, name: str, mine: bytes, timeout_s: float) -> list[bytes | None]:
    import torch.distributed as dist

    return entered(dist.PrefixStore(name, job.store), job.rank, job.ranks, mine, timeout_s)


def _refuse(job: Job, error: PlannerError) -> NoReturn:
    """Tell the others, who wait, and raise."""
    words = json.dumps({"refused": str(error)}).encode()
    for name in ("cards", "joined"):
        _gathered(job, name, words, 0.0)
    raise error


def _everyone_has_joined(job: Job) -> None:
    words = _gathered(job, "joined", b"{}", ENTRY_S + _CONTROLLER_S)
    _raise_refusal(job, words)


def _raise_refusal(job: Job, words: Sequence[bytes | None]) -> None:
    for rank, each in enumerate(words):
        if each is not None and b'"refused"' in each[:12]:
            raise RankError(f"rank {rank} does not begin: {json.loads(each)['refused']}")
