"""`planner report`: what was measured, planned and ran in; one page to look at out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from perseus_planner.cli import console
from perseus_planner.errors import UsageError

if TYPE_CHECKING:
    from fractions import Fraction
    from pathlib import Path

    from perseus_planner.views.report.rates import Work
    from perseus_planner.views.report.sources import Sources


@click.command(
    epilog=console.examples(
        "planner report frontier.npz plan.yaml -o report.html",
        "planner report frontier.npz plan.yaml run job.yaml profile.yaml --price 0.09 --pue 1.1 -o report.html",
    )
)
@click.argument("source", type=console.PATH, nargs=-1, required=True)
@click.option("--price", type=float, default=0.12, show_default=True, metavar="USD", help="Of a kWh, in US dollars.")
@click.option(
    "--pue",
    type=float,
    default=1.2,
    show_default=True,
    metavar="RATIO",
    help="Energy at the meter over energy at the GPUs; 1 adds nothing for cooling and all else.",
)
@click.option(
    "--carbon", type=float, default=0.40, show_default=True, metavar="KG", help="Of a kWh of the grid, in kg of CO2e."
)
@click.option(
    "--pipelines",
    type=int,
    metavar="N",
    help="Data-parallel pipelines that run alike, whose savings are added up.  [default: as the job file says, or 1]",
)
@click.option(
    "--tokens-per-iteration",
    "tokens",
    type=int,
    metavar="N",
    help="That all of these pipelines together train on.  [default: as the job file says]",
)
@click.option(
    "--samples-per-iteration",
    "samples",
    type=int,
    metavar="N",
    help="Likewise, samples.  [default: as the job file says]",
)
@click.option("--iterations", type=int, metavar="N", help="Of the run that is planned, for what it saves in all.")
@click.option(
    "--blocking-power",
    metavar="POWER",
    callback=console.quantity("BLOCKING_POWER"),
    help="What a GPU draws while it waits, e.g. 83.64W, for a profile that is a CSV.",
)
@console.output("the page, .html")
@console.as_json
def report(
    source: tuple[Path, ...],
    price: float,
    pue: float,
    carbon: float,
    blocking_power: float | None,
    output: Path,
    as_json: bool,
    **work: int | None,
) -> None:
    """Write one page of what was measured, what a plan changes and what it saves.

    SOURCE is any of: a profile, a frontier, a job file; and plans and the folders of runs, of which there may be
    several. All must be of one kind of pipeline. The first plan is the one that the report is about. With the frontier,
    the page has the pipeline before and the points of other planners; with the profile as well, standard errors.

    The page is one file without links to anywhere. The price, the PUE and the carbon of the grid are assumptions:
    give those that hold where your GPUs are.
    """
    from perseus_planner.views.report.page import page
    from perseus_planner.views.report.rates import Rates
    from perseus_planner.views.report.report import make_report
    from perseus_planner.views.report.sources import read_sources
    from perseus_planner.views.report.text import report_text

    console.refuse_same(source, output)
    rates = Rates(price, pue, carbon)
    with console.progress("Reporting"):
        sources = read_sources(source, blocking_power)
        made = make_report(sources, rates, _work(sources, work))
        _write(output, page(made))
    console.report(made, report_text(made), [output], as_json=as_json)


def _work(sources: Sources, given: dict[str, Any]) -> Work:
    """What is given here, or else what the job file says of these pipelines."""
    from perseus_planner.views.report.rates import Work

    numbers = dict(given)
    for name, option in (("tokens_per_iteration", "tokens"), ("samples_per_iteration", "samples")):
        said = getattr(sources.job, name, None)
        if given[option] is None and said is not None:
            numbers[option] = _float(said * sources.of_all_pipelines)
    if given["pipelines"] is None:
        numbers["pipelines"] = sources.pipelines
    return Work(**numbers)


def _float(number: Fraction) -> float:
    """As a float; infinite where none is that large, which is refused as what is written so."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _write(path: Path, text: str) -> None:
    from perseus_planner.files import write_file

    write_file(path, text, UsageError)
