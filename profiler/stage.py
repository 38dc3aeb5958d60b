"""A stage as the profiler sees it: what runs each kind of computation, and how to wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

T = TypeVar("T")

Run = Callable[[int], None]
"""Launches a computation so many times back to back; the GPU may still be at it on return."""
Progress = Callable[[int, int], None]
"""Called with the measurements that are done and the total, which may shrink; the last call has them equal."""


@dataclass(frozen=True)
class Timed:
    """What is measured of one kind.

    Attributes:
        run: runs it.
        less: a kind of the same stage that each repetition of `run` also runs once, and whose time and energy are
            therefore taken off: "F" where a backward cannot be run without its forward.
    """

    run: Run
    less: str | None = None


@dataclass(frozen=True)
class Stage:
    """What is measured of one pipeline stage on one GPU.

    Attributes:
        timed: kind, as in `Profile.measurements` -> what runs it. A kind stands after the one that its `less` names.
        synchronize: returns when the GPU has finished all that was launched.
        block: keeps the GPU really waiting for a neighbour's message for about so many seconds; None where there is no
            neighbour. Returns when the message has come.
    """

    timed: Mapping[str, Timed]
    synchronize: Callable[[], None]
    block: Callable[[float], None] | None = None


class Group(Protocol):
    """The GPUs that share a stage (tensor parallelism), and so must measure in step."""

    @property
    def size(self) -> int:
        """How many they are."""

    def gathered(self, value: T) -> list[T]:
        """Everyone's `value`, in the order of ranks, at everyone; returns when all have given theirs."""


class Alone:
    """The group of one GPU."""

    size = 1

    def gathered(self, value: T) -> list[T]:
        """`[value]`."""
        return [value]
