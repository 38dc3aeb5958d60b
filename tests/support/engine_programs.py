"""Programs of ranks whose engines have a hook: each prints as JSON what the adapter returned and
called.
"""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from schedule_engines import TORCH
from torch import nn
from torch.distributed import pipelining
from torch.utils.checkpoint import checkpoint

from perseus_planner.base.errors import UsageError
from perseus_planner.plans.plan import Plan
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.runtime.engines import engine_of
from perseus_planner.runtime.engines.engine import Engine
from perseus_planner.runtime.hook import Hook, Program
from perseus_planner.runtime.marks import HostMarks, parse_clock_request
from perseus_planner.schedules import Computation, Schedule, generate
from perseus_planner.schedules.pipeline import pipeline_iteration

WIDTH = 8
ROWS = 2  # of a microbatch
ITERATIONS = 2

#: Whose `eval` fails in torch 2.13, with or without a hook.
V_SHAPED = (pipelining.ScheduleZBVZeroBubble, pipelining.ScheduleDualPipeV)


class Recorder:
    """A stand-in for a hook that records its calls by iteration."""

    def __init__(self) -> None:
        self.iterations: list[dict[str, Any]] = []
        self.inside = self.computing = False

    def begin_iteration(self, microbatches: int | None = None) -> None:
        assert not self.inside
        self.inside, self.computing = True, False
        self.iterations.append({"microbatches": microbatches, "computations": []})

    def begin(self, stage: int, kind: str, microbatch: int) -> None:
        assert self.inside
        assert not self.computing
        self.computing = True
        self.iterations[-1]["computations"].append(str(Computation(stage, kind, microbatch)))

    def end(self) -> None:
        assert self.computing
        self.computing = False

    def end_iteration(self) -> None:
        assert self.inside
        self.inside = False

    def abandon_iteration(self) -> None:
        self.inside = self.computing = False


class Watched(Hook):
    """A real hook, whose request is read when each computation begins."""

    def __init__(self, program: Program) -> None:
        self.word = memoryview(bytearray(8)).cast("Q")
        self.seen: list[tuple[int | None, int]] = []
        self.deviations: list[str | None] = []
        self.program = program
        super().__init__(HostMarks(self.word), self, program)

    def begin(self, stage: int, kind: str, microbatch: int) -> None:
        super().begin(stage, kind, microbatch)
        self.seen.append(parse_clock_request(self.word[0]))

    def program_for(self, _: int) -> Program:
        return self.program

    def on_end(self, _: int, program: Program | None, deviation: str | None, *__: object) -> None:
        self.deviations.append(deviation)


def plan_of(schedule: Schedule) -> Plan:
    """Return a plan in which each computation of a rank has another clock."""
    clocks = {str(each): 1000 + place for row in schedule.ranks for place, each in enumerate(row)}
    measured = {
        (stage, kind): {clock: Measurement(clock, 1.0, 1.0) for clock in clocks.values()}
        for stage in range(schedule.stages)
        for kind in schedule.kinds
    }
    return Plan(
        pipeline_iteration(schedule), clocks, measured, "0" * 64, None, "simulated", 1.0, *[1.0] * 6
    )


def schedule_of(name: str, ranks: int, microbatches: int) -> Schedule:
    """Return our schedule."""
    virtual = 2 if name.startswith(("interleaved", "looped")) else None
    return generate(name, ranks=ranks, microbatches=microbatches, virtual_stages=virtual)


def with_clocks(adapter: Engine, hook: Watched) -> dict[str, Any]:
    """Compare, for every iteration, the requests at the begin of each computation with the
    expected ones.
    """
    order = adapter.order()
    assert order is not None
    hook.program.check_order(order, adapter.name)
    wanted = list(enumerate(hook.program.clocks))
    return {
        "deviations": hook.deviations,
        "clocks": [
            hook.seen[first : first + len(wanted)] == wanted
            for first in range(0, len(hook.seen), len(wanted))
        ],
        "next": parse_clock_request(hook.word[0]),
        "first": wanted[0],
    }


def attributes_of(owners: list[Any]) -> list[dict[str, int]]:
    """Return the identities of the attributes of `owners`."""
    return [{name: id(value) for name, value in vars(each).items()} for each in owners]


