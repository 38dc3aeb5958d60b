"""Programs of ranks whose engines have a hook: each prints as JSON what the adapter returned and
called.
"""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime_training import Recorder, equal, plan_of, schedule_of
from schedule_engines import TORCH
from tiny_training import DeepSpeed, Layer, Torch
from torch import nn
from torch.distributed import pipelining
from torch.utils.checkpoint import checkpoint

from perseus_planner.base.errors import UsageError
from perseus_planner.engines import engine_of
from perseus_planner.engines.engine import Engine
from perseus_planner.runtime.hook import Hook
from perseus_planner.runtime.marks import Marks, parse_clock_request
from perseus_planner.runtime.program import Program
from perseus_planner.schedules import Schedule

ITERATIONS = 2

#: Whose `eval` fails in torch 2.13, with or without a hook.
V_SHAPED = (pipelining.ScheduleZBVZeroBubble, pipelining.ScheduleDualPipeV)


class Watched(Hook):
    """A real hook, whose request is read when each computation begins."""

    lane = None  # so that each begin is a call

    def __init__(self, program: Program) -> None:
        self.word = memoryview(bytearray(8)).cast("Q")
        self.seen: list[tuple[int | None, int]] = []
        self.deviations: list[str | None] = []
        self.program = program
        super().__init__(Marks(self.word), self, program)

    def begin(self, stage: int, kind: str, microbatch: int) -> None:
        super().begin(stage, kind, microbatch)
        self.seen.append(parse_clock_request(self.word[0]))

    def program_for(self, _: int) -> Program:
        return self.program

    def on_end(self, _: int, program: Program | None, deviation: str | None, *__: object) -> None:
        self.deviations.append(deviation)


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


class Loss:
    """Counts how often it is called during a computation."""

    def __init__(self) -> None:
        self.recorder, self.inside = Recorder(), 0

    def __call__(self, output: Any, target: Any) -> Any:
        self.inside += self.recorder.computing
        return nn.functional.mse_loss(output, target)


# Schedules of torch


def torch_schedules(_: str) -> None:
    """Train every torch schedule without and with a hook."""
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    result = {name: _torch_followed(name, ranks) for name in TORCH}
    pipeline = Torch("interleaved-zb", 2 * ranks)

    def break_layer() -> None:
        if pipeline.stages[1].is_last:
            pipeline.layers[1].left = 2

    result["failure"] = _failed(pipeline, break_layer)
    print(json.dumps(result), flush=True)
    sys.exit()  # without waiting for ranks that may have failed


def _torch_followed(name: str, ranks: int) -> dict[str, Any]:
    loss, microbatches = Loss(), 2 * ranks
    result, pipeline = _followed(
        partial(Torch, name, microbatches), partial(schedule_of, name, ranks), loss
    )
    more = Torch(name, 2 * microbatches)
    adapter, others = engine_of(more.engine), Recorder()
    with adapter.attached(others):
        more.step()
    return {
        **result,
        "losses": loss.inside if any(stage.is_last for stage in pipeline.stages) else None,
        "changed": others.iterations,
        "changed_orders": [[str(each) for each in adapter.order() or ()]],
    }


def _followed(
    create: Callable[..., Any], schedule: Callable[[int], Schedule], losses: Loss | None = None
) -> tuple[dict[str, Any], Any]:
    """Return what hooks saw of pipelines that `create` makes, and one that was followed.

    Args:
        create: Makes a pipeline from keywords.
        schedule: Our schedule of so many microbatches.
        losses: The loss of that pipeline.
    """
    microbatches = 2 * dist.get_world_size()
    expected = _trained(create(), nullcontext())

    pipeline = create() if losses is None else create(loss=losses)
    adapter, recorder = (
        engine_of(pipeline.engine),
        Recorder() if losses is None else losses.recorder,
    )
    order, owners = adapter.order(), owners_of(pipeline)
    result = entered_and_left(adapter, owners)
    results = _trained(pipeline, adapter.attached(recorder))

    watched = create()
    hook = Watched(Program.of_plan(1, plan_of(schedule(microbatches), gpu=None), dist.get_rank()))
    _trained(watched, engine_of(watched.engine).attached(hook))
    return {
        **result,
        "microbatches": microbatches,
        "order": [str(each) for each in order or ()],
        "iterations": recorder.iterations,
        "open": recorder.inside or recorder.computing,
        "equal": equal(expected, results),
        "left": not_taken_off(owners),
        **with_clocks(engine_of(watched.engine), hook),
    }, pipeline


