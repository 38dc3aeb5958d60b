"""One rank of number 23: trains on an emulated GPU at full clocks, by the best plan, and without a
plan.

    learning_ranks.py GPU MICROBATCHES ITERATIONS FOLDER

A process of a job of torch.distributed, with its rank in the environment. Rank 0 writes
FOLDER/learning.json.
"""

# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from emulated_ranks import CHANGE, torch_pipeline
from emulated_training import DEPTHS

from perseus_planner import Profile, schedules, solve
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.simulated.emulated import EmulatedGpu
from perseus_planner.profiler.pipeline import profile_pipeline
from perseus_planner.runtime import planner_runtime
from perseus_planner.runtime.emulation import emulate

if TYPE_CHECKING:
    from emulated_ranks import Step

MAX_CHANGES = 8
_FEW = 7  #: iterations at full clocks, and by the plan; the first two do not count


def main(gpu: str, microbatches: str, iterations: str, folder: str) -> None:
    """Train in three ways, and write what each iteration took and drew over all ranks."""
    torch.set_num_threads(1)
    engine, step = torch_pipeline(int(microbatches))
    where, rank = Path(folder), dist.get_rank()
    with open_gpu(f"emulated:{gpu.replace('?', f'/{rank}?')}") as device:
        assert isinstance(device, EmulatedGpu)
        with profile_pipeline(engine, gpu=device.simulated_text, output=where / "profile.yaml"):
            step()
        planned = [0.0, 0.0, 0.0]
        if rank == 0:
            profile = replace(Profile.load(where / "profile.yaml"), clock_change=CHANGE)
            frontier = solve(profile, schedules.one_f_one_b(len(DEPTHS), int(microbatches)))
            plan = frontier.plan_for(frontier.baseline_time_s, max_changes=MAX_CHANGES)
            plan.save(where / "plan.yaml")
            planned = [
                plan.saving_j / plan.baseline_energy_j,
                plan.time_s / plan.baseline_time_s,
                plan.time_s,
            ]
        dist.barrier()
        ways: dict[str, Any] = {}
        with emulate(engine, device.text):
            for name in ("full", "plan", "learning"):
                plan_of = {"plan": {"plan": where / "plan.yaml"}, "learning": {"state": None}}
                with (
                    nullcontext()
                    if name == "full"
                    else planner_runtime(
                        engine, gpu=device.text, max_changes=MAX_CHANGES, **plan_of[name]
                    )
                ) as runtime:
                    ways[name] = _measured(
                        step, device, int(iterations) if name == "learning" else _FEW, runtime
                    )
    if rank == 0:
        (where / "learning.json").write_text(json.dumps({"planned": planned, **ways}))
    dist.barrier()
    dist.destroy_process_group()


def _measured(step: Step, gpu: EmulatedGpu, iterations: int, runtime: Any) -> list[Any]:
    """Return seconds of each iteration on rank 0, joules over all ranks, and what the autopilot
    did.
    """
    moments, phases = [(time.monotonic(), gpu.energy_j())], []
    for _ in range(iterations):
        step()
        moments.append((time.monotonic(), gpu.energy_j()))
        phases.append(
            runtime.autopilot.phase if runtime is not None and runtime.autopilot is not None else ""
        )
    mine = [
        (end_s - start_s, end_j - start_j)
        for (start_s, start_j), (end_s, end_j) in pairwise(moments)
    ]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    together = zip(*of_ranks, strict=True)
    return [
        (spans[0][0], sum(energy_j for _, energy_j in spans), phase)
        for spans, phase in zip(together, phases, strict=True)
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
