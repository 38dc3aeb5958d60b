"""Decides which GPU is set to what, and when; needs neither GPUs nor the time of day.

The rules:

- The latest request wins. A request that is replaced before it could be served is never served.
- A GPU is not set to a value that it already has.
- All changes of a node together keep to a rate: any span of time has as many as fit into it at that
  rate, plus one for each GPU. So all GPUs can change at once, as those of a pipeline do when an
  iteration begins.
- The GPU that has waited longest is next, and a newer request keeps the place in the queue of the
  one it replaces. So while a GPU waits, no other GPU is set twice.

A program is too fast for its node if more than half of the last `JUDGED` changes of a GPU were
overtaken by the next. Resets that were overtaken do not count: no program has them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from perseus_planner.base.errors import UsageError

RESET = 0
"""The value that resets a GPU: no clock or power limit is 0."""

JUDGED = 64
"""How many changes of a GPU are looked at to judge whether the node can follow the plan."""

_LEAST_PER_S = 0.001

Key = TypeVar("Key", bound=Hashable)


class PendingChange(NamedTuple):
    """A change that has been requested."""

    value: int  #: What the GPU is to be set to; `RESET` to reset it
    position: int | None  #: Position of the requesting rank in its program
    seen_ns: int  #: When the request was seen


@dataclass
class _GpuQueue:
    value: int = RESET  #: what the GPU is set to
    pending: PendingChange | None = None
    overtaken: int = 0
    #: whether each change was overtaken
    outcomes: deque[bool] = field(default_factory=lambda: deque(maxlen=JUDGED))
    lost: int = 0  #: how many of them were

    def judge(self, *, is_overtaken: bool) -> None:
        """Take in one more change."""
        # The oldest one falls out, so that only the last ones are judged.
        if len(self.outcomes) == JUDGED:
            self.lost -= self.outcomes[0]
        self.outcomes.append(is_overtaken)
        self.lost += is_overtaken


class ChangeScheduler(Generic[Key]):
    """The pending changes of all GPUs of a node.

    Args:
        max_changes_per_s: Rate of all changes together; may be infinite.

    Raises:
        UsageError: If the rate is below 0.001.
    """

    def __init__(self, max_changes_per_s: float) -> None:
        # Written so that NaN is refused as well.
        if not max_changes_per_s >= _LEAST_PER_S:
            raise UsageError(f"{max_changes_per_s} changes per second: give {_LEAST_PER_S} or more")
        self._period_ns = math.ceil(1e9 / max_changes_per_s)
        #: when the last change would have been due at exactly the rate
        self._spent_until_ns: int | None = None
        self._gpus: dict[Key, _GpuQueue] = {}
        self._waiting: dict[Key, _GpuQueue] = {}  #: those with a change, the longest wait first

    def add(self, gpu: Key) -> None:
        """Add a GPU, which is reset now."""
        self._gpus[gpu] = _GpuQueue()

    def remove(self, gpu: Key) -> None:
        """Forget a GPU."""
        del self._gpus[gpu]
        self._waiting.pop(gpu, None)

    def cancel(self, gpu: Key) -> None:
        """Drop the pending change of a GPU, which is reset now, and judge it by later changes
        only.
        """
        queue = self._gpus[gpu]
        queue.pending = None
        self._waiting.pop(gpu, None)
        queue.value = RESET
        self.judge_anew(gpu)

    def judge_anew(self, gpu: Key) -> None:
        """Judge a GPU by later changes only."""
        queue = self._gpus[gpu]
        queue.outcomes.clear()
        queue.lost = 0

    def request(self, gpu: Key, value: int, position: int | None, now_ns: int) -> None:
        """Request a value for a GPU; has no effect if that is pending or set already."""
        queue = self._gpus[gpu]
        pending = queue.pending
        # Equal values are not set again.
        if value == (queue.value if pending is None else pending.value):
            return
        # What was pending was never made; a reset that is overtaken is no loss.
        if pending is not None:
            queue.overtaken += 1
            if pending.value != RESET:
                queue.judge(is_overtaken=True)
        # Back to what is set already, so there is nothing to do.
        if value == queue.value:
            queue.pending = None
            del self._waiting[gpu]  # as it has another value, something was pending
            return
        queue.pending = PendingChange(value, position, now_ns)
        self._waiting[gpu] = queue  # in the place of the one that it replaces

    def take(self, now_ns: int) -> tuple[Key, PendingChange] | None:
        """Take the change to make now, which counts as made from then on; return None if none is
        allowed.
        """
        if not self._waiting or now_ns < self.allowed_ns:
            return None
        # The one that has waited for longest.
        gpu = next(iter(self._waiting))
        queue = self._waiting.pop(gpu)
        pending = queue.pending
        queue.pending = None
        assert pending is not None  # as it is waiting
        queue.value = pending.value
        queue.judge(is_overtaken=False)
        # Time that was not used is not saved up, beyond what `allowed_ns` lets through at once.
        spent_ns = now_ns if self._spent_until_ns is None else max(now_ns, self._spent_until_ns)
        self._spent_until_ns = spent_ns + self._period_ns
        return gpu, pending

    @property
    def allowed_ns(self) -> int:
        """When the next change is within the rate; a time that has passed if one is now."""
        if self._spent_until_ns is None:
            return 0
        # So many changes at once as there are GPUs, as all of them begin an iteration together.
        return self._spent_until_ns - (len(self._gpus) - 1) * self._period_ns

    def overtaken(self, gpu: Key) -> int:
        """Return how many changes of a GPU were overtaken."""
        return self._gpus[gpu].overtaken

    def made_share(self, gpu: Key) -> float:
        """Return which part of the last `JUDGED` changes of a GPU were made before they were
        overtaken.
        """
        queue = self._gpus[gpu]
        judged = len(queue.outcomes)
        return (judged - queue.lost) / judged if judged else 1.0

    def is_overloaded(self, gpu: Key) -> bool:
        """Whether more than half of the last `JUDGED` changes of a GPU were overtaken."""
        queue = self._gpus[gpu]
        return len(queue.outcomes) == JUDGED and 2 * queue.lost > JUDGED
