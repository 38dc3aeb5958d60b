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


Capture = Callable[[Callable[[], Any], "int | None"], Any]
"""Runs an iteration, with so many microbatches, in which a graph is captured; marks it."""


class _CaptureEvents(TimerEvents):
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

    def around(self, name: str, timer: Any) -> WrappedTimer:
        """See `TimerEvents.around`."""
        kind = SHOWN[name]
        if kind is None:
            return WrappedTimer(timer, timer.start, timer.stop)

        def stop(*args: Any, **kwargs: Any) -> Any:
            if not self._is_in_step:
                self.guard.attempt(self._mark, kind)
            return timer.stop(*args, **kwargs)

        return WrappedTimer(timer, timer.start, stop)

    def run_step(self, kinds: str, step: Callable[..., T], values: Mapping[str, Any]) -> T:
        """See `TimerEvents.run_step`; its end is marked."""
        self._is_in_step = True
        try:
            result = step()
        finally:
            self._is_in_step = False
        self.guard.attempt(self._mark, kinds)
        return result

    def _mark(self, kinds: str) -> None:
        self.order.append(joined([next(self._in_turn[kind]) for kind in kinds]))
        self._capturing.capture(len(self.order))


def showing_replays(guard: HookGuard, capture: Capture | None = None) -> Callable[..., Any]:
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


def run_captured(
    guard: HookGuard,
    capturing: Capturing,
    configs: Sequence[Any],
    rank: PipelineRank,
    chunks: int,
    group: int,
    combined: CombinedStep | None,
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
        config.timers = WrappedTimers(timers, marks)
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
