"""Ranks that train by schedules of torch in the ways that newer releases have brought: batches that
come split, functions of the training's own, backwards without autograd, options of schedules. Each
prints as JSON what ran, by hooks of modules and gradients, and what the adapter showed.
"""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from batch_programs import GPU
from overlapping import Functions
from runtime_training import Recorder, WarningLog, equal, job, plan_of, schedule_of
from tiny_training import ROWS, WIDTH, Torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import schedules

from perseus_planner.engines import engine_of
from perseus_planner.profiler.pipeline import profile_pipeline
from perseus_planner.runtime import planner_runtime
from perseus_planner.schedules import Computation, generate

DOCUMENTS = ([12], [6, 6], [4, 4, 4], [3, 3, 3, 3])  #: lengths in the one row of each microbatch
LENGTH = 12
SHAPE = (1, LENGTH)

HAS_SPLIT = "arg_mbs" in inspect.signature(schedules.PipelineScheduleSingle.step).parameters
OPTIONS: dict[str, dict[str, Any]] = {
    "defer_pp_recv": {"defer_pp_recv": True},
    "unshard_lookahead": {"unshard_lookahead": "auto"},
    "defer_reduce_grad_wait": {"defer_reduce_grad_wait": True},
    "max_outstanding_sends": {"max_outstanding_sends": 1},
}


def positions_of(lengths: list[int]) -> Any:
    """Return the positions of documents that follow each other in a row."""
    return torch.tensor([[place for length in lengths for place in range(length)]])


