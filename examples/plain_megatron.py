"""Trains a small GPT as a pipeline of Megatron-core. It knows of no planner.

torchrun --nproc-per-node 2 examples/plain_megatron.py
"""

from __future__ import annotations

import os
from contextlib import nullcontext

import gpt
import megatron_cpu
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

STEPS, MICROBATCHES, ROWS = 6, 4, 2
SIZE = gpt.Size()
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu", int(os.environ["LOCAL_RANK"]))


def chunk() -> GPTModel:
    """Return this rank's part of the model."""
    config = TransformerConfig(
        num_layers=SIZE.layers,
        hidden_size=SIZE.hidden,
        num_attention_heads=SIZE.heads,
        pipeline_model_parallel_size=dist.get_world_size(),
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        batch_p2p_sync=False,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=gpt.VOCABULARY,
        max_sequence_length=SIZE.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )


def forward_step(batches, model):
    """Run the forward of a microbatch; return its losses, and what makes one number of them."""
    tokens, targets = (each.to(DEVICE) for each in next(batches))
    positions = torch.arange(SIZE.sequence, device=DEVICE).expand_as(tokens)
    square = (1, 1, SIZE.sequence, SIZE.sequence)
    mask = torch.ones(square, dtype=torch.bool, device=DEVICE).triu(1)
    return model(tokens, positions, mask, labels=targets), mean_loss


def mean_loss(losses):
    """Return the loss to train on, and a copy to print."""
    mean = losses.mean()
    return mean, {"loss": mean.detach().clone()}


def train(model, optimizer) -> None:
    """Run all steps; the last rank prints their losses."""
    for step in range(STEPS):
        numbers = range(step * MICROBATCHES, (step + 1) * MICROBATCHES)
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=(gpt.batch(number, ROWS, SIZE) for number in numbers),
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=SIZE.sequence,
            micro_batch_size=ROWS,
            forward_only=False,
        )
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            mean = torch.stack([each["loss"] for each in losses]).mean()
            print(f"step {step}: loss {mean.item():.9f}", flush=True)


def main() -> None:
    """Train on one rank of the pipeline."""
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
    torch.manual_seed(0)
    with nullcontext() if ON_GPU else megatron_cpu.cpu_only():
        if ON_GPU:
            from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

            model_parallel_cuda_manual_seed(0)
        model = chunk().to(DEVICE)
        train(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