def not_taken_off(owners: list[Any]) -> list[str]:
    """Return the attributes of `owners` that an adapter has left."""
    found = [(name, value) for each in owners for name, value in vars(each).items()]
    return [
        name
        for name, value in found
        if "perseus" in name
        or name in ("_exec_schedule", "_INSTRUCTION_MAP")
        or "perseus_planner" in str(getattr(value, "__module__", ""))  # where it was written
    ]


def refused(adapter: Engine, engine: Any) -> set[str]:
    """Return the refusals of a second hook, by the same adapter and by another one."""
    said = set()
    for again in (lambda: adapter, lambda: engine_of(engine)):
        try:
            with again().attached(Recorder()):
                said.add("nothing")
        except UsageError as error:
            said.add(str(error))
    return said


def entered_and_left(adapter: Engine, owners: list[Any]) -> dict[str, Any]:
    """Return what an adapter knows before the engine runs, and whether it restores the engine."""
    before = attributes_of(owners)
    with adapter.attached(Recorder()):
        inside, refusals = attributes_of(owners), refused(adapter, owners[0])
    after = attributes_of(owners)
    failed = False
    try:
        with adapter.attached(Recorder()):
            raise KeyError  # noqa: TRY301
    except KeyError:
        failed = True
    seat = adapter.pipeline_rank
    return {
        "name": adapter.name,
        "seat": [seat.rank, seat.ranks, seat.pipeline, list(seat.peers)],
        "device": str(adapter.device),
        "wraps": inside != before,
        "refusals": list(refusals),
        "restored": before == after == attributes_of(owners) and failed,
    }


def equal(left: list[Any], right: list[Any]) -> bool:
    assert len(left) == len(right) > 0
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


class Layer(nn.Module):
    """A layer that uses random numbers.

    Attributes:
        left: Number of forwards before one fails; None if none fails.
        calls: Number of forwards so far.
    """

    left: int | None = None
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Any) -> Any:
        self.calls += 1
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise ArithmeticError("the layer fails")
        return self.drop(self.linear(x)).tanh()


class Loss:
    """Counts how often it is called during a computation."""

    def __init__(self) -> None:
        self.recorder, self.inside = Recorder(), 0

    def __call__(self, output: Any, target: Any) -> Any:
        self.inside += self.recorder.computing
        return nn.functional.mse_loss(output, target)


# Schedules of torch


def torch_schedules() -> None:
    """Train every torch schedule without and with a hook."""
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    said = {name: _followed(name, ranks) for name in TORCH}
    said["failure"] = _torch_failure()
    print(json.dumps(said), flush=True)
    sys.exit()  # without waiting for ranks that may have failed


def _followed(name: str, ranks: int) -> dict[str, Any]:
    microbatches = 2 * ranks
    plain = _torch_trained(torch_schedule(name, microbatches), nullcontext())

    schedule = torch_schedule(name, microbatches)
    adapter, recorder = engine_of(schedule), schedule._loss_fn.recorder
    owners = [schedule, *_stages(schedule)]
    order = adapter.order()
    said = entered_and_left(adapter, owners)
    hooked = _torch_trained(schedule, adapter.attached(recorder))

    watched = torch_schedule(name, microbatches)
    adapter = engine_of(watched)
    hook = Watched(Program(1, plan_of(schedule_of(name, ranks, microbatches)), dist.get_rank()))
    _torch_trained(watched, adapter.attached(hook))

    more = torch_schedule(name, 2 * microbatches)
    adapter, others = engine_of(more), Recorder()
    with adapter.attached(others):
        torch_step(more, 2 * microbatches)
    return {
        **said,
        "microbatches": microbatches,
        "order": [str(each) for each in order or ()],
        "iterations": recorder.iterations,
        "open": recorder.inside or recorder.computing,
        "equal": equal(plain, hooked),
        "losses": schedule._loss_fn.inside
        if any(stage.is_last for stage in _stages(schedule))
        else None,
        "left": not_taken_off(owners),
        **with_clocks(engine_of(watched), hook),
        "more": others.iterations,
        "more_order": [str(each) for each in adapter.order() or ()],
    }


