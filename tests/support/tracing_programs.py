"""Programs of ranks that train tiny pipelines under torch's profiler with its defaults, for the
tests of `planner trace`. Each rank writes `rank<N>.json`, its trace, and `order<N>.json`, what it
ran by the engine's own calls.
"""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from schedule_engines import TORCH
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

STEPS = 3
WIDTH = 64


class Wide(nn.Module):
    """A layer with some work, whose backward has several operations."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + self.second(self.first(x).relu())


def _record(folder: Path, step: Callable[[], Any], ran: list[str], *, numbers_steps: bool) -> None:
    """Train under the profiler, and keep what ran in its last steps."""
    step()  # settles what engines do once
    ran.clear()
    rank = dist.get_rank()
    settings: dict[str, Any] = {"activities": [ProfilerActivity.CPU]}
    if numbers_steps:
        settings["schedule"] = schedule(wait=0, warmup=1, active=STEPS, repeat=1)
    with profile(**settings) as profiler:
        for _ in range(STEPS + numbers_steps):
            step()
            if numbers_steps:
                profiler.step()
    profiler.export_chrome_trace(str(folder / f"rank{rank}.json"))
    (folder / f"order{rank}.json").write_text(json.dumps(ran))
    dist.barrier()


def trace_torch(folder: str, name: str, microbatches: str, numbers_steps: str = "yes") -> None:
    """Trace a schedule of torch."""
    from tiny_training import Torch

    ran: list[str] = []
    training = Torch(
        name,
        int(microbatches),
        lambda stage, kind, number: ran.append(f"{stage}{kind}{number}"),
        layer=Wide,
        shape=(8, WIDTH),
        has_shapes=True,
    )
    _record(Path(folder), training.step, ran, numbers_steps=numbers_steps == "yes")
    dist.destroy_process_group()


def trace_deepspeed(folder: str, microbatches: str, numbers_steps: str = "yes") -> None:
    """Trace DeepSpeed's pipeline engine."""
    from tiny_training import DeepSpeed

    ran: list[str] = []
    training = DeepSpeed(
        int(microbatches),
        lambda stage, kind, number: ran.append(f"{stage}{kind}{number}"),
        layer=Wide,
        shape=(8, WIDTH),
    )
    _record(Path(folder), training.step, ran, numbers_steps=numbers_steps == "yes")
    dist.destroy_process_group()


def trace_megatron(
    folder: str, virtual: str, group: str, microbatches: str, numbers_steps: str = "yes"
) -> None:
    """Trace Megatron-core; `virtual` and `group` are 0 where there are none."""
    from tiny_gpt import Training, parallel

    dist.init_process_group("gloo")
    with parallel(int(virtual) or None):
        training = Training(int(virtual) or None, int(group) or None)

        def step() -> None:
            training.step(int(microbatches))

        _record(Path(folder), step, [], numbers_steps=numbers_steps == "yes")
    dist.destroy_process_group()


SCHEDULES = tuple(TORCH)
assert torch is not None
