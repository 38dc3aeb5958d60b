"""The stages of the small GPT for `planner profile`: `stage: stages:build_stage` in a job file.

In one process:         planner profile examples/job.yaml
A rank for each stage:  torchrun --nproc-per-node 4 -m perseus_planner profile examples/job.yaml
"""

from __future__ import annotations

import gpt
import torch

ROWS = 2


def build_stage(stage: int, stages: int):
    """Return the module of a stage, a microbatch to run it on, and the loss of the last stage."""
    size = gpt.Size()
    tokens, targets = gpt.batch(0, ROWS, size)
    inputs = tokens if stage == 0 else torch.randn(ROWS, size.sequence, size.hidden)
    loss = (
        (lambda logits: gpt.loss(logits, targets.to(logits.device)))
        if stage == stages - 1
        else None
    )
    return gpt.stage(size, stage, stages), inputs, loss
