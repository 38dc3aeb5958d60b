"""Trains a small GPT as a pipeline of torch.distributed.pipelining. It knows of no planner.

torchrun --nproc-per-node 2 examples/plain_torch.py
"""

from __future__ import annotations

import os

import gpt
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

STEPS, MICROBATCHES, ROWS = 6, 4, 2

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu", int(os.environ["LOCAL_RANK"]))
size = gpt.Size()

module = gpt.stage(size, rank, ranks).to(device)
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
schedule = Schedule1F1B(PipelineStage(module, rank, ranks, device), MICROBATCHES, loss_fn=gpt.loss)

for step in range(STEPS):
    tokens, targets = (each.to(device) for each in gpt.batch(step, ROWS * MICROBATCHES, size))
    inputs = [tokens] if rank == 0 else []
    losses: list[torch.Tensor] = []
    outputs = {"target": targets, "losses": losses} if rank == ranks - 1 else {}
    schedule.step(*inputs, **outputs)
    optimizer.step()
    optimizer.zero_grad()
    if losses:
        print(f"step {step}: loss {torch.stack(losses).mean().item():.9f}", flush=True)
dist.destroy_process_group()
