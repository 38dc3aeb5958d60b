"""GPUs that hold a stage, each measured in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar

from waiting import LONG_S

T = TypeVar("T")


class Member:
    """One GPU of the group; see `GpuGroup`."""

    def __init__(self, rank: int, values: list[Any], barrier: Barrier, replicas: int) -> None:
        self._rank, self._values, self._barrier = rank, values, barrier
        self.size = len(values) // replicas
        self.replicas = [f"replica {number}" for number in range(replicas)]

    def gather(self, value: T) -> list[T]:
        """Return the values of all GPUs."""
        self._values[self._rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


def measured_together(
    measure: Callable[[Any, Member], Any], gpus: Sequence[Any], replicas: int = 1
) -> list[Any]:
    """Measure all GPUs of so many replicas at once; return what each measured, or its exception,
    after which all end.
    """
    values, barrier = [None] * len(gpus), Barrier(len(gpus), timeout=LONG_S)

    def run(rank: int) -> Any:
        try:
            return measure(gpus[rank], Member(rank, values, barrier, replicas))
        except Exception as error:
            barrier.abort()
            return error

    with ThreadPoolExecutor(len(gpus)) as pool:
        return list(pool.map(run, range(len(gpus))))
