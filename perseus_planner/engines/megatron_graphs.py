"""Iterations of Megatron-core that are replayed as one CUDA graph, without Python.

`FullCudaGraphWrapper` runs the first iterations as usual, then the schedule once more while a graph
is captured, then replays. Training and evaluation have graphs of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from perseus_planner.engines.guard import HookGuard, marked, original_of
from perseus_planner.engines.megatron_timers import (
    SHOWN,
    T,
    TimerEvents,
    WrappedTimer,
    WrappedTimers,
    joined,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from perseus_planner.engines.edges import Capturing
    from perseus_planner.engines.engine import PipelineRank
    from perseus_planner.engines.megatron_pairs import CombinedStep
    from perseus_planner.schedules import Computation


def is_one_graph(config: Any) -> bool:
    """Whether whole iterations are replayed as one CUDA graph."""
    scope = getattr(config, "cuda_graph_scope", None)
    # Releases give one scope or a list of them, as texts or members of an enumeration.
    scopes = [
        getattr(item, "name", item) for item in (scope if isinstance(scope, list) else [scope])
    ]
    return "full_iteration" in (getattr(config, "cuda_graph_impl", None), *scopes)


Watch = Callable[[bool, Callable[[], Any], "int | None"], Any]
"""Runs an iteration that is not a replay, with so many microbatches, and looks inside; is told
whether a graph is captured in it.
"""


class _InsideEvents(TimerEvents):
    """Notes the computations of an iteration that is not a replay; marks them if a graph is
    captured in it.
    """

    def __init__(
        self,
        guard: HookGuard,
        capturing: Capturing | None,
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
        self.order: list[Computation] = []  #: What has run

    def around(self, name: str, timer: Any) -> WrappedTimer:
        """See `TimerEvents.around`."""
        kind = SHOWN[name]
        if kind is None:
            return WrappedTimer(timer, timer.start, timer.stop)

        def stop(*args: Any, **kwargs: Any) -> Any:
            if not self._is_in_step:
                self.guard.attempt(self._note, kind)
            return timer.stop(*args, **kwargs)

        return WrappedTimer(timer, timer.start, stop)

    def run_step(self, kinds: str, step: Callable[..., T], values: Mapping[str, Any]) -> T:
        """See `TimerEvents.run_step`; its end is noted."""
        self._is_in_step = True
        try:
            result = step()
        finally:
            self._is_in_step = False
        self.guard.attempt(self._note, kinds)
        return result

    def _note(self, kinds: str) -> None:
        self.order.append(joined([next(self._in_turn[kind]) for kind in kinds]))
        if self._capturing is not None:
            self._capturing.capture(len(self.order))


def showing_replays(guard: HookGuard, watch: Watch | None = None) -> Callable[..., Any]:
    """Return a `FullCudaGraphWrapper.__call__` that shows the replays of the training's graph.

    Args:
        guard: The guard of the hook.
        watch: Runs what is not a replay; None to look at nothing.
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
            if watch is None:
                return step()
            is_captured = bool(guard.ask(_is_captured_next, self))
            return watch(is_captured, step, kwargs.get("num_microbatches"))
        return guard.run(step, _begin_replay, guard, kwargs.get("num_microbatches"))

    return marked(call, original)


def _replays(wrapper: Any) -> bool:
    """Whether the training's graph is captured, so that the next iteration is its replay."""
    return wrapper.cuda_graph["training"] is not None


def _is_captured_next(wrapper: Any) -> bool:
    """Whether the next iteration of the training is the one in which its graph is captured."""
    return bool(wrapper.curr_iteration["training"] == wrapper.cuda_graph_warmup_steps)


def run_watched(
    guard: HookGuard,
    capturing: Capturing,
    configs: Sequence[Any],
    rank: PipelineRank,
    chunks: int,
    group: int,
    combined: CombinedStep | None,
    is_captured: bool,
    step: Callable[[], Any],
    microbatches: int | None,
) -> Any:
    """Run an iteration that is not a replay. Its timers start and stop, and each one that stops
    tells what has run; if a graph is captured it also leaves a mark there. What the iteration
    returns or raises is not touched.
    """
    marking = capturing if is_captured else None
    events = _InsideEvents(guard, marking, rank, chunks, group, microbatches or 0)
    # Set on the configs, as the schedule asks these for its timers.
    before = [config.timers for config in configs]
    for config, timers in zip(configs, before, strict=True):
        config.timers = WrappedTimers(timers, events)
    try:
        with nullcontext() if combined is None else combined.shown(events):
            result = step()
    finally:
        for config, timers in zip(configs, before, strict=True):
            config.timers = timers
    if is_captured:
        guard.attempt(capturing.end_capture, events.order)
    else:
        guard.attempt(capturing.end_eager, events.order, microbatches)
    return result


def _begin_replay(_: ExitStack, guard: HookGuard, microbatches: int | None) -> None:
    guard.show(microbatches)
