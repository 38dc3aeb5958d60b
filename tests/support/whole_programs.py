"""Ranks that train data-parallel copies of a model on emulated GPUs, without a pipeline."""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from gpu_owners import CONTROLLER, planner_processes
from runtime_training import LONG_S, WarningLog, every_rank, job
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from perseus_planner.base.loops import LONGEST_PAUSE_S, Backoff
from perseus_planner.extensions.service.agent import agent
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.simulated.model import OpCost
from perseus_planner.gpu.torch_device import gpu_text
from perseus_planner.runtime import Runtime, planner_runtime, telemetry

GPU = "emulated:a100-sxm?call=1ms&step=0&noise=0&drift=0"
COST = OpCost(flops=2e12, bytes=5e10)  # an iteration mostly waits for its memory


def data_parallel(state: str, address: str) -> None:
    """Train with the runtime, until a lower clock ran both before and after the controller was
    killed, and the service has seen the job; then as often without.
    """
    agent._COUNTS_S, telemetry.CHECKPOINT_S = 0.2, 0.2
    short = mock.patch.object(Backoff.__init__, "__defaults__", (0.1, LONGEST_PAUSE_S, None))
    with job(state) as result, open_gpu(gpu_text(GPU, torch.device("cpu"))) as gpu:
        warning_log, values = WarningLog(), list[int | None]()
        top_mhz = max(gpu.supported_clocks_mhz)
        is_killed, since, until_s = False, 0, time.monotonic() + LONG_S

        def is_low() -> bool:
            return any(value is not None and value < top_mhz for value in values[since:])

        def goes_on(runtime: Runtime, number: int) -> bool:
            nonlocal is_killed, since
            assert time.monotonic() < until_s, (runtime.autopilot, runtime.problem, values)
            if not is_killed and every_rank(is_low()):
                is_killed, since = True, number
                if dist.get_rank() == 0:
                    planner_processes(state, CONTROLLER)[-1].send_signal(signal.SIGKILL)
                dist.barrier()
                while runtime.problem is None:
                    time.sleep(0.01)  # until the rank has lost it
            is_over = is_killed and is_low() and Path("stop").exists()
            return not every_rank(is_over)

        def compute() -> None:
            gpu.run(COST)
            values.append(gpu.locked_mhz)

        options = {"slowdown": 1.3, "record": "run", "service": address, "job": "ddp"}
        with short, planner_runtime(gpu=GPU, **options) as runtime:  # type: ignore[arg-type]
            found = _trained(runtime.iteration, compute, lambda number: goes_on(runtime, number))
            result["pipeline"] = runtime.pipeline
            result["recorded"] = len(runtime.iterations) > 0
        iterations = len(values)
        expected = _trained(nullcontext, lambda: None, lambda number: number < iterations)
        result["after"], result["iterations"] = gpu.locked_mhz, iterations
        result["equal"] = all(map(torch.equal, expected, found))
        result["warnings"] = warning_log.taken()
        result["state"] = os.path.exists("run/autopilot.yaml")


def _trained(
    iteration: Callable[[], AbstractContextManager[None]],
    compute: Callable[[], None],
    goes_on: Callable[[int], bool],
) -> list[Any]:
    """Return the losses and weights of all iterations."""
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)))
    optimizer, results = torch.optim.AdamW(model.parameters(), lr=0.01), []
    while goes_on(len(results)):
        with iteration():
            compute()
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(loss.detach())
    return [*results, *(each.detach() for each in model.parameters())]
