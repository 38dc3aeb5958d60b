"""Functions that ranks run to train on emulated GPUs; launching.py starts them by name."""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from overlapping import Functions
from tiny_training import DeepSpeed, Torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.pipelining import schedules

from perseus_planner import Profile
from perseus_planner.base.errors import UsageError
from perseus_planner.gpu.simulated.emulated import EmulatedGpu
from perseus_planner.profiler.pipeline import profile_pipeline
from perseus_planner.profiler.sweep import SweepSettings
from perseus_planner.profiles.modes import OWN
from perseus_planner.runtime import Recompute
from perseus_planner.runtime.emulation import emulate
from perseus_planner.schedules import combined_1f1b, save_grid

WIDTH, MICROBATCHES = 32, 4
SHAPE = (4, WIDTH)


def train(name: str) -> None:
    """Losses and weights are the same without emulation; energy is that of the profile's rows
    and of waiting.
    """
    results = []
    for on_gpus in (False, True):
        torch.manual_seed(0)
        engine, step, modules = {
            "torch": torch_pipeline,
            "interleaved": partial(torch_pipeline, "interleaved-1f1b"),
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


def modes() -> None:
    """Each mode of a stage takes the energy of its rows, and so the time."""
    engine, step, modules = torch_pipeline(layer=lambda: checkpoint_wrapper(_layer()))
    recompute, drawn = Recompute(engine), {}
    switch = {"own": recompute.on, "keep": recompute.off}
    gpu_text = "emulated:a100-sxm?slower=20000"
    with emulate(engine, gpu_text, mode=lambda: recompute.is_on) as gpu:
        for mode, enter in switch.items():
            enter()
            step()  # counts its FLOPs
            drawn[mode] = _drawn(gpu, step)
        recompute.on()
    request = {"gpu": gpu.simulated_text, "settings": SweepSettings(control="observed")}
    with profile_pipeline(engine, output="profile.yaml", modes=switch, **request):
        step()
    dist.barrier()
    profile = Profile.load("profile.yaml")
    for mode in switch:
        _check(profile, modules, *drawn[mode], mode=mode)
    assert (
        profile.measurements[0, "B"][0].time_s
        > 1.1 * profile.measurements[0, "B", "keep"][0].time_s
    )
    dist.barrier()
    dist.destroy_process_group()


def split() -> None:
    """A schedule that computes I and W separately."""
    schedule = Torch("interleaved-zb", 4).engine
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
    mode: str = OWN,
) -> None:
    """Check that the energy is that of the profile's rows and of waiting, within one percent of
    the rows.
    """
    stages = range(dist.get_rank(), dist.get_world_size() * len(modules), dist.get_world_size())
    rows = [profile.measurements[stage, kind, mode][0] for stage in stages for kind in "FB"]
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


def torch_pipeline(
    name: str = "1f1b", layer: Callable[[], nn.Module] | None = None
) -> tuple[Any, Any, list[Any]]:
    """Return an engine, its step, and its modules."""
    pipeline = Torch(name, MICROBATCHES, layer=layer or _layer, shape=SHAPE, has_shapes=True)
    return _parts_of(pipeline)


def pairs_pipeline() -> tuple[Any, Any, list[Any]]:
    """1F1B with one forward more before the first pair, each of which a function of the training
    runs; the grid is in the folder.
    """
    schedule = combined_1f1b(dist.get_world_size(), 1, MICROBATCHES)
    if dist.get_rank() == 0:
        save_grid(schedule, "pairs.csv")
    dist.barrier()

    def made(stage: Any, count: int, **options: Any) -> Any:
        loaded = schedules._PipelineScheduleRuntime([stage], count, **options)
        loaded._load_csv("pairs.csv", format="compute_only")
        return loaded

    pipeline = Torch("1f1b", MICROBATCHES, layer=_layer, shape=SHAPE, has_shapes=True, kind=made)
    in_turn = Functions(pipeline).in_turn
    pipeline.engine.register_custom_function(schedules.OVERLAP_F_B, in_turn)
    return _parts_of(pipeline)


def _parts_of(pipeline: Torch) -> tuple[Any, Any, list[Any]]:
    def step() -> list[Any]:
        losses = pipeline.run(pipeline.engine.step)
        pipeline.optimizer.step()  # gradients are kept and grow: each microbatch adds to one
        return losses

    return pipeline.engine, step, list(pipeline.layers)


def deepspeed_pipeline(**options: Any) -> tuple[Any, Any, list[Any]]:
    made = {"layer": _layer, "shape": SHAPE, "layers": 2, "num_stages": 2, **options}
    pipeline = DeepSpeed(MICROBATCHES, **made)
    return pipeline.engine, pipeline.step, [pipeline.engine.module]


def _layer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))