def torch_schedule(name: str, microbatches: int) -> Any:
    """Create a pipeline; it is the same each time."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    single, v_shaped = name in ("gpipe", "1f1b"), name in ("zbv", "dualpipe-v")
    numbers = (
        [rank] if single else [rank, 2 * ranks - 1 - rank] if v_shaped else [rank, ranks + rank]
    )
    torch.manual_seed(rank)
    count = ranks * len(numbers)
    parts = [
        pipelining.PipelineStage(Layer(), each, count, torch.device("cpu")) for each in numbers
    ]
    kind = getattr(pipelining.schedules, f"Schedule{TORCH[name]}")
    return kind(parts[0] if single else parts, microbatches, loss_fn=Loss())


def _stages(schedule: Any) -> list[Any]:
    return [schedule._stage] if hasattr(schedule, "_stage") else schedule._stages


def _torch_trained(schedule: Any, attached: AbstractContextManager[None]) -> list[Any]:
    """Return the losses and weights of all iterations; the second follows an evaluation."""
    modules = nn.ModuleList(stage.submod for stage in _stages(schedule))
    optimizer, results = torch.optim.AdamW(modules.parameters(), lr=0.01), []
    with attached:
        for step in range(ITERATIONS):
            if step == 1:
                _torch_refused(schedule)
            if step == 1 and not isinstance(schedule, V_SHAPED):
                results += torch_step(schedule, schedule._n_microbatches, schedule.eval)
            results += torch_step(schedule, schedule._n_microbatches)
            optimizer.step()
            optimizer.zero_grad()
    return [*results, *modules.state_dict().values(), torch.rand(1)]


def torch_step(
    schedule: Any, microbatches: int, run: Callable[..., Any] | None = None
) -> list[Any]:
    stages = _stages(schedule)
    data = torch.randn(2, microbatches * ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    losses: list[Any] = []
    target = {"target": data[1], "losses": losses} if any(each.is_last for each in stages) else {}
    (run or schedule.step)(*([data[0]] if any(each.is_first for each in stages) else []), **target)
    return [each.detach() for each in losses]


def _torch_refused(schedule: Any) -> None:
    """Run a step that cannot train, which torch refuses."""
    try:
        with torch.no_grad():
            torch_step(schedule, schedule._n_microbatches)
    except RuntimeError as error:
        assert "requires gradients to be enabled" in str(error)  # noqa: PT017
    else:
        raise AssertionError


def _torch_failure() -> dict[str, Any]:
    """Let the last rank fail in its second iteration."""
    microbatches = 2 * dist.get_world_size()
    schedule = torch_schedule("interleaved-zb", microbatches)
    adapter, recorder = engine_of(schedule), Recorder()
    said: dict[str, Any] = {}
    with adapter.attached(recorder):
        torch_step(schedule, microbatches)
        if schedule._stages[1].is_last:
            schedule._stages[1].submod.left = 2
        try:
            torch_step(schedule, microbatches)
        except Exception as error:
            said = _failure(error)
    return {
        **said,
        "iterations": recorder.iterations,
        "open": recorder.inside,
        "left": not_taken_off([schedule, *_stages(schedule)]),
    }


def _failure(error: Exception) -> dict[str, Any]:
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return {"error": type(error).__name__, "cause": f"{type(cause).__name__}: {cause}"}


# Engines of DeepSpeed


def deepspeed_engines() -> None:
    """Train the DeepSpeed engines without and with a hook."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
        False  # pipelines do not need it, and it would be compiled
    )
    deepspeed.init_distributed("gloo", dist_init_required=True, verbose=False)
    ranks = dist.get_world_size()
    modules = {"1f1b": PipelineModule}
    if hasattr(deepspeed.runtime.pipe, "dualpipev"):
        modules["dualpipe-v"] = deepspeed.runtime.pipe.dualpipev.DualPipeVModule
    said = {name: _deepspeed_followed(name, module, ranks) for name, module in modules.items()}
    if ranks == 4:
        said["replicas"] = _replicas()
    said["failure"] = _deepspeed_failure()
    print("\n" + json.dumps(said), flush=True)
    sys.exit()


