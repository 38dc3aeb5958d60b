"""Trains under a plan to a last iteration, with checkpoints; started again, it goes on from the
last one.

As a script it is one rank. In the first attempt the last rank waits for its death, amid a
computation."""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from runtime_training import Torch, Watch, plan_of, planned, schedule_of

from perseus_planner.base.files import replacing
from perseus_planner.runtime import joining, rendezvous, telemetry

ITERATIONS, CHECKPOINT_EVERY = 12, 4
PLAN = plan_of(schedule_of("1f1b", 2, 4))
GPU = "emulated:a100-sxm?call=1ms"


def train(folder: str, dies_at: str) -> None:
    """Train, each computation at its clock.

    Args:
        folder: What all attempts share. Each rank adds a line to `attempts-<rank>` in each attempt;
            the last rank adds one to `losses` for each iteration, and creates `amid` when it waits
            for its death.
        dies_at: The iteration in which the first attempt ends, from 0; -1 if it does not.
    """
    # Each launcher is a node, with a state folder of its own.
    joining.node_name = lambda: os.environ["PLANNER_STATE_DIR"]
    rendezvous.RENDEZVOUS_S, telemetry.WRITTEN_AFTER_S = 20.0, 0.1
    dist.init_process_group("gloo")
    rank, amid = dist.get_rank(), Path(folder, "amid")

    def run(stage: int, kind: str, microbatch: int) -> None:
        watch(stage, kind, microbatch)
        if (rank, iteration, kind, microbatch) == (1, int(dies_at), "F", 2) and not amid.exists():
            amid.touch()
            time.sleep(1000.0)

    watch = Watch(GPU)
    pipeline = Torch("1f1b", 4, run)
    first = _restore(folder, pipeline)
    plan, run_folder = Path(folder, "plan.yaml"), Path(folder, "run")
    with planned(pipeline, plan, gpu=GPU, record=run_folder) as runtime:
        _append(
            folder,
            f"attempts-{rank}",
            {"process": os.getpid(), "locked_mhz": watch.gpu.locked_mhz, "first": first},
        )
        watch.planned = lambda: runtime.plan
        for iteration in range(first, ITERATIONS):
            losses = pipeline.step()
            if losses:
                _append(
                    folder,
                    "losses",
                    {"iteration": iteration, "losses": [each.item() for each in losses]},
                )
            if (iteration + 1) % CHECKPOINT_EVERY == 0:
                _save(folder, pipeline, iteration + 1)
        assert runtime.plan == PLAN
        assert all(row.is_as_planned for row in runtime.iterations)
    dist.barrier()  # no rank leaves while another one uses the store
    dist.destroy_process_group()


def undisturbed(folder: str) -> None:
    """Write the plan, and train as a job that nobody kills."""
    os.environ["PLANNER_STATE_DIR"] = f"{folder}/state"
    plan = Path(folder, "plan.yaml")
    if os.environ["RANK"] == "0":
        PLAN.save(plan)
    train(folder, "-1")


def _save(folder: str, pipeline: Torch, done: int) -> None:
    with replacing(Path(folder, f"checkpoint-{done}-{pipeline.rank}")) as file:
        torch.save(pipeline.checkpoint(), file)


def _restore(folder: str, pipeline: Torch) -> int:
    """Load the last checkpoint that all ranks have written; return how many iterations it has
    behind it.
    """
    for done in range(ITERATIONS - ITERATIONS % CHECKPOINT_EVERY, 0, -CHECKPOINT_EVERY):
        if all(
            Path(folder, f"checkpoint-{done}-{rank}").exists()
            for rank in range(dist.get_world_size())
        ):
            pipeline.restore(torch.load(Path(folder, f"checkpoint-{done}-{pipeline.rank}")))
            return done
    return 0


def _append(folder: str, name: str, value: dict[str, object]) -> None:
    with Path(folder, name).open("a") as file:
        file.write(json.dumps(value) + "\n")


if __name__ == "__main__":
    train(*sys.argv[1:])
