"""A tiny GPT that Megatron-core trains on the CPU."""
# ruff: noqa: TID253 - for ranks, which are there for torch and Megatron

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
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
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.timers import Timers
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import megatron_cpu
from tiny_models import ROWS, SEQUENCE, VOCABULARY, Place, chunk_of

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


OVERLAPPED: dict[str, Any] = {
    **EXPERTS,
    "moe_token_dispatcher_type": "alltoall",
    "moe_aux_loss_coeff": 0.0,  # its log is as long as the first model
    "overlap_p2p_comm": True,
    "batch_p2p_comm": False,
}
"""Of experts whose all-to-all is overlapped: layers of a forward and a backward run in turn."""

_type = torch.Tensor.type


def _type_on_gpu(tensor: Any, *args: Any) -> Any:
    """Return the type by which the distributed optimizer recognizes float32."""
    return _type(tensor, *args) if args else "torch.cuda.FloatTensor"


@contextmanager
def on_cpu() -> Iterator[None]:
    """Let Megatron train on the CPU."""
    with (
        megatron_cpu.cpu_only(),
        mock.patch.object(torch.Tensor, "type", _type_on_gpu),
        mock.patch.object(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
        mock.patch("torch.cuda.synchronize"),
        mock.patch("torch.cuda.current_stream"),
        mock.patch.object(moe_utils, "te_general_gemm", None, create=True),
    ):
        yield


def _keep(*_: Any) -> bool:
    return False


@contextmanager
def overlapping() -> Iterator[None]:
    """Let Megatron overlap experts on the CPU: its streams and events do nothing, so all runs in
    the order of its calls, and what it frees early on a GPU is kept.
    """
    exchange = dist.all_to_all_single

    def exchanged(
        output: Any, given: Any, output_sizes: Any = None, given_sizes: Any = None, **options: Any
    ) -> Any:
        """Exchange tokens whose numbers a GPU would have copied to the host."""
        sizes = {"output_split_sizes": output_sizes, "input_split_sizes": given_sizes} | options
        for name in ("output_split_sizes", "input_split_sizes"):
            if sizes[name] is not None:
                sizes[name] = list(map(int, sizes[name]))
        return exchange(output, given, **sizes)

    with ExitStack() as stack:
        for name in ("Stream", "Event", "nvtx.range_push", "nvtx.range_pop"):
            stack.enter_context(mock.patch(f"torch.cuda.{name}"))
        stack.enter_context(mock.patch("torch.cuda.stream", return_value=nullcontext()))
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream"))
        stack.enter_context(mock.patch.object(dist, "all_to_all_single", exchanged))
        # Core 0.19 has it in the second module, which 0.16 lacks.
        for name in ("gpt.fine_grained_callables", "common.utils"):
            name = f"megatron.core.models.{name}"
            module = import_module(name) if find_spec(name) else None
            if hasattr(module, "should_free_input"):
                stack.enter_context(mock.patch.object(module, "should_free_input", _keep))
        yield


@contextmanager
def parallel(
    virtual: int | None = None,
    tensor: int = 1,
    pipeline: int | None = None,
    experts: int = 1,
    context: int = 1,
    embeddings: Sequence[int] | None = None,
) -> Iterator[None]:
    """Set up Megatron's parallel state; pipelines span all ranks by default.

    Args:
        virtual: Chunks on each rank; None if the model is not cut into chunks.
        tensor: Ranks of tensor parallel.
        pipeline: Ranks of a pipeline.
        experts: Ranks that share a layer's experts.
        context: Ranks of context parallel.
        embeddings: Which ranks of a pipeline have word embeddings; None for Megatron's default.
    """
    get_embedding_ranks = None
    if embeddings is not None:
        get_embedding_ranks = lambda ranks, *_: [ranks[each] for each in embeddings]  # noqa: E731
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline or dist.get_world_size(),
        virtual_pipeline_model_parallel_size=virtual,
        expert_model_parallel_size=experts,
        context_parallel_size=context,
        get_embedding_ranks=get_embedding_ranks,
    )
    try:
        with on_cpu():
            yield
    finally:
        parallel_state.destroy_model_parallel()


