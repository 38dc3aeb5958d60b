"""Ranks that train data-parallel copies of a model on emulated GPUs, without a pipeline."""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from runtime_training import WarningLog, job
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.simulated.model import OpCost
from perseus_planner.gpu.torch_device import gpu_text
from perseus_planner.runtime import planner_runtime
from perseus_planner.runtime.whole import search

GPU = "emulated:a100-sxm?call=1ms&step=0&noise=0&drift=0"
COST = OpCost(flops=2e12, bytes=5e10)  # an iteration mostly waits for its memory
ITERATIONS = 150


def data_parallel(state: str) -> None:
    """Train without and with the runtime."""
    search.WINDOW_S = 0.3  # these counters have no steps
    with job(state) as result:
        warning_log = WarningLog()
        expected = _trained(nullcontext, lambda: None)
        with open_gpu(gpu_text(GPU, torch.device("cpu"))) as gpu:
            values: list[int | None] = []

            def compute() -> None:
                gpu.run(COST)
                values.append(gpu.locked_mhz)

            with planner_runtime(gpu=GPU, slowdown=1.3) as runtime:
                found = _trained(runtime.iteration, compute)
            result["after"] = gpu.locked_mhz
        result["equal"] = all(map(torch.equal, expected, found))
        result["values"] = values
        result["reference_s"], result["problem"] = runtime.reference_s, runtime.problem
        result["warnings"] = warning_log.taken()
        result["state"] = os.path.exists("autopilot.yaml")


def _trained(
    iteration: Callable[[], AbstractContextManager[None]], compute: Callable[[], None]
) -> list[Any]:
    """Return the losses and weights of all iterations."""
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)))
    optimizer, results = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for _ in range(ITERATIONS):
        with iteration():
            compute()
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(loss.detach())
    return [*results, *(each.detach() for each in model.parameters())]
