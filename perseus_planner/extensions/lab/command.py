"""`planner simulate`: a job on a cluster under several policies. What it prints, and its CSV with a
row for each GPU; what `planner show` prints of a file of lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from perseus_planner.base.errors import UsageError
from perseus_planner.base.prefixes import counted, si
from perseus_planner.base.tables import Column, Sheet, csv_text, lay_out
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
from perseus_planner.plans.replay import ALL_MAXIMUM, origin_text
from perseus_planner.views.context import context_of_profile, pipeline_text, share

if TYPE_CHECKING:
    from pathlib import Path

    from perseus_planner.extensions.lab.replay import (
        BatchOutcome,
        Cluster,
        Lengths,
        Outcome,
        UnlikeJob,
    )

_SHOWN_GPU = "simulated:a100-sxm"
_SHOWN_STAGES = 1, 4, 8  #: of the pipelines that `planner show` replays a file of lengths on
_MOST_PLANS = 320  #: that it makes for each of them
_COLUMNS = ("policy", "pipeline", "rank", "gpu", "energy_j", "busy_s", "idle_s")


def summarize_cluster(
    cluster: Cluster, outcomes: Sequence[Outcome], slowdown: float, left_out: Sequence[str] = ()
) -> dict[str, Any]:
    """Summarize a job under several policies.

    Args:
        cluster: the job.
        outcomes: its outcomes; the first is that of the policy `max`, the baseline of the others.
        slowdown: the target of the policies that have one.
        left_out: policies that do not apply, each with the reason.
    """
    return {
        "context": context_of_profile(cluster.frontier.profile, cluster.frontier.dag.iteration),
        "pipelines": cluster.pipelines,
        "gpus": cluster.gpus,
        "iterations": cluster.iterations,
        "stragglers": len(cluster.stragglers),
        "reaction_delay_s": cluster.delay_s,
        "slowdown": slowdown,
        "baseline_time_s": cluster.frontier.baseline_time_s,
        "policies": [_policy(cluster, outcome, outcomes[0].energy_j) for outcome in outcomes],
        "left_out": list(left_out),
    }


def _policy(cluster: Cluster, outcome: Outcome, baseline_j: float) -> dict[str, Any]:
    energy_j = outcome.energy_j
    # The mean, as iterations beside a straggler are longer than others.
    iteration_s = outcome.time_s / outcome.iterations
    return {
        "policy": outcome.policy,
        "time_s": outcome.time_s,
        "iteration_s": iteration_s,
        "time_ratio": iteration_s / cluster.frontier.baseline_time_s,
        "iterations_per_s": outcome.iterations / outcome.time_s,
        "energy_j": energy_j,
        "power_w": outcome.power_w,
        "idle_share": math.fsum(outcome.idle_s.flat) / (outcome.idle_s.size * outcome.time_s),
        "saved_j": baseline_j - energy_j,
        "saved_share": share(baseline_j - energy_j, baseline_j),
    }


def cluster_text(summary: dict[str, Any]) -> str:
    """Return the text that `planner simulate` prints: a row for each policy."""
    context = summary["context"]
    columns = lay_out(
        summary["policies"],
        Column("policy", "policy", "<"),
        Column("iteration {}", "iteration_s", "s"),
        Column("x baseline", "time_ratio", ".4f"),
        Column("iterations/s", "iterations_per_s", "#"),
        Column("energy {}", "energy_j", "J"),
        Column("power {}", "power_w", "W"),
        Column("idle %", "idle_share", "%"),
        Column("saved %", "saved_share", "%"),
    )
    pipelines = (
        f"{counted(summary['pipelines'], 'pipeline')} x {counted(context.ranks, 'rank')} x "
        f"{counted(context.gpus_per_stage, 'GPU')}"
    )
    notes = [
        f"x baseline: mean iteration over {si(summary['baseline_time_s'], 's', 6)}, {ALL_MAXIMUM} "
        f"without stragglers; the target is {summary['slowdown']:g}x.",
        f"Baseline of every saving: {ALL_MAXIMUM} (max) with the same stragglers, for as many "
        "iterations.",
        *(f"Left out: {reason}." for reason in summary["left_out"]),
    ]
    return Sheet(
        f"Cluster of {counted(summary['gpus'], 'GPU')}: {pipelines}, each pipeline "
        f"{pipeline_text(context)}",
        f"{origin_text(context.origin)}, in simulated time: "
        f"{counted(summary['iterations'], 'iteration')}, "
        f"{counted(summary['stragglers'], 'straggler')}; policies learn of them "
        f"{summary['reaction_delay_s']:g} s late.",
        columns,
        notes,
    ).text()


def gpu_csv(outcomes: Sequence[Outcome]) -> bytes:
    """Return a CSV with the energy, busy time and idle time of each GPU under each policy.

    The column `gpu` counts within a rank.
    """
    return csv_text(
        [_COLUMNS, *(row for outcome in outcomes for row in _gpu_rows(outcome))]
    ).encode()


def _gpu_rows(outcome: Outcome) -> Iterator[tuple[object, ...]]:
    columns = zip(
        outcome.energy_per_gpu_j.tolist(),
        outcome.busy_s.tolist(),
        outcome.idle_s.tolist(),
        strict=True,
    )
    for pipeline, ranks in enumerate(columns):
        for rank, figures in enumerate(zip(*ranks, strict=True)):
            # GPUs of a tensor group are alike, so each gets the figures of its rank.
            for gpu in range(outcome.gpus_per_stage):
                yield outcome.policy, pipeline, rank, gpu, *figures


def summarize_lengths(
    job: UnlikeJob, outcomes: Sequence[BatchOutcome], slowdown: float
) -> dict[str, Any]:
    """Summarize a job of unlike microbatches under several policies.

    Args:
        job: the job.
        outcomes: its outcomes; the first is that of the policy `max`, the baseline of the others.
        slowdown: the target.
    """
    frontier = job.frontier
    baseline = outcomes[0]
    # The same microbatches in another order, as far as order alone can help.
    as_is_s, reordered_s = job.reordered_s()
    return {
        "context": context_of_profile(frontier.profile, frontier.dag.iteration),
        "lengths": _spread_of(job.lengths),
        "slowdown": slowdown,
        "policies": [
            {
                "policy": outcome.policy,
                "iteration_s": math.fsum(outcome.times_s) / len(outcome.times_s),
                "later_share": math.fsum(outcome.times_s) / math.fsum(baseline.times_s) - 1.0,
                "worst_share": max(
                    time_s / before_s - 1.0
                    for time_s, before_s in zip(outcome.times_s, baseline.times_s, strict=True)
                ),
                "energy_j": outcome.energy_j,
                "saved_share": share(baseline.energy_j - outcome.energy_j, baseline.energy_j),
            }
            for outcome in outcomes
        ],
        "reordered_share": 1.0 - reordered_s / as_is_s,
    }


def _spread_of(lengths: Lengths) -> dict[str, Any]:
    iterations, pipelines, microbatches = lengths.work.shape
    return {
        "iterations": iterations,
        "pipelines": pipelines,
        "microbatches": microbatches,
        "of_sequences": lengths.of_sequences,
        "spread": lengths.spread,
        "longest": float(lengths.work.max()),
        "slowest": lengths.slowest,
        "moves": lengths.moves,
    }


def lengths_text(summary: dict[str, Any]) -> str:
    """Return the text that `planner simulate --lengths` prints: a row for each policy."""
    context = summary["context"]
    columns = lay_out(
        summary["policies"],
        Column("policy", "policy", "<"),
        Column("iteration {}", "iteration_s", "s"),
        Column("later %", "later_share", "%"),
        Column("worst %", "worst_share", "%"),
        Column("energy {}", "energy_j", "J"),
        Column("saved %", "saved_share", "%"),
    )
    notes = [
        f"Baseline of time and saving: {ALL_MAXIMUM} (max), in the same iterations; the target is "
        f"{summary['slowdown']:g}x of it.",
        *_spread_notes(summary["lengths"]),
        _order_note(summary["reordered_share"]),
    ]
    spread = summary["lengths"]
    return Sheet(
        f"{counted(spread['pipelines'], 'pipeline')} of different microbatches, each "
        f"{pipeline_text(context)}",
        f"{origin_text(context.origin)}, in simulated time: "
        f"{counted(spread['iterations'], 'iteration')}; the work of each batch is known before it "
        "runs.",
        columns,
        notes,
    ).text()


def _spread_notes(spread: dict[str, Any]) -> list[str]:
    from perseus_planner.extensions.lab.replay import WORK_OF_LENGTHS

    notes = [
        f"Microbatches: work spreads by {100 * spread['spread']:.1f} %, the longest has "
        f"{spread['longest']:.2f} times the mean.",
        f"Pipelines: the slowest has {spread['slowest']:.2f} times the mean work, and is another "
        f"one than before in {100 * spread['moves']:.0f} % of iterations.",
    ]
    if spread["of_sequences"]:
        notes.append(f"Work of a microbatch: {WORK_OF_LENGTHS}.")
    return notes


def _order_note(reordered_share: float) -> str:
    return (
        "Order: with the microbatches inside each pipeline in another order, iterations take "
        f"{100 * reordered_share:.1f} % less time at maximum clocks."
    )


def show_lengths(path: Path) -> tuple[dict[str, Any], str]:
    """Return a file of lengths as `planner show` wants it: what plans of the batch would bring, on
    pipelines of a simulated GPU.
    """
    from perseus_planner import solve
    from perseus_planner.extensions.lab.replay import UnlikeJob, read_lengths
    from perseus_planner.profiler.simulated_pipeline import profile_simulated

    lengths = read_lengths(path)
    summary: dict[str, Any] = {"lengths": _spread_of(lengths), "gpu": _SHOWN_GPU}
    # Plans of the batch take time, so fewer iterations of larger jobs are replayed.
    replayed = lengths.first(max(1, _MOST_PLANS // lengths.work.shape[1]))
    summary["replayed_iterations"] = len(replayed.work)
    # Several depths, as the reader's pipeline is not known.
    summary["pipelines"] = rows = []
    for stages in _SHOWN_STAGES:
        frontier = solve(
            profile_simulated(_SHOWN_GPU, stages), "1f1b", microbatches=lengths.work.shape[2]
        )
        job = UnlikeJob(frontier, replayed)
        # Full clocks first, with which all others are compared.
        outcomes = [job.outcome(name) for name in ("max", "planner-fixed", "one-clock", "batch")]
        outcome_of_job = summarize_lengths(job, outcomes, 1.0)
        _, static, one_clock, batch = outcome_of_job["policies"]
        rows.append(
            {
                "stages": stages,
                "static_later_share": static["later_share"],
                "one_clock_saved_share": one_clock["saved_share"],
                "batch_saved_share": batch["saved_share"],
                "batch_later_share": batch["later_share"],
                "reordered_share": outcome_of_job["reordered_share"],
            }
        )
    columns = lay_out(
        rows,
        Column("stages", "stages"),
        Column("static plan: later %", "static_later_share", "%"),
        Column("one clock: saved %", "one_clock_saved_share", "%"),
        Column("plan of the batch: saved %", "batch_saved_share", "%"),
        Column("later %", "batch_later_share", "%"),
        Column("other order: less time %", "reordered_share", "%"),
    )
    spread = summary["lengths"]
    notes = [
        *_spread_notes(spread),
        "Static plan: for microbatches that are alike. One clock, and the plan of the batch, are "
        "chosen for each pipeline and iteration from the work of all pipelines.",
        "Other order: of the microbatches inside each pipeline, at maximum clocks. It changes the "
        "order in which gradients are summed.",
        "For your own pipeline: planner simulate frontier.npz --lengths FILE",
    ]
    title = (
        f"Lengths of {counted(spread['iterations'], 'iteration')} x "
        f"{counted(spread['pipelines'], 'pipeline')} x "
        f"{counted(spread['microbatches'], 'microbatch')}"
    )
    source = (
        f"What plans of the batch would bring on {_SHOWN_GPU} (simulated: no GPU was touched), "
        f"1F1B, replayed: {counted(len(replayed.work), 'iteration')}"
    )
    return summary, Sheet(title, source, columns, notes).text()


_BASELINE = "max"
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
    _simulate_stragglers(
        frontier,
        stragglers,
        (pipelines, 1000 if iterations is None else iterations),
        reaction_delay_s,
        slowdown,
        policies,
        table,
    )


def _simulate_stragglers(
    path: Path,
    stragglers: Path | None,
    size: tuple[int, int],
    reaction_delay_s: float,
    slowdown: float,
    policies: Sequence[str],
    table: Path | None,
) -> None:
    """Replay a job of so many pipelines and iterations with stragglers, and print what it comes
    to.
    """
    pipelines, iterations = size
    from perseus_planner import Frontier
    from perseus_planner.base.files import write_file
    from perseus_planner.extensions.lab.command import cluster_text, gpu_csv, summarize_cluster
    from perseus_planner.extensions.lab.replay import Cluster, Outcome, read_stragglers
    from perseus_planner.extensions.lab.replay import simulate as replay

    refuse_same([path, stragglers], table, "--csv")
    solved = Frontier.load(path)
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
    from perseus_planner.extensions.lab.command import lengths_text, summarize_lengths
    from perseus_planner.extensions.lab.replay import LENGTH_POLICIES, UnlikeJob, read_lengths

    lengths = read_lengths(path)
    if iterations is not None:
        lengths = lengths.first(COUNT.check(iterations, "iterations"))
    job = UnlikeJob(Frontier.load(frontier), lengths, slowdown)
    names = dict.fromkeys((_BASELINE, *(policies or LENGTH_POLICIES)))
    outcomes = [job.outcome(name) for name in console.each("Simulating", names)]
    summary = summarize_lengths(job, outcomes, slowdown)
    console.report(summary, lengths_text(summary), [])
