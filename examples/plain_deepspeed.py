"""Trains a small GPT as a pipeline of DeepSpeed. It knows of no planner.

deepspeed --num_gpus 2 examples/plain_deepspeed.py
"""

from __future__ import annotations

import deepspeed
import gpt
import torch.distributed as dist
from deepspeed.pipe import PipelineModule

STEPS, MICROBATCHES, ROWS = 6, 4, 2
CONFIG = {
    "train_micro_batch_size_per_gpu": ROWS,
    "gradient_accumulation_steps": MICROBATCHES,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "steps_per_print": 2**31,
}

# Pipelines do not need this operation, and without a GPU DeepSpeed would compile it first.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

deepspeed.init_distributed()
rank, ranks = dist.get_rank(), dist.get_world_size()
size = gpt.Size()

module = PipelineModule(layers=gpt.layers(size), num_stages=ranks, loss_fn=gpt.loss)
engine, *_ = deepspeed.initialize(
    model=module, model_parameters=list(module.parameters()), config=CONFIG
)

for step in range(STEPS):
    numbers = range(step * MICROBATCHES, (step + 1) * MICROBATCHES)
    loss = engine.train_batch(gpt.batch(number, ROWS, size) for number in numbers)
    if rank == ranks - 1:
        print(f"step {step}: loss {loss.item():.9f}", flush=True)
dist.destroy_process_group()
