"""What ranks run that train under the planner's service on emulated GPUs; launching.py asks for
them by name.
"""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from runtime_training import LONG_S, WarningLog, any_rank
from tiny_training import DeepSpeed, Torch
from torch import nn

from perseus_planner import Profile, schedules, solve
from perseus_planner.extensions.service.agent import agent
from perseus_planner.extensions.service.client import Client
from perseus_planner.profiler.pipeline import profile_pipeline
from perseus_planner.runtime import planner_runtime, telemetry
from perseus_planner.runtime.emulation import emulate

WIDTH, ROWS, MICROBATCHES = 64, 8, 4
STAGES = PIPELINES = 2
GPU = "a100-sxm?slower=400000"

Step = Callable[[], object]


def train(engine: str, address: str, state: str) -> None:
    """Two pipelines of two stages, until there is a file `stop`; every rank writes a row for each
    iteration.

    A file `slow` says for how many seconds pipeline 1 waits for its data in each iteration, and
    `proposed` when plans were last proposed.
    """
    os.environ["PLANNER_STATE_DIR"] = state
    telemetry.CHECKPOINT_S, agent._COUNTS_S = (
        1.0,
        0.5,
    )  # so that who reads what was counted need not wait for long
    agent._END_S = (
        LONG_S  # a busy machine answers late, and makes ranks slow, of which nothing is to be said
    )
    agent.Client = lambda address, timeout_s: Client(address, timeout_s=LONG_S)
    agent.ServiceLink.on_straggling = lambda _, then: lambda straggling: None
    propose = agent.Agent._propose

    def noted(self: agent.Agent, found: Any) -> None:
        Path("proposed").write_text(str(time.time()))
        propose(self, found)

    agent.Agent._propose = noted
    made, step = {"torch": torch_pipelines, "deepspeed": _deepspeed}[engine]()
    warning_log = WarningLog()
    with profile_pipeline(made, gpu=f"simulated:{GPU}&noise=0&drift=0", output="profile.yaml"):
        step()
    if dist.get_rank() == 0:
        frontier = solve(Profile.load("profile.yaml"), schedules.one_f_one_b(STAGES, MICROBATCHES))
        frontier.save("frontier.npz")
        frontier.plan_for(frontier.baseline_time_s).save("plan.yaml")
    dist.barrier()
    served = {"service": address, "job": "e2e", "frontier": "frontier.npz"}
    served["record"] = "run"
    with (
        emulate(made, f"emulated:{GPU}") as gpu,
        planner_runtime(made, plan="plan.yaml", gpu=f"emulated:{GPU}", **served) as runtime,
        open(f"rows-{dist.get_rank()}", "w", buffering=1) as rows,
    ):
        while not any_rank(Path("stop").exists()):  # and so all wait for the slowest pipeline
            slow = Path("slow")
            if runtime.pipeline == 1 and slow.exists():
                time.sleep(float(slow.read_text()))
            begin_s, begin_j = time.time(), gpu.energy_j()
            step()
            row = {"begin_s": begin_s, "begin_j": begin_j, "plan_s": runtime.plan.time_s}
            row |= {"energy_j": gpu.energy_j(), "read_s": time.time()}
            print(json.dumps(row), file=rows)
        ran = [
            (each.version, each.is_as_planned, each.clock, each.achieved_mhz, each.changes_late)
            for each in runtime.iterations
        ]
    said = {
        "pipeline": runtime.pipeline,
        "problem": runtime.problem,
        "ran": ran,
        "warnings": warning_log.taken(),
    }
    dist.barrier()
    print("\n" + json.dumps(said), flush=True)
    dist.destroy_process_group()


def torch_pipelines() -> tuple[Any, Step]:
    """Two pipelines of two stages side by side: the schedule, and a step of the training."""
    made = Torch(
        "1f1b", MICROBATCHES, sides=PIPELINES, layer=_layer, shape=(ROWS, WIDTH), has_shapes=True
    )
    return made.engine, made.step


def _deepspeed() -> tuple[Any, Step]:
    sizes = {"layers": STAGES, "num_stages": STAGES}
    made = DeepSpeed(MICROBATCHES, layer=_layer, shape=(ROWS, WIDTH), **sizes)
    return made.engine, made.step


def _layer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
