"""Programs of ranks whose store rank 0 holds; launching.py runs them as "ending_programs:NAME"."""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil
import torch
import torch.distributed as dist
from runtime_training import GPU, Torch, plan_of, schedule_of

from perseus_planner.runtime import planner_runtime


def _begin(state: str) -> Callable[[], None]:
    """Begin, and return a function in which all ranks but 0 wait until rank 0 has ended, for
    four seconds at most.
    """
    os.environ["PLANNER_STATE_DIR"] = state
    dist.init_process_group("gloo")
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    first = psutil.Process(int(pids[0]))

    def stay() -> None:
        deadline_s = time.monotonic() + 4.0
        while (
            first.is_running()
            and first.status() != psutil.STATUS_ZOMBIE
            and time.monotonic() < deadline_s
        ):
            time.sleep(0.01)

    return (lambda: None) if dist.get_rank() == 0 else stay


def trains(state: str) -> None:
    """Train; the ranks other than 0 end later, and use the store until then."""
    stay, count = _begin(state), dist.get_world_size()
    pipeline, plan = Torch("1f1b", count), plan_of(schedule_of("1f1b", count, count))
    with planner_runtime(pipeline.engine, plan=plan, gpu=GPU) as runtime:
        for _ in range(3):
            pipeline.step()
        stay()
        if dist.get_rank() > 0:
            runtime.switch_to(plan).wait(60.0)
    os._exit(0)


def has_no_plan(state: str) -> None:
    """Have no plan on rank 0; the others come later."""
    stay, engine = _begin(state), Torch("1f1b", 3).engine
    stay()
    with planner_runtime(engine, plan="absent.yaml", gpu=GPU):
        pass
