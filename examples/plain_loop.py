"""Trains a small GPT on each GPU, with data parallelism and without a pipeline. It knows of no
planner.

torchrun --nproc-per-node 2 examples/plain_loop.py
"""

from __future__ import annotations

import os

import gpt
import torch
import torch.distributed as dist
from torch import nn

STEPS, ROWS = 6, 8

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu", int(os.environ["LOCAL_RANK"]))
size = gpt.Size()

model = nn.parallel.DistributedDataParallel(nn.Sequential(*gpt.layers(size)).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(STEPS):
    tokens, targets = (each.to(device) for each in gpt.batch(step * ranks + rank, ROWS, size))
    loss = gpt.loss(model(tokens), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == ranks - 1:
        print(f"step {step}: loss {loss.item():.9f}", flush=True)
dist.destroy_process_group()
