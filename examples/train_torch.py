"""Trains a torch.distributed.pipelining pipeline: its first step is profiled and planned for, others run by the plan.

Without a GPU:  torchrun --nproc-per-node 4 examples/train_torch.py --gpu simulated:a100-sxm
On four GPUs:   torchrun --nproc-per-node 4 examples/train_torch.py --layers 24 --hidden 1024 --sequence 1024
"""

from __future__ import annotations

import os

import gpt
import shared
import torch
import torch.distributed as dist
from torch.distributed import pipelining

from perseus_planner import schedules
from perseus_planner.profiler.pipeline import profile_pipeline
from perseus_planner.runtime import planner_runtime


def main() -> None:
    """Train on one rank of the pipeline."""
    given = shared.parsed(__doc__)
    device = torch.device("cpu")
    if shared.is_on_gpu(given):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    run(Training(given, device), given)
    dist.destroy_process_group()


def run(training, given):
    """All training steps."""
    if given.no_plan:
        training.train(range(given.steps))
        return
    # 1. The first step is as ever; when it has ended, what it ran is profiled.
    with profile_pipeline(training.schedule, gpu=given.gpu, output=given.profile, settings=given.sweep) as profiling:
        training.train(range(1))
    # 2. Rank 0 has the profile, and plans.
    if profiling.profile is not None:
        schedule = schedules.one_f_one_b(dist.get_world_size(), given.microbatches)
        shared.write_plan(profiling.profile, schedule, given)
    # 3. All other steps run by the plan.
    with planner_runtime(training.schedule, plan=given.plan, gpu=given.gpu, dry_run=given.dry_run, record=given.record):
        training.train(range(1, given.steps))


class Training:
    """This rank's stage, its schedule and its optimizer."""

    def __init__(self, given, device) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        module = gpt.stage(given.size, rank, ranks).to(device)
        stage = pipelining.PipelineStage(module, rank, ranks, device)
        self.schedule = pipelining.Schedule1F1B(stage, given.microbatches, loss_fn=gpt.loss)
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        self.given, self.device = given, device

    def train(self, steps) -> None:
        """Train; the last rank prints the losses."""
        for step in steps:
            losses = self.forward_and_backward(step)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if losses:
                print(f"step {step}: loss {torch.stack(losses).mean().item():.9f}", flush=True)

    def forward_and_backward(self, step):
        """One iteration; the losses of its microbatches, on the last rank."""
        rows = self.given.rows * self.given.microbatches
        tokens, targets = (each.to(self.device) for each in gpt.batch(step, rows, self.given.size))
        inputs = (tokens,) if dist.get_rank() == 0 else ()
        if dist.get_rank() < dist.get_world_size() - 1:
            self.schedule.step(*inputs)
            return []
        losses = []
        self.schedule.step(*inputs, target=targets, losses=losses)
        return losses


if __name__ == "__main__":
    main()
