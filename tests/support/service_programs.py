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

import torch
import torch.distributed as dist
from runtime_training import LONG_S, WarningLog, any_rank
from torch import nn
from torch.distributed import pipelining

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
    made, step = {"torch": _torch, "deepspeed": _deepspeed}[engine]()
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


def _torch(*, init: bool = True) -> tuple[Any, Step]:
    if init:
        dist.init_process_group("gloo")
    groups = [
        dist.new_group(list(range(pipeline, STAGES * PIPELINES, PIPELINES)))
        for pipeline in range(PIPELINES)
    ]
    number, pipeline = divmod(dist.get_rank(), PIPELINES)
    given, sent = torch.empty(ROWS, WIDTH), torch.empty(ROWS, WIDTH, requires_grad=True)
    inputs = sent if number else given
    stage = pipelining.PipelineStage(
        _layer(number), number, STAGES, torch.device("cpu"), inputs, sent, group=groups[pipeline]
    )
    schedule = pipelining.Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    data = torch.randn(ROWS * MICROBATCHES, WIDTH)

    def step() -> None:
        schedule.step(*([] if number else [data]), **({"target": data} if number else {}))

    return schedule, step


def _deepspeed() -> tuple[Any, Step]:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
        False  # no pipeline needs it, and it would be compiled
    )
    deepspeed.init_distributed("gloo", verbose=False)
    module = PipelineModule(
        layers=[_layer(number) for number in range(STAGES)],
        num_stages=STAGES,
        loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
    )
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICROBATCHES,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "steps_per_print": 2**31,
    }
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=list(module.parameters()), config=config
    )
    data = torch.randn(ROWS, WIDTH)
    return engine, lambda: engine.train_batch(iter([(data, data)] * MICROBATCHES))


def _layer(stage: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
