"""Ranks that train on emulated GPUs by clocks that follow the batch, and the same without them;
launching.py runs them as "batch_programs:NAME".

What a computation takes is drawn for each microbatch, and affine in that: work and clocks are all
that tells iterations apart.
"""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import msgspec
import torch
import torch.distributed as dist
from batch_world import COST, KINDS, LEARNT, MEASURED, MICROBATCHES, WHOLE_COST, drawn
from runtime_training import WarningLog, equal, job
from tiny_training import DeepSpeed, Torch
from torch import nn

from perseus_planner.extensions.autopilot.batches.exchange import OwnTime
from perseus_planner.extensions.autopilot.batches.leader import Leader
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.simulated.emulated import EmulatedGpu
from perseus_planner.gpu.simulated.model import OpCost
from perseus_planner.gpu.torch_device import gpu_text
from perseus_planner.runtime import Runtime, planner_runtime

GPU = "emulated:a100-sxm?call=1ms"


class Worked:
    """Makes the computations of a rank take what their work says.

    Attributes:
        iteration: The number of the iteration.
        work: (iterations, microbatches) of this rank's pipeline.

    Args:
        scale: How large computations are; 0 to take no time.
    """

    work: Any

    def __init__(self, scale: float) -> None:
        self._scale = scale
        opened = open_gpu(gpu_text(GPU, torch.device("cpu")))
        assert isinstance(opened, EmulatedGpu)
        self.gpu, self.iteration = opened, 0

    def place(self, pipelines: int) -> int:
        """Take the work of this rank's pipeline, and return its number."""
        pipeline = dist.get_rank() % pipelines
        self.work = drawn(pipelines)[:, pipeline]
        return pipeline

    def __call__(self, stage: int, kind: str, microbatch: int) -> None:
        self.run(COST[kind], kind, float(self.work[self.iteration, microbatch]))

    def run(self, cost: OpCost, kind: str, work: float) -> None:
        """Take as long as a computation of this mean cost and kind does with its work."""
        fixed, slope = KINDS[kind]
        if self._scale:
            self.gpu.run(cost * (self._scale * (fixed + slope * work)))


class Packed(Torch):
    """A torch pipeline whose microbatches hold their work in their first number."""

    worked: Worked

    def run(self, run: Callable[..., Any]) -> list[Any]:
        rows, width = self._shape
        generator = torch.Generator().manual_seed(self._side)
        data = torch.randn(2, self.microbatches * rows, width, generator=generator)
        work = torch.from_numpy(self.worked.work[self.worked.iteration])
        data[0, ::rows, 0] = work.float()
        losses: list[Any] = []
        target = {"target": data[1], "losses": losses} if self.stages[0].is_last else {}
        run(*([data[0]] if self.stages[0].is_first else []), **target)
        return [loss.detach().clone() for loss in losses]


class Pipelines:
    """Training by torch, in two pipelines."""

    sides = 2

    def __init__(self, worked: Worked) -> None:
        self._pipeline = Packed("1f1b", MICROBATCHES, worked, sides=self.sides)
        self._pipeline.worked = worked
        self.engine = self._pipeline.engine
        world = dist.get_world_size()
        groups = [dist.new_group([at, at + 1]) for at in range(0, world, self.sides)]
        self._replicas = groups[dist.get_rank() // self.sides]

    def step(self, _: Runtime | None) -> list[Any]:
        losses = self._pipeline.compute()
        for parameter in self._pipeline.layers.parameters():  # pipelines end together
            dist.all_reduce(parameter.grad, group=self._replicas)
        self._pipeline.finish()
        return losses

    def state(self) -> list[Any]:
        return self._pipeline.state()


class DataParallel:
    """Training without a pipeline; its batch is known while the iteration before runs."""

    def __init__(self, worked: Worked) -> None:
        self.engine, self._worked = None, worked
        self.sides = dist.get_world_size()
        torch.manual_seed(0)
        self._model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.01)

    def step(self, runtime: Runtime | None) -> list[Any]:
        number, work = self._worked.iteration, self._worked.work
        if runtime is not None and number == 0:
            runtime.batch(list(work[0]))
        data = torch.randn(4, 8)
        with nullcontext() if runtime is None else runtime.iteration():
            if runtime is not None and number + 1 < len(work):
                runtime.batch(list(work[number + 1]))
            self._worked.run(WHOLE_COST, "F", float(work[number].mean()))
            loss = self._model(data).square().mean()
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        return [loss.detach()]

    def state(self) -> list[Any]:
        return [*self._model.parameters(), torch.get_rng_state()]