class Seen(Recorder):
    """What ran, and during which computation of the hook: of modules and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[str, str | None]] = []
        self.batches: list[list[Any]] = []
        self._pool = ThreadPoolExecutor(1)  # as the planner looks at batches on another thread
        self._looked: list[Any] = []

    def begin_iteration(
        self, microbatches: int | None = None, batch: Any = None, _number: int | None = None
    ) -> None:
        super().begin_iteration(microbatches)
        if batch is not None:
            self._looked.append(self._pool.submit(list, batch()))

    def note(self, kind: str, stage: int, microbatch: int) -> None:
        inside = self.iterations[-1]["computations"][-1] if self.computing else None
        self.ran.append((str(Computation(stage, kind, microbatch)), inside))

    def taken(self) -> list[list[Any]]:
        """Return the microbatches of all iterations."""
        return [looked.result() for looked in self._looked]


class NumberedLayer(nn.Module):
    """A layer that is told the number of its microbatch, and notes its forwards and gradients."""

    stage = 0
    seen: Seen | None = None

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Any, number: Any, **_: Any) -> Any:
        microbatch = int(number.flatten()[0])
        self._note("F", microbatch)
        output = self.linear(x).tanh()
        if output.requires_grad:
            output.register_hook(lambda _: self._note("B", microbatch))
        return output

    def _note(self, kind: str, microbatch: int) -> None:
        if self.seen is not None:
            self.seen.note(kind, self.stage, microbatch)


class Numbered(Torch):
    """A torch pipeline whose model gets the number of each microbatch by name."""

    def __init__(self, name: str, microbatches: int, **options: Any) -> None:
        self.call = "whole"  #: how a step gets its batch
        super().__init__(
            name, microbatches, **{"layer": NumberedLayer, "has_shapes": True} | options
        )

    def watch(self, seen: Seen | None) -> None:
        for stage in self.stages:
            stage.submod.stage, stage.submod.seen = stage.stage_index, seen

    def run(self, run: Callable[..., Any]) -> list[Any]:
        rows, width = self._shape
        generator = torch.Generator().manual_seed(0)
        data = torch.randn(2, self.microbatches * rows, width, generator=generator)
        losses: list[Any] = []
        is_first = any(stage.is_first for stage in self.stages)
        is_last = any(stage.is_last for stage in self.stages)
        named = self.named()
        if self.call == "whole":
            whole = {name: torch.cat([each[name] for each in named]) for name in named[0]}
            target = {"target": data[1], "losses": losses} if is_last else {}
            run(*([data[0]] if is_first else []), **whole, **target)
        else:  # as torchtitan calls it
            run(
                arg_mbs=[(each,) for each in data[0].split(rows)] if is_first else None,
                kwarg_mbs=named,
                target_mbs=list(data[1].split(rows)) if is_last else None,
                losses=losses if is_last else None,
                return_outputs=False,
                **self.further(),
            )
        return [loss.detach().clone() for loss in losses]

    def named(self) -> list[dict[str, Any]]:
        """Return the arguments by name of each microbatch."""
        return [{"number": torch.full((ROWS,), each)} for each in range(self.microbatches)]

    def further(self) -> dict[str, Any]:
        """Return further arguments of the call."""
        return {}


class Packed(Numbered):
    """A torch pipeline that trains on packed documents, with their positions, as torchtitan does.

    Args:
        name: Name of the schedule.
        further: Further arguments of each step.
    """

    def __init__(self, name: str, further: dict[str, Any] | None = None, **options: Any) -> None:
        self._further = further or {}
        layer = partial(NumberedLayer, LENGTH)
        super().__init__(name, len(DOCUMENTS), layer=layer, shape=SHAPE, **options)

    def named(self) -> list[dict[str, Any]]:
        return [
            {"number": torch.full((1,), number), "positions": positions_of(lengths)}
            for number, lengths in enumerate(DOCUMENTS)
        ]

    def further(self) -> dict[str, Any]:
        return self._further

    def run(self, run: Callable[..., Any]) -> list[Any]:
        if self.call == "whole" and self._further:
            return super().run(partial(run, **self._further))
        return super().run(run)


def summed_loss(output: Any, target: Any, global_valid_tokens: Any = 1) -> Any:
    """Return a loss as torchtitan has it."""
    return nn.functional.mse_loss(output, target, reduction="sum") / global_valid_tokens


def watched(pipeline: Numbered, iterations: int = 2) -> dict[str, Any]:
    """Train with a hook, and compare with what modules and gradients say that ran."""
    adapter = engine_of(pipeline.engine)
    seen = Seen()
    pipeline.watch(seen)
    adapter.check()
    order = [str(each) for each in adapter.order() or ()]
    with adapter.attached(seen):
        losses = [loss for _ in range(iterations) for loss in pipeline.step()]
    pipeline.watch(None)
    return {
        "order": order,
        "iterations": seen.iterations,
        "ran": seen.ran,
        "losses": [float(loss) for loss in losses],
        "microbatches": pipeline.microbatches,
        "stages": [stage.stage_index for stage in pipeline.stages],
    }


# Batches


def batches(state: str) -> None:
    """Train with clocks that follow the batch; print the rows of work that the planner took."""
    with job(state) as result:
        ways = {"whole": {}, "split": {"loss_kwargs": {"global_valid_tokens": 7}}}
        for name in ("1f1b", "interleaved-1f1b", "dualpipe-v"):
            for call in ("whole", *(("split",) if HAS_SPLIT else ())):
                result[f"{name} {call}"] = _work_rows(name, call, ways[call])
        if HAS_SPLIT:
            result["unfinished"] = _work_rows("1f1b", "split", {"finalize_gradients": False})


def _work_rows(name: str, call: str, further: dict[str, Any], **options: Any) -> dict[str, Any]:
    from perseus_planner.extensions.autopilot.batches.leader import Leader

    if name == "dualpipe-v":  # needs as many microbatches as stages, and has 4 of them here
        assert 2 * dist.get_world_size() == len(DOCUMENTS)
    log = WarningLog()
    pipelines = [Packed(name, further, loss=summed_loss, **options) for _ in range(2)]
    rows: list[Any] = []

    own = Leader.own

    def noted(leader: Leader, iteration: int, work: Any) -> Any:
        rows.append(None if work is None else work.tolist())
        return own(leader, iteration, work)

    losses = []
    for pipeline, is_planned in zip(pipelines, (True, False), strict=True):
        pipeline.call = call
        planned = planner_runtime(
            pipeline.engine,
            gpu=GPU,
            learn=False,
            state="stages.yaml" if len(pipeline.stages) > 1 else "profile.yaml",
            work="perseus_planner.extensions.autopilot.batches.work:sequence_work",
        )
        with mock.patch.object(Leader, "own", noted), planned if is_planned else nullcontext():
            losses.append([*(loss for _ in range(3) for loss in pipeline.step())])
        losses[-1] += pipeline.state()
    return {
        "rows": rows,
        "warnings": log.taken(),
        "equal": equal(*losses),
        "is_first": any(stage.is_first for stage in pipelines[0].stages),
    }


class WithCurriculum(schedules.Schedule1F1B):
    """A schedule whose `step` has a parameter of its own, which reverses the batch."""

    def step(self, *args: Any, curriculum: str = "", **kwargs: Any) -> Any:
        if curriculum:
            args = tuple(torch.flip(each, (0,)) for each in args)
            kwargs = {
                name: torch.flip(value, (0,)) if name in ("number", "positions") else value
                for name, value in kwargs.items()
            }
        return super().step(*args, **kwargs)


class WithUnnamedCurriculum(WithCurriculum):
    """The same without a parameter that can be seen."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("reverse")
        return super().step(*args, **kwargs, curriculum="reverse")


