"""The discrete problem of a plan, laid out in arrays for kernels: which operating point each
computation takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.solver.kernels import kernel

if TYPE_CHECKING:
    from perseus_planner.schedules.dag import PipelineDag
    from perseus_planner.solver.network import Floats, Integers


class PointProblem(NamedTuple):
    """The discrete problem: n nodes in topological order; all nodes of a class have the same
    points.
    """

    member: Integers  #: (n,) class of each node
    point_start: Integers  #: (classes + 1,) where the points of each class begin, fastest first
    time_s: Floats  #: (points,)
    cost_j: Floats  #: (points,) effective energy, falling within a class
    gain_w: Floats  #: (points,) the most that any slower point saves per second
    loss_w: Floats  #: (points,) the least that any faster point costs per second
    kind: Integers  #: (classes,) number of the kind of each class
    before_start: Integers  #: (n + 1,) where the predecessors of each node begin in `before`
    before: Integers  #: the predecessors of all nodes
    before_lag_s: Floats  #: aligned with `before`: least seconds from their end to the node's start
    after_start: Integers  #: (n + 1,) where the successors of each node begin in `after`
    after: Integers  #: the successors of all nodes
    after_lag_s: Floats  #: aligned with `after`: least seconds from the node's end to their start


def point_problem(dag: PipelineDag) -> PointProblem:
    """Lay out the nodes of `dag` for the kernels, in `dag.order`."""
    keys = list(dag.points)
    number = {key: i for i, key in enumerate(keys)}
    member = [number[dag.keys[place]] for place in dag.order]
    start = np.cumsum([0, *(len(dag.points[key]) for key in keys)])
    time_s = np.array([point.time_s for key in keys for point in dag.points[key]])
    cost_j = np.array([point.effective_j for key in keys for point in dag.points[key]])
    gain_w, loss_w = np.zeros_like(time_s), np.full_like(time_s, np.inf)
    for first, stop in pairwise(start.tolist()):
        for i in range(first, stop):
            gain_w[i] = max(
                (cost_j[i] - cost_j[i + 1 : stop]) / (time_s[i + 1 : stop] - time_s[i]), default=0.0
            )
            loss_w[i] = min(
                (cost_j[first:i] - cost_j[i]) / (time_s[i] - time_s[first:i]), default=np.inf
            )
    kinds = list(dict.fromkeys(kind for _, kind in keys))
    kind = np.array([kinds.index(kind) for _, kind in keys])
    rank = {place: k for k, place in enumerate(dag.order)}
    before = [
        [(rank[other], lag_s) for other, lag_s in dag.iteration.waits[place]] for place in dag.order
    ]
    after: list[list[tuple[int, float]]] = [[] for _ in before]
    for k, others in enumerate(before):
        for other, lag_s in others:
            after[other].append((k, lag_s))
    return PointProblem(
        np.array(member), start, time_s, cost_j, gain_w, loss_w, kind, *_flat(before), *_flat(after)
    )


def _flat(lists: Sequence[Sequence[tuple[int, float]]]) -> tuple[Integers, Integers, Floats]:
    start = np.cumsum([0, *(len(entries) for entries in lists)], dtype=np.int64)
    entries = [entry for entries in lists for entry in entries]
    return (
        start,
        np.array([k for k, _ in entries], dtype=np.int64),
        np.array([lag_s for _, lag_s in entries]),
    )


@kernel
def compute_ends(problem: PointProblem, chosen: Integers, end_s: Floats) -> float:
    """Fill `end_s` with the end of each node under the `chosen` points; return the makespan,
    seconds.
    """
    before_start, before, time_s = problem.before_start, problem.before, problem.time_s
    lag_s = problem.before_lag_s
    makespan_s = 0.0
    for k in range(len(chosen)):
        start_s = 0.0
        for i in range(before_start[k], before_start[k + 1]):
            start_s = max(start_s, end_s[before[i]] + lag_s[i])
        end_s[k] = start_s + time_s[chosen[k]]
        makespan_s = max(makespan_s, end_s[k])
    return makespan_s
