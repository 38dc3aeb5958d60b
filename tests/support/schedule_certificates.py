"""Runs a schedule with its tensors counted: what proves that it is whole, can run, and keeps no
more than it may.

Written from what a computation takes and makes, with nothing of the package's own rules of what
waits for what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from perseus_planner.schedules import Computation, Schedule

Tensor = tuple[str, int, int]  #: what it is, of which stage, of which microbatch


class Run(NamedTuple):
    """What came out.

    Attributes:
        starts: when each computation starts.
        ends: when it ends.
        peaks: for each rank, the most activations it keeps at one time.
        left: the tensors that nobody took in the end.
        stopped: the computations at which ranks wait for ever.
    """

    starts: dict[Computation, int]
    ends: dict[Computation, int]
    peaks: tuple[int, ...]
    left: Counter[Tensor]
    stopped: tuple[Computation, ...]


def _tensors(computation: Computation, last: int) -> tuple[list[Tensor], list[Tensor]]:
    """What a computation takes, once and for all, and what it makes."""
    stage, kind, m = computation
    if kind == "F":
        onward = ("gradient", stage, m) if stage == last else ("output", stage, m)
        return [("output", stage - 1, m)], [onward, ("kept", stage, m)]
    if kind == "W":
        return [("half", stage, m), ("kept", stage, m)], []
    made = [("gradient", stage - 1, m)] + ([("half", stage, m)] if kind == "I" else [])
    return [("gradient", stage, m)] + ([("kept", stage, m)] if kind == "B" else []), made


def run(schedule: Schedule, duration: Callable[[Computation], int] = lambda _: 1) -> Run:
    """Each rank in its order, each computation as soon as what it takes has been made."""
    last = max(computation.stage for computation in schedule.computations())
    inputs = {computation.microbatch for computation in schedule.computations()}
    made: dict[Tensor, int] = {("output", -1, m): 0 for m in inputs}
    starts: dict[Computation, int] = {}
    ends: dict[Computation, int] = {}
    free, kept, peaks, reached = ([0] * len(schedule.ranks) for _ in range(4))
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.ranks):
            while reached[rank] < len(order):
                computation = order[reached[rank]]
                takes, makes = _tensors(computation, last)
                if not all(tensor in made for tensor in takes):
                    break
                starts[computation] = max(free[rank], *(made.pop(tensor) for tensor in takes))
                free[rank] = ends[computation] = starts[computation] + duration(computation)
                made |= dict.fromkeys(makes, free[rank])
                kept[rank] += (computation.kind == "F") - (computation.kind in "BW")
                peaks[rank] = max(peaks[rank], kept[rank])
                reached[rank] += 1
                moved = True
    stopped = tuple(
        order[reached[r]] for r, order in enumerate(schedule.ranks) if reached[r] < len(order)
    )
    return Run(starts, ends, tuple(peaks), Counter(made.keys()), stopped)
