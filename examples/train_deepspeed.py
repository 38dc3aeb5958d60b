"""Trains a PipelineEngine of DeepSpeed: its first step is profiled and planned for, the others run by the plan.

Without a GPU:  DS_ACCELERATOR=cpu torchrun --nproc-per-node 4 examples/train_deepspeed.py --gpu simulated:a100-sxm
On four GPUs:   deepspeed --num_gpus 4 examples/train_deepspeed.py --layers 24 --hidden 1024 --sequence 1024
"""

from __future__ import annotations

import deepspeed
import gpt
import shared
import torch.distributed as dist
from deepspeed.pipe import PipelineModule

from perseus_planner import schedules
from perseus_planner.profiler.pipeline import profile_pipeline
from perseus_planner.runtime import planner_runtime

# A pipeline does not need it, and without a GPU DeepSpeed would compile it first.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main() -> None:
    """Train on one rank of the pipeline."""
    given = shared.parsed(__doc__)
    deepspeed.init_distributed()
    run(pipeline(given), given)
    dist.destroy_process_group()


def run(engine, given):
    """All training steps."""
    if given.no_plan:
        train(engine, range(given.steps), given)
        return
    # 1. The first step is as ever; when it has ended, what it ran is profiled.
    with profile_pipeline(engine, gpu=given.gpu, output=given.profile, settings=given.sweep) as profiling:
        train(engine, range(1), given)
    # 2. Rank 0 has the profile, and plans.
    if profiling.profile is not None:
        schedule = schedules.one_f_one_b(dist.get_world_size(), given.microbatches)
        shared.write_plan(profiling.profile, schedule, given)
    # 3. All other steps run by the plan.
    with planner_runtime(engine, plan=given.plan, gpu=given.gpu, dry_run=given.dry_run, record=given.record):
        train(engine, range(1, given.steps), given)


def pipeline(given):
    """The engine of all ranks, one stage each."""
    module = PipelineModule(
        layers=gpt.layers(given.size), num_stages=dist.get_world_size(), loss_fn=gpt.loss, partition_method="uniform"
    )
    config = {
        "train_micro_batch_size_per_gpu": given.rows,
        "gradient_accumulation_steps": given.microbatches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": 2**31,
    }
    engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)
    return engine


def train(engine, steps, given):
    """Train; the last rank prints the losses."""
    for step in steps:
        loss = engine.train_batch(microbatches(step, given))
        if dist.get_rank() == dist.get_world_size() - 1:
            print(f"step {step}: loss {loss.item():.9f}", flush=True)


def microbatches(step, given):
    """The microbatches of one iteration."""
    for each in range(given.microbatches):
        yield gpt.batch(step * given.microbatches + each, given.rows, given.size)


if __name__ == "__main__":
    main()
