"""`planner show`: the content of a file or a run folder as text, as a figure, or as a Perfetto
trace; and `planner report`, which writes a page about several of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import click

from perseus_planner.base.errors import UsageError
from perseus_planner.cli import console
from perseus_planner.cli.options import (
    BlockingPower,
    Carbon,
    Number,
    Option,
    OutputFile,
    SourceFile,
    command,
    output_file,
    refuse_same,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from perseus_planner.views.savings import IterationSize
    from perseus_planner.views.sources import Sources

#: the keys of `views.report.FIGURES`, which is not loaded for --help
FIGURES = ("points", "timeline", "timeline-clock", "curves")


class _View(NamedTuple):
    """One file: its summary and text, and what draws and traces it."""

    summary: Any
    text: str
    #: a function of the module `views.figures`; None if there is no figure.
    draw: Callable[[Any], Figure] | None = None
    #: a function of the file to write and of the files beside it; None if there is no timeline.
    write_trace: Callable[[Path, tuple[Path, ...]], None] | None = None
    #: returns a table of each iteration; None if there are no iterations.
    csv: Callable[[], bytes] | None = None


@command(
    "planner show frontier.npz --plot frontier.png",
    "planner show plan.yaml --plot plan.svg --perfetto plan.json",
    "planner show frontier.npz --beside plan.yaml --plot before-after.pdf --figure timeline",
    "planner show run --plot run.png",
    "planner show run run-2",
    "planner show run --csv power.csv",
    "planner show profile.yaml --plot curves.png",
)
def show(
    file: Annotated[Path, SourceFile()],
    run2: Annotated[Path | None, SourceFile("run")] = None,
    *,
    plot: Annotated[
        Path | None,
        "Also write a figure: .png, .svg or .pdf.",
        Option(type=OutputFile(), metavar="FIGURE"),
    ],
    figure: Annotated[
        str | None,
        "Choose a figure of `planner report`: the frontier with plans and other planners, the "
        "iteration before and after coloured by power or by clock, or energy over time of each "
        "computation.  [default: FILE alone]",
        Option(type=click.Choice(FIGURES)),
    ],
    beside: Annotated[
        tuple[Path, ...],
        "Add a frontier, plan, run or profile to the --figure; can be repeated. A frontier adds "
        "the iteration with all clocks at maximum to the --perfetto trace of a plan.",
    ],
    perfetto: Annotated[
        Path | None,
        "Also write the timeline of a plan or run for Perfetto (ui.perfetto.dev) or "
        "chrome://tracing: .json.",
        Option(type=OutputFile(".json"), metavar="TRACE"),
    ],
    table: Annotated[
        Path | None,
        "Also write the time, energy, power, saving and clock of each GPU in each iteration of a "
        "run: .csv.",
        Option("--csv", type=OutputFile(".csv"), metavar="TABLE"),
    ],
    blocking_power_w: Annotated[
        BlockingPower | None,
        "Power of a waiting GPU, e.g. 85W, for a folder of plans of Kareus.",
    ],
) -> None:
    """Show a profile, a frontier, a plan with its timeline, or a training run beside its plan.

    With two run folders, FILE and RUN2, both are shown side by side.

    FILE is a profile (.yaml or .csv), a file that `planner solve`, `planner plan` or
    `planner inference plan` wrote, a run folder (even while the run goes on), or a folder with
    plans of Kareus. The figure of a run shows the last iteration that ran as planned on all ranks.
    The trace of a run has all iterations whose computations were kept.
    """
    # Two runs are compared as text, so all else is refused there.
    if run2 is not None:
        others = (plot, figure, beside, perfetto, table, blocking_power_w)
        _show_pair(file, run2, has_more=any(others))
        return
    if figure is not None and plot is None:
        raise UsageError("--figure: chooses what --plot draws; add --plot FIGURE")
    if beside and figure is None and perfetto is None:
        raise UsageError("--beside: adds files to --figure or --perfetto; add --figure NAME")
    # Everything that can be refused is refused before files are read or written.
    if plot is not None:
        from perseus_planner.views.figures import check_figure_path

        check_figure_path(plot, "--plot")
    refuse_same([file, *beside], perfetto, "--perfetto")
    refuse_same([file, *beside], table, "--csv")
    # Read once, whatever is drawn or written of it.
    view = _view(file, blocking_power_w)
    if perfetto is not None and view.write_trace is None:
        raise UsageError(f"--perfetto {perfetto}: {file} has no timeline; name a plan or a run")
    if table is not None and view.csv is None:
        raise UsageError(f"--csv {table}: {file} has no iterations; name a run folder")
    # Drawn before anything is written, as a figure may be refused.
    if plot is not None:
        from perseus_planner.views.figures import save_figure

        if figure is None:
            drawn = _drawn_alone(view, file)
        else:
            drawn = _draw(figure, (file, *beside), blocking_power_w)
        save_figure(drawn, plot)
    _write_beside(view, perfetto, table, beside)
    written = [path for path in (plot, perfetto, table) if path is not None]
    console.report(view.summary, view.text, written)


def _write_beside(
    view: _View, perfetto: Path | None, table: Path | None, beside: tuple[Path, ...]
) -> None:
    """Write the trace and the table of a view, where they are wanted."""
    if perfetto is not None and view.write_trace is not None:
        view.write_trace(perfetto, beside)
    if table is not None and view.csv is not None:
        from perseus_planner.base.files import replacing

        with replacing(table, UsageError) as output:
            output.write(view.csv())


def _show_pair(first: Path, second: Path, *, has_more: bool) -> None:
    """Print two runs side by side."""
    from perseus_planner import Run
    from perseus_planner.base.file_kinds import kind_of
    from perseus_planner.views.pair import RunPair, figures_of, pair_text

    # Other files have no iterations that could stand side by side.
    for path in (first, second):
        if kind_of(path) != "run":
            raise UsageError(
                f"{path}: is not a run folder, and only two of them are shown side by side; for "
                "other files give --beside with --figure"
            )
    if has_more:
        raise UsageError(
            f"{second}: two runs are shown side by side as text alone; name one of them, or leave "
            "the options out"
        )
    pair = RunPair(*(figures_of(Run.load(path), str(path)) for path in (first, second)))
    console.report(pair, pair_text(pair), [])


def _drawn_alone(view: _View, file: Path) -> Figure:
    """Return the figure of one file."""
    from perseus_planner.views import figures

    if view.draw is None:
        raise UsageError(f"{file}: has no figure; leave --plot out")
    return view.draw(figures)


def _draw(name: str, files: tuple[Path, ...], blocking_power_w: float | None) -> Figure:
    from perseus_planner.views.report import FIGURES
    from perseus_planner.views.sources import read_sources

    return FIGURES[name](read_sources(files, blocking_power_w))


def _view(path: Path, blocking_power_w: float | None) -> _View:
    """Read any kind of file; `Plan.load` says why it refuses a file that is not recognized."""
    from perseus_planner.base import extensions
    from perseus_planner.base.file_kinds import kind_of

    readers = {"run": _run_view, "frontier": _frontier_view, "profile": _profile_view}
    kind = kind_of(path)
    # Plans of others need an extension, and the power that their files lack.
    if kind == "kareus":
        plans = extensions.offer("kareus")(path, blocking_power_w)
        text = "\n".join(kareus_plan.sheet.text() for kareus_plan in plans)
        return _View({"kareus": plans}, text)
    if blocking_power_w is not None:
        raise UsageError(
            f"--blocking-power: is for plans of Kareus, and {path} has none; leave it out"
        )
    shown = extensions.places("shown")
    if kind is not None and kind in shown:
        return _View(*extensions.load(shown[kind])(path))
    _refuse_foreign(path, kind)
    return readers.get(kind or "", _plan_view)(path)


def _refuse_foreign(path: Path, kind: str | None) -> None:
    """Refuse a file of no kind that is read here; `kind` is what `kind_of` says of it."""
    # A YAML may be a plan, whose reader says best why it is none.
    if kind is None and path.suffix.lower() not in (".yaml", ".yml"):
        raise UsageError(
            f"{path}: is not a file of the planner; name a profile, a frontier, a plan or a run "
            "folder"
        )


def _profile_view(file: Path) -> _View:
    from perseus_planner import Profile
    from perseus_planner.views.curves import profile_text, summarize_profile

    # A table with a profile beside it is part of that.
    beside = next(
        (path for path in map(file.with_suffix, (".yaml", ".yml")) if path.exists()), None
    )
    # A table does not hold the power of a waiting GPU.
    # Waiting is unknown then, so 0 stands in and is not shown.
    is_table = file.suffix.lower() == ".csv" and beside is None
    profile = Profile.load(beside or file, 0.0 if is_table else None)
    summary = summarize_profile(profile)
    if is_table:
        summary = replace(summary, context=replace(summary.context, blocking_power_w=None))
    return _View(summary, profile_text(summary), lambda figures: figures.draw_curves(profile))


def _frontier_view(file: Path) -> _View:
    from perseus_planner import Frontier
    from perseus_planner.views.frontier import chart_frontier, frontier_text, summarize_frontier

    frontier = Frontier.load(file)
    summary = summarize_frontier(frontier)
    return _View(
        summary,
        frontier_text(summary),
        lambda figures: figures.draw_frontier(chart_frontier(frontier)),
    )


def _plan_view(file: Path) -> _View:
    from perseus_planner import Plan
    from perseus_planner.base.prefixes import si
    from perseus_planner.views.figures import chart_plan
    from perseus_planner.views.plan import summarize_timeline, timeline_text
    from perseus_planner.views.traces import trace_plan

    plan = Plan.load(file)
    summary = summarize_timeline(plan)

    def draw(figures: Any) -> Any:
        subtitle = f"{si(plan.time_s, 's')}, {si(plan.energy_j, 'J', 5)}"
        return figures.draw_gantt([chart_plan(str(plan.schedule), plan, subtitle)], plan.control)

    def write_trace(path: Path, beside: tuple[Path, ...]) -> None:
        # A frontier beside the plan knows the iteration at full clocks.
        from perseus_planner.views.sources import read_sources

        frontier = read_sources((file, *beside)).frontier if beside else None
        before = None if frontier is None else frontier.baseline_plan
        trace_plan(plan, path, before)

    return _View(summary, timeline_text(summary), draw, write_trace)


def _run_view(folder: Path) -> _View:
    from perseus_planner import Run
    from perseus_planner.runs.values import values_csv
    from perseus_planner.views.figures import chart_run_beside_plan
    from perseus_planner.views.run import run_text, summarize_run
    from perseus_planner.views.traces import trace_run
    from perseus_planner.views.unplanned import summarize_unplanned, unplanned_text

    run = Run.load(folder)

    def csv() -> bytes:
        return values_csv(run)

    # A run that followed plans is shown beside them, and any other as it ran.
    if run.decider is None or run.versions:
        summary = summarize_run(run)
        return _View(
            summary,
            run_text(summary),
            lambda figures: figures.draw_gantt(chart_run_beside_plan(run), summary.context.control),
            lambda path, _: trace_run(run, path),
            csv,
        )

    unplanned = summarize_unplanned(run)
    return _View(unplanned, unplanned_text(unplanned), csv=csv)


@dataclass(frozen=True)
class SizeOptions:
    """What is saved with, as `views.sources.IterationSize` has it."""

    pipelines: Annotated[
        Number | None,
        "Number of equal data-parallel pipelines, whose savings are added up.  [default: that of "
        "the job file, or 1]",
    ]
    tokens: Annotated[
        int | None,
        "Tokens per iteration of all these pipelines together.  [default: that of the job file]",
        Option("--tokens-per-iteration", metavar="N"),
    ]
    samples: Annotated[
        int | None,
        "Samples per iteration of all these pipelines together.  [default: that of the job file]",
        Option("--samples-per-iteration", metavar="N"),
    ]
    iterations: Annotated[
        Number | None,
        "Number of iterations of the planned run, to show the total saving.",
    ]


@command(
    "planner report frontier.npz plan.yaml -o report.html",
    "planner report frontier.npz plan.yaml run job.yaml profile.yaml --price 0.09 --pue 1.1 -o "
    "report.html",
)
def report(
    source: Annotated[
        tuple[
            Annotated[Path, SourceFile("profile", "frontier", "plan", "job", "run", "inference")],
            ...,
        ],
        Option(required=True),
    ],
    *,
    price: Annotated[float, "Price of a kWh, US dollars.", Option(metavar="USD")] = 0.12,
    pue: Annotated[
        float,
        "Power usage effectiveness: energy at the meter over energy at the GPUs.",
        Option(metavar="RATIO"),
    ] = 1.2,
    carbon: Annotated[
        Carbon, "Emissions of the grid per kWh, CO2e, e.g. 400g.", Option(default="400g")
    ],
    size: SizeOptions,
    blocking_power_w: Annotated[
        BlockingPower | None,
        "Power of a waiting GPU, e.g. 83.64W, for a profile that is a CSV or plans of Kareus.",
    ],
    output: Annotated[Path, output_file("the page", ".html", ".htm")],
) -> None:
    """Write a page that shows where the energy goes, what a plan changes, and what it saves.

    SOURCE is a profile, a frontier, a job file, a plan, a run folder or a folder with plans of
    Kareus. Give one or more, with at most one profile, frontier and job file; all must be for the
    same kind of pipeline, but for plans of Kareus, which have sections of their own. The report
    is about the first plan. Add the frontier to compare with the iteration before and with other
    planners, and the profile to see standard errors. A run without a plan is shown as it ran, with
    what it learnt. A plan of `planner inference plan` has a
    report of its own.

    The page is one file and opens offline. The price, the PUE and the carbon are assumptions: give
    the numbers of your site.
    """
    from perseus_planner.base import extensions
    from perseus_planner.base.file_kinds import kind_of
    from perseus_planner.base.files import write_file
    from perseus_planner.views.report import make_report, page, report_text
    from perseus_planner.views.savings import EnergyRates
    from perseus_planner.views.sources import read_sources

    refuse_same(source, output)
    rates = EnergyRates(price, pue, carbon / 1e3)
    reported = extensions.places("reported")
    # Some kinds of plans have a report of their own, made by their extension.
    # The extension reports on all sources itself.
    kinds = dict(zip(source, map(kind_of, source), strict=True))
    for path, of_path in kinds.items():
        _refuse_foreign(path, of_path)
    for kind in reported.keys() & set(kinds.values()):
        content, text, html = extensions.load(reported[kind])(source, rates)
        write_file(output, html, UsageError)
        console.report(content, text, [output])
        return
    # Other planners are replayed, which takes seconds.
    with console.progress("Reporting"):
        sources = read_sources(source, blocking_power_w)
        job_report = make_report(sources, rates, _size(sources, size))
        write_file(output, page(job_report), UsageError)
    console.report(job_report, report_text(job_report), [output])


def _size(sources: Sources, options: SizeOptions) -> IterationSize:
    """Return the size of an iteration by the options, or else by the job file."""
    from perseus_planner.views.savings import IterationSize

    numbers: dict[str, Any] = dict(vars(options))
    # What the options leave out the job file may say, for the pipelines of this report.
    for name in ("tokens", "samples"):
        of_job = getattr(sources.job, f"{name}_per_iteration", None)
        if numbers[name] is None and of_job is not None:
            try:
                numbers[name] = float(of_job * sources.share_of_pipelines)
            except OverflowError:
                numbers[name] = math.inf  # which `IterationSize` refuses
    # The job file knows how many pipelines train side by side.
    if options.pipelines is None:
        numbers["pipelines"] = sources.pipelines
    return IterationSize(**numbers)
