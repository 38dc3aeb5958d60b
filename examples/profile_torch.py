"""Profiles a pipeline of torch.distributed.pipelining in its first training step, and trains on.

On two GPUs:      torchrun --nproc-per-node 2 examples/profile_torch.py
Without a GPU:    torchrun --nproc-per-node 2 examples/profile_torch.py --gpu simulated:a100-sxm
"""

from __future__ import annotations

import os
from contextlib import nullcontext

import gpt
import options
import torch
import torch.distributed as dist
from torch.distributed import pipelining

from perseus_planner.profiler.pipeline import profile_pipeline

SCHEDULES = {
    "1f1b": (pipelining.Schedule1F1B, 1),
    "gpipe": (pipelining.ScheduleGPipe, 1),
    "interleaved-1f1b": (pipelining.ScheduleInterleaved1F1B, 2),
    "interleaved-zb": (pipelining.ScheduleInterleavedZeroBubble, 2),
}
"""Name -> its class, and the stages that each rank has."""


def main() -> None:
    """Train on one rank of the pipeline."""
    given = options.parsed(__doc__)
    device = torch.device("cpu")
    if torch.cuda.is_available() and not given.gpu.startswith("simulated:"):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    schedule, optimizer = pipeline(given, device)
    for step in range(given.steps):
        profiled = step == 0 and not given.no_profile
        sweep = profile_pipeline(schedule, gpu=given.gpu, output=given.output, settings=options.settings(given))
        with sweep if profiled else nullcontext():
            losses = train(schedule, given, step, device)
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            print(f"step {step}: loss {torch.stack(losses).mean().item():.9f}", flush=True)
    dist.destroy_process_group()


def pipeline(given, device):
    """The schedule on this rank, and the optimizer of its stages."""
    rank, ranks, size = dist.get_rank(), dist.get_world_size(), gpt.Size()
    kind, chunks = SCHEDULES[os.environ.get("SCHEDULE", "1f1b")]
    stages = [
        pipelining.PipelineStage(gpt.stage(size, number, chunks * ranks).to(device), number, chunks * ranks, device)
        for number in range(rank, chunks * ranks, ranks)
    ]
    schedule = kind(stages[0] if chunks == 1 else stages, given.microbatches, loss_fn=gpt.loss)
    return schedule, torch.optim.AdamW([each for stage in stages for each in stage.submod.parameters()], lr=1e-3)


def train(schedule, given, step, device):
    """Forward and backward of one iteration; the losses, on the last rank."""
    tokens, targets = (each.to(device) for each in gpt.batch(step, given.rows * given.microbatches, gpt.Size()))
    inputs = (tokens,) if dist.get_rank() == 0 else ()
    if dist.get_rank() < dist.get_world_size() - 1:
        schedule.step(*inputs)
        return []
    losses = []
    schedule.step(*inputs, target=targets, losses=losses)
    return losses


if __name__ == "__main__":
    main()
