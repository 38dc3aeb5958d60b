"""Megatron-core, followed through the timers that its schedules start and stop around all that they
run: `megatron_timers`. Overlapped pairs of forward and backward are followed by `megatron_pairs`,
and iterations that are replayed as one CUDA graph by `megatron_graphs`.

Not all that Megatron runs has timers. Where a config or an argument shows that, it is not followed
(`_check_visible`, `HALF_SEEN_MODULES`). An iteration that ends with other numbers of forwards and
backwards than its schedule should run is the last one that is followed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import UsageError
from perseus_planner.engines.edges import EdgeHook
from perseus_planner.engines.engine import (
    EngineStage,
    PipelineRank,
    attached_once,
    current_device,
    replaced,
)
from perseus_planner.engines.guard import Guard, HookGuard
from perseus_planner.engines.megatron_graphs import is_one_graph, run_watched, showing_replays
from perseus_planner.engines.megatron_pairs import CombinedStep
from perseus_planner.engines.megatron_timers import (
    HALF_SEEN_MODULES,
    EdgeEvents,
    ScheduleCall,
    TimerEvents,
    WrappedTimers,
    noting_packed,
    timed,
)
from perseus_planner.engines.overlapped import OverlappedMicrobatch
from perseus_planner.engines.torch_state import preserve_attributes

if TYPE_CHECKING:
    import torch

    from perseus_planner.engines.guard import IterationHook
    from perseus_planner.schedules import Computation

_BUCKET_STATE = ("param_gather_dispatched", "param_gather_handle", "is_last_microbatch")
"""What a group of buckets of Megatron's DistributedDataParallel knows of the iteration."""


