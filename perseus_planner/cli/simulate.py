"""`planner simulate`: a job on a cluster, with stragglers, under several policies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from perseus_planner.cli import console
from perseus_planner.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from perseus_planner.cluster.replay import Cluster, Outcome

_BASELINE = "max"
_DEFAULT = ("one-clock", "per-stage", "envpipe", "planner-fixed", "planner")
_POLICIES = (_BASELINE, "one-clock", "per-stage", "envpipe", "planner-fixed", "planner")


def _delay(_: click.Context, parameter: click.Parameter, text: str) -> float:
    """The option as seconds; unlike other durations it may be 0."""
    from perseus_planner.quantities import DURATION, WAIT

    rule = WAIT._replace(wanted="a delay: write seconds of 0 or more, or a number with ms, s or min, such as 1s")
    return DURATION._replace(rule=rule).parse(text, parameter.opts[0])


@click.command(
    epilog=console.examples(
        "planner simulate frontier.npz --pipelines 128 --csv gpus.csv",
        "planner simulate frontier.npz --pipelines 16 --stragglers stragglers.csv --reaction-delay 5s --csv gpus.csv",
    )
)
@click.argument("frontier", type=console.PATH)
@click.option("--pipelines", required=True, type=int, metavar="N", help="Data-parallel pipelines, at least 1.")
@click.option("--iterations", default=1000, show_default=True, metavar="N", help="How many the job runs.")
@click.option(
    "--stragglers",
    type=console.PATH,
    metavar="FILE",
    help="CSV with the columns start, end (s), slowdown, pipeline, stage (empty: the whole pipeline).  [default: none]",
)
@click.option(
    "--reaction-delay",
    default="1s",
    show_default=True,
    metavar="TIME",
    callback=_delay,
    help="How late policies learn that a straggler came or went.",
)
@click.option(
    "--slowdown",
    default="1.0",
    show_default=True,
    metavar="RATIO",
    callback=console.quantity("SLOWDOWN"),
    help="Without stragglers an iteration may take this many times as long as with all clocks at maximum.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice(_POLICIES),
    help="What chooses clocks; may be repeated.  [default: all that apply]",
)
@click.option(
    "--csv",
    "table",
    type=console.PATH,
    callback=console.writable,
    metavar="FILE",
    help="File to write as well: energy, busy and idle time of each GPU under each policy.",
)
@console.as_json
def simulate(
    frontier: Path,
    pipelines: int,
    iterations: int,
    stragglers: Path | None,
    reaction_delay: float,
    slowdown: float,
    policies: tuple[str, ...],
    table: Path | None,
    as_json: bool,
) -> None:
    """Replay a job on a cluster, with stragglers, under several policies.

    FRONTIER is a file of `planner solve`; every pipeline is one of it. Pipelines end each iteration together. max, all
    clocks at maximum, is always there: it is what the others are compared with.
    """
    from perseus_planner.cluster.replay import Cluster
    from perseus_planner.cluster.stragglers import read_stragglers
    from perseus_planner.solver.frontier import Frontier
    from perseus_planner.views.cluster_summary import gpu_rows, summarize_cluster
    from perseus_planner.views.tables import cluster_text

    for source in filter(None, (frontier, stragglers)):
        if table is not None:
            console.refuse_same([source], table, "--csv")
    solved = Frontier.load(frontier)
    Cluster(solved, pipelines, iterations)  # its numbers are checked before the events are read against them
    events = read_stragglers(stragglers, pipelines, solved.schedule.stages) if stragglers else ()
    cluster, left_out = Cluster(solved, pipelines, iterations, events, reaction_delay), list[str]()
    with console.progress("Simulating") as progress:
        names = tuple(dict.fromkeys((_BASELINE, *(policies or _DEFAULT))))
        outcomes = []
        for done, outcome in enumerate(_outcomes(cluster, names, slowdown, None if policies else left_out)):
            outcomes.append(outcome)
            if progress is not None:
                progress(done + 1, len(names))
    if table is not None:
        _write(table, gpu_rows(outcomes))
    summary = summarize_cluster(cluster, outcomes, slowdown, left_out)
    console.report(summary, cluster_text(summary), [table] if table else [], as_json=as_json)


def _outcomes(cluster: Cluster, names: Sequence[str], slowdown: float, left_out: list[str] | None) -> Iterator[Outcome]:
    """Those of the policies; with `left_out`, policies that do not apply are named there, with the reason."""
    from perseus_planner.cluster.replay import simulate as simulated

    for name in names:
        try:
            yield simulated(cluster, name, slowdown)
        except UsageError as error:
            if left_out is None:
                raise
            left_out.append(f"{name}: {error}")


def _write(path: Path, data: bytes) -> None:
    from perseus_planner.files import write_file

    write_file(path, data, UsageError)
