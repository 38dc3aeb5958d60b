"""Functions that ranks run to train on emulated GPUs; launching.py starts them by name."""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from perseus_planner import Profile
from perseus_planner.base.errors import UsageError
from perseus_planner.gpu.simulated.emulated import EmulatedGpu
from perseus_planner.profiler.pipeline import profile_pipeline
from perseus_planner.profiler.sweep import SweepSettings
from perseus_planner.runtime.emulation import emulate

WIDTH, MICROBATCHES = 32, 4
CPU = torch.device("cpu")


def train(name: str) -> None:
    """Losses and weights are the same without emulation; energy is that of the profile's rows
    and of waiting.
    """
    results = []
    for on_gpus in (False, True):
        torch.manual_seed(0)
        engine, step, modules = {
            "torch": torch_pipeline,
            "interleaved": _interleaved,
            "deepspeed": deepspeed_pipeline,
        }[name]()
        losses = _stepped(step)
        with emulate(engine, "emulated:a100-sxm?slower=20000") if on_gpus else nullcontext() as gpu:
            for _ in range(2):
                losses += _stepped(step)
            if gpu is not None:
                simulated = gpu.simulated_text
                drawn = _drawn(gpu, step)
            else:
                step()
        weights = [each.detach().clone() for module in modules for each in module.parameters()]
        results.append([*losses, *weights, torch.rand(1)])
    assert len(results[0]) == len(results[1])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    settings = SweepSettings(control="observed")
    with profile_pipeline(engine, gpu=simulated, settings=settings, output="profile.yaml"):
        step()
    dist.barrier()
    _check(Profile.load("profile.yaml"), modules, *drawn)
    dist.barrier()
    dist.destroy_process_group()


def split() -> None:
    """A schedule that computes I and W separately."""
    dist.init_process_group("gloo")
    stages = [
        pipelining.PipelineStage(nn.Linear(WIDTH, WIDTH), dist.get_rank() + each, 4, CPU)
        for each in (0, 2)
    ]
    schedule = pipelining.ScheduleInterleavedZeroBubble(stages, 4, loss_fn=nn.functional.mse_loss)
    refused = pytest.raises(UsageError, match="gradients of inputs and of weights separately")
    with refused, emulate(schedule, "emulated:a100-sxm?slower=20000"):
        pass
    dist.destroy_process_group()


def _stepped(step: Any) -> list[Any]:
    return [each.detach().clone() for each in step() or ()]


def _drawn(gpu: EmulatedGpu, step: Any) -> tuple[EmulatedGpu, tuple[float, float], float]:
    """Return the bounds of the time of an iteration, and its energy."""
    early_s, start_j, start_s = time.monotonic(), gpu.energy_j(), time.monotonic()
    step()
    end_s, end_j, late_s = time.monotonic(), gpu.energy_j(), time.monotonic()
    return gpu, (end_s - start_s, late_s - early_s), end_j - start_j


def _check(
    profile: Profile,
    modules: list[Any],
    gpu: EmulatedGpu,
    seconds: tuple[float, float],
    joules: float,
) -> None:
    """Check that the energy is that of the profile's rows and of waiting, within one percent of
    the rows.
    """
    stages = range(dist.get_rank(), dist.get_world_size() * len(modules), dist.get_world_size())
    rows = [profile.measurements[stage, kind][0] for stage in stages for kind in "FB"]
    busy_s, busy_j = (
        MICROBATCHES * sum(getattr(row, each) for row in rows) for each in ("time_s", "energy_j")
    )
    least_j, most_j = (
        busy_j + gpu.model.blocking_power_w * (span_s - busy_s) for span_s in seconds
    )
    assert busy_s < seconds[1]
    assert least_j - 0.01 * busy_j <= joules <= most_j + 0.01 * busy_j, (
        least_j,
        joules,
        most_j,
        busy_j,
    )


def torch_pipeline() -> tuple[Any, Any, list[Any]]:
    return _schedule(pipelining.Schedule1F1B, 1)


def _interleaved() -> tuple[Any, Any, list[Any]]:
    return _schedule(pipelining.ScheduleInterleaved1F1B, 2)


def _schedule(kind: Any, chunks: int) -> tuple[Any, Any, list[Any]]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    given, sent = torch.empty(4, WIDTH), torch.empty(4, WIDTH, requires_grad=True)
    stages = [
        pipelining.PipelineStage(
            _layer(number), number, chunks * size, CPU, sent if number else given, sent
        )
        for number in range(rank, chunks * size, size)
    ]
    schedule = kind(
        stages[0] if chunks == 1 else stages, MICROBATCHES, loss_fn=nn.functional.mse_loss
    )
    data = torch.randn(4 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(
        [each for stage in stages for each in stage.submod.parameters()], lr=0.01
    )

    def step() -> list[Any]:
        losses: list[Any] = []
        arguments = {"target": data, "losses": losses} if rank == size - 1 else {}
        schedule.step(*([data] if rank == 0 else []), **arguments)
        optimizer.step()  # gradients are kept and grow: every microbatch adds to one that is there
        return losses

    return schedule, step, [stage.submod for stage in stages]


def deepspeed_pipeline() -> tuple[Any, Any, list[Any]]:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False)
    module = PipelineModule(
        layers=[_layer(each) for each in range(2)],
        num_stages=2,
        loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
    )
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICROBATCHES,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "steps_per_print": 2**31,
    }
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=list(module.parameters()), config=config
    )
    data = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    return engine, lambda: [engine.train_batch(iter([(data, data)] * MICROBATCHES))], [module]


def _layer(stage: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))