class MegatronModel:
    """The chunks of a Megatron-core model on this rank, trained by 1F1B or interleaved 1F1B.

    Args:
        chunks: The chunks as Megatron's schedule takes them, first to last.
    """

    name = "Megatron-core"
    packages = ("torch", "megatron-core")
    splits_backward = False

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._chunks = tuple(chunks)

    def check(self) -> None:
        """See `Engine.check`; what else cannot be followed shows its config, when it is attached.

        Raises:
            UsageError: If a chunk is one of several modules of a pipeline.
        """
        # A MimoModel says by its role whether its modules are on ranks of their own.
        for chunk in self._chunks:
            mode = getattr(_wrapped(chunk, "role"), "mode", None)
            if getattr(mode, "name", None) == "NON_COLOCATED":
                raise UsageError(f"{HALF_SEEN_MODULES}; train it without a plan")

    @property
    def pipeline_rank(self) -> PipelineRank:
        """See `Engine.pipeline_rank`; each tensor-parallel rank of a stage counts as a separate
        pipeline.

        Raises:
            UsageError: If neither the chunks nor Megatron's parallel state have process groups.
        """
        import torch.distributed as dist

        pipeline = self._pipeline_group
        # Each tensor-parallel rank has data-parallel replicas of its own.
        replicas = self._process_group("dp", "get_data_parallel_group")
        return PipelineRank(
            rank=dist.get_rank(pipeline),
            ranks=dist.get_world_size(pipeline),
            pipeline=None if replicas is None else dist.get_rank(replicas),
            peers=tuple(dist.get_process_group_ranks(pipeline)),
        )

    @property
    def tensor_rank(self) -> int:
        """See `Engine.tensor_rank`; tensor and context parallel."""
        import torch.distributed as dist

        tensor = self._process_group("tp", "get_tensor_model_parallel_group")
        context = self._process_group("cp", "get_context_parallel_group")
        rank = 0 if tensor is None else dist.get_rank(tensor)
        if context is not None:
            size = 1 if tensor is None else dist.get_world_size(tensor)
            # Tensor ranks count fastest, so each pair of both ranks has a number of its own.
            rank += size * dist.get_rank(context)
        return rank

    @property
    def _pipeline_group(self) -> Any:
        """The ranks of this pipeline."""
        pipeline = self._process_group("pp", "get_pipeline_model_parallel_group")
        if pipeline is None:
            raise UsageError(
                "Megatron's parallel state is not initialized; call initialize_model_parallel "
                "first, or give the model its process groups (pg_collection)"
            )
        return pipeline

    def _process_group(self, name: str, of_state: str) -> Any:
        """Return a process group of this rank: the model's own where it was given some, else that
        of Megatron's parallel state; None if there is neither.

        Args:
            name: Its name in a ProcessGroupCollection.
            of_state: The function of the parallel state that returns it.
        """
        from megatron.core import parallel_state as state

        for chunk in self._chunks:
            group = getattr(_wrapped(chunk, "pg_collection"), name, None)
            if group is not None:
                return group
        return getattr(state, of_state)() if state.model_parallel_is_initialized() else None

    @property
    def device(self) -> torch.device:
        """See `Engine.device`: that of its parameters. A rank whose stages are empty, which a
        pipeline layout such as `E|ttt||L` allows, computes on the current one.
        """
        device = next((parameter.device for parameter in self.parameters()), None)
        return current_device() if device is None else device

    def stages(self) -> list[EngineStage]:
        """See `Engine.stages`."""
        seat = self.pipeline_rank
        rank = seat.rank
        ranks = seat.ranks
        return [
            EngineStage(
                index * ranks + rank,
                chunk,
                chunk,
                loss_with_output=index * ranks + rank == ranks * len(self._chunks) - 1,
                receiver=_receiver(chunk),
                planned=(_receiver(chunk), "build_schedule_plan") if self.has_pairs else None,
                preserve_state=partial(_preserve_state, chunk),
            )
            for index, chunk in enumerate(self._chunks)
        ]

    def overlapped(
        self, index: int, inputs: Mapping[str, Any], loss: Callable[[Any], Any] | None
    ) -> OverlappedMicrobatch:
        """Return a microbatch of a chunk to repeat, where forwards and backwards overlap.

        Args:
            index: Number of the chunk on this rank.
            inputs: As recorded.
            loss: In the last stage, from its output to a scalar.
        """
        from megatron.core.utils import get_model_config

        chunk = self._chunks[index]
        number = index if len(self._chunks) > 1 else None
        first = index == 0 and self.pipeline_rank.rank == 0
        config = get_model_config(chunk)
        return OverlappedMicrobatch(chunk, config, number, inputs, loss, first=first)

    def parameters(self) -> Iterator[torch.Tensor]:
        """See `Engine.parameters`."""
        for chunk in self._chunks:
            yield from chunk.parameters()

    def microbatches(self) -> int | None:
        """See `Engine.microbatches`; only its schedule knows."""
        return ScheduleCall.running().microbatches

    @property
    def shows_edges_only(self) -> bool:
        """Whether whole iterations are replayed as one CUDA graph, without Python."""
        return any(map(is_one_graph, self._configs))

    def iteration(self, forwards: int) -> Mapping[str, str | int]:
        """See `Engine.iteration`."""
        iteration: dict[str, str | int] = {"schedule": "1f1b", "microbatches": forwards}
        if len(self._chunks) > 1:
            iteration |= {"schedule": "interleaved-1f1b", "virtual_stages": len(self._chunks)}
            config = _receiver(self._chunks[0]).config
            group = getattr(config, "microbatch_group_size_per_vp_stage", None)
            iteration |= {} if group is None else {"microbatch_group": group}
        if self.has_pairs:
            iteration |= {"schedule": "combined-1f1b", "virtual_stages": len(self._chunks)}
        return iteration

    def order(self) -> tuple[Computation, ...] | None:
        """See `Engine.order`; known if every iteration has the same number of microbatches."""
        from megatron.core import num_microbatches_calculator as module

        calculator = getattr(module, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None)
        # The other calculators change the number as training goes on.
        if type(calculator).__name__ != "ConstantNumMicroBatchesCalculator":
            return None
        return self.order_for(module.get_num_microbatches())

    def order_for(self, microbatches: int) -> tuple[Computation, ...]:
        """Return what this rank runs in an iteration of `microbatches`.

        Raises:
            ScheduleError: If Megatron refuses this number.
        """
        from perseus_planner.schedules import combined_1f1b, interleaved_1f1b

        rank = self.pipeline_rank
        # Pairs are a schedule of their own; plain 1F1B is interleaved 1F1B of one chunk.
        generator = combined_1f1b if self.has_pairs else interleaved_1f1b
        schedule = generator(rank.ranks, len(self._chunks), microbatches, self._group)
        return schedule.shown(rank.rank)

    @contextmanager
    def attached(self, hook: IterationHook) -> Iterator[None]:
        """See `Engine.attached`.

        Raises:
            UsageError: If a hook is attached already, or Megatron runs computations that its timers
                do not show.
        """
        for config in self._configs:
            _check_visible(config, self.pipeline_rank.ranks)
        with self._attached_to_timers(hook, TimerEvents):
            yield

    @contextmanager
    def _attached_to_timers(
        self, hook: IterationHook, make_events: type[TimerEvents]
    ) -> Iterator[None]:
        """Show what the timers of the configs show to a hook, inside the block."""
        owners = [(config, "timers") for config in self._configs]
        # Megatron-LM copies its timers from here, at the start of training and after every
        # evaluation.
        module = sys.modules.get("megatron.training.global_vars")
        if getattr(module, "_GLOBAL_TIMERS", None) is not None:
            owners.append((module, "_GLOBAL_TIMERS"))
        rank = self.pipeline_rank
        # Timers inside timers would show each computation twice.
        if any(isinstance(getattr(*owner), WrappedTimers) for owner in owners):
            raise UsageError(
                "a runtime is attached to this Megatron-core model already; leave its block first"
            )
        events = make_events(HookGuard(hook), rank, len(self._chunks), self._group or rank.ranks)
        with ExitStack() as stack:
            packing = sys.modules.get("megatron.core.datasets.data_schedule")
            create = getattr(packing, "create_data_iterator", None)
            # Only a core that packs whole batches has this function; it runs before the iteration.
            if create is not None and hasattr(packing, "wrap_data_iterator"):
                noting = partial(noting_packed, create, events)
                stack.enter_context(replaced(packing, create_data_iterator=noting))
            for owner, name in owners:
                stack.enter_context(timed(owner, name, events))
            # Pairs start one timer at most, so the function that runs them is followed instead.
            if self.has_pairs and make_events is TimerEvents:
                stack.enter_context(CombinedStep.found().shown(events))
            # First on leaving: from here on, what cannot be restored only passes on.
            stack.callback(events.guard.close)
            yield

    @contextmanager
    def attached_to_edges(self, hook: IterationHook) -> Iterator[None]:
        """Call `hook` at the begin and the end of each training iteration.

        Where iterations are one graph, these are its replays: the first iterations, and the one in
        which the graph is captured, run otherwise, and are only compared with the plan. Else they
        are those of the schedule, whatever computations it runs.
        """
        if not self.shows_edges_only:
            with self._attached_to_timers(hook, EdgeEvents):
                yield
            return
        from megatron.core.full_cuda_graph import FullCudaGraphWrapper

        guard = HookGuard(hook)
        watch = None
        # What runs before there is a graph is compared with the plan; what is captured is marked.
        if isinstance(hook, EdgeHook) and hook.capturing is not None:
            rank = self.pipeline_rank
            group = self._group or rank.ranks
            watch = partial(
                run_watched,
                guard,
                hook.capturing,
                self._configs,
                rank,
                len(self._chunks),
                group,
                CombinedStep.found() if self.has_pairs else None,
            )
        shown = showing_replays(guard, watch)
        attached = attached_once(FullCudaGraphWrapper, __call__=shown)
        with attached, ExitStack() as stack:
            stack.callback(guard.close)
            yield

    @property
    def _group(self) -> int | None:
        """Number of microbatches that run through one chunk before the next chunk runs."""
        return getattr(self._configs[0], "microbatch_group_size_per_vp_stage", None)

    @property
    def has_pairs(self) -> bool:
        """See `engine.has_pairs`; 1F1B on several ranks without chunks has none."""
        if len(self._chunks) == 1 and self.pipeline_rank.ranks > 1:
            return False
        return any(
            getattr(config, "overlap_moe_expert_parallel_comm", False) for config in self._configs
        )

    @property
    def _configs(self) -> list[Any]:
        """The configs of the chunks, each once; chunks may share a config."""
        from megatron.core.utils import get_model_config

        try:
            configs = [get_model_config(chunk) for chunk in self._chunks]
        except RuntimeError as error:
            raise UsageError(
                f"a chunk has no Megatron-core config ({error}); give the chunks that you give to "
                "its schedule"
            ) from error
        return list({id(config): config for config in configs}.values())


