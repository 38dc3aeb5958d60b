"""Profiles a PipelineEngine of DeepSpeed in its first training step, and trains on.

On two GPUs:      deepspeed --num_gpus 2 examples/profile_deepspeed.py
Without a GPU:    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/profile_deepspeed.py --gpu simulated:a100-sxm
"""

from __future__ import annotations

from contextlib import nullcontext

import deepspeed
import gpt
import options
import torch.distributed as dist
from deepspeed.pipe import PipelineModule

from perseus_planner.profiler.pipeline import profile_pipeline

# A pipeline does not need it, and without a GPU DeepSpeed would compile it first.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main() -> None:
    """Train on one rank of the pipeline."""
    given = options.parsed(__doc__)
    deepspeed.init_distributed()
    engine, stages = pipeline(given), dist.get_world_size()
    for step in range(given.steps):
        profiled = step == 0 and not given.no_profile
        sweep = profile_pipeline(engine, gpu=given.gpu, output=given.output, settings=options.settings(given))
        with sweep if profiled else nullcontext():
            loss = engine.train_batch(microbatches(step, given))
        if dist.get_rank() == stages - 1:
            print(f"step {step}: loss {loss.item():.9f}", flush=True)
    dist.destroy_process_group()


def pipeline(given):
    """The engine of all ranks, one stage each."""
    size = gpt.Size()
    module = PipelineModule(
        layers=gpt.layers(size), num_stages=dist.get_world_size(), loss_fn=gpt.loss, partition_method="uniform"
    )
    config = {
        "train_micro_batch_size_per_gpu": given.rows,
        "gradient_accumulation_steps": given.microbatches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": 2**31,
    }
    engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)
    return engine


def microbatches(step, given):
    """The microbatches of one iteration."""
    for each in range(given.microbatches):
        yield gpt.batch(step * given.microbatches + each, given.rows, gpt.Size())


if __name__ == "__main__":
    main()