class DeepSpeedPipelines(DeepSpeed):
    """Training by DeepSpeed, in two pipelines, from an iterator that draws from torch's state."""

    sides = 2

    def __init__(self, worked: Worked) -> None:
        from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

        self._worked = worked
        stages = dist.get_world_size() // self.sides
        topology = PipeDataParallelTopology(num_pp=stages, num_dp=self.sides)
        super().__init__(MICROBATCHES, topology=topology, layers=stages)
        self.rank = self.engine.stage_id
        self.engine._INSTRUCTION_MAP = self._watched(worked)
        self._data = self._drawn()

    def step(self, _: Runtime | None = None) -> list[Any]:
        return [self.engine.train_batch(self._data).detach().clone()]

    def _drawn(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(0)
        while True:
            for work in self._worked.work[self._worked.iteration]:
                drawn = [torch.randn(self._shape, generator=generator) for _ in range(2)]
                drawn[0][0, 0] = float(work)
                yield tuple(drawn)


def megatron_pipelines(worked: Worked) -> Any:
    from megatron_batches import MegatronPipelines

    return MegatronPipelines(worked)


MADE: dict[str, Callable[[Worked], Any]] = {
    "torch": Pipelines,
    "ddp": DataParallel,
    "deepspeed": DeepSpeedPipelines,
    "megatron": megatron_pipelines,
}


def first_number(microbatch: Any) -> float:
    """Return the work of a microbatch of these trainings."""
    return float((microbatch[0] if isinstance(microbatch, tuple) else microbatch)[0, 0])


def trained(state: str, name: str, scale: str = "1", *others: str) -> None:
    """Train with clocks that follow the batch, then in `others`, such as "full" clocks, and then
    without all that.
    """
    with job(state) as result:
        warning_log, results, seen = WarningLog(), {}, {}
        for mode in ("followed", *others, "plain"):
            worked, clocks = Worked(0.0 if mode == "plain" else float(scale)), set[Any]()
            training = MADE[name](worked)
            pipeline = worked.place(training.sides)
            settings: dict[str, Any] = {"gpu": GPU, "learn": False, "state": "profile.yaml"}
            with (
                mock.patch.object(Leader, "own", _paying) if mode == "full" else nullcontext(),
                nullcontext()
                if mode == "plain"
                else planner_runtime(
                    training.engine, work=first_number, max_slowdown=1.0, **settings
                ) as runtime,
            ):
                losses, readings = list[Any](), list[tuple[float, float]]()
                for number in range(LEARNT + MEASURED):
                    worked.iteration = number
                    readings.append((time.monotonic(), worked.gpu.energy_j()))
                    losses += training.step(runtime)
                    if number >= LEARNT and mode == "followed":
                        assert runtime.pipeline == pipeline
                        clocks.add(runtime._follower.program.clocks)
                readings.append((time.monotonic(), worked.gpu.energy_j()))
            seen[mode] = readings[LEARNT:]
            results[mode] = [*losses, *training.state()]
            if mode == "followed":
                result["clocks"], result["warnings"] = len(clocks), warning_log.taken()
                result["after"] = worked.gpu.locked_mhz
        result["equal"] = equal(results["followed"], results["plain"])
        result["readings"] = [seen[mode] for mode in ("followed", *others)]


def _paying(leader: Leader, iteration: int, work: Any) -> OwnTime:
    """Have all pipelines run at full clocks."""
    return msgspec.structs.replace(_own(leader, iteration, work), pays=True)


_own = Leader.own
