"""Ranks that profile a training in virtual time, in which computations take three times as long
without autocast.
"""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from virtual_time import VirtualTime

from perseus_planner.engines import recording
from perseus_planner.gpu.simulated.gpu import SimulatedGpu
from perseus_planner.gpu.simulated.model import CATALOG
from perseus_planner.profiler.pipeline import profile_pipeline
from perseus_planner.profiler.ranks import measure
from perseus_planner.profiler.sweep import SweepSettings
from perseus_planner.profiles.profiles import Profile

WIDTH = 4


TIME = VirtualTime(look_s=0.0)


def spend(duration_s: float) -> None:
    """Let time pass, three times as much without autocast."""
    TIME.sleep(duration_s if torch.is_autocast_enabled("cpu") else 3 * duration_s)


class Spending(torch.autograd.Function):
    """Takes 10 ms forward and 20 ms backward."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        spend(0.010)
        ctx.autocast = torch.is_autocast_enabled("cpu")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=ctx.autocast):
            spend(0.020)
        return gradient


class Layer(nn.Linear):
    """A layer that takes time."""

    def forward(self, x: Any) -> Any:
        return Spending.apply(super().forward(x.float()).float())


class MeasuredGpu:
    """A GPU that is measured in this virtual time, at 100 W."""

    origin, keeps_settings = "measured", False

    def __init__(self) -> None:
        self._gpu = SimulatedGpu(CATALOG["a100-sxm"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gpu, name)

    def __enter__(self) -> MeasuredGpu:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def now_s(self) -> float:
        return TIME.now_s

    def clock_mhz(self) -> int:
        return 1410

    def wait(self, duration_s: float) -> None:
        TIME.sleep(duration_s)

    def energy_j(self) -> float:
        return 100 * (TIME.now_s // 0.02) * 0.02


def compared(autocast: str) -> None:
    """Profile a training under autocast, which the repetitions run under only if `autocast` is
    "kept".
    """
    dist.init_process_group("gloo")
    patch = pytest.MonkeyPatch()
    patch.setattr(recording, "time", TIME)
    patch.setattr(measure, "time", TIME)
    patch.setattr(measure, "open_gpu", lambda _: MeasuredGpu())
    if autocast == "lost":
        patch.setattr(recording.RecordedCall, "as_recorded", lambda _: nullcontext())
    example = torch.empty(4, WIDTH, requires_grad=True)
    stage = pipelining.PipelineStage(
        Layer(WIDTH, WIDTH), dist.get_rank(), 2, torch.device("cpu"), example, example
    )

    def loss(output: Any, target: Any) -> Any:
        spend(0.005)
        return (output - target).square().mean()

    schedule = pipelining.Schedule1F1B(stage, 4, loss_fn=loss)
    settings = SweepSettings(control="observed", window_s=0.5, cool_down_s=0.0)
    options = {
        "settings": settings,
        "blocking_power_w": 80.0,
        "gpu": "simulated:a100-sxm",
    }
    with profile_pipeline(schedule, output="profile.yaml", **options):
        data = torch.randn(16, WIDTH)
        with torch.autocast("cpu", torch.bfloat16):
            schedule.step(*([data] if dist.get_rank() == 0 else []), target=data)
    if dist.get_rank() == 0:
        profile = Profile.load("profile.yaml")
        times_ms = {
            f"{stage}{kind}": round(1000 * rows[0].time_s, 6)
            for (stage, kind), rows in profile.measurements.items()
        }
        print(json.dumps([times_ms, profile.conditions.get("unlike training")]))
    dist.destroy_process_group()
