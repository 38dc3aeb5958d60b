"""A tiny GPT that Megatron-core trains on the CPU."""
# ruff: noqa: TID253 - for ranks, which are there for torch and Megatron

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.timers import Timers
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import megatron_cpu

SEQUENCE, ROWS, VOCABULARY = 8, 1, 16
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 2,
    "moe_router_topk": 1,
    "moe_router_pre_softmax": True,
    "moe_aux_loss_coeff": 0.01,
    "moe_token_dispatcher_type": "allgather",
    "expert_model_parallel_size": 2,
    "add_bias_linear": False,
}


class Wrapper(nn.Module):
    """Wraps a chunk like Megatron's DistributedDataParallel and Float16Module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


_type = torch.Tensor.type


def _type_on_gpu(tensor: Any, *args: Any) -> Any:
    """Return the type by which the distributed optimizer recognizes float32."""
    return _type(tensor, *args) if args else "torch.cuda.FloatTensor"


@contextmanager
def parallel(
    virtual: int | None = None, tensor: int = 1, pipeline: int | None = None, experts: int = 1
) -> Iterator[None]:
    """Set up Megatron's parallel state; pipelines span all ranks by default."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline or dist.get_world_size(),
        virtual_pipeline_model_parallel_size=virtual,
        expert_model_parallel_size=experts,
    )
    try:
        with (
            megatron_cpu.cpu_only(),
            mock.patch.object(torch.Tensor, "type", _type_on_gpu),
            mock.patch.object(torch.Tensor, "cuda", lambda tensor: tensor),
            mock.patch.object(moe_utils, "te_general_gemm", None, create=True),
        ):
            yield
    finally:
        parallel_state.destroy_model_parallel()


FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


@contextmanager
def recomputing() -> Iterator[None]:
    """Set up Megatron's parallel state for trainings that recompute activations on the CPU."""
    from megatron.core.tensor_parallel import random

    with parallel(), ExitStack() as stack:
        for name in ("_get_cuda_rng_state", "_set_cuda_rng_state"):  # there are none on the CPU
            stack.enter_context(mock.patch.object(random, name, return_value=None))
        yield


