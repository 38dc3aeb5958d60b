"""Trains a DeepSpeed PipelineEngine: the first step is profiled, the others run by a plan.

Without a GPU:  DS_ACCELERATOR=cpu torchrun --nproc-per-node 4 examples/train_deepspeed.py --gpu
emulated:a100-sxm On four GPUs:   deepspeed --num_gpus 4 examples/train_deepspeed.py --layers 24
--hidden 1024 --sequence 1024
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

# Pipelines do not need this operation, and without a GPU DeepSpeed would compile it first.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main() -> None:
    """Train on one rank of the pipeline."""
    args = shared.parse_options(__doc__)
    deepspeed.init_distributed()
    run(pipeline(args), args)
    dist.destroy_process_group()


def run(engine, args):
    """Run all training steps."""
    if args.no_plan:
        train(engine, range(args.steps), args)
        return
    # 1. Run the first step unchanged; when it has ended, its computations are profiled.
    with profile_pipeline(
        engine, gpu=args.gpu, output=args.profile, settings=args.sweep
    ) as profiling:
        train(engine, range(1), args)
    # 2. Rank 0 has the profile, and plans from it.
    if profiling.profile is not None:
        schedule = schedules.one_f_one_b(dist.get_world_size(), args.microbatches)
        shared.write_plan(profiling.profile, schedule, args)
    # 3. Run all other steps with the plan.
    runtime = planner_runtime(
        engine,
        plan=args.plan,
        gpu=args.gpu,
        dry_run=args.dry_run,
        record=args.record,
        **shared.service_options(args),
    )
    with shared.emulated(engine, args), runtime:
        train(engine, range(1, args.steps), args)
    if dist.get_rank() == 0:
        shared.say_what_next(args)


def pipeline(args):
    """Return the engine, with one stage for each rank."""
    module = PipelineModule(
        layers=gpt.layers(args.size),
        num_stages=dist.get_world_size(),
        loss_fn=gpt.loss,
        partition_method="uniform",
    )
    config = {
        "train_micro_batch_size_per_gpu": args.rows,
        "gradient_accumulation_steps": args.microbatches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": 2**31,
    }
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=list(module.parameters()), config=config
    )
    return engine


def train(engine, steps, args):
    """Train; the last rank prints the loss of each step."""
    for step in steps:
        loss = engine.train_batch(microbatches(step, args))
        if dist.get_rank() == dist.get_world_size() - 1:
            print(f"step {step}: loss {loss.item():.9f}", flush=True)


def microbatches(step, args):
    """Yield the microbatches of one iteration."""
    for each in range(args.microbatches):
        yield gpt.batch(step * args.microbatches + each, args.rows, args.size)


if __name__ == "__main__":
    main()
