"""A report as plain values, the text that `planner report` prints of it, and the figures of
`planner show --figure`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from perseus_planner.base import __version__, registry
from perseus_planner.base.errors import RunError, UsageError
from perseus_planner.base.tables import column, numbers, quantities, table
from perseus_planner.plans.replay import ALL_MAXIMUM, all_maximum
from perseus_planner.views.context import Context, origin_label
from perseus_planner.views.figures import draw_curves, draw_frontier, draw_gantt
from perseus_planner.views.frontier import FrontierChart, IterationPoint, chart_frontier
from perseus_planner.views.gantt import GanttChart, chart_plan, chart_run
from perseus_planner.views.plan import RankSummary, summarize_plan
from perseus_planner.views.profiles import MeasuredCurve, curves_of
from perseus_planner.views.report.savings import (
    EnergyRates,
    IterationSize,
    Saving,
    pipelines_of_run,
    savings_of,
)
from perseus_planner.views.report.where import WhereEnergyGoes, where_energy_goes
from perseus_planner.views.run import RunSummary, summarize_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from perseus_planner.runs.run import Run
    from perseus_planner.solver.frontier import Frontier
    from perseus_planner.views.report.sources import Sources


@dataclass(frozen=True)
class RanksOfPlan:
    """What each rank does in an iteration of a plan, and where those numbers come from."""

    name: str
    origin: str
    time_s: float
    ranks: tuple[RankSummary, ...]


@dataclass(frozen=True)
class EnergyReport:
    """The values of a report."""

    planner: str  #: version of the planner that made it
    files: tuple[str, ...]  #: names of the files that it was made from
    context: Context  #: the profile and the iteration
    rates: EnergyRates  #: what a kilowatt-hour costs
    size: IterationSize  #: the size of an iteration
    savings: tuple[Saving, ...]  #: what each run and plan saves
    where: WhereEnergyGoes  #: where the energy goes and why
    frontier: FrontierChart  #: the chart of the frontier
    #: the iteration with all clocks at maximum, as planned, and as recorded.
    iterations: tuple[GanttChart, ...]
    left_out: tuple[str, ...]  #: iterations that cannot be shown, each with the reason
    ranks: tuple[RanksOfPlan, ...]  #: clock changes, clocks and load of each rank by each plan
    runs: dict[str, RunSummary]  #: name -> the run beside its plans
    curves: tuple[MeasuredCurve, ...]  #: the curve of each computation


def make_report(sources: Sources, rates: EnergyRates, size: IterationSize) -> EnergyReport:
    """Make the report of `sources`. It replays other planners, which takes seconds for a large
    pipeline.
    """
    charts, left_out = chart_iterations(sources)
    savings = savings_of(sources, rates, size)
    return EnergyReport(
        planner=__version__,
        files=sources.names,
        context=sources.context,
        rates=rates,
        size=size,
        savings=savings,
        where=where_energy_goes(sources, savings),
        frontier=chart_sources(sources),
        iterations=charts,
        left_out=left_out,
        ranks=tuple(
            RanksOfPlan(name, origin_label(plan.origin), plan.time_s, summarize_plan(plan).per_rank)
            for name, plan in sources.plans.items()
        ),
        runs={name: summarize_run(run) for name, run in sources.runs.items()},
        curves=() if sources.profile is None else curves_of(sources.profile),
    )


def chart_iterations(sources: Sources) -> tuple[tuple[GanttChart, ...], tuple[str, ...]]:
    """Return the iteration with all clocks at maximum, as planned and as recorded; then what is
    left out, and why.
    """
    charts, left_out = list[GanttChart](), list[str]()
    if sources.frontier is not None:
        plan = sources.frontier.plan_of(all_maximum(sources.frontier.dag))
        charts.append(chart_plan(ALL_MAXIMUM, plan, "before: the baseline of every saving"))
    charts += [chart_plan(name, plan, "as planned") for name, plan in sources.plans.items()]
    for name, run in sources.runs.items():
        try:
            charts.append(chart_run(name, run)[0])
        except RunError as error:
            left_out.append(str(error))
    if sources.plans and sources.frontier is None:
        left_out.append(
            f"The iteration before, with {ALL_MAXIMUM}, is not known from a plan alone; add the "
            "frontier"
        )
    return tuple(charts), tuple(left_out)


def chart_sources(sources: Sources) -> FrontierChart:
    """Return the bound with every known iteration beside it; other planners choose for the time
    of the first plan.
    """
    known = (
        *_plan_points(sources),
        *(point for name, run in sources.runs.items() for point in _run_points(name, run)),
    )
    if sources.frontier is None:
        return FrontierChart("", (), (), (*_baseline_points(sources), *known))
    chart = chart_frontier(sources.frontier)
    baseline, *landmarks = chart.points
    first = next(iter(sources.plans.values()), None)
    deadline_s = (
        sources.frontier.baseline_time_s if first is None else max(first.time_s, first.deadline_s)
    )
    peers, left_out = _peer_points(sources.frontier, deadline_s)
    points = (baseline, *known, *landmarks, *peers)
    return replace(chart, points=points, deadline_s=deadline_s, left_out=left_out)


def _baseline_points(sources: Sources) -> Iterator[IterationPoint]:
    plan = sources.any_plan
    if plan is not None:
        origin = origin_label(plan.origin)
        yield IterationPoint(
            ALL_MAXIMUM, "baseline", plan.baseline_time_s, plan.baseline_energy_j, origin
        )


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


def _peer_points(
    frontier: Frontier, deadline_s: float
) -> tuple[tuple[IterationPoint, ...], tuple[str, ...]]:
    found, left_out = [], []
    for name, choose in registry.load(registry.OTHER_PLANNERS).items():
        try:
            plan = frontier.plan_of(choose(frontier.dag, deadline_s))
        except UsageError as error:
            left_out.append(f"{name}: {error}")
        else:
            found.append(
                IterationPoint(name, "peer", plan.time_s, plan.energy_j, origin_label(plan.origin))
            )
    return tuple(found), tuple(left_out)


def report_text(report: EnergyReport) -> str:
    """Return the text that `planner report` prints: the savings as a table, and the rates that
    they assume.
    """
    unlike = [run.unlike_plan for run in report.runs.values() if run.unlike_plan is not None]
    if unlike:
        return f"{unlike[0]}.\n"
    if not report.savings:
        return "There is no saving to show: no plan was given, and no run whose energy is known.\n"
    rates = report.rates
    return (
        "".join(f"{sentence}\n" for sentence in report.where.sentences) + "\n"
        f"{table(list(_saving_columns(report)))}\n\n"
        f"Compared with {ALL_MAXIMUM}; kWh, money and CO2e are at the meter, for a day of such "
        "iterations.\n"
        f"Assumed: {rates.price_usd_per_kwh:g} USD and {rates.carbon_kg_per_kwh:g} kg of CO2e per "
        "kWh, "
        f"PUE {rates.pue:g}.\n"
    )


def _saving_columns(report: EnergyReport) -> Iterator[list[str]]:
    rows = report.savings
    days = [row.per_day for row in rows]
    yield ["", *(row.name for row in rows)]
    yield from quantities(["iteration {}"], "s", [row.time_s for row in rows])
    yield from quantities(["energy {}"], "J", [row.energy_j for row in rows])
    yield column("saved %", [f"{100 * row.saved_share:.2f}" for row in rows])
    yield column("kWh a day", numbers([day.kwh for day in days]))
    yield column("USD a day", numbers([day.usd for day in days]))
    yield column("kg CO2e a day", numbers([day.co2e_kg for day in days]))
    yield ["  energy is", *(f"  {row.energy_origin}" for row in rows)]


def _draw_iterations(sources: Sources, by: str) -> Figure:
    charts, left_out = chart_iterations(sources)
    if not charts:
        raise UsageError(
            "; ".join(left_out) or "--figure timeline: needs a plan, a run or a frontier; name one"
        )
    return draw_gantt(charts, sources.context.control, by)


def _draw_profile(sources: Sources) -> Figure:
    if sources.profile is None:
        raise UsageError("--figure curves: needs a profile; name one, or add it with --beside")
    return draw_curves(sources.profile)


FIGURES: Mapping[str, Callable[[Sources], Figure]] = MappingProxyType(
    {
        "points": lambda sources: draw_frontier(chart_sources(sources)),
        "timeline": partial(_draw_iterations, by="power"),
        "timeline-clock": partial(_draw_iterations, by="clock"),
        "curves": _draw_profile,
    }
)
"""The figures of `planner show --figure` by name."""
