"""A report as plain values, the text that `planner report` prints of it, its page, and the figures
of `planner show --figure`; and a page of tables for other rooms.

A page is one HTML file. Everything is inside, so that it opens anywhere, and offline.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import Environment, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from perseus_planner.base import __version__, extensions
from perseus_planner.base.errors import RunError, UsageError
from perseus_planner.base.prefixes import counted, si
from perseus_planner.base.tables import Column, html_table, lay_out, table
from perseus_planner.plans.replay import ALL_MAXIMUM
from perseus_planner.profiles.csv_file import unit_of
from perseus_planner.views.accounts import account_text
from perseus_planner.views.context import Context, origin_label
from perseus_planner.views.course import RunCourse, course_of
from perseus_planner.views.curves import MeasuredCurve, curves_of
from perseus_planner.views.energy import PHASES
from perseus_planner.views.figures import (
    GanttChart,
    chart_plan,
    chart_run,
    draw_curves,
    draw_frontier,
    draw_gantt,
    page_file,
)
from perseus_planner.views.frontier import FrontierChart, IterationPoint, chart_frontier
from perseus_planner.views.plan import RankSummary, load_columns, summarize_plan
from perseus_planner.views.run import tables_of_run, time_and_saving
from perseus_planner.views.savings import EnergyRates, IterationSize, Saving, savings_of
from perseus_planner.views.unplanned import decider_text, tables_of_unplanned, unplanned_text
from perseus_planner.views.where import WhereEnergyGoes, where_energy_goes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from perseus_planner.base.tables import Sheet
    from perseus_planner.plans.plan import Plan
    from perseus_planner.views.run import RunSummary
    from perseus_planner.views.sources import Sources
    from perseus_planner.views.unplanned import UnplannedRun

_NOT_KNOWN = "\u2013"
_MINUS = "\u2212"


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
    #: the profile and the iteration; None if there are only plans of Kareus.
    context: Context | None
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
    unplanned: dict[str, UnplannedRun]  #: name -> a run without a plan, as it ran
    courses: tuple[RunCourse, ...]  #: the course of each of these
    curves: tuple[MeasuredCurve, ...]  #: the curve of each computation
    kareus: tuple[Any, ...]  #: plans of Kareus for each configuration

    @property
    def dry_runs(self) -> dict[str, str]:
        """Name -> that no clock was set in this run, and what its plan would have set."""
        runs: dict[str, RunSummary | UnplannedRun] = {**self.runs, **self.unplanned}
        return {name: run.dry_run for name, run in runs.items() if run.dry_run is not None}


def make_report(sources: Sources, rates: EnergyRates, size: IterationSize) -> EnergyReport:
    """Make the report of `sources`. It replays other planners, which takes seconds for a large
    pipeline.
    """
    charts, left_out = chart_iterations(sources)
    savings = savings_of(sources, rates, size)
    # Sentences are about savings, so expectations of traces come after them.
    where = where_energy_goes(sources, savings)
    where = replace(where, sentences=(*where.sentences, *_expectations(sources)))
    return EnergyReport(
        planner=__version__,
        files=sources.names,
        context=sources.context,
        rates=rates,
        size=size,
        savings=savings,
        where=where,
        frontier=chart_sources(sources),
        iterations=charts,
        left_out=left_out,
        # The load of each rank is that of plans: runs have their own tables.
        ranks=tuple(
            RanksOfPlan(name, origin_label(plan.origin), plan.time_s, summarize_plan(plan).per_rank)
            for name, plan in sources.plans.items()
        ),
        runs=sources.summaries,
        unplanned=sources.unplanned,
        courses=tuple(course_of(sources.runs[name]) for name in sources.unplanned),
        curves=() if sources.profile is None else curves_of(sources.profile),
        kareus=sources.kareus,
    )


def chart_iterations(sources: Sources) -> tuple[tuple[GanttChart, ...], tuple[str, ...]]:
    """Return the iteration with all clocks at maximum, as planned and as recorded; then what is
    left out, and why.
    """
    charts = list[GanttChart]()
    left_out = list[str]()
    if sources.before is not None:
        note = "before: the baseline of every saving"
        charts.append(chart_plan(ALL_MAXIMUM, sources.before, note))
    charts += [chart_plan(name, plan, "as planned") for name, plan in sources.plans.items()]
    # A run may have kept no iteration that can be drawn, and then says why.
    for name, run in sources.runs.items():
        try:
            charts.append(chart_run(name, run)[0])
        except RunError as error:
            left_out.append(str(error))
    # A plan has the numbers of full clocks, but not their computations.
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
    iteration_points = [_point_of(name, "plan", plan) for name, plan in sources.plans.items()]
    for name, run in sources.summaries.items():
        time_s = run.current.time_s
        energy_j = run.current.energy_j
        if time_s is not None and energy_j is not None:
            # A run may be of several pipelines, and the frontier is of one.
            energy_j /= run.pipelines_of_plan
            iteration_points.append(IterationPoint(name, "run", time_s, energy_j, run.origin))
    frontier = sources.frontier
    # Without a frontier there is no bound, but a plan knows its baseline's time and energy.
    if frontier is None:
        plan = sources.any_plan
        if plan is not None:
            baseline = _point_of(ALL_MAXIMUM, "baseline", plan)
            time_s = plan.baseline_time_s
            energy_j = plan.baseline_energy_j
            iteration_points.insert(0, replace(baseline, time_s=time_s, energy_j=energy_j))
        return FrontierChart("", (), (), tuple(iteration_points))
    first = next(iter(sources.plans.values()), None)
    # Other planners get the time that the plan had, or took.
    deadline_s = frontier.baseline_time_s if first is None else max(first.time_s, first.deadline_s)
    peers = list[IterationPoint]()
    left_out = list[str]()
    # The extension with other planners may be missing, and the rest of the report is not.
    try:
        other_planners = extensions.offer("other planners")
    except UsageError as error:
        left_out.append(str(error))
        other_planners = {}
    for name, choose in other_planners.items():
        try:
            peers.append(
                _point_of(name, "peer", frontier.plan_of(choose(frontier.dag, deadline_s)))
            )
        except UsageError as error:
            left_out.append(f"{name}: {error}")
    chart = chart_frontier(frontier)
    baseline, *landmarks = chart.points
    points = (baseline, *iteration_points, *landmarks, *peers)
    return replace(chart, points=points, deadline_s=deadline_s, left_out=tuple(left_out))


def _expectations(sources: Sources) -> tuple[str, ...]:
    """Return what is to be said of traced profiles, whose savings are expectations."""
    said: dict[str, None] = {}
    for source in (sources.profile, *sources.plans.values()):
        if source is not None and source.origin == "traced":
            said.update(dict.fromkeys(source.remarks))
    return tuple(said)


def _point_of(name: str, kind: Literal["plan", "peer", "baseline"], plan: Plan) -> IterationPoint:
    return IterationPoint(name, kind, plan.time_s, plan.energy_j, origin_label(plan.origin))


def report_text(report: EnergyReport) -> str:
    """Return the text that `planner report` prints: the savings as a table, and the rates that
    they assume.
    """
    dry_runs = "".join(f"{name}: {text}.\n" for name, text in report.dry_runs.items())
    # A run that cannot be compared with its plan has no saving to show.
    unlike = [run.unlike_plan for run in report.runs.values() if run.unlike_plan is not None]
    if unlike:
        return f"{dry_runs}{unlike[0]}.\n"
    verdicts = dry_runs + "".join(
        f"{name}: {run.verdict}\n" for name, run in report.runs.items() if run.verdict is not None
    )
    kareus = "".join(f"{read_plans.sheet.text()}\n" for read_plans in report.kareus)
    unplanned = "".join(f"{name}: {unplanned_text(run)}" for name, run in report.unplanned.items())
    # Without savings there may still be runs without a plan, and plans of others.
    if not report.savings:
        return verdicts + (
            unplanned + kareus
            or "There is no saving to show: no plan was given, and no run whose energy is known.\n"
        )
    rates = report.rates
    sentences = "".join(f"{sentence}\n" for sentence in report.where.sentences)
    accounts = "".join(
        f"{name}: {account_text(run.total, saves=True)}\n" for name, run in report.runs.items()
    )
    origins = "; ".join(f"{saving.name}: {saving.energy_origin}" for saving in report.savings)
    columns = [column for column in _SAVINGS if report.runs or column is not _UNTIL_NEXT]
    return (
        f"{verdicts}{sentences}\n{table(lay_out(report.savings, *columns))}\n\n"
        f"Energy of {origins}.\nSaved against {ALL_MAXIMUM}, by a run in as much time; kWh, money "
        "and CO2e are saved at the meter, in a day of such iterations.\n"
        f"{_OF_RUNS * bool(report.runs)}"
        f"Assumed: {rates.price_usd_per_kwh:g} USD and {rates.carbon_kg_per_kwh:g} kg of CO2e per "
        f"kWh, PUE {rates.pue:g}.\n{accounts}{unplanned}\n{kareus}"
    )


_OF_RUNS = (
    "A run: an iteration goes from its begin to its end, on the slowest rank, in the mean over "
    "those in the planned order\nby its newest plan, without the first of them; until the next, "
    "energy and saving are of all iterations, the first too,\nin the mean over ranks, each until "
    "the next one begins.\n"
)
_UNTIL_NEXT = Column("until the next {}", "window_s", "s4")
_SAVINGS = (
    Column("", "name", "<"),
    Column("iteration {}", "time_s", "s4"),
    _UNTIL_NEXT,
    Column("energy {}", "energy_j", "J4"),
    Column("saved %", "saved_share", "%"),
    Column("saved kWh/day", "per_day.kwh", ".4g"),
    Column("USD/day", "per_day.usd", ".4g"),
    Column("kg CO2e/day", "per_day.co2e_kg", ".4g"),
)


def _draw_iterations(sources: Sources, by: str) -> Figure:
    charts, left_out = chart_iterations(sources)
    if not charts:
        raise UsageError(
            "; ".join(left_out) or "--figure timeline: needs a plan, a run or a frontier; name one"
        )
    return draw_gantt(charts, _control(sources.context), by)


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


def page(report: EnergyReport) -> str:
    """Return the page of `report`. Names of files and profiles are escaped, whatever they contain.

    A content security policy in the page allows only its own scripts and styles, by their digests,
    and loads nothing.
    """
    # Everything stands inside the page, as it has to open offline.
    styles = [Markup(page_file(f"{name}.css")) for name in ("theme", "report")]
    scripts = [Markup(page_file(f"{name}.js")) for name in ("charts", "report")]
    unit = _unit(report)
    environment = page_environment()
    environment.filters |= {
        # Tables escape their own cells, and so are safe here.
        "table": lambda columns: Markup(html_table(columns)),
        "tables_of_run": tables_of_run,
        "tables_of_unplanned": partial(tables_of_unplanned, unit=unit),
        "lines_of_unplanned": lambda run: account_text(run.total, saves=True).splitlines(),
        "decider": decider_text,
        "time_and_saving": lambda run: (
            _NOT_KNOWN if run.current.time_s is None else time_and_saving(run)
        ),
        "cost": lambda energy_j: report.rates.cost(energy_j),
        "saved": _saved_columns,
        "used": _used_columns,
        "load": lambda plan: load_columns(plan.ranks, plan.time_s, unit, digits=3),
        "si": _si,
        "number": number,
        "counted": counted,
        "input": _input,
        "share": _share,
        "signed": _signed,
        "watts": _watts,
    }
    return environment.from_string(page_file("report.html.j2")).render(
        report=report,
        unit=unit,
        styles=styles,
        scripts=scripts,
        # The policy names exactly these scripts and styles, so that no others run.
        policy=content_policy(scripts, styles),
        multiples=_multiples(report.curves),
        has_errors=any(
            point.energy_stderr_j is not None for curve in report.curves for point in curve.points
        ),
        # Escaped for a script, so that no name can end it.
        data=htmlsafe_json_dumps(_data(report), dumps=json.dumps, separators=(",", ":")),
    )


def _unit(report: EnergyReport) -> str:
    return unit_of(_control(report.context))


def _control(context: Context | None) -> str:
    """Return what is set: a clock, where only a run without a plan is known."""
    return "clock" if context is None else context.control


def page_environment() -> Environment:
    """Return what renders pages: it escapes all texts."""
    return Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_unbroken,
    )


def _unbroken(value: Any) -> Any:
    """Return a text in which no line ends between a number and its percent sign."""
    return value.replace(" %", "\u00a0%") if type(value) is str else value


def _saved_columns(report: EnergyReport) -> list[list[str]]:
    """Return the columns of what is saved: per iteration, per day, and in the run."""
    rows = [
        {"name": f"{saving.name}{_pipelines(saving, report)}, {span}", **asdict(cost)}
        for saving in report.savings
        for span, cost in (
            ("per iteration", saving.per_iteration),
            ("per day", saving.per_day),
            (
                f"in {counted(saving.iterations or 0, 'iteration')}"
                f"{' of all attempts' * saving.is_run}",
                saving.per_run,
            ),
        )
        if cost is not None
    ]
    units = {"gpu_j": "J", "kwh": "kWh", "usd": "USD", "co2e_kg": "kg CO\u2082e"}
    return lay_out(
        rows,
        Column("", "name", "<"),
        *(Column(unit, partial(_numbered, name)) for name, unit in units.items()),
    )


def _used_columns(report: EnergyReport) -> list[list[str]]:
    """Return the columns of time, energy and power of each baseline and of what is compared with
    it.
    """
    rows = list[dict[str, Any]]()
    for saving in report.savings:
        pipelines = _pipelines(saving, report)
        energy = saving.energy_origin
        time = saving.time_origin
        origin = energy if energy == time else f"time {time}, energy {energy}"
        before = saving.baseline_efficiency
        baseline = (saving.baseline, saving.baseline_time_s, saving.baseline_energy_j, before)
        for (name, time_s, energy_j, efficiency), source in (
            (baseline, saving.baseline_origin),
            ((saving.name, saving.time_s, saving.energy_j, saving.efficiency), origin),
        ):
            # The energies of a run are of longer times than its iterations.
            window_s = saving.window_s if saving.is_run else time_s
            row = {
                "name": f"{name}{pipelines}",
                "time_s": time_s,
                "window_s": window_s,
                "energy_j": energy_j,
                "source": source,
            }
            row |= {"power_w": energy_j / window_s, **efficiency}
            # Several plans share one baseline, which is shown once.
            if row not in rows:
                rows.append(row)
    names = {"time_s": "s per iteration"}
    # A run's joules and watts are of all until the next iteration begins, and so stand beside that.
    if report.runs:
        names["window_s"] = "s until the next"
    names |= {"energy_j": "J per iteration", "power_w": "W on average"}
    if report.size.tokens:
        names["joules_per_token"] = "J per token"
    if report.size.samples:
        names["samples_per_s_per_w"] = "samples/s/W"
    return lay_out(
        rows,
        Column("", "name", "<"),
        *(Column(heading, partial(_numbered, name)) for name, heading in names.items()),
        Column("source", "source"),
    )


def _numbered(name: str, row: Mapping[str, Any]) -> str:
    return number(row[name])


def _pipelines(saving: Saving, report: EnergyReport) -> str:
    """Name the pipelines of a saving, if they are not those of the report."""
    if saving.pipelines == report.size.pipelines:
        return ""
    return f", of {counted(saving.pipelines, 'pipeline')}"


def number(value: float | None, digits: int = 3) -> str:
    """Write a number with thousands separated and `digits` significant digits; a whole one with all
    of them.
    """
    if value is None:
        return _NOT_KNOWN
    if not float(value).is_integer():
        value = float(f"{value:.{digits}g}")
    places = 0 if value == 0 else max(0, digits - 1 - int(f"{value:e}".split("e")[1]))
    text = f"{value:,.{min(places, 12)}f}" if places and value % 1 else f"{value:,.0f}"
    return text.replace("-", _MINUS)


def _input(value: float) -> str:
    """Write a number as it was given."""
    return f"{value:g}"


def _share(value: float) -> str:
    return f"{100 * value:.1f}\u00a0%".replace("-", _MINUS)


def _signed(value: float) -> str:
    """Write a share in percent, with its sign, to three digits and two decimals at most."""
    return f"{100 * value:+.{2 if abs(value) < 0.0995 else 1}f}\u00a0%".replace("-", _MINUS)


def _si(value: float, unit: str) -> str:
    """Write a quantity with its prefix, which stays on its line, to three digits."""
    return si(value, unit, 3).replace(" ", "\u00a0").replace("-", _MINUS)


def _watts(power_w: float | Iterable[float]) -> str:
    if isinstance(power_w, (int, float)):
        return f"{number(power_w)}\u00a0W"
    powers_w = list(power_w)
    return f"{number(min(powers_w))} to {number(max(powers_w))}\u00a0W"


def _multiples(curves: Sequence[MeasuredCurve]) -> dict[str, list[tuple[str, int]]]:
    """Return kind of computation -> names of the stages whose curves are equal, and the index of
    the first of them.
    """
    # Stages with equal curves share a picture, as a pipeline has many of them.
    alike: dict[str, dict[object, list[int]]] = {}
    for index, curve in enumerate(curves):
        of_kind = alike.setdefault(curve.computation, {})
        of_kind.setdefault((curve.points, curve.hull), []).append(index)
    return {
        computation: [
            (_stages([curves[index].stage for index in indices]), indices[0])
            for indices in groups.values()
        ]
        for computation, groups in alike.items()
    }


def _stages(numbers: Sequence[int]) -> str:
    """Name stages, such as "stages 0 to 6" or "stages 0, 2, 4"."""
    first = numbers[0]
    last = numbers[-1]
    if first == last:
        return f"stage {first}"
    if list(numbers) == list(range(first, last + 1)):
        return f"stages {first} to {last}"
    return f"stages {', '.join(map(str, numbers))}"


def content_policy(scripts: Iterable[str], styles: Iterable[str]) -> str:
    """Return a content security policy that allows these scripts and styles, by their digests,
    and nothing else.
    """
    allowed = [
        " ".join(f"'sha256-{_digest(text)}'" for text in texts) or "'none'"
        for texts in (scripts, styles)
    ]
    return (
        f"default-src 'none'; script-src {allowed[0]}; style-src {allowed[1]}; base-uri 'none'; "
        "form-action 'none'"
    )


def _digest(text: str) -> str:
    return b64encode(sha256(text.encode()).digest()).decode()


def _data(report: EnergyReport) -> dict[str, Any]:
    """Return the data that the scripts draw."""
    return {
        "unit": _unit(report),
        "where": [asdict(iteration) for iteration in report.where.iterations],
        "phases": PHASES,
        "frontier": asdict(report.frontier),
        "iterations": [asdict(iteration) for iteration in report.iterations],
        "courses": [asdict(course) for course in report.courses],
        "ranks": [asdict(rank) for rank in report.ranks],
        "curves": [asdict(curve) for curve in report.curves],
    }


def page_of_sheets(
    title: str,
    heading: str,
    first: tuple[str, str, str],
    sheets: Sequence[Sheet],
) -> str:
    """Return a page. Texts are escaped, whatever they contain.

    Args:
        title: Its title.
        heading: Its heading.
        first: Its first section: the heading, the sentence under it, and a note.
        sheets: Its tables.
    """
    styles = [page_file("theme.css"), page_file("report.css")]
    return (
        page_environment()
        .from_string(page_file("sheets.html.j2"))
        .render(
            title=title,
            heading=heading,
            first=first,
            sheets=[(sheet.title, Markup(sheet.html())) for sheet in sheets],
            styles=[Markup(text) for text in styles],
            policy=Markup(content_policy([], styles)),
        )
    )
