"""`planner report`: writes a page about a profile, a frontier, plans and runs."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perseus_planner.base.errors import UsageError
from perseus_planner.cli import console

if TYPE_CHECKING:
    from perseus_planner.views.savings import EnergyRates, IterationSize
    from perseus_planner.views.sources import Sources


@click.command(
    epilog=console.examples(
        "planner report frontier.npz plan.yaml -o report.html",
        "planner report frontier.npz plan.yaml run job.yaml profile.yaml --price 0.09 --pue 1.1 -o "
        "report.html",
    )
)
@click.argument("source", type=console.PATH, nargs=-1, required=True)
@click.option(
    "--price",
    type=float,
    default=0.12,
    show_default=True,
    metavar="USD",
    help="Price of a kWh, US dollars.",
)
@click.option(
    "--pue",
    type=float,
    default=1.2,
    show_default=True,
    metavar="RATIO",
    help="Power usage effectiveness: energy at the meter over energy at the GPUs.",
)
@click.option(
    "--carbon",
    type=float,
    default=0.40,
    show_default=True,
    metavar="KG",
    help="Emissions of the grid per kWh, kg of CO2e.",
)
@click.option(
    "--pipelines",
    type=int,
    metavar="N",
    help="Number of equal data-parallel pipelines, whose savings are added up.  [default: that of "
    "the job file, or 1]",
)
@click.option(
    "--tokens-per-iteration",
    "tokens",
    type=int,
    metavar="N",
    help="Tokens per iteration of all these pipelines together.  [default: that of the job file]",
)
@click.option(
    "--samples-per-iteration",
    "samples",
    type=int,
    metavar="N",
    help="Samples per iteration of all these pipelines together.  [default: that of the job file]",
)
@click.option(
    "--iterations",
    type=int,
    metavar="N",
    help="Number of iterations of the planned run, to show what it saves in all.",
)
@click.option(
    "--blocking-power",
    type=console.BLOCKING_POWER,
    help="Power of a waiting GPU, e.g. 83.64W, for a profile that is a CSV.",
)
@console.output("the page", ".html", ".htm")
@console.as_json
def report(
    source: tuple[Path, ...],
    price: float,
    pue: float,
    carbon: float,
    blocking_power: float | None,
    output: Path,
    as_json: bool,
    **size: int | None,
) -> None:
    """Write a page that shows where the energy goes, what a plan changes, and what it saves.

    SOURCE is a profile, a frontier, a job file, a plan or a run folder. Give one or more, with at
    most one profile, frontier and job file; all must be for the same kind of pipeline. The report
    is about the first plan. Add the frontier to compare with the iteration before and with other
    planners, and the profile to see standard errors. A plan of `planner inference plan` has a
    report of its own.

    The page is one file that loads nothing. The price, the PUE and the carbon are assumptions: give
    the numbers of the place where your GPUs are.
    """
    from perseus_planner.base.documents import kind_of
    from perseus_planner.base.files import write_file
    from perseus_planner.views.report import make_report, page, report_text
    from perseus_planner.views.savings import EnergyRates
    from perseus_planner.views.sources import read_sources

    console.refuse_same(source, output)
    rates = EnergyRates(price, pue, carbon)
    if any(kind_of(path) == "inference" for path in source):
        _report_pools(source, rates, output, as_json=as_json)
        return
    with console.progress("Reporting"):
        sources = read_sources(source, blocking_power)
        made = make_report(sources, rates, _size(sources, size))
        write_file(output, page(made), UsageError)
    console.report(made, report_text(made), [output], as_json=as_json)


def _report_pools(
    source: tuple[Path, ...], rates: EnergyRates, output: Path, *, as_json: bool
) -> None:
    """Write the page of a plan for inference."""
    from perseus_planner.base.files import write_file
    from perseus_planner.inference.plan import InferencePlan
    from perseus_planner.views.inference import plan_view
    from perseus_planner.views.pools import make_pools_report, pools_page, pools_text

    if len(source) > 1:
        raise UsageError("a plan for inference has a report of its own; name it alone")
    made = make_pools_report(source[0].name, plan_view(InferencePlan.load(source[0])), rates)
    write_file(output, pools_page(made), UsageError)
    console.report(made, pools_text(made), [output], as_json=as_json)


def _size(sources: Sources, given: dict[str, Any]) -> IterationSize:
    """Return the size of an iteration by the options, or else by the job file."""
    from perseus_planner.views.savings import IterationSize

    numbers = dict(given)
    for name, option in (("tokens_per_iteration", "tokens"), ("samples_per_iteration", "samples")):
        of_job = getattr(sources.job, name, None)
        if given[option] is None and of_job is not None:
            numbers[option] = _float(of_job * sources.share_of_pipelines)
    if given["pipelines"] is None:
        numbers["pipelines"] = sources.pipelines
    return IterationSize(**numbers)


def _float(number: Fraction) -> float:
    """Return the number as a float; infinite if it is too large, which `IterationSize` refuses."""
    try:
        return float(number)
    except OverflowError:
        return math.inf
