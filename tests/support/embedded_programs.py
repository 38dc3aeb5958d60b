"""What ranks run that train under a service of their own; launching.py asks for it by name."""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from runtime_training import GPU, NAME, Torch, any_rank
from strategies import smooth_profile

from perseus_planner import schedules, solve
from perseus_planner.runtime import planner_runtime

MICROBATCHES = 3


def train(service: str, state: str) -> None:
    """One pipeline of two stages, until there is a file `stop`; every rank writes its plan's
    time in each iteration.
    """
    os.environ["PLANNER_STATE_DIR"] = state
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    Path(f"pid-{rank}").write_text(str(os.getpid()))
    logging.getLogger("perseus_planner.runtime").addHandler(logging.FileHandler(f"heard-{rank}"))
    made = Torch("1f1b", MICROBATCHES)
    if rank == 0:
        frontier = solve(
            replace(smooth_profile(2, 90), gpu=NAME), schedules.one_f_one_b(2, MICROBATCHES)
        )
        frontier.save("frontier.npz")
        frontier.plan_for(frontier.baseline_time_s).save("plan.yaml")
    dist.barrier()
    served = {"service": service, "job": "own", "frontier": "frontier.npz"}
    with (
        planner_runtime(made.engine, plan="plan.yaml", gpu=GPU, **served) as runtime,
        open(f"rows-{rank}", "w", buffering=1) as rows,
    ):
        while not any_rank(Path("stop").exists()):
            time.sleep(0.03)  # as if there was something to compute
            made.step()
            print(runtime.plan.time_s, file=rows)
    dist.barrier()
    dist.destroy_process_group()
