"""Trains a torch.distributed.pipelining pipeline: the first step is profiled, the others run by a
plan.

Without a GPU:  torchrun --nproc-per-node 4 examples/train_torch.py --gpu emulated:a100-sxm
On four GPUs:   torchrun --nproc-per-node 4 examples/train_torch.py --layers 24 --hidden 1024
--sequence 1024
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
    args = shared.parse_options(__doc__)
    device = torch.device("cpu")
    if shared.is_on_gpu(args):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    run(Training(args, device), args)
    dist.destroy_process_group()


def run(training, args):
    """Run all training steps."""
    if args.no_plan:
        training.train(range(args.steps))
        return
    # 1. Run the first step unchanged; when it has ended, its computations are profiled.
    with profile_pipeline(
        training.schedule, gpu=args.gpu, output=args.profile, settings=args.sweep
    ) as profiling:
        training.train(range(1))
    # 2. Rank 0 has the profile, and plans from it.
    if profiling.profile is not None:
        schedule = schedules.one_f_one_b(dist.get_world_size(), args.microbatches)
        shared.write_plan(profiling.profile, schedule, args)
    # 3. Run all other steps with the plan.
    runtime = planner_runtime(
        training.schedule,
        plan=args.plan,
        gpu=args.gpu,
        dry_run=args.dry_run,
        record=args.record,
        **shared.service_options(args),
    )
    with shared.emulated(training.schedule, args), runtime:
        training.train(range(1, args.steps))
    if dist.get_rank() == 0:
        shared.say_what_next(args)


class Training:
    """This rank's stage, its schedule and its optimizer."""

    def __init__(self, args, device) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        module = gpt.stage(args.size, rank, ranks).to(device)
        stage = pipelining.PipelineStage(module, rank, ranks, device)
        self.schedule = pipelining.Schedule1F1B(stage, args.microbatches, loss_fn=gpt.loss)
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        self.args, self.device = args, device

    def train(self, steps) -> None:
        """Train; the last rank prints the loss of each step."""
        for step in steps:
            losses = self.forward_and_backward(step)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if losses:
                print(f"step {step}: loss {torch.stack(losses).mean().item():.9f}", flush=True)

    def forward_and_backward(self, step):
        """Run one iteration; return the losses of its microbatches on the last rank."""
        rows = self.args.rows * self.args.microbatches
        tokens, targets = (each.to(self.device) for each in gpt.batch(step, rows, self.args.size))
        inputs = (tokens,) if dist.get_rank() == 0 else ()
        if dist.get_rank() < dist.get_world_size() - 1:
            self.schedule.step(*inputs)
            return []
        losses = []
        self.schedule.step(*inputs, target=targets, losses=losses)
        return losses


if __name__ == "__main__":
    main()