def own_parameters(state: str) -> None:
    """Train with schedules whose steps have parameters of their own."""
    with job(state) as result:
        for name, kind, further in (
            ("named", WithCurriculum, {"curriculum": "reverse"}),
            ("not given", WithCurriculum, {}),
            ("unnamed", WithUnnamedCurriculum, {"reverse": True}),
        ):
            result[name] = _work_rows("1f1b", "whole", further, kind=kind)


# Functions of the training's own


def functions(state: str) -> None:
    """Follow schedules with functions of their own."""
    with job(state) as result:
        for name in ("in_turn", "at_once", "hidden"):
            result[name] = _with_function(name, "OVERLAP_F_B")
        pipeline = Numbered("dualpipe-v", 6)
        in_turn = Functions(pipeline).in_turn
        pipeline.engine.register_custom_function(schedules.OVERLAP_F_B, in_turn)
        with profile_pipeline(pipeline.engine, gpu="simulated:a100-sxm", output=None) as profiling:
            pipeline.step()
        result["profiling"] = profiling.problem
        result["default"] = watched(Numbered("dualpipe-v", 6))
        result["forwards"] = _with_function("hidden", "FORWARD")
        result["backwards"] = _with_function("in_turn", "BACKWARD_INPUT")
        result["never run"] = _with_function("hidden", "BACKWARD_INPUT", "looped-bfs")


def _with_function(name: str, kind: str, schedule: str = "dualpipe-v") -> dict[str, Any]:
    pipeline = Numbered(schedule, 6)
    function = getattr(Functions(pipeline), name)
    kind = getattr(schedules._ComputationType, kind)
    pipeline.engine.register_custom_function(kind, function)
    seen = watched(pipeline)
    assert pipeline.engine._comp_type_to_function_map == {kind: function}
    iteration = dict(engine_of(pipeline.engine).iteration(6))
    iteration["virtual_stages"] = 2
    generated = generate(iteration.pop("schedule"), ranks=dist.get_world_size(), **iteration)
    return {**seen, "generated": [str(each) for each in generated.shown(dist.get_rank())]}


def registered_later(state: str) -> None:
    """Register a function after the runtime is attached."""
    with job(state) as result:
        seen = Seen()
        pipeline = Numbered("dualpipe-v", 6)
        adapter = engine_of(pipeline.engine)
        with adapter.attached(seen):
            orders = [adapter.order()]
            pipeline.step()
            pipeline.engine.register_custom_function(
                schedules.OVERLAP_F_B, Functions(pipeline).at_once
            )
            orders.append(adapter.order())
            losses = [loss for _ in range(2) for loss in pipeline.step()]
        result["iterations"] = [each["computations"] for each in seen.iterations]
        result["orders"] = [list(map(str, order)) for order in orders]
        result["losses"] = len(losses)


# Backwards without autograd


class StageWithoutAutograd(pipelining.PipelineStage):
    """A stage that computes its gradients by itself."""

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, **_: Any
    ) -> None:
        with torch.no_grad():
            assert not torch.is_grad_enabled()
            self.submod._note("B", bwd_chunk_id)
            for weight in self.submod.parameters():
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad + 1


def without_autograd(state: str) -> None:
    """Train with gradients off."""
    with job(state) as result:
        pipeline = Numbered(
            "looped-bfs",
            4,
            stage=StageWithoutAutograd,
            options={"backward_requires_autograd": False},
        )
        # Stages pass no gradients here.
        for stage in pipeline.stages:
            stage.get_bwd_send_ops = lambda _: []
            stage.get_bwd_recv_ops = lambda _: []
        with torch.no_grad():
            result["training"] = watched(pipeline)
        seen = Seen()
        with engine_of(pipeline.engine).attached(seen), torch.no_grad():
            pipeline.evaluate()
        result["evaluations"] = len(seen.iterations)
        profiled = profile_pipeline(pipeline.engine, gpu="simulated:a100-sxm", output=None)
        with profiled as profiling, torch.no_grad():
            pipeline.step()
        result["profiling"] = profiling.problem