def wrap_training(module: Any, guard: Guard, begin: Callable[[Any], bool]) -> None:
    """See `engines.wrap_training`."""
    import torch

    def begin_if_training(kwargs: Mapping[str, Any]) -> None:
        # An evaluation calls the same functions.
        if "model" in kwargs and not kwargs.get("forward_only") and torch.is_grad_enabled():
            begin(kwargs["model"])

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def forward_backward(*args: Any, **kwargs: Any) -> Any:
            guard.call(begin_if_training, kwargs)
            return original(*args, **kwargs)

        return forward_backward

    # Without a pipeline nothing is planned, so that function stays as it is.
    for name in ("with", "without"):
        name = f"forward_backward_pipelining_{name}_interleaving"
        setattr(module, name, wrapped(getattr(module, name)))


def _receiver(chunk: Any) -> Any:
    """Return the module inside a wrapped chunk that takes the tensor from the stage before."""
    while not hasattr(chunk, "set_input_tensor"):
        chunk = chunk.module
    return chunk


def _wrapped(chunk: Any, name: str) -> Any:
    """Return an attribute of a wrapped chunk or of a module inside; None if none has it."""
    while chunk is not None:
        value = getattr(chunk, name, None)
        if value is not None:
            return value
        chunk = getattr(chunk, "module", None)
    return None