def _deepspeed_followed(name: str, module: Any, ranks: int) -> dict[str, Any]:
    microbatches = 2 * ranks
    plain = _deepspeed_trained(_engine(module, microbatches), nullcontext())

    engine = _engine(module, microbatches)
    adapter, recorder = engine_of(engine), Recorder()
    order = adapter.order()
    said = entered_and_left(adapter, [engine])
    hooked = _deepspeed_trained(engine, adapter.attached(recorder))
    calls = next(each for each in engine.module.modules() if isinstance(each, Layer)).calls

    schedule = deepspeed_schedule(name, ranks, microbatches)
    hook = Watched(Program(1, plan_of(schedule), dist.get_rank()))
    others, orders = Recorder(), []
    with adapter.attached(hook):
        _deepspeed_step(engine)
    with adapter.attached(others):
        for each in (2 * microbatches, microbatches):
            engine.set_train_batch_size(ROWS * each * engine.grid.data_parallel_size)
            orders.append([str(computation) for computation in adapter.order() or ()])
            _deepspeed_step(engine)
    return {
        **said,
        "microbatches": microbatches,
        "order": [str(each) for each in order or ()],
        "iterations": recorder.iterations,
        "open": recorder.inside or recorder.computing,
        "equal": equal(plain, hooked),
        "left": not_taken_off([engine]),
        **with_clocks(adapter, hook),
        "calls": calls,
        "changed": others.iterations,
        "changed_orders": orders,
    }


def deepspeed_schedule(name: str, ranks: int, microbatches: int) -> Schedule:
    """Return our schedule; DeepSpeed runs DualPipeV with whole backwards where ours has I and,
    later, W.
    """
    schedule = schedule_of(name, ranks, microbatches)
    rows = tuple(
        tuple(
            each._replace(kind="B" if each.kind == "I" else each.kind)
            for each in row
            if each.kind != "W"
        )
        for row in schedule.ranks
    )
    return Schedule(name, rows)


def _engine(module: Any, microbatches: int, **topology: Any) -> Any:
    """Create an engine, the same each time; its layers recompute activations in each backward."""
    import deepspeed

    torch.manual_seed(0)
    topology = topology or {"num_stages": dist.get_world_size()}
    model = module(
        layers=[Layer() for _ in range(8)],
        loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
        activation_checkpoint_interval=1,
        activation_checkpoint_func=partial(checkpoint, use_reentrant=False),
        **topology,
    )
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": microbatches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "steps_per_print": 2**31,
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    return engine


def _microbatches() -> Iterator[Any]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield (
            torch.randn(ROWS, WIDTH, generator=generator),
            torch.randn(ROWS, WIDTH, generator=generator),
        )


def _deepspeed_trained(engine: Any, attached: AbstractContextManager[None]) -> list[Any]:
    """Return the losses and weights of all iterations; the second follows an evaluation."""
    results = []
    with attached:
        for step in range(ITERATIONS):
            if step == 1:
                results.append(engine.eval_batch(_microbatches()).detach().clone())
            results += _deepspeed_step(engine)
    return [
        *results,
        *(each.detach().clone() for each in engine.module.parameters()),
        torch.rand(1),
    ]


def _deepspeed_step(engine: Any) -> list[Any]:
    return [engine.train_batch(_microbatches()).detach().clone()]


def _replicas() -> dict[str, Any]:
    """Train two pipelines of two stages."""
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

    engine = _engine(PipelineModule, 3, topology=PipeDataParallelTopology(2, 2))
    adapter, recorder = engine_of(engine), Recorder()
    said = entered_and_left(adapter, [engine])
    with adapter.attached(recorder):
        _deepspeed_step(engine)
    return {
        **said,
        "order": [str(each) for each in adapter.order() or ()],
        "iterations": recorder.iterations,
    }


def _deepspeed_failure() -> dict[str, Any]:
    """Let the last rank fail in its second iteration."""
    from deepspeed.pipe import PipelineModule

    engine = _engine(PipelineModule, 2 * dist.get_world_size())
    adapter, recorder = engine_of(engine), Recorder()
    said: dict[str, Any] = {}
    with adapter.attached(recorder):
        _deepspeed_step(engine)
        if engine.is_last_stage():
            engine.module.forward_funcs[0].left = 1
        try:
            _deepspeed_step(engine)
        except Exception as error:
            said = _failure(error)
    return {
        **said,
        "iterations": recorder.iterations,
        "open": recorder.inside,
        "left": not_taken_off([engine]),
    }
