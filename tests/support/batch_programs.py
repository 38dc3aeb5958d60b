"""Ranks that train on emulated GPUs by clocks that follow the batch, and the same without them;
launching.py runs them as "batch_programs:NAME".

What a computation takes is drawn for each microbatch, and affine in that: work and clocks are all
that tells iterations apart.
"""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from batch_world import COST, KINDS, LEARNT, MEASURED, MICROBATCHES, drawn
from runtime_training import WarningLog, job
from tiny_training import Torch

from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.simulated.emulated import EmulatedGpu
from perseus_planner.gpu.torch_device import gpu_text
from perseus_planner.runtime import planner_runtime

GPU = "emulated:a100-sxm?call=1ms"


class Worked:
    """Makes the computations of a rank take what their work says.

    Attributes:
        iteration: The number of the iteration.

    Args:
        work: (iterations, microbatches) of this rank's pipeline.
    """

    def __init__(self, work: Any) -> None:
        opened = open_gpu(gpu_text(GPU, torch.device("cpu")))
        assert isinstance(opened, EmulatedGpu)
        self.gpu, self.work, self.iteration = opened, work, 0

    def __call__(self, stage: int, kind: str, microbatch: int) -> None:
        fixed, slope = KINDS[kind]
        self.gpu.run(COST[kind] * (fixed + slope * float(self.work[self.iteration, microbatch])))


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


def first_number(microbatch: Any) -> float:
    return float(microbatch[0, 0])


def torch_pipelines(worked: Worked, sides: int) -> tuple[Any, Callable[[Any], list[Any]]]:
    pipeline = Packed("1f1b", MICROBATCHES, worked, sides=sides)
    pipeline.worked = worked
    results: list[Any] = []

    def step(_: Any) -> list[Any]:
        losses = pipeline.compute()
        for parameter in pipeline.layers.parameters():  # pipelines end an iteration together
            dist.all_reduce(parameter.grad, group=_replicas(sides))
        pipeline.finish()
        results[:] = pipeline.state()
        return losses

    return pipeline.engine, step


_GROUPS: dict[int, Any] = {}


def _replicas(sides: int) -> Any:
    if sides not in _GROUPS:
        world = dist.get_world_size()
        groups = [dist.new_group([*range(at, at + sides)]) for at in range(0, world, sides)]
        _GROUPS[sides] = groups[dist.get_rank() // sides]
    return _GROUPS[sides]


def trained(state: str, name: str) -> None:
    """Train with clocks that follow the batch, and then without."""
    with job(state) as result:
        warning_log = WarningLog()
        made: dict[str, Any] = {"torch": partial(torch_pipelines, sides=2)}
        sides = {"torch": 2}[name]
        side = dist.get_rank() % sides
        work = drawn(sides)[:, side]
        found, losses = {}, {}
        for follows in (True, False):
            worked = Worked(work)
            engine, step = made[name](worked)
            options = {"gpu": GPU, "work": first_number, "learn": False, "max_slowdown": 0.05}
            with (
                planner_runtime(engine, state="profile.yaml", **options)  # type: ignore[arg-type]
                if follows
                else nullcontext()
            ) as runtime:
                losses[follows] = []
                for number in range(LEARNT + MEASURED):
                    worked.iteration = number
                    if number == LEARNT:
                        dist.barrier()
                        begun_s, begun_j = time.monotonic(), worked.gpu.energy_j()
                        clocks = set()
                    losses[follows] += step(runtime)
                    if number >= LEARNT and runtime is not None:
                        clocks.add(runtime._follower.program.clocks[-1])
                dist.barrier()
                used_j = worked.gpu.energy_j() - begun_j
                found[follows] = used_j, time.monotonic() - begun_s
            if follows:
                result["clocks"] = len(clocks)
                result["warnings"] = warning_log.taken()
                result["after"] = worked.gpu.locked_mhz
        result["equal"] = all(map(torch.equal, losses[True], losses[False]))
        result["losses"] = len(losses[True])
        result["energy_j"] = [found[True][0], found[False][0]]
        result["time_s"] = [found[True][1], found[False][1]]