def owners_of(pipeline: Any) -> list[Any]:
    """Return the objects that an adapter may change."""
    return [pipeline.engine, *getattr(pipeline, "stages", ())]


def _trained(pipeline: Any, attached: AbstractContextManager[None]) -> list[Any]:
    """Return the results of all iterations; the second follows an evaluation."""
    results = []
    with attached:
        for iteration in range(ITERATIONS):
            if iteration == 1 and isinstance(pipeline, Torch):
                with pytest.raises(RuntimeError, match="requires gradients"), torch.no_grad():
                    pipeline.run(pipeline.engine.step)
            if iteration == 1 and not isinstance(pipeline.engine, V_SHAPED):
                results += pipeline.evaluate()
            results += pipeline.step()
    return [*results, *pipeline.state()]


def _failed(pipeline: Any, break_layer: Callable[[], None]) -> dict[str, Any]:
    """Let the last rank fail in its second iteration."""
    adapter, recorder = engine_of(pipeline.engine), Recorder()
    result: dict[str, Any] = {}
    with adapter.attached(recorder):
        pipeline.step()
        break_layer()
        try:
            pipeline.step()
        except Exception as error:
            result = _failure(error)
    return {
        **result,
        "iterations": recorder.iterations,
        "open": recorder.inside,
        "left": not_taken_off(owners_of(pipeline)),
    }


def _failure(error: Exception) -> dict[str, Any]:
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return {"error": type(error).__name__, "cause": f"{type(cause).__name__}: {cause}"}


# Engines of DeepSpeed


def deepspeed_schedules(_: str) -> None:
    """Train the DeepSpeed engines without and with a hook."""
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime import pipe

    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    modules = {"1f1b": PipelineModule}
    if hasattr(pipe, "dualpipev"):
        modules["dualpipe-v"] = pipe.dualpipev.DualPipeVModule
    result = {name: _deepspeed_followed(name, module) for name, module in modules.items()}
    if ranks == 4:
        result["replicas"] = _replicas()
    pipeline = _deepspeed(2 * ranks)

    def break_layer() -> None:
        if pipeline.engine.is_last_stage():
            pipeline.engine.module.forward_funcs[0].left = 1

    result["failure"] = _failed(pipeline, break_layer)
    print("\n" + json.dumps(result), flush=True)
    sys.exit()


def _deepspeed(microbatches: int, module: Any = None, **options: Any) -> DeepSpeed:
    """Create a pipeline whose layers recompute activations in each backward."""
    recompute = partial(checkpoint, use_reentrant=False)
    return DeepSpeed(
        microbatches,
        module=module,
        layers=8,
        activation_checkpoint_interval=1,
        activation_checkpoint_func=recompute,
        **options,
    )


def _deepspeed_followed(name: str, module: Any) -> dict[str, Any]:
    ranks = dist.get_world_size()
    result, pipeline = _followed(
        partial(_deepspeed, 2 * ranks, module), partial(deepspeed_schedule, name, ranks)
    )
    engine, others, orders = pipeline.engine, Recorder(), []
    calls = next(each for each in engine.module.modules() if isinstance(each, Layer)).calls
    adapter = engine_of(engine)
    with adapter.attached(others):
        for microbatches in (4 * ranks, 2 * ranks):
            pipeline.change(microbatches)
            orders.append([str(computation) for computation in adapter.order() or ()])
            pipeline.step()
    return {**result, "calls": calls, "changed": others.iterations, "changed_orders": orders}


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


def _replicas() -> dict[str, Any]:
    """Train two pipelines of two stages."""
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

    pipeline = _deepspeed(3, topology=PipeDataParallelTopology(2, 2))
    adapter, recorder = engine_of(pipeline.engine), Recorder()
    result = entered_and_left(adapter, [pipeline.engine])
    with adapter.attached(recorder):
        pipeline.step()
    return {
        **result,
        "order": [str(each) for each in adapter.order() or ()],
        "iterations": recorder.iterations,
    }
