"""Megatron-core, followed through the timers that its schedules start and stop around all that they
run.

`timers` is a field of Megatron's config. A schedule calls `config.timers(name, log_level=...)` and
starts and stops the timer that it returns: `forward-backward` around an iteration,
`forward-compute` around the forward and the loss of a microbatch, and `backward-compute` around its
backward. Core 0.9 to 0.19 do so at the same points.

With `overlap_moe_expert_parallel_comm` a forward and the backward of another microbatch run layer
by layer in turn, so that the experts' all-to-all of one hides behind the computing of the other.
`combined_forward_backward_step` runs such a pair, and what is left of them alone at the begin and
the end. It starts `forward-compute` alone, if at all, so it is followed itself: a pair is one
computation.

Not all that Megatron runs has timers. Where a config or an argument shows that, it is not followed
(`_check_visible`, `_MULTIMODULE`). An iteration that ends with other numbers of forwards and
backwards than its schedule should run is the last one that is followed.

A schedule draws microbatches one by one. Megatron's development branch packs the sequences of a
whole batch before an iteration (`wrap_data_iterator`), with another number of microbatches each
time, and then every stage has their lengths. The branch calls itself 0.20.0; no release up to
0.19.2 has the function.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from operator import getitem
from typing import TYPE_CHECKING, Any, TypeVar

from perseus_planner.base.errors import EngineChanged, UsageError
from perseus_planner.base.prefixes import counted
from perseus_planner.engines.edges import EdgeHook
from perseus_planner.engines.engine import (
    EngineStage,
    PipelineRank,
    attached_once,
    current_device,
    replaced,
    say_left,
)
from perseus_planner.engines.guard import Guard, HookGuard, marked, original_of
from perseus_planner.engines.overlapped import OverlappedMicrobatch
from perseus_planner.engines.torch_state import preserve_attributes

if TYPE_CHECKING:
    import torch

    from perseus_planner.engines.edges import Capturing
    from perseus_planner.engines.guard import IterationHook
    from perseus_planner.schedules import Computation

_MULTIMODULE = ("MultiModulePipelineCommunicator", "MultiModuleProcessGroupCollection")
"""Classes of arguments of a schedule that make it run a pipeline of several modules."""

_HALF_SEEN_MODULES = (
    "Megatron-core runs a pipeline of several modules, whose backwards its timers do not show"
)

_EVALUATION = "evaluate"
"""The timer of an evaluation of Megatron-LM, inside which its config has no timers."""
_SHOWN = {
    "forward-backward": None,
    "forward-compute": "F",
    "backward-compute": "B",
    _EVALUATION: None,
}
"""Timers that show something: an iteration, the kind of a computation, or an evaluation."""

_UNREADABLE_CALL = (
    "Megatron-core's timer forward-backward was started by no function with the arguments "
    "num_microbatches and forward_only, so the planner does not know what its schedule runs; use "
    "a release that is tested"
)

_BUCKET_STATE = ("param_gather_dispatched", "param_gather_handle", "is_last_microbatch")
"""What a group of buckets of Megatron's DistributedDataParallel knows of the iteration."""

T = TypeVar("T")

