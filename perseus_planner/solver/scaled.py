"""One iteration, laid out once, in which each node can take longer or shorter than measured.

Time and energy of a node scale alike, so all slopes between them stay, and with them the network
and its flows: only vertices move. The relaxed optimum at one deadline then comes from one walk
there, and a plan from a few dispatches that it guides.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from perseus_planner.profiles.measurement import lower_hull
from perseus_planner.solver.dispatch import Guide, improve, try_all_points
from perseus_planner.solver.mincut import walk
from perseus_planner.solver.network import scaled_network
from perseus_planner.solver.point_problem import PointProblem, compute_ends, point_problem
from perseus_planner.solver.rounding import STIFFNESS, point_step_s

if TYPE_CHECKING:
    from perseus_planner.profiles.measurement import OperatingPoint
    from perseus_planner.schedules.dag import PipelineDag
    from perseus_planner.solver.network import Floats, Integers, Network, ScaledNetwork

_LARGE = 256  #: nodes above which a walk takes long
_VERTICES = 8, 4  #: of a hull at most; for that many nodes, and for more
_FEW = 2**12  #: combinations of points up to which all are tried
_TIME_BITS = 60  #: all durations together are at most 2**60 ticks


class ScaledDag:
    """An iteration whose nodes can be scaled.

    Args:
        dag: the iteration, as measured.

    Raises:
        ProfileError: If the measurements cannot be scaled.
    """

    def __init__(self, dag: PipelineDag) -> None:
        self._base = scaled_network(_thinned(dag, _VERTICES[len(dag.order) > _LARGE]))
        base, count = self._base.network, len(dag.order)
        spans = [np.arange(a, b + 1) for a, b in zip(base.first, base.last, strict=True)][:count]
        #: (vertices,) the vertex of the base, first those of each node, then all of the base, of
        #: which waits have theirs
        self._vertex = np.concatenate([*spans, np.arange(len(base.vertex_time))])
        start = np.cumsum([0, *map(len, spans)])
        #: (vertices of nodes,) the node of each
        self._vertex_node = np.repeat(np.arange(count), np.diff(start))
        first, last = base.first + start[-1], base.last + start[-1]
        first[:count], last[:count] = start[:-1], start[1:] - 1
        self._network = base._replace(
            first=first, last=last, vertex_slope=base.vertex_slope[self._vertex]
        )
        self._follows = np.arange(len(self._vertex)) < start[-1]  # behind a slower vertex
        self._follows[first] = False
        _check_slopes(self._network, self._follows)
        problem = point_problem(dag)
        sizes = np.diff(problem.point_start)[problem.member]
        point_start = np.cumsum([0, *sizes])
        point = np.arange(point_start[-1]) + np.repeat(
            problem.point_start[problem.member] - point_start[:-1], sizes
        )
        self._point_node = np.repeat(np.arange(count), sizes)
        #: every node is a class of its own
        self.points = problem._replace(
            member=np.arange(count),
            point_start=point_start,
            time_s=problem.time_s[point],
            cost_j=problem.cost_j[point],
            gain_w=problem.gain_w[point],
            loss_w=problem.loss_w[point],
            kind=problem.kind[problem.member],
        )
        self._is_small = math.prod(sizes.tolist()) <= _FEW
        clocks = [row.clock_mhz for key in dag.points for row in dag.points[key]]
        self.point_mhz = np.array(clocks)[point]  #: (points,)

    def scaled_points(self, scale: Floats) -> PointProblem:
        """Return the discrete problem of nodes that take `scale` times as long: (n,)."""
        factor = scale[self._point_node]
        return self.points._replace(
            time_s=self.points.time_s * factor, cost_j=self.points.cost_j * factor
        )

    def choose(
        self, problem: PointProblem, scale: Floats, deadline_s: float, tries: int
    ) -> Integers:
        """Return the point of each node in the best plan found.

        Args:
            problem: that of `scaled_points` for the scale.
            scale: (n,) of each node.
            deadline_s: seconds; at least what the fastest points take.
            tries: how many plans to make.

        Returns:
            (n,) indices of points; they meet the deadline if the fastest ones do.
        """
        chosen, end_s = problem.point_start[1:] - 1, np.empty(len(scale))
        if compute_ends(problem, chosen, end_s) <= deadline_s:
            return chosen  # the slowest of each
        if self._is_small:
            return try_all_points(problem, deadline_s)
        guide = self._relaxed(scale, deadline_s)
        chosen = problem.point_start[:-1].copy()
        improve(problem, deadline_s, guide, chosen, np.inf, tries, point_step_s(problem), True)
        return chosen

    def _relaxed(self, scale: Floats, deadline_s: float) -> Guide:
        """Return the relaxed optimum at a deadline: when each node ends, and the price of its
        time.
        """
        scaled = self._scaled(scale)
        step = next(walk(scaled.network, [int(deadline_s / scaled.tick_s)]))
        event, flow = step.state.event, step.state.flow
        end_s = np.asarray(event[1 : 2 * len(scale) : 2] * scaled.tick_s, dtype=np.float64)
        price_w = np.asarray(flow[: len(scale)] * scaled.power_unit_w, dtype=np.float64)
        return Guide(end_s, price_w, np.array(STIFFNESS))

    def _scaled(self, scale: Floats) -> ScaledNetwork:
        """Return the network with moved vertices, and the ticks in which its times still fit."""
        base, network = self._base, self._network
        ticks = base.network.vertex_time[self._vertex].astype(np.float64)
        ticks[: len(self._vertex_node)] *= scale[self._vertex_node]
        longest = float(ticks[network.first].sum())
        fits = math.ldexp(1.0, min(0, _TIME_BITS - math.frexp(longest)[1]))
        time = np.rint(ticks * fits).astype(np.int64)
        falls = time[:-1] > time[1:]
        if not falls[self._follows[1:]].all():  # else the kernels would walk out of their arrays
            raise AssertionError("a scaled curve does not fall: please report this")
        return replace(base, network=network._replace(vertex_time=time), tick_s=base.tick_s / fits)


def _check_slopes(network: Network, follows: Integers) -> None:
    """Check what the kernels take for granted: slopes are 0 at the slow end, and rise."""
    slope = network.vertex_slope
    if slope[network.first].any() or not (slope[1:] > slope[:-1])[follows[1:]].all():
        raise AssertionError("a scaled curve is not convex: please report this")


def _thinned(dag: PipelineDag, vertices: int) -> PipelineDag:
    """Return the iteration with few of its operating points, those whose hull is the closest.

    A walk on all of them takes twice as long, and saves less than a tenth of a point more.
    """
    used = {
        key: {point.clock_mhz for point in _few(points, vertices)}
        for key, points in dag.points.items()
    }
    measurements = {
        key: tuple(m for m in rows if m.clock_mhz in used[key]) if key in used else rows
        for key, rows in dag.profile.measurements.items()
    }
    return dag.with_profile(replace(dag.profile, measurements=measurements))


def _few(points: tuple[OperatingPoint, ...], most: int) -> list[OperatingPoint]:
    """Return the ends of the lower hull, and the vertices that are the furthest from what is
    kept.
    """
    hull = lower_hull([(point.time_s, point.effective_j) for point in points])
    kept = [0, len(hull) - 1]
    while len(kept) < min(most, len(hull)):
        below: list[tuple[float, int]] = []
        for a, b in pairwise(sorted(kept)):
            (x0, y0), (x1, y1) = hull[a], hull[b]
            below += [
                (y0 + (y1 - y0) * (hull[i][0] - x0) / (x1 - x0) - hull[i][1], i)
                for i in range(a + 1, b)
            ]
        kept.append(max(below)[1])
    vertices = {hull[i] for i in kept}
    return [point for point in points if (point.time_s, point.effective_j) in vertices]
