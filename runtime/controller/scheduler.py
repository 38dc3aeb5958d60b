"""When which GPU is set to what: the rules, without GPUs and without a clock.

- The latest value counts. A value that is overtaken by the next one before it could be set is never set.
- What a GPU is set to already is not set again.
- From the start of one change of a GPU to the start of its next one passes its dwell; a reset need not wait for that.
- All changes of a node together keep to a rate: in any time span as many as fit into it at the rate, and one more for
  each GPU. So all GPUs can change at once, as a pipeline's do when an iteration begins.
- Who has waited longest is first, and a newer value takes over the wait of the one that it overtakes. So while a GPU
  waits that may be set, no other is set twice.

A plan is too fast for its node if, of the last `JUDGED` changes of a GPU that needed a call, more than half were
overtaken.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

from perseus_planner.errors import UsageError

RESET = 0
"""The value of a GPU to which nothing is set."""

JUDGED = 64
"""So many changes show whether a plan can be followed."""

_LEAST_PER_S = 0.001

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Wanted:
    """A change that is asked for.

    Attributes:
        value: what the GPU is to be set to; `RESET`: nothing.
        place: where the rank was that asks.
        seen_ns: when it was seen to ask.
    """

    value: int
    place: int | None
    seen_ns: int


@dataclass
class _Gpu:
    dwell_ns: int
    value: int = RESET  #: what it is set to
    begun_ns: int | None = None  #: when that change began; None: nothing was set yet
    wanted: Wanted | None = None
    turn: int = 0  #: less for who waits longer
    overtaken: int = 0
    outcomes: deque[bool] = field(default_factory=lambda: deque(maxlen=JUDGED))  #: of changes: was it overtaken?


class Pacing(Generic[Key]):
    """The GPUs of a node.

    Args:
        max_changes_per_s: the rate; infinite: there is none.

    Raises:
        UsageError: it is below 0.001.
    """

    def __init__(self, max_changes_per_s: float) -> None:
        if not max_changes_per_s >= _LEAST_PER_S:
            raise UsageError(f"{max_changes_per_s} changes per second: give {_LEAST_PER_S} or more")
        self._period_ns = math.ceil(1e9 / max_changes_per_s)
        self._spent_until_ns: int | None = None  #: when the last change would have been due, had all kept to the rate
        self._gpus: dict[Key, _Gpu] = {}
        self._turns = count(1)

    def add(self, gpu: Key, min_dwell_s: float) -> None:
        """From now on this GPU, which is reset, may be asked for."""
        self._gpus[gpu] = _Gpu(_nanoseconds(min_dwell_s))

    def remove(self, gpu: Key) -> None:
        """It is no GPU of this node any more."""
        del self._gpus[gpu]

    def withdraw(self, gpu: Key) -> None:
        """What is asked of a GPU is not asked any more."""
        self._gpus[gpu].wanted = None

    def dwell(self, gpu: Key, min_dwell_s: float) -> None:
        """Change the dwell of a GPU."""
        self._gpus[gpu].dwell_ns = _nanoseconds(min_dwell_s)

    def ask(self, gpu: Key, value: int, place: int | None, now_ns: int) -> None:
        """The GPU is to be set to `value`; changes nothing where that is asked for, or set, already."""
        state = self._gpus[gpu]
        if value == (state.value if state.wanted is None else state.wanted.value):
            return
        if state.wanted is None:
            state.turn = next(self._turns)
        else:
            state.overtaken += 1
            state.outcomes.append(True)
        state.wanted = None if value == state.value else Wanted(value, place, now_ns)

    def grant(self, now_ns: int) -> tuple[Key, Wanted] | None:
        """What is to be set now, and counts as set from now on; None: nothing may be."""
        if not self._is_within_rate(now_ns):
            return None
        free = [(state.turn, gpu) for gpu, state in self._gpus.items() if _may_change(state, now_ns)]
        if not free:
            return None
        _, gpu = min(free, key=lambda each: each[0])
        state = self._gpus[gpu]
        wanted, state.wanted = state.wanted, None
        assert wanted is not None  # that of a GPU that may change
        state.value, state.begun_ns = wanted.value, now_ns
        state.outcomes.append(False)
        spent_ns = now_ns if self._spent_until_ns is None else max(now_ns, self._spent_until_ns)
        self._spent_until_ns = spent_ns + self._period_ns
        return gpu, wanted

    def overtaken(self, gpu: Key) -> int:
        """How many changes of a GPU were overtaken."""
        return self._gpus[gpu].overtaken

    def is_too_slow(self, gpu: Key) -> bool:
        """Whether more than half of the last `JUDGED` changes of a GPU were overtaken."""
        outcomes = self._gpus[gpu].outcomes
        return len(outcomes) == JUDGED and 2 * sum(outcomes) > JUDGED

    def _is_within_rate(self, now_ns: int) -> bool:
        burst_ns = (len(self._gpus) - 1) * self._period_ns
        return self._spent_until_ns is None or self._spent_until_ns - now_ns <= burst_ns


def _may_change(state: _Gpu, now_ns: int) -> bool:
    if state.wanted is None:
        return False
    is_held = state.begun_ns is not None and now_ns < state.begun_ns + state.dwell_ns
    return state.wanted.value == RESET or not is_held


def _nanoseconds(duration_s: float) -> int:
    return round(duration_s * 1e9)