Timers = Callable[..., Any]
"""The timers of a config: called with a name, they return a timer to start and stop."""


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
                raise UsageError(f"{_HALF_SEEN_MODULES}; train it without a plan")

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
        return _ScheduleCall.running().microbatches

    @property
    def shows_edges_only(self) -> bool:
        """Whether whole iterations are replayed as one CUDA graph, without Python."""
        return any(map(_is_one_graph, self._configs))

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
        with self._attached_to_timers(hook, _TimerEvents):
            yield

    @contextmanager
    def _attached_to_timers(
        self, hook: IterationHook, make_events: type[_TimerEvents]
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
        if any(isinstance(getattr(*owner), _Timers) for owner in owners):
            raise UsageError(
                "a runtime is attached to this Megatron-core model already; leave its block first"
            )
        events = make_events(HookGuard(hook), rank, len(self._chunks), self._group or rank.ranks)
        with ExitStack() as stack:
            packing = sys.modules.get("megatron.core.datasets.data_schedule")
            create = getattr(packing, "create_data_iterator", None)
            # Only a core that packs whole batches has this function; it runs before the iteration.
            if create is not None and hasattr(packing, "wrap_data_iterator"):
                noting = partial(_noting_packed, create, events)
                stack.enter_context(replaced(packing, create_data_iterator=noting))
            for owner, name in owners:
                stack.enter_context(_timed(owner, name, events))
            # Pairs start one timer at most, so the function that runs them is followed instead.
            if self.has_pairs and make_events is _TimerEvents:
                stack.enter_context(_CombinedStep.found().shown(events))
            # First on leaving: from here on, what cannot be restored only passes on.
            stack.callback(events.guard.close)
            yield

    @contextmanager
    def attached_to_edges(self, hook: IterationHook) -> Iterator[None]:
        """Call `hook` at the begin and the end of each training iteration.

        Where iterations are one graph, these are its replays: the first iterations, and the one in
        which the graph is captured, run otherwise and are not shown. Else they are those of the
        schedule, whatever computations it runs.
        """
        if not self.shows_edges_only:
            with self._attached_to_timers(hook, _EdgeEvents):
                yield
            return
        from megatron.core.full_cuda_graph import FullCudaGraphWrapper

        guard = HookGuard(hook)
        capture = None
        # The hook takes marks inside the graph, so the capture has to be followed as well.
        if isinstance(hook, EdgeHook) and hook.capturing is not None:
            rank = self.pipeline_rank
            group = self._group or rank.ranks
            capture = partial(
                _captured,
                guard,
                hook.capturing,
                self._configs,
                rank,
                len(self._chunks),
                group,
                _CombinedStep.found() if self.has_pairs else None,
            )
        shown = _showing_replays(guard, capture)
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


class _TimerEvents:
    """Calls a hook when timers start and stop.

    Attributes:
        guard: The guard of the hook.
        packed: The microbatches that were packed last, if they are.
    """

    def __init__(self, guard: HookGuard, rank: PipelineRank, chunks: int, group: int) -> None:
        self.guard = guard
        self._rank = rank
        self._chunks = chunks
        self._group = group
        self._computations: dict[str, Iterator[Computation]] = {}
        self._microbatches: int | None = None  #: of the iteration
        self._ended = {"F": 0, "B": 0}  #: how many of each kind have ended in the iteration
        self._is_in_step = False  #: inside a combined step, which is shown as a whole
        self.packed: Sequence[Mapping[str, Any]] | None = None

    def around(self, name: str, timer: Any) -> _Timer:
        """Return a timer of `_SHOWN` with the hook called when it has started and before it
        stops.
        """
        # Bound once, as Megatron starts a timer for each computation.
        guard = self.guard
        kind = _SHOWN[name]
        if name == _EVALUATION:

            def evaluate(*args: Any, **kwargs: Any) -> Any:
                result = timer.start(*args, **kwargs)
                guard.note_evaluation()
                return result

            return _Timer(timer, evaluate, timer.stop)
        if kind is None:

            def start(*args: Any, **kwargs: Any) -> Any:
                result = timer.start(*args, **kwargs)
                self._begin_iteration()
                return result

            def stop(*args: Any, **kwargs: Any) -> Any:
                self._end_iteration()
                return timer.stop(*args, **kwargs)

            return _Timer(timer, start, stop)

        def begin() -> None:
            if not self._is_in_step:
                self._begin_next(kind)

        def end(*_: Any, **__: Any) -> None:
            if not self._is_in_step:
                self._end_kinds(kind)

        started = guard.around(timer.start, after=begin)
        return _Timer(timer, started, guard.around(timer.stop, before=end))

    def _begin_next(self, kinds: str) -> None:
        """Begin the next computation of a kind, or of "FB" the next of both, which overlap."""
        self.guard.begin(*_joined([next(self._computations[kind]) for kind in kinds]))

    def _end_kinds(self, kinds: str) -> None:
        for kind in kinds:
            self._ended[kind] += 1
        self.guard.end()

    def run_step(self, kinds: str, step: Callable[..., T], values: Mapping[str, Any]) -> T:
        """Run a combined step, shown as one computation from when it has what it waits for.

        Args:
            kinds: What it runs: "F", "B", or "FB" for a pair.
            step: Runs it; takes other values for arguments.
            values: Its arguments. `pre_forward` and `pre_backward` wait for other ranks.
        """
        waits = [name for name in _WAITS if values.get(name) is not None]
        begin = partial(self.guard.call, self._begin_next, kinds)
        instead = {}
        # Waiting for other ranks is no part of the computation.
        if waits:  # it begins when the last one has returned
            instead = {waits[-1]: _followed_by(values[waits[-1]], begin)}
        else:
            begin()
        # The step may start the timer of its forward, which must not show it once more.
        self._is_in_step = True
        try:
            result = step(**instead)
        finally:
            self._is_in_step = False
        self.guard.call(self._end_kinds, kinds)
        return result

    def _begin_iteration(self) -> None:
        if self.guard.is_inside:  # the iteration before has raised, and never stopped its timer
            self.guard.abandon_iteration()
        # If `_is_shown` fails, the call of an earlier iteration is not taken for this one.
        self._call = _ScheduleCall(None, forward_only=False)
        if self.guard.ask(self._is_shown):
            self.guard.begin_iteration(self._begin, self._call)

    def _is_shown(self) -> bool:
        """Return whether the schedule that has started its timer trains; one of which that cannot
        be read is the last one that is followed.
        """
        call = _ScheduleCall.running()
        self._call = call
        problem = call.problem
        if problem is None and call.is_multimodule:
            problem = _HALF_SEEN_MODULES
        if problem is not None and not call.forward_only:
            self.guard.stop_following(problem)
            return False
        if call.forward_only:
            self.guard.note_evaluation()
        return not call.forward_only

    def _begin(self, call: _ScheduleCall) -> None:
        self._is_in_step = False
        self._microbatches = call.microbatches
        self._ended = dict.fromkeys("FB", 0)
        chunks = range(self._chunks)
        self._computations = {
            # Forwards go through the chunks from the first one on, backwards from the last one.
            "F": self._in_order("F", chunks, call.microbatches or 0),
            "B": self._in_order("B", chunks[::-1], call.microbatches or 0),
        }
        packed = self.packed
        batch = None if packed is None else partial(_with_lengths, packed)
        self.guard.show(call.microbatches, batch)

    def _end_iteration(self) -> None:
        if not self.guard.is_inside:
            return
        problem = self.guard.call(self._unseen)
        if problem is None:
            self.guard.end_iteration()
        else:
            self.guard.stop_following(problem)

    def _unseen(self) -> str | None:
        """Return what shows that the iteration ran computations without timers; None if nothing
        does.
        """
        forwards = self._ended["F"]
        backwards = self._ended["B"]
        expected = forwards
        if self._microbatches is not None:
            # Each microbatch goes through every chunk of this rank once, both ways.
            expected = self._microbatches * self._chunks
        if forwards == backwards == expected:
            return None
        return (
            f"Megatron-core's timers show {counted(forwards, 'forward')} and "
            f"{counted(backwards, 'backward')} in an iteration that should run {expected} of each, "
            "so the planner does not see all that runs"
        )

    def _in_order(
        self, kind: str, chunks: Iterable[int], microbatches: int
    ) -> Iterator[Computation]:
        """Yield all computations of one kind in Megatron's order.

        A group of microbatches runs through each of `chunks`, then the next group does. The last
        group ends with the last microbatch. The iterator then goes on with microbatches that should
        not run, so that the hook sees them if they do.
        """
        from perseus_planner.schedules import Computation

        begin = 0
        while True:
            # The last group may be smaller; beyond it, all are whole again.
            end = (
                min(begin + self._group, microbatches)
                if begin < microbatches
                else begin + self._group
            )
            for chunk in chunks:
                for microbatch in range(begin, end):
                    yield Computation(chunk * self._rank.ranks + self._rank.rank, kind, microbatch)
            begin = end


class _EdgeEvents(_TimerEvents):
    """Shows iterations alone, in which timers need not show all that runs."""

    def around(self, name: str, timer: Any) -> _Timer:
        """See `_TimerEvents.around`."""
        if _SHOWN[name] is not None:
            return _Timer(timer, timer.start, timer.stop)
        return super().around(name, timer)

    def run_step(self, kinds: str, step: Callable[..., T], values: Mapping[str, Any]) -> T:
        """See `_TimerEvents.run_step`."""
        return step()

    def _unseen(self) -> str | None:
        return None


class _CaptureEvents(_TimerEvents):
    """Marks the computations of an iteration that is captured."""

    def __init__(
        self,
        guard: HookGuard,
        capturing: Capturing,
        rank: PipelineRank,
        chunks: int,
        group: int,
        microbatches: int,
    ) -> None:
        super().__init__(guard, rank, chunks, group)
        self._capturing = capturing
        self._in_turn = {
            "F": self._in_order("F", range(chunks), microbatches),
            "B": self._in_order("B", range(chunks)[::-1], microbatches),
        }
        self.order: list[Computation] = []  #: What was captured

    def around(self, name: str, timer: Any) -> _Timer:
        """See `_TimerEvents.around`."""
        kind = _SHOWN[name]
        if kind is None:
            return _Timer(timer, timer.start, timer.stop)

        def stop(*args: Any, **kwargs: Any) -> Any:
            if not self._is_in_step:
                self.guard.attempt(self._mark, kind)
            return timer.stop(*args, **kwargs)

        return _Timer(timer, timer.start, stop)

    def run_step(self, kinds: str, step: Callable[..., T], values: Mapping[str, Any]) -> T:
        """See `_TimerEvents.run_step`; its end is marked."""
        self._is_in_step = True
        try:
            result = step()
        finally:
            self._is_in_step = False
        self.guard.attempt(self._mark, kinds)
        return result

    def _mark(self, kinds: str) -> None:
        self.order.append(_joined([next(self._in_turn[kind]) for kind in kinds]))
        self._capturing.capture(len(self.order))


def _joined(computations: Sequence[Computation]) -> Computation:
    """Return a computation, or the two of a pair, as it is shown."""
    from perseus_planner.schedules import overlapped

    return computations[0] if len(computations) == 1 else overlapped(*computations)


def _followed_by(function: Callable[..., T], after: Callable[[], object]) -> Callable[..., T]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> T:
        result = function(*args, **kwargs)
        after()
        return result

    return call


_WAITS = ("pre_forward", "pre_backward")
"""Arguments of a combined step that wait for what it computes on, in the order of their calls."""


@dataclass(frozen=True)
class _CombinedStep:
    """The function of this core that runs combined steps."""

    module: Any  #: That has it
    names: Sequence[str]  #: Of its arguments

    NAME = "combined_forward_backward_step"

    @classmethod
    def found(cls) -> _CombinedStep:
        """Return that of this core.

        Raises:
            EngineChanged: If there is none, or one with other arguments.
        """
        problem = None
        names: Sequence[str] = ()
        try:
            from megatron.core.pipeline_parallel import combined_1f1b as module

            names = tuple(inspect.signature(getattr(module, cls.NAME)).parameters)
        except (ImportError, AttributeError) as error:
            problem = str(error)
        # Read from the signature, as no release number says it.
        needed = ("f_model", "b_model", "config", *_WAITS)
        problem = problem or next((f"no {name}" for name in needed if name not in names), None)
        if problem is not None:
            raise EngineChanged(
                "overlap_moe_expert_parallel_comm: this Megatron-core has no combined_1f1b."
                f"{cls.NAME} as it is followed ({problem}); use core 0.16 to 0.19, or train "
                "without the overlap"
            )
        return cls(module, names)

    @contextmanager
    def shown(self, events: _TimerEvents) -> Iterator[None]:
        """Show the steps of the configs whose timers these events are, inside the block."""
        # That of another model's steps may be around Megatron's own.
        inner = getattr(self.module, self.NAME)

        @wraps(inner)
        def step(*args: Any, **kwargs: Any) -> Any:
            values = dict(zip(self.names, args, strict=False)) | kwargs
            timers = getattr(values.get("config"), "timers", None)
            # A step of another model, or one with timers of its own.
            if not isinstance(timers, _Timers) or timers._events is not events:
                return inner(*args, **kwargs)
            runs = {"F": values.get("f_model"), "B": values.get("b_model")}
            kinds = "".join(kind for kind, model in runs.items() if model is not None)
            return events.run_step(kinds, partial(inner, **values), values)

        with replaced(self.module, **{self.NAME: step}):
            yield


def _noting_packed(
    create: Callable[..., Any], events: _TimerEvents, *args: Any, **kwargs: Any
) -> Any:
    """Note the packed microbatches of which an iterator is made, the first argument; the ranks that
    share a stage get none, but for the first. This runs before an iteration, and cannot fail.
    """
    events.packed = args[0] if args else None
    return create(*args, **kwargs)


def _with_lengths(packed: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return packed microbatches with their `cu_seqlens` on the CPU. They were computed before the
    packing counted them there, so one copy of all waits for nothing more.
    """
    import torch

    lengths = [microbatch["cu_seqlens"] for microbatch in packed]
    if not lengths:
        return []
    on_cpu = torch.cat(lengths).cpu().split([len(cu_seqlens) for cu_seqlens in lengths])
    return [
        {**microbatch, "cu_seqlens": cu_seqlens}
        for microbatch, cu_seqlens in zip(packed, on_cpu, strict=True)
    ]


class _NoTimer:
    """Stands for a timer where there is none."""

    def start(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    stop = start


class _Timers:
    """Timers that pass everything on to the original ones, and show some to a hook.

    Args:
        original: The original timers; None if there were none.
        events: Shows them.
    """

    def __init__(self, original: Timers | None, events: _TimerEvents) -> None:
        no_timer = _NoTimer()
        self._original = original
        self._events = events
        self._call: Timers = original if original is not None else lambda *_, **__: no_timer
        self._wrapped: dict[str, _Timer] = {}

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Any:
        timer = self._call(name, *args, **kwargs)
        if name not in _SHOWN:
            return timer
        wrapped = self._wrapped.get(name)
        # Megatron may make a timer anew; then so is what is around it.
        if wrapped is not None and wrapped.original is timer:
            return wrapped
        try:
            wrapped = self._events.around(name, timer)
            self._wrapped[name] = wrapped
        # The training gets its own timer, whatever happens to ours.
        except Exception as error:
            self._events.guard.fault(error)
            return timer
        return wrapped

    def note_evaluation(self) -> None:
        """Note an evaluation that is not timed."""
        self._events.guard.note_evaluation()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or saved config has the original timers.
        return getitem, ((self._original,), 0)


@contextmanager
def _timed(owner: Any, name: str, events: _TimerEvents) -> Iterator[None]:
    """Show the timers that are an attribute, inside the block.

    Megatron-LM's loops set the attribute anew, to the timers that are shown or to None, and that
    is no replacement by something else.
    """
    original = getattr(owner, name)
    setattr(owner, name, _Timers(original, events))
    try:
        yield
    finally:
        timers = getattr(owner, name)
        # Ours, or none, as Megatron-LM's loops set it: nobody else has replaced it.
        if timers is None or (isinstance(timers, _Timers) and timers._events is events):
            setattr(owner, name, original)
        else:
            say_left(owner, name)


class _Timer:
    """A timer with other functions to start and stop it."""

    def __init__(self, original: Any, start: Callable[..., Any], stop: Callable[..., Any]) -> None:
        self.original = original
        self.start = start
        self.stop = stop

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


@dataclass(frozen=True)
class _ScheduleCall:
    """What a schedule that starts a timer was called with.

    Timers do not receive this, so it is read from the arguments of the calling schedule, which are
    passed by name.

    Attributes:
        microbatches: How many it runs; None if no caller has such arguments.
        forward_only: Whether it only evaluates them.
        is_multimodule: Whether it runs a pipeline of several modules.
        problem: Why that cannot be read; None if it can.
    """

    microbatches: int | None
    forward_only: bool
    is_multimodule: bool = False
    problem: str | None = None

    @classmethod
    def running(cls) -> _ScheduleCall:
        """Return the call of the innermost schedule that runs now."""
        import torch

        frame = inspect.currentframe()
        while frame is not None:
            code = frame.f_code
            # Names of parameters alone; local names come after them.
            arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if "num_microbatches" in arguments and "forward_only" in arguments:
                # The innermost one: a schedule may call another one.
                values = frame.f_locals
                kinds = {
                    type(values.get(name)).__name__
                    for name in ("p2p_communicator", "pg_collection")
                }
                return cls(
                    values["num_microbatches"],
                    values["forward_only"] or not torch.is_grad_enabled(),
                    not kinds.isdisjoint(_MULTIMODULE),
                )
            frame = frame.f_back
        return cls(None, not torch.is_grad_enabled(), problem=_UNREADABLE_CALL)


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
    if _is_one_graph(config):
        raise UsageError(
            "Megatron-core is to replay whole iterations as one CUDA graph (full_iteration), which "
            "does not show its computations; follow a plan with at most 4 clock changes by time "
            "(`planner plan --max-changes 4`, and leave out follow=), or train with graphs of "
            "layers"
        )


def _is_one_graph(config: Any) -> bool:
    """Whether whole iterations are replayed as one CUDA graph."""
    scope = getattr(config, "cuda_graph_scope", None)
    # Releases give one scope or a list of them, as texts or members of an enumeration.
    scopes = [
        getattr(item, "name", item) for item in (scope if isinstance(scope, list) else [scope])
    ]
    return "full_iteration" in (getattr(config, "cuda_graph_impl", None), *scopes)


Capture = Callable[[Callable[[], Any], "int | None"], Any]
"""Runs an iteration, with so many microbatches, in which a graph is captured; marks it."""


def _showing_replays(guard: HookGuard, capture: Capture | None = None) -> Callable[..., Any]:
    """Return a `FullCudaGraphWrapper.__call__` that shows the replays of the training's graph.

    Args:
        guard: The guard of the hook.
        capture: Marks what is captured; None to mark nothing.
    """
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper

    original = original_of(FullCudaGraphWrapper.__call__)

    @wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = partial(original, self, *args, **kwargs)
        # The evaluation has a graph of its own.
        if kwargs.get("forward_only"):
            guard.note_evaluation()
            return step()
        if guard.is_closed:
            return step()
        # Before there is a graph, iterations run as usual, and are not shown.
        if not guard.ask(_replays, self):
            microbatches = kwargs.get("num_microbatches")
            is_next = guard.ask(_is_captured_next, self)
            return capture(step, microbatches) if capture and is_next else step()
        return guard.run(step, _begin_replay, guard, kwargs.get("num_microbatches"))

    return marked(call, original)


def _replays(wrapper: Any) -> bool:
    """Whether the training's graph is captured, so that the next iteration is its replay."""
    return wrapper.cuda_graph["training"] is not None


def _is_captured_next(wrapper: Any) -> bool:
    """Whether the next iteration of the training is the one in which its graph is captured."""
    return bool(wrapper.curr_iteration["training"] == wrapper.cuda_graph_warmup_steps)


def _captured(
    guard: HookGuard,
    capturing: Capturing,
    configs: Sequence[Any],
    rank: PipelineRank,
    chunks: int,
    group: int,
    combined: _CombinedStep | None,
    step: Callable[[], Any],
    microbatches: int | None,
) -> Any:
    """Run an iteration in which a graph is captured: its timers start and stop once more, and each
    one that stops leaves a mark in the graph. What it returns or raises is not touched.
    """
    marks = _CaptureEvents(guard, capturing, rank, chunks, group, microbatches or 0)
    # Set on the configs, as the schedule asks these for its timers.
    before = [config.timers for config in configs]
    for config, timers in zip(configs, before, strict=True):
        config.timers = _Timers(timers, marks)
    try:
        with nullcontext() if combined is None else combined.shown(marks):
            result = step()
    finally:
        for config, timers in zip(configs, before, strict=True):
            config.timers = timers
    guard.attempt(capturing.end_capture, marks.order)
    return result


def _begin_replay(_: ExitStack, guard: HookGuard, microbatches: int | None) -> None:
    guard.show(microbatches)