@contextmanager
def _preserve_state(chunk: Any) -> Iterator[None]:
    """Preserve the random states of tensor ranks, the losses that layers of experts report, and
    where the distributed optimizer is in gathering weights and reducing gradients.

    Inside the block, weights count as gathered, as they are after an iteration's first forward.
    Otherwise a repeated forward would gather them, and the first one of the next iteration would
    not, with the weights of this one.
    """
    import torch
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    # Dropout of tensor ranks draws from generators that the state of torch's own leaves out.
    states = tracker.get_states() if hasattr(tracker, "get_states") else None
    losses = {name: values.clone() for name, values in _losses_of_experts().items()}
    with ExitStack() as stack:
        for name in ("bucket_groups", "expert_parallel_bucket_groups"):
            for group in getattr(chunk, name, ()):
                stack.enter_context(preserve_attributes(group, *_BUCKET_STATE))
                # As after an iteration's first forward: gathered, and nothing under way.
                group.param_gather_dispatched = True
                group.param_gather_handle = None
        try:
            yield
        finally:
            if states is not None:
                tracker.set_states(states)
            # The repeated forwards may have been the first to report a loss.
            for name, values in _losses_of_experts().items():
                values.copy_(losses.get(name, torch.zeros_like(values)))


def _losses_of_experts() -> dict[str, torch.Tensor]:
    """Return what layers of experts add their losses to, by name: one value for each layer."""
    # Core 0.18 and later have a tracker, made when it is first asked for.
    module = sys.modules.get("megatron.core.transformer.moe.moe_logging")
    if module is not None:
        entries = module.get_moe_metrics_tracker().metrics
        return {name: entry.values for name, entry in entries.items()}
    from megatron.core import parallel_state as state

    # Core 0.13 moved their dictionary from the parallel state.
    module = sys.modules.get("megatron.core.transformer.moe.moe_utils", state)
    name = "_MOE_LAYER_WISE_LOGGING_TRACKER"
    reports = getattr(module, name, getattr(state, name, {}))
    return {name: report["values"] for name, report in reports.items()}


def _check_visible(config: Any, ranks: int) -> None:
    """Refuse a config by which Megatron runs computations that its timers do not show, or that no
    plan can have.

    Args:
        config: The config of a chunk.
        ranks: The number of ranks of the pipeline.
    """
    # With a pipeline, Megatron's schedules ignore the field.
    if getattr(config, "hybrid_context_parallel", False) and ranks == 1:
        raise UsageError(
            "hybrid_context_parallel makes Megatron-core cut each batch into another number of "
            "parts on each rank, so no plan can have its computations; train without it, or "
            "without a plan"
        )
    if is_one_graph(config):
        raise UsageError(
            "Megatron-core is to replay whole iterations as one CUDA graph (full_iteration), which "
            "does not show its computations; follow a plan with at most 4 clock changes by time "
            "(`planner plan --max-changes 4`, and leave out follow=), or train with graphs of "
            "layers"
        )