# Options of schedules


def options(state: str) -> None:
    """Train with each option that this torch has."""
    with job(state) as result:
        parameters = inspect.signature(schedules.ScheduleInterleaved1F1B).parameters
        for name, given in OPTIONS.items():
            if name not in parameters:
                continue
            for schedule in ("interleaved-1f1b", "interleaved-zb", "dualpipe-v"):
                result[f"{name} {schedule}"] = watched(Numbered(schedule, 4, options=given))


def files(state: str) -> None:
    """Train with schedules that are loaded from files, of each kind that torch writes."""
    with job(state) as result:
        for name in ("interleaved-1f1b", "zbv"):
            for form in ("compute_only", "compute_comms"):
                path = f"{state}-{name}-{form}-{dist.get_rank()}.csv"
                Numbered(name, 4).engine._dump_csv(path, format=form)
                loaded = Numbered(name, 4, kind=schedules._PipelineScheduleRuntime)
                loaded.engine._load_csv(path, format=form)
                result[f"{name} {form}"] = watched(loaded)


def few_microbatches(state: str) -> None:
    """Make 1F1B with fewer microbatches than stages."""
    with job(state) as result:
        try:
            Torch("1f1b", dist.get_world_size() - 1)
        except ValueError as error:
            result["refused"] = str(error)


# Sharded stages


def sharded(state: str) -> None:
    """Train stages that `fully_shard` has sharded: in which computations collectives are, and what
    is said of a plan that was profiled with another torch.
    """
    with job(state) as result:
        for name in ("1f1b", "interleaved-1f1b"):
            result[name] = _collectives(name)
        log = WarningLog()
        pipeline = _sharded("1f1b")
        plan = replace(plan_of(schedule_of("1f1b", 2, 4)), torch="2.9.1+cu130")
        options: dict[str, Any] = {"gpu": GPU, "record": "run", "max_changes_per_s": 1e6}
        with planner_runtime(pipeline.engine, plan=plan, **options):
            for _ in range(3):
                pipeline.step()
        result["warnings"] = log.taken()
        result["torch"] = torch.__version__
        same = replace(plan, torch=torch.__version__)
        with planner_runtime(pipeline.engine, plan=same, gpu=GPU):
            pipeline.step()
        result["of the same torch"] = log.taken()
        simulated = "simulated:a100-sxm?noise=0&drift=0&step=0&call=0"
        with profile_pipeline(pipeline.engine, gpu=simulated, output="sharded.yaml") as profiling:
            pipeline.step()
        result["problem"] = profiling.problem


def _sharded(name: str) -> Torch:
    def wrap(module: Any, group: Any) -> Any:
        mesh = DeviceMesh.from_group(group, "cpu")
        for part in module:
            fully_shard(part, mesh=mesh)
        return fully_shard(module, mesh=mesh)

    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    return Torch(name, 4, sides=2, wrap=wrap, layer=layer, has_shapes=True)


def _collectives(name: str) -> dict[str, list[str]]:
    """Return the kinds of computation in which each collective began; "" for outside of them."""
    recorder = Recorder()
    begun: dict[str, list[str]] = {"reduce_scatter": [], "all_gather": []}

    def noted(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            inside = ""
            if recorder.computing:
                inside = recorder.iterations[-1]["computations"][-1]
            begun[kind].append("".join(filter(str.isalpha, inside)))
            return original(*args, **kwargs)

        return called

    pipeline = _sharded(name)
    with ExitStack() as stack:
        for kind in begun:
            for end in ("single", "tensor", "into_tensor"):
                method = f"{kind}_{end}"
                if hasattr(dist, method):
                    replacement = noted(kind, getattr(dist, method))
                    stack.enter_context(mock.patch.object(dist, method, replacement))
        stack.enter_context(engine_of(pipeline.engine).attached(recorder))
        for _ in range(2):
            pipeline.step()
    return begun
