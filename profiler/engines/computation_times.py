"""How long forwards and backwards take inside a training iteration, seen through hooks on a
function's results.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

from perseus_planner.training.values import tensors


class ComputationTimes:
    """Times of the forwards of a function, and of the backwards that begin at their results.

    On a GPU they are taken by CUDA events in the stream that computes, so nothing waits for them.
    """

    def __init__(self) -> None:
        self._forwards: list[tuple[Any, Any]] = []
        self._backwards: list[tuple[Any, Any]] = []

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, timed."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            begin = mark()
            result = function(*args, **kwargs)
            self.add_forward(begin, result)
            return result

        return wrapper

    def add_forward(self, begin: object, result: object) -> None:
        """Note that a forward which began at `begin` has given `result`, and watch for its
        backward.
        """
        self._forwards.append((begin, mark()))
        begun = False

        def begin_backward(_: object) -> None:
            nonlocal begun
            if not begun:  # at the first of several results
                begun = True
                self._begin_backward()

        for tensor in tensors(result):
            if tensor.requires_grad:
                tensor.register_hook(begin_backward)

    def least_forward_s(self) -> float | None:
        """Return the time of the fastest forward, seconds; None if there was none."""
        return min(map(_elapsed_s, self._forwards), default=None)

    def least_backward_s(self) -> float | None:
        """Return the time of the fastest backward, seconds; None if there was none."""
        return min(map(_elapsed_s, self._backwards), default=None)

    def _begin_backward(self) -> None:
        from torch.autograd import Variable

        begin, engine = mark(), cast("Any", Variable)._execution_engine
        engine.queue_callback(
            lambda: self._backwards.append((begin, mark()))
        )  # at the end of this backward


def mark() -> Any:
    """Return this moment: that of the CUDA device, if this process uses one."""
    import torch

    if not torch.cuda.is_initialized():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed_s(span: tuple[Any, Any]) -> float:
    begin, end = span
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
