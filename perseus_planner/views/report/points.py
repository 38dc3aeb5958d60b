"""The chart of a frontier with plans, runs and the choices of other planners beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from perseus_planner.cluster import baselines
from perseus_planner.errors import UsageError
from perseus_planner.views.context import ALL_MAXIMUM, origin_label
from perseus_planner.views.frontier import FrontierChart, IterationPoint, chart_frontier
from perseus_planner.views.report.savings import pipelines_of_run
from perseus_planner.views.run import summarize_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from perseus_planner.runs.run import Run
    from perseus_planner.solver.frontier import Frontier
    from perseus_planner.views.report.sources import Sources

_ENVPIPE_COMPUTATIONS = 2000  #: EnvPipe replays the iteration up to computations x clocks times; more take minutes


def chart_sources(sources: Sources) -> FrontierChart:
    """Return the bound with every known iteration beside it; other planners choose for the time of the first plan."""
    known = (*_plan_points(sources), *(point for name, run in sources.runs.items() for point in _run_points(name, run)))
    if sources.frontier is None:
        return FrontierChart("", (), (), (*_baseline_points(sources), *known))
    chart = chart_frontier(sources.frontier)
    baseline, *landmarks = chart.points
    first = next(iter(sources.plans.values()), None)
    deadline_s = sources.frontier.baseline_time_s if first is None else max(first.time_s, first.deadline_s)
    peers, left_out = _peer_points(sources.frontier, deadline_s)
    points = (baseline, *known, *landmarks, *peers)
    return replace(chart, points=points, deadline_s=deadline_s, left_out=left_out)


def _baseline_points(sources: Sources) -> Iterator[IterationPoint]:
    plan = sources.any_plan
    if plan is not None:
        origin = origin_label(plan.origin)
        yield IterationPoint(ALL_MAXIMUM, "baseline", plan.baseline_time_s, plan.baseline_energy_j, origin)


def _plan_points(sources: Sources) -> Iterator[IterationPoint]:
    for name, plan in sources.plans.items():
        yield IterationPoint(name, "plan", plan.time_s, plan.energy_j, origin_label(plan.origin))


def _run_points(name: str, run: Run) -> Iterator[IterationPoint]:
    """Yield the mean iteration of one pipeline by the newest plan, if its energy is known."""
    summary = summarize_run(run)
    time_s, energy_j = summary.current.time_s, summary.current.energy_j
    if time_s is not None and energy_j is not None:
        origin = f"time measured, energy {summary.gpu_origin or 'of unknown origin'}"
        yield IterationPoint(name, "run", time_s, energy_j / pipelines_of_run(run, summary), origin)


def _peer_points(frontier: Frontier, deadline_s: float) -> tuple[tuple[IterationPoint, ...], tuple[str, ...]]:
    found, left_out = [], []
    for name, choose in _CHOICES.items():
        try:
            plan = frontier.plan_of(choose(frontier, deadline_s))
        except UsageError as error:
            left_out.append(f"{name}: {error}")
        else:
            found.append(IterationPoint(name, "peer", plan.time_s, plan.energy_j, origin_label(plan.origin)))
    return tuple(found), tuple(left_out)


def _envpipe(frontier: Frontier, _: float) -> Mapping[str, int]:
    count = len(frontier.dag.computations)
    if count > _ENVPIPE_COMPUTATIONS:
        raise UsageError(
            f"its walk over {count:,} computations takes minutes; `planner simulate --policy envpipe` replays it"
        )
    return baselines.envpipe(frontier.dag)


_CHOICES: Mapping[str, Callable[[Frontier, float], Mapping[str, int]]] = {
    "one clock for the job": lambda frontier, deadline_s: baselines.one_clock(frontier.dag, deadline_s),
    "one clock per stage (Zeus)": lambda frontier, deadline_s: baselines.one_per_stage(frontier.dag, deadline_s),
    "EnvPipe": _envpipe,
}
