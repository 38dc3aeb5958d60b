"""`planner simulate`: a job on a cluster under several policies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from perseus_planner.base.errors import UsageError
from perseus_planner.cli import console
from perseus_planner.cli.options import (
    Lag,
    Option,
    OutputFile,
    Slowdown,
    SourceFile,
    command,
    refuse_same,
)

_BASELINE = "max"
_ITERATIONS = 1000  #: of a job, unless another number is asked for
_DEFAULT = ("one-clock", "per-stage", "envpipe", "planner-fixed", "planner")


@command(
    "planner simulate frontier.npz --pipelines 128 --csv gpus.csv",
    "planner simulate frontier.npz --pipelines 16 --stragglers stragglers.csv --reaction-delay "
    "5s --csv gpus.csv",
    "planner simulate frontier.npz --lengths lengths.csv",
)
def simulate(
    frontier: Annotated[Path, SourceFile("frontier")],
    *,
    pipelines: Annotated[
        int | None,
        "Number of data-parallel pipelines.  [default: those of --lengths]",
        Option(metavar="N"),
    ],
    iterations: Annotated[
        int | None,
        "Number of iterations of the job.  [default: 1000, or those of --lengths]",
        Option(metavar="N"),
    ],
    lengths: Annotated[
        Path | None,
        "CSV with the lengths of a job whose microbatches differ: a row for each sequence, with "
        "the columns step, pipeline, microbatch and length (tokens); or one for each pipeline, "
        "with its microbatches' work as microbatch_0, microbatch_1 and so on.",
    ],
    stragglers: Annotated[
        Path | None,
        "CSV with the columns start and end (s), slowdown, pipeline and stage (empty for the "
        "whole pipeline).  "
        "[default: no stragglers]",
    ],
    reaction_delay_s: Annotated[
        Lag, "How late policies learn that a straggler begins or ends.", Option(default="1s")
    ],
    slowdown: Annotated[
        Slowdown,
        "Iteration time to meet without stragglers, as a multiple of that with all clocks at "
        "maximum.",
        Option(default="1.0"),
    ],
    policies: Annotated[
        tuple[
            Literal[
                "max",
                "one-clock",
                "per-stage",
                "envpipe",
                "planner-fixed",
                "planner",
                "on-time",
                "own-time",
                "batch",
            ],
            ...,
        ],
        "Policy that chooses clocks; can be repeated.  [default: all that apply]",
        Option("--policy"),
    ],
    table: Annotated[
        Annotated[Path, OutputFile(".csv")] | None,
        "Also write a CSV with the energy, busy time and idle time of each GPU under each policy.",
        Option("--csv"),
    ],
) -> None:
    """Replay a job on a cluster under several policies, with stragglers or different microbatches.

    FRONTIER is a file that `planner solve` wrote; all pipelines are alike and end each iteration
    together. The policy max, all clocks at maximum, is always included as the baseline of the
    others. With --lengths, a computation takes the measured time for a microbatch of mean work, and
    a proportional time for others. The policies are then max, planner-fixed, on-time, own-time,
    one-clock and batch.
    """
    # Lengths bring their own pipelines, and the options of stragglers have no meaning there.
    if lengths is not None:
        given = {"--pipelines": pipelines, "--stragglers": stragglers, "--csv": table}
        for name, value in given.items():
            if value is not None:
                raise UsageError(f"{name}: does not go with --lengths; leave it out")
        _simulate_lengths(frontier, lengths, iterations, slowdown, policies)
        return
    if pipelines is None:
        raise UsageError(
            "--pipelines: is missing; give the number of data-parallel pipelines, or --lengths "
            "with a file that has them"
        )
    from perseus_planner import Frontier
    from perseus_planner.base.files import write_file
    from perseus_planner.extensions.lab.replay import Cluster, Outcome
    from perseus_planner.extensions.lab.replay import simulate as replay
    from perseus_planner.extensions.lab.stragglers import read_stragglers
    from perseus_planner.extensions.lab.views import cluster_text, gpu_csv, summarize_cluster

    iterations = _ITERATIONS if iterations is None else iterations
    refuse_same([frontier, stragglers], table, "--csv")
    solved = Frontier.load(frontier)
    Cluster(solved, pipelines, iterations)  # checks the numbers that the stragglers are read with
    events = read_stragglers(stragglers, pipelines, solved.schedule.stages) if stragglers else ()
    cluster = Cluster(solved, pipelines, iterations, events, reaction_delay_s)
    outcomes = list[Outcome]()
    left_out = list[str]()
    for name in console.each("Simulating", dict.fromkeys((_BASELINE, *(policies or _DEFAULT)))):
        try:
            outcomes.append(replay(cluster, name, slowdown))
        except UsageError as error:  # a policy that does not apply
            # A policy that was asked for must not be left out silently.
            if policies:
                raise
            left_out.append(f"{name}: {error}")
    if table is not None:
        write_file(table, gpu_csv(outcomes), UsageError)
    summary = summarize_cluster(cluster, outcomes, slowdown, left_out)
    console.report(summary, cluster_text(summary), [table] if table else [])


def _simulate_lengths(
    frontier: Path,
    path: Path,
    iterations: int | None,
    slowdown: float,
    policies: Sequence[str],
) -> None:
    """Replay a job whose microbatches differ, and print what it comes to."""
    from perseus_planner import Frontier
    from perseus_planner.base.units import COUNT
    from perseus_planner.extensions.lab.lengths import LENGTH_POLICIES, UnlikeJob, read_lengths
    from perseus_planner.extensions.lab.views import lengths_text, summarize_lengths

    lengths = read_lengths(path)
    if iterations is not None:
        lengths = lengths.first(COUNT.check(iterations, "iterations"))
    job = UnlikeJob(Frontier.load(frontier), lengths, slowdown)
    names = dict.fromkeys((_BASELINE, *(policies or LENGTH_POLICIES)))
    outcomes = [job.outcome(name) for name in console.each("Simulating", names)]
    summary = summarize_lengths(job, outcomes, slowdown)
    console.report(summary, lengths_text(summary), [])
