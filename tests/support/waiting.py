"""Wait for what other threads and processes do, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import psutil

Found = TypeVar("Found")

LONG_S = 300.0
"""Guards against waiting forever: nothing takes as long, however busy the machine is."""

TRIES = 10
"""How often what takes its time is measured: so many pauses in a row come on no machine."""

SOON_S = 2.0
"""How long it may take to reset all GPUs after whatever death."""


def eventually(
    holds: Callable[[], Found], said: Callable[[], str] = lambda: "it never came"
) -> Found:
    """Wait for what nothing tells of, and return it; fail with what is `said` after a long time."""
    until_s = time.monotonic() + LONG_S
    while not (found := holds()):
        assert time.monotonic() < until_s, said()
        time.sleep(0.002)  # between two looks
    return found


def calmly(measure: Callable[[], Found]) -> Found:
    """Return what is measured in real time and checked by `measure`, at the first of some tries
    whose checks hold: a pause of this or another process may spoil one, and what is wrong spoils
    all.
    """
    for _ in range(TRIES - 1):
        with suppress(AssertionError):
            return measure()
    return measure()


def idle_s() -> float:
    """Return how long a CPU of this machine has had nothing to do, on average."""
    return float(psutil.cpu_times().idle) / (psutil.cpu_count() or 1)


def soon(
    holds: Callable[[], bool],
    said: Callable[[], str] = lambda: "it took longer",
    since_s: float = -1,
) -> None:
    """Wait for what takes `SOON_S` at most, in which a CPU is idle: while all are busy, whoever
    does it has to queue.

    Args:
        holds: Whether it is done.
        said: What the failure says.
        since_s: `idle_s()` when it began; now by default.
    """
    until_s = (idle_s() if since_s < 0 else since_s) + SOON_S

    def is_so() -> bool:
        late = idle_s() > until_s  # before the look, as a look may be interrupted
        held = holds()
        assert held or not late, said()
        return held

    eventually(is_so, said)
