"""The discrete problem of a plan, laid out in arrays for kernels: which measured option each computation takes."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.schedules.dag import PipelineDag
    from perseus_planner.solver.network import Integers

Floats = NDArray[np.float64]


class Choices(NamedTuple):
    """The discrete problem: n nodes in topological order, each of a class that has options."""

    member: Integers  #: (n,) class of each computation
    option_start: Integers  #: (classes + 1,) where the options of a class begin, fastest first
    time_s: Floats  #: (options,)
    cost_j: Floats  #: (options,) effective energy, falling within a class
    gain_w: Floats  #: (options,) the most that any slower option saves per second
    loss_w: Floats  #: (options,) the least that any faster option costs per second
    kind: Integers  #: (classes,) classes of one number are of one kind
    before_start: Integers  #: (n + 1,)
    before: Integers  #: nodes that each one waits for
    before_lag_s: Floats  #: for how long after their end
    after_start: Integers  #: (n + 1,)
    after: Integers  #: nodes that wait for it
    after_lag_s: Floats  #: for how long after its end


def choices_of(dag: PipelineDag) -> Choices:
    """Lay out the nodes of `dag`, in `dag.order`, for the kernels."""
    keys = list(dag.points)
    number = {key: i for i, key in enumerate(keys)}
    member = [number[dag.keys[place]] for place in dag.order]
    start = np.cumsum([0, *(len(dag.points[key]) for key in keys)])
    time_s = np.array([option.time_s for key in keys for option in dag.points[key]])
    cost_j = np.array([option.effective_j for key in keys for option in dag.points[key]])
    gain_w, loss_w = np.zeros_like(time_s), np.full_like(time_s, np.inf)
    for first, stop in pairwise(start.tolist()):
        for i in range(first, stop):
            gain_w[i] = max((cost_j[i] - cost_j[i + 1 : stop]) / (time_s[i + 1 : stop] - time_s[i]), default=0.0)
            loss_w[i] = min((cost_j[first:i] - cost_j[i]) / (time_s[i] - time_s[first:i]), default=np.inf)
    kinds = list(dict.fromkeys(kind for _, kind in keys))
    kind = np.array([kinds.index(kind) for _, kind in keys])
    rank = {place: k for k, place in enumerate(dag.order)}
    before = [[(rank[other], lag_s) for other, lag_s in dag.iteration.waits[place]] for place in dag.order]
    after: list[list[tuple[int, float]]] = [[] for _ in before]
    for k, others in enumerate(before):
        for other, lag_s in others:
            after[other].append((k, lag_s))
    return Choices(np.array(member), start, time_s, cost_j, gain_w, loss_w, kind, *_flat(before), *_flat(after))


def _flat(lists: Sequence[Sequence[tuple[int, float]]]) -> tuple[Integers, Integers, Floats]:
    start = np.cumsum([0, *(len(entries) for entries in lists)], dtype=np.int64)
    entries = [entry for entries in lists for entry in entries]
    return start, np.array([k for k, _ in entries], dtype=np.int64), np.array([lag_s for _, lag_s in entries])


@njit(cache=True)
def ends(choices: Choices, choice: Integers, end_s: Floats) -> float:
    """Fill `end_s` with when each computation ends under `choice`; the makespan, seconds."""
    before_start, before, time_s = choices.before_start, choices.before, choices.time_s
    lag_s = choices.before_lag_s
    makespan_s = 0.0
    for k in range(len(choice)):
        start_s = 0.0
        for i in range(before_start[k], before_start[k + 1]):
            start_s = max(start_s, end_s[before[i]] + lag_s[i])
        end_s[k] = start_s + time_s[choice[k]]
        makespan_s = max(makespan_s, end_s[k])
    return makespan_s