def grid_of(pipeline: int, replicas: int, offset: int = 0) -> Any:
    """Return Megatron's HyperCommGrid of the ranks from `offset` on, with its process groups."""
    from megatron.core.hyper_comm_grid import HyperCommGrid

    sizes = {"tp": 1, "cp": 1, "pp": pipeline, "dp": replicas}
    made = HyperCommGrid(list(sizes.values()), list(sizes), rank_offset=offset, backend="gloo")
    for names in (["tp"], ["cp"], ["pp"], ["dp"], ["dp", "cp"], ["tp", "cp"]):
        made.create_pg(names)
    return made


@contextmanager
def gridded(pipeline: int) -> Iterator[Any]:
    """Set up process groups of a grid, and no parallel state; yield the groups."""
    made = grid_of(pipeline, dist.get_world_size() // pipeline)
    # Attention without Transformer Engine computes in it.
    parallel_state._set_global_memory_buffer()
    try:
        with on_cpu():
            yield groups_of(made)
    finally:
        parallel_state.destroy_global_memory_buffer()


def groups_of(made: Any) -> Any:
    """Return the process groups of a grid as a ProcessGroupCollection."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection()
    for name in ("tp", "cp", "pp", "dp"):
        setattr(groups, name, made.get_pg([name]))
    groups.dp_cp = made.get_pg(["dp", "cp"])
    # A model without experts asks for these as well.
    groups.tp_cp = made.get_pg(["tp", "cp"])
    groups.ep = groups.expt_tp = groups.tp
    groups.expt_dp = groups.dp
    # No stage shares its embeddings.
    groups.embd = groups.pos_embd = None
    return groups


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
        model: str = "gpt",
        groups: Any = None,
        combined: bool = False,
        **options: Any,
    ) -> None:
        self._groups = groups
        pipeline = self._group("pp", parallel_state.get_pipeline_model_parallel_group)
        fields: dict[str, Any] = {
            "num_layers": pipeline.size() * (virtual or 1),
            "hidden_size": 8,
            "num_attention_heads": 2,
            "pipeline_model_parallel_size": pipeline.size(),
            "virtual_pipeline_model_parallel_size": virtual,
            "microbatch_group_size_per_vp_stage": group,
            "pipeline_dtype": torch.float32,
            "use_cpu_initialization": True,
            "batch_p2p_sync": False,
            "hidden_dropout": 0.1,
        }
        if combined:
            fields |= OVERLAPPED | {"expert_model_parallel_size": experts}
        elif experts > 1:
            fields |= EXPERTS
        config = TransformerConfig(**fields | options)
        torch.manual_seed(pipeline.rank())
        places = [
            Place(pipeline.rank(), pipeline.size(), number, virtual)
            for number in range(virtual or 1)
        ]
        self.chunks = [
            chunk_of(model, copy.copy(config) if apart else config, place, groups)
            for place in places
        ]
        for each, chunk in enumerate(self.chunks):
            adapt(each * pipeline.size() + pipeline.rank(), chunk)
        self.config = self.chunks[0].config
        self.configs = [chunk.config for chunk in self.chunks]
        for each in self.configs:  # the config itself would ask for experts on several ranks
            each.overlap_moe_expert_parallel_comm = combined
        self.model: list[Any] = [Wrapper(chunk) for chunk in self.chunks]
        parameters = [each for chunk in self.chunks for each in chunk.parameters()]
        if not parameters:  # an optimizer wants one, and a rank with empty stages has none
            parameters = [nn.Parameter(torch.zeros(1))]
        self.optimizer: Any = torch.optim.AdamW(parameters, lr=0.01)
        if overlap:
            self._distribute()

    def _group(self, name: str, otherwise: Callable[[], Any]) -> Any:
        """Return a process group: of those that were given, or of Megatron's parallel state."""
        return otherwise() if self._groups is None else getattr(self._groups, name)

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

    def step(
        self, microbatches: int, forward_backward: Any = None, *, forward_only: bool = False
    ) -> list[Any]:
        """Run one iteration, by another schedule function than Megatron's if one is given; return
        its losses on the last rank.
        """
        torch.manual_seed(100 + dist.get_rank())
        for model in self.model:
            if hasattr(model, "zero_grad_buffer"):
                model.zero_grad_buffer()
        schedule = forward_backward or self._schedule()
        return self.run(schedule, microbatches, forward_only=forward_only)

    def _schedule(self) -> Any:
        """Return the schedule function, as Megatron's training takes it."""
        if self._groups is None:
            return get_forward_backward_func()
        is_interleaved = "with" if len(self.model) > 1 else "without"
        function = getattr(schedules, f"forward_backward_pipelining_{is_interleaved}_interleaving")
        communicator = P2PCommunicator(self._groups.pp, self.config)
        return partial(function, p2p_communicator=communicator, pg_collection=self._groups)

    def run(
        self, forward_backward: Any, microbatches: int, *, forward_only: bool = False
    ) -> list[Any]:
        """Call a schedule function of Megatron-core."""
        replicas = self._group("dp", parallel_state.get_data_parallel_group)
        data = torch.randint(
            VOCABULARY,
            (microbatches, ROWS, SEQUENCE),
            generator=torch.Generator().manual_seed(7 + replicas.rank()),
        )
        # Ranks of context parallel have a part of each sequence.
        parts = self.config.context_parallel_size
        data = data[..., : SEQUENCE // parts]
        batches = [iter(data) for _ in self.model]
        losses: list[Any] = forward_backward(
            forward_step_func=partial(_forward_step, reports=replicas if self.reports else None),
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
    def watched_pairs(self) -> Iterator[list[str]]:
        """Return the names of what combined steps run, pairs as grids have them, seen at the plans
        that Megatron runs.
        """
        from megatron.core.models.common.model_chunk_schedule_plan import (
            TransformerModelChunkSchedulePlan as Plan,
        )

        seat = self.engine.pipeline_rank
        run = Plan.run
        forwards: dict[int, str] = {}
        ran: list[str] = []

        def watched(forward: Any, backward: Any, **options: Any) -> Any:
            names = []
            if forward is not None:
                chunk = forward.state.model
                stage = self.chunks.index(chunk) * seat.ranks + seat.rank
                names.append(f"{stage}F{chunk.decoder.layers[0].current_microbatch}")
                forwards[id(forward)] = names[0]
            if backward is not None:
                names.append(forwards.pop(id(backward)).replace("F", "B"))
            ran.append(names[0] if len(names) == 1 else f"({';'.join(names)})OVERLAP_F_B")
            return run(forward, backward, **options)

        with mock.patch.object(Plan, "run", staticmethod(watched)):
            yield ran
        assert not forwards

    @contextmanager
    def watched(self) -> Iterator[list[tuple[int, str, int]]]:
        """Return what really runs, seen by hooks on modules and gradients.

        The schedule writes the microbatch into the layers of a chunk; a chunk without any is
        watched for one iteration only, in which its calls are counted.
        """
        seat, ran, handles = self.engine.pipeline_rank, [], []

        def watch(number: int, chunk: Any) -> None:
            stage = number * seat.ranks + seat.rank
            drawn = 0

            def forward(module: Any, args: Any, output: Any) -> None:
                nonlocal drawn
                layers = module.decoder.layers
                microbatch = layers[0].current_microbatch if len(layers) else drawn
                drawn += 1
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
        evaluate, timers = get_forward_backward_func(), self._globals._GLOBAL_TIMERS
        timers("evaluate", log_level=2).start(barrier=True)  # 0 there, which needs CUDA
        with torch.no_grad():
            self._training.config.timers = None
            losses = self._training.run(evaluate, 4, forward_only=True)
            self._training.config.timers = timers
        timers("evaluate", log_level=2).stop()
        return losses

    def state(self) -> list[Any]:
        return self._training.weights()


def _forward_step(
    batches: Any, model: Any, return_schedule_plan: bool = False, *, reports: Any = None
) -> Any:
    """Run a microbatch, or return what a combined step runs; its loss is reduced over the group
    `reports`, if there is one.
    """
    tokens = next(batches)
    length = tokens.shape[-1]
    places = torch.arange(length).expand_as(tokens)
    hidden = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)

    def loss(losses: Any) -> Any:
        reported = losses.mean().detach().clone()
        if reports is not None:
            dist.all_reduce(reported, group=reports)
        return losses.mean(), reported

    run = model.build_schedule_plan if return_schedule_plan else model
    return run(tokens, places, hidden, labels=tokens), loss
