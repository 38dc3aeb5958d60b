"""One rank of number 17: trains a stack of linear layers on an emulated GPU, at maximum clocks and
by plans.

    emulated_ranks.py ENGINE GPU MICROBATCHES ROUNDS FOLDER

A process of a job of torch.distributed, with its rank in the environment. Rank 0 writes
FOLDER/ENGINE.json.
"""

# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from emulated_training import DEPTHS, SLOWDOWNS
from torch import nn
from torch.distributed import pipelining
from torch.nn import functional

from perseus_planner import Profile, schedules, solve
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.simulated.emulated import EmulatedGpu
from perseus_planner.profiler.pipeline import profile_pipeline
from perseus_planner.profiles.measurement import ClockChange
from perseus_planner.runtime import planner_runtime
from perseus_planner.runtime.emulation import emulate

WIDTH = 128  # of square matrices, whose real computation takes a few percent of the emulated time
WARM_UP, COUNTED = 2, 5  # iterations of each plan in a round
CHANGE = ClockChange(
    call_s=6e-3, settle_s=0.9e-3, gpus_per_node=len(DEPTHS)
)  # the mean of the emulated calls

Step = Callable[[], None]
Span = tuple[float, float]


def main(engine_name: str, gpu: str, microbatches: str, rounds: str, folder: str) -> None:
    """Profile, solve on rank 0, then train with all clocks at maximum and by each plan, in
    several rounds.
    """
    torch.set_num_threads(1)
    engine, step = {"torch": torch_pipeline, "deepspeed": _deepspeed}[engine_name](
        int(microbatches)
    )
    where = Path(folder)
    with open_gpu(f"emulated:{gpu.replace('?', f'/{dist.get_rank()}?')}") as device:
        assert isinstance(device, EmulatedGpu)
        with profile_pipeline(
            engine, gpu=device.simulated_text, output=where / f"{engine_name}.yaml"
        ):
            step()
        if dist.get_rank() == 0:
            _solve(where, engine_name, int(microbatches))
        dist.barrier()
        spans: dict[str, list[Span]] = {}
        with emulate(engine, device.text):
            for name in int(rounds) * ("maximum", *map(str, SLOWDOWNS)):
                plan = where / f"{engine_name}-{name}.yaml"
                with (
                    nullcontext()
                    if name == "maximum"
                    else planner_runtime(engine, plan=plan, gpu=device.text)
                ):
                    spans.setdefault(name, []).extend(_measured(step, device))
    if dist.get_rank() == 0:
        (where / f"{engine_name}.json").write_text(json.dumps(spans))
    dist.barrier()
    dist.destroy_process_group()


def _solve(where: Path, engine_name: str, microbatches: int) -> None:
    profile = replace(Profile.load(where / f"{engine_name}.yaml"), clock_change=CHANGE)
    frontier = solve(profile, schedules.one_f_one_b(len(DEPTHS), microbatches))
    for slowdown in SLOWDOWNS:
        plan = frontier.plan_until(slowdown * frontier.baseline_time_s)
        plan.save(where / f"{engine_name}-{slowdown}.yaml")


def _measured(step: Step, gpu: EmulatedGpu) -> list[Span]:
    """Return the seconds of each iteration, and its joules over all ranks."""
    for _ in range(WARM_UP):
        step()
    moments = [(time.monotonic(), gpu.energy_j())]
    for _ in range(COUNTED):
        step()
        moments.append((time.monotonic(), gpu.energy_j()))
    mine = [
        (end_s - start_s, end_j - start_j)
        for (start_s, start_j), (end_s, end_j) in pairwise(moments)
    ]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    return [
        (spans[0][0], sum(energy_j for _, energy_j in spans))
        for spans in zip(*of_ranks, strict=True)
    ]


def torch_pipeline(microbatches: int) -> tuple[Any, Step]:
    """Return this rank's schedule of torch.distributed.pipelining, and what runs one iteration."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    given, sent = torch.empty(WIDTH, WIDTH), torch.empty(WIDTH, WIDTH, requires_grad=True)
    stage = pipelining.PipelineStage(
        _layer(rank), rank, size, torch.device("cpu"), sent if rank else given, sent
    )
    schedule = pipelining.Schedule1F1B(stage, microbatches, loss_fn=functional.mse_loss)
    data = torch.randn(microbatches * WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))

    def step() -> None:
        schedule.step(
            *([data] if rank == 0 else []), **({"target": data} if rank == size - 1 else {})
        )
        stage.submod.zero_grad()

    return schedule, step


def _deepspeed(microbatches: int) -> tuple[Any, Step]:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    # Pipelines do not need this operation, and without a GPU DeepSpeed would compile it first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    layers = [_layer(number) for number in range(len(DEPTHS))]
    module = PipelineModule(
        layers=layers,
        num_stages=len(layers),
        loss_fn=functional.mse_loss,
        partition_method="uniform",
    )
    config = {
        "train_micro_batch_size_per_gpu": WIDTH,
        "gradient_accumulation_steps": microbatches,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "steps_per_print": 2**31,
    }
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=list(module.parameters()), config=config
    )
    data = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
    return engine, lambda: engine.train_batch(iter([(data, data)] * microbatches))


def _layer(stage: int) -> nn.Sequential:
    torch.manual_seed(stage)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTHS[stage])))


if __name__ == "__main__":
    main(*sys.argv[1:])
