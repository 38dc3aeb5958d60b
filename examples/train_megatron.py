"""Trains a Megatron-core GPTModel: the first step is profiled, the others run by a plan.

Without a GPU:  torchrun --nproc-per-node 4 examples/train_megatron.py --gpu emulated:a100-sxm
On four GPUs:   torchrun --nproc-per-node 4 examples/train_megatron.py --layers 24 --hidden 1024
--sequence 1024
"""

from __future__ import annotations

import os
from contextlib import nullcontext

import gpt
import megatron_cpu
import shared
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

from perseus_planner import schedules
from perseus_planner.profiler.pipeline import profile_pipeline
from perseus_planner.runtime import planner_runtime


def main() -> None:
    """Train on one rank of the pipeline."""
    args = shared.parse_options(__doc__)
    on_gpu = shared.is_on_gpu(args)
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
    with nullcontext() if on_gpu else megatron_cpu.cpu_only():
        run(Training(args, torch.device("cuda" if on_gpu else "cpu")), args)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def run(training, args):
    """Run all training steps."""
    if args.no_plan:
        training.train(range(args.steps))
        return
    # 1. Run the first step, wrapped by `watched`; when it has ended, its computations are profiled.
    with profile_pipeline(
        training.model, gpu=args.gpu, output=args.profile, settings=args.sweep
    ) as profiling:
        training.train(range(1), profiling.watched)
    # 2. Rank 0 has the profile, and plans from it.
    if profiling.profile is not None:
        schedule = schedules.one_f_one_b(dist.get_world_size(), args.microbatches)
        shared.write_plan(profiling.profile, schedule, args)
    # 3. Run all other steps with the plan.
    runtime = planner_runtime(
        training.model,
        plan=args.plan,
        gpu=args.gpu,
        dry_run=args.dry_run,
        record=args.record,
        **shared.service_options(args),
    )
    with shared.emulated(training.model, args), runtime:
        training.train(range(1, args.steps))
    if dist.get_rank() == 0:
        shared.say_what_next(args)


class Training:
    """This rank's chunk of the model, and its optimizer."""

    def __init__(self, args, device) -> None:
        self.model = stage(args.size, on_gpu=device.type == "cuda").to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.args, self.device = args, device

    def train(self, steps, watched=lambda forward_step: forward_step) -> None:
        """Train; the last rank prints the loss of each step."""
        for step in steps:
            losses = self.forward_and_backward(step, watched)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if losses:
                print(f"step {step}: loss {torch.stack(losses).mean().item():.9f}", flush=True)

    def forward_and_backward(self, step, watched):
        """Run one iteration; return the losses of its microbatches on the last rank."""
        args, first = self.args, step * self.args.microbatches
        batches = iter(
            [
                gpt.batch(each, args.rows, args.size)
                for each in range(first, first + args.microbatches)
            ]
        )
        losses = get_forward_backward_func()(
            forward_step_func=watched(self.forward_step),
            data_iterator=batches,
            model=self.model,
            num_microbatches=args.microbatches,
            seq_length=args.size.sequence,
            micro_batch_size=args.rows,
            forward_only=False,
        )
        return [each["loss"] for each in losses]

    def forward_step(self, batches, model):
        """Run the forward of one microbatch; return its losses and the function that averages
        them.
        """
        tokens, targets = (each.to(self.device) for each in next(batches))
        positions = torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)
        mask = torch.ones(
            1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=self.device
        ).triu(1)
        return model(tokens, positions, mask, labels=targets), mean_loss


def mean_loss(losses):
    """Return the loss to train on, and a copy to keep."""
    mean = losses.mean()
    return mean, {"loss": mean.detach().clone()}


def stage(size, *, on_gpu):
    """Return this rank's chunk of the model."""
    torch.manual_seed(0)
    if on_gpu:
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        pipeline_model_parallel_size=dist.get_world_size(),
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        batch_p2p_sync=False,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=gpt.VOCABULARY,
        max_sequence_length=size.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )


if __name__ == "__main__":
    main()