class Training:
    """A small GPT on this rank, in one or more chunks, and its optimizer; equal ones give equal
    results.
    """

    finishes = True  #: Whether iterations end with a step of the optimizer
    #: Whether each loss is reduced over pipelines for a report, for which they wait for each other
    reports = True

    def __init__(
        self,
        virtual: int | None = None,
        group: int | None = None,
        *,
        apart: bool = False,
        overlap: bool = False,
        experts: int = 1,
        adapt: Callable[[int, nn.Module], None] = lambda number, chunk: None,
        **options: Any,
    ) -> None:
        ranks = parallel_state.get_pipeline_model_parallel_world_size()
        settings: dict[str, Any] = {
            "num_layers": ranks * (virtual or 1),
            "hidden_size": 8,
            "num_attention_heads": 2,
            "pipeline_model_parallel_size": ranks,
            "virtual_pipeline_model_parallel_size": virtual,
            "microbatch_group_size_per_vp_stage": group,
            "pipeline_dtype": torch.float32,
            "use_cpu_initialization": True,
            "batch_p2p_sync": False,
            "hidden_dropout": 0.1,
        }
        if experts > 1:
            settings |= EXPERTS
        config = TransformerConfig(**(settings | options))
        torch.manual_seed(parallel_state.get_pipeline_model_parallel_rank())
        self.chunks = [
            _chunk(copy.copy(config) if apart else config, each, virtual)
            for each in range(virtual or 1)
        ]
        for each, chunk in enumerate(self.chunks):
            adapt(each * ranks + parallel_state.get_pipeline_model_parallel_rank(), chunk)
        self.config = self.chunks[0].config
        self.configs = [chunk.config for chunk in self.chunks]
        self.model: list[Any] = [Wrapper(chunk) for chunk in self.chunks]
        parameters = [each for chunk in self.chunks for each in chunk.parameters()]
        if not parameters:  # an optimizer wants one, and a rank with empty stages has none
            parameters = [nn.Parameter(torch.zeros(1))]
        self.optimizer: Any = torch.optim.AdamW(parameters, lr=0.01)
        if overlap:
            self._distribute()

    @cached_property
    def engine(self) -> Any:
        """The planner's adapter, which a training that knows no planner does not load."""
        from perseus_planner.engines.megatron import MegatronModel

        return MegatronModel(self.model)

    def _distribute(self) -> None:
        """Train with the distributed optimizer, which communicates while the chunks compute."""
        flags = {"use_distributed_optimizer": True, "overlap_param_gather": True}
        ddp = DistributedDataParallelConfig(**flags, overlap_grad_reduce=True, bucket_size=500)
        self.model = [
            DistributedDataParallel(chunk.config, ddp, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(self.chunks)
        ]
        settings = OptimizerConfig(lr=0.01, **flags)
        self.optimizer = get_megatron_optimizer(settings, self.model)
        hooks = {
            "no_sync_func": [model.no_sync for model in self.model],
            "grad_sync_func": [model.start_grad_sync for model in self.model],
        }
        for config in {id(config): config for config in self.configs}.values():
            config.finalize_model_grads_func = finalize_model_grads
            config.grad_scale_func = self.optimizer.scale_loss
            for name, functions in hooks.items():
                setattr(config, name, functions if len(functions) > 1 else functions[0])

    def step(self, microbatches: int, *, forward_only: bool = False) -> list[Any]:
        """Run one iteration; return its losses on the last rank."""
        torch.manual_seed(100 + dist.get_rank())
        for model in self.model:
            if hasattr(model, "zero_grad_buffer"):
                model.zero_grad_buffer()
        return self.run(get_forward_backward_func(), microbatches, forward_only=forward_only)

    def run(
        self, forward_backward: Any, microbatches: int, *, forward_only: bool = False
    ) -> list[Any]:
        """Call a schedule function of Megatron-core."""
        data = torch.randint(
            VOCABULARY,
            (microbatches, ROWS, SEQUENCE),
            generator=torch.Generator().manual_seed(7 + parallel_state.get_data_parallel_rank()),
        )
        batches = [iter(data) for _ in self.model]
        losses: list[Any] = forward_backward(
            forward_step_func=partial(_forward_step, reports=self.reports),
            data_iterator=batches if len(batches) > 1 else batches[0],
            model=self.model if len(batches) > 1 else self.model[0],
            num_microbatches=microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=ROWS,
            forward_only=forward_only,
        )
        if not forward_only and self.finishes:
            self.finish()
        return losses

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[Any]:
        return [each.detach().clone() for chunk in self.chunks for each in chunk.parameters()]

    @contextmanager
    def watched(self) -> Iterator[list[tuple[int, str, int]]]:
        """Return what really runs, seen by hooks on modules and gradients."""
        seat, ran, handles = self.engine.pipeline_rank, [], []

        def watch(number: int, chunk: Any) -> None:
            stage = number * seat.ranks + seat.rank

            def forward(module: Any, args: Any, output: Any) -> None:
                microbatch = module.decoder.layers[
                    0
                ].current_microbatch  # the schedule writes it there
                ran.append((stage, "F", microbatch))
                if output.requires_grad:
                    output.register_hook(lambda gradient: ran.append((stage, "B", microbatch)))

            handles.append(chunk.register_forward_hook(forward))

        for number, chunk in enumerate(self.chunks):
            watch(number, chunk)
        yield ran
        for handle in handles:
            handle.remove()


class LoopTraining:
    """1F1B as Megatron-LM's `pretrain` trains, with the interface of the trainings in
    tiny_training.py.

    `megatron.training` is not part of megatron-core. This has the structure of its `train`,
    `train_step` and `evaluate` (core 0.16): one schedule function is taken at the start of training
    and another for each evaluation, and the timers of the config are those of a global variable,
    dropped while it evaluates.
    """

    def __init__(self) -> None:
        module: Any = ModuleType("megatron.training.global_vars")
        # At this level those of computations do nothing.
        module._GLOBAL_TIMERS = Timers(0, "minmax")
        sys.modules[module.__name__] = self._globals = module
        dist.init_process_group("gloo")
        self._parallel = parallel()
        self._parallel.__enter__()  # until the process ends
        self._training = Training()
        self._training.config.timers = module._GLOBAL_TIMERS
        self._train = get_forward_backward_func()

    def step(self) -> list[Any]:
        return self._training.run(self._train, 4)

    def evaluate(self) -> list[Any]:
        evaluate = get_forward_backward_func()
        with torch.no_grad():
            self._training.config.timers = None
            losses = self._training.run(evaluate, 4, forward_only=True)
            self._training.config.timers = self._globals._GLOBAL_TIMERS
        return losses

    def state(self) -> list[Any]:
        return self._training.weights()


def _chunk(config: Any, number: int, virtual: int | None) -> Any:
    stage = number if virtual else None
    return GPTModel(
        config,
        get_gpt_layer_local_spec(config.num_moe_experts),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=False,
        mtp_block_spec=_mtp_block(config, stage) if config.mtp_num_layers else None,
        vp_stage=stage,
    )


def _mtp_block(config: Any, stage: int | None) -> Any:
    """Return what predicts further tokens, on the ranks that do."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    layer = get_gpt_layer_local_spec()
    return get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False, vp_stage=stage)


def _forward_step(batches: Any, model: Any, *, reports: bool = True) -> Any:
    tokens = next(batches)
    places = torch.arange(SEQUENCE).expand_as(tokens)
    hidden = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)

    def loss(losses: Any) -> Any:
        reported = losses.mean().detach().clone()
        if reports:
            dist.all_reduce(reported, group=parallel_state.get_data_parallel_group())
        return losses.mean(), reported

    return model(tokens, places, hidden, labels=tokens), loss
