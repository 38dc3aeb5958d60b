"""Profiles a GPTModel of Megatron-core in its first training step, and trains on.

On two GPUs:      torchrun --nproc-per-node 2 examples/profile_megatron.py
Without a GPU:    torchrun --nproc-per-node 2 examples/profile_megatron.py --gpu simulated:a100-sxm
"""

from __future__ import annotations

import os
from contextlib import nullcontext

import gpt
import megatron_cpu
import options
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

from perseus_planner.profiler.pipeline import profile_pipeline


def main() -> None:
    """Train on one rank of the pipeline."""
    given = options.parsed(__doc__)
    on_gpu = torch.cuda.is_available() and not given.gpu.startswith("simulated:")
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
    with nullcontext() if on_gpu else megatron_cpu.cpu_only():
        run(given, torch.device("cuda" if on_gpu else "cpu"))
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def run(given, device):
    """All training steps."""
    model = stage(gpt.Size(), on_gpu=device.type == "cuda").to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(given.steps):
        profiled = step == 0 and not given.no_profile
        sweep = profile_pipeline(model, gpu=given.gpu, output=given.output, settings=options.settings(given))
        with sweep if profiled else nullcontext() as profiling:
            losses = train(model, given, step, device, profiling.watched if profiled else lambda function: function)
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            print(f"step {step}: loss {torch.stack(losses).mean().item():.9f}", flush=True)


def stage(size, *, on_gpu):
    """This rank's chunk of the model."""
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


def train(model, given, step, device, watched):
    """Forward and backward of one iteration; the losses, on the last rank."""
    size = gpt.Size()
    first = step * given.microbatches
    batches = iter([gpt.batch(each, given.rows, size) for each in range(first, first + given.microbatches)])
    losses = get_forward_backward_func()(
        forward_step_func=watched(lambda *arguments: forward_step(*arguments, device)),
        data_iterator=batches,
        model=model,
        num_microbatches=given.microbatches,
        seq_length=size.sequence,
        micro_batch_size=given.rows,
        forward_only=False,
    )
    return [each["loss"] for each in losses]


def forward_step(batches, model, device):
    """The forward of one microbatch, and what makes a loss of it."""
    tokens, targets = (each.to(device) for each in next(batches))
    places = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
    hidden = torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=device).triu(1)
    output = model(tokens, places, hidden, labels=targets)

    def loss(losses):
        mean = losses.mean()
        return mean, {"loss": mean.detach().clone()}

    return output, loss


if __name__ == "__main__":
    main()
