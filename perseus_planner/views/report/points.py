"""The frontier of an iteration, with the points of plans, of runs and of other planners beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from perseus_planner.cluster import baselines
from perseus_planner.errors import UsageError
from perseus_planner.solver.frontier import Frontier
from perseus_planner.views.report.savings import pipelines_of_run, replayed
from perseus_planner.views.run_summary import summarize_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from perseus_planner.runs.run import Run
    from perseus_planner.views.report.sources import Sources

_MOST_POINTS = 500  #: of a curve, far more than can be seen
_ENVPIPE_COMPUTATIONS = 2000  #: it replays the iteration up to computations x clocks times; more take minutes

BEFORE = "all clocks at maximum"  #: the baseline of every saving
Kind = Literal["baseline", "plan", "peer", "run", "landmark"]


@dataclass(frozen=True)
class Point:
    """An iteration of one pipeline: seconds, joules over all GPUs, waiting included, and where they are from."""

    name: str
    kind: Kind
    time_s: float
    energy_j: float
    origin: str


@dataclass(frozen=True)
class Points:
    """What the frontier's figure shows.

    Attributes:
        times_s: of the bound, rising; empty without a frontier.
        energies_j: the least energy that any plan of that time can have, waiting included.
        points: the iterations beside it.
        deadline_s: what the other planners were asked to meet; None: none was asked.
        left_out: other planners that are missing, and why.
    """

    times_s: tuple[float, ...]
    energies_j: tuple[float, ...]
    points: tuple[Point, ...]
    deadline_s: float | None
    left_out: tuple[str, ...]


def points(sources: Sources) -> Points:
    """The bound, and every iteration that is known: plans, runs, and other planners at the first plan's time."""
    own = (*_baseline(sources), *_plans(sources), *_runs(sources))
    frontier = sources.frontier
    if frontier is None:
        return Points((), (), own, None, ())
    first = next(iter(sources.plans.values()), None)
    deadline_s = frontier.baseline_time_s if first is None else max(first.time_s, first.deadline_s)
    peers, left_out = _peers(frontier, deadline_s)
    times_s, energies_j = bound(frontier)
    return Points(times_s, energies_j, (*own, *_landmarks(frontier), *peers), deadline_s, left_out)


def bound(frontier: Frontier) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Times, rising, and energies of the bound: its corners, or at most `_MOST_POINTS` of them."""
    count = len(frontier.times_s)
    kept = np.unique(np.linspace(0, count - 1, min(count, _MOST_POINTS)).round().astype(int))[::-1]
    return tuple(frontier.times_s[kept].tolist()), tuple(frontier.energies_j[kept].tolist())


def _baseline(sources: Sources) -> Iterator[Point]:
    known = sources.frontier or sources.any_plan
    if known is not None:
        origin = known.profile.origin if isinstance(known, Frontier) else known.origin
        yield Point(BEFORE, "baseline", known.baseline_time_s, known.baseline_energy_j, replayed(origin))


def _plans(sources: Sources) -> Iterator[Point]:
    for name, plan in sources.plans.items():
        yield Point(name, "plan", plan.time_s, plan.energy_j, replayed(plan.origin))


def _runs(sources: Sources) -> Iterator[Point]:
    for name, run in sources.runs.items():
        yield from _run(name, run)


def _run(name: str, run: Run) -> Iterator[Point]:
    summary = summarize_run(run)
    by = next(each for each in summary.plans if each.version == summary.version)
    if by.time_s is not None and by.energy_j is not None:
        origin = f"time measured, energy {summary.gpu_origin or 'of unknown origin'}"
        yield Point(name, "run", by.time_s, by.energy_j / pipelines_of_run(run, summary), origin)


def _landmarks(frontier: Frontier) -> Iterator[Point]:
    origin = replayed(frontier.profile.origin)
    for name, time_s in (("fastest", frontier.min_time_s), ("least energy", frontier.least_energy_time_s)):
        yield Point(f"bound, {name}", "landmark", time_s, frontier.bound_j(time_s), origin)


def _peers(frontier: Frontier, deadline_s: float) -> tuple[tuple[Point, ...], tuple[str, ...]]:
    found, left_out = [], []
    for name, choose in _CHOOSE.items():
        try:
            plan = frontier.plan_of(choose(frontier, deadline_s))
        except UsageError as error:
            left_out.append(f"{name}: {error}")
        else:
            found.append(Point(name, "peer", plan.time_s, plan.energy_j, replayed(plan.origin)))
    return tuple(found), tuple(left_out)


def _envpipe(frontier: Frontier, _: float) -> Mapping[str, int]:
    count = len(frontier.dag.computations)
    if count > _ENVPIPE_COMPUTATIONS:
        raise UsageError(
            f"its walk over {count:,} computations takes minutes; `planner simulate --policy envpipe` replays it"
        )
    return baselines.envpipe(frontier.dag)


_CHOOSE: Mapping[str, Callable[[Frontier, float], Mapping[str, int]]] = {
    "one clock for the job": lambda frontier, deadline_s: baselines.one_clock(frontier.dag, deadline_s),
    "one clock per stage (Zeus)": lambda frontier, deadline_s: baselines.one_per_stage(frontier.dag, deadline_s),
    "EnvPipe": _envpipe,
}
