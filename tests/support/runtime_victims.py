"""Trains under a plan until a file asks it to stop, or until it is killed.

As a script it runs as one rank, under a launcher.
"""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch.distributed as dist
from runtime_training import Torch, Watch, any_rank, plan_of, planned, schedule_of

from perseus_planner.base.files import replacing
from perseus_planner.runtime import Runtime, attachment, rendezvous

PLAN = plan_of(schedule_of("1f1b", 2, 4))
VICTIM_GPU = "emulated:a100-sxm?call=1ms"
SLOW_S = 0.02  #: how long a computation waits for its clock; it need not come


def train(folder: str) -> None:
    """Train until a file `stop` exists; without a plan if a file `unplanned` does."""
    os.environ["PLANNER_STATE_DIR"] = f"{folder}/state"
    # Do not wait for minutes for ranks that are killed at the start; others come within that.
    rendezvous.RENDEZVOUS_S = attachment.ATTACH_S = 20.0
    dist.init_process_group("gloo")
    with replacing(Path(folder, f"met-{dist.get_rank()}")) as file:
        file.write(str(os.getpid()).encode())
    watch = Watch(VICTIM_GPU)
    pipeline = Torch("1f1b", 4, lambda *computation: _follow(watch, runtime, *computation))
    stop = Path(folder, "stop")
    plan = None if Path(folder, "unplanned").exists() else PLAN
    with planned(pipeline, plan, gpu=VICTIM_GPU) as runtime:
        if not os.fork():  # as a loader of data is, and lives on when its rank is killed
            while not stop.exists():
                time.sleep(0.05)
            os._exit(0)
        while not any_rank(stop.exists()):
            pipeline.step()
    os._exit(0)  # without waiting for ranks that may be gone


def _follow(watch: Watch, runtime: Runtime, stage: int, kind: str, microbatch: int) -> None:
    """Take some time for a computation, so that clocks can be set."""
    deadline_s = time.monotonic() + SLOW_S
    wanted_mhz = None if runtime.plan is None else runtime.plan.clocks[f"{stage}{kind}{microbatch}"]
    while (
        watch.gpu.locked_mhz != wanted_mhz
        and runtime.problem is None
        and time.monotonic() < deadline_s
    ):
        time.sleep(0.0005)


if __name__ == "__main__":
    (folder,) = (word for word in sys.argv[1:] if not word.startswith("--local_rank"))
    train(folder)  # DeepSpeed's launcher passes --local_rank
