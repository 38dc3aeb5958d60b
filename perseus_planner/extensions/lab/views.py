"""What `planner simulate` prints, with its CSV that has a row for each GPU; and what `planner show`
prints of a file of lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perseus_planner.base.prefixes import counted, si
from perseus_planner.base.tables import Column, Sheet, csv_text, lay_out
from perseus_planner.plans.replay import ALL_MAXIMUM, origin_text
from perseus_planner.views.context import Context, context_of_profile, pipeline_text, share

if TYPE_CHECKING:
    from pathlib import Path

    from perseus_planner.extensions.lab.lengths import BatchOutcome, Lengths, UnlikeJob
    from perseus_planner.extensions.lab.replay import Cluster, Outcome

_SHOWN_GPU = "simulated:a100-sxm"
_SHOWN_STAGES = 1, 4, 8  #: of the pipelines that `planner show` replays a file of lengths on
_MOST_PLANS = 320  #: that it makes for each of them
_COLUMNS = ("policy", "pipeline", "rank", "gpu", "energy_j", "busy_s", "idle_s")


@dataclass(frozen=True)
class PolicyFigures:
    """What a job on a cluster comes to under one policy."""

    policy: str  #: name of the policy
    time_s: float  #: of the whole job, seconds
    iteration_s: float  #: mean iteration time, seconds
    time_ratio: float  #: of that to the baseline's time without stragglers
    iterations_per_s: float
    energy_j: float  #: over all GPUs, waiting included, joules
    power_w: float  #: mean of all GPUs together, watts
    idle_share: float  #: of the time of all GPUs
    saved_j: float  #: against the baseline with the same stragglers, joules
    saved_share: float  #: the same, as a share


@dataclass(frozen=True)
class ClusterSummary:
    """A job on a cluster under several policies."""

    context: Context  #: the profile and the iteration of each pipeline
    pipelines: int  #: number of pipelines
    gpus: int  #: number of GPUs
    iterations: int  #: number of iterations
    stragglers: int  #: number of stragglers
    reaction_delay_s: float  #: how late policies learn of them, seconds
    slowdown: float  #: the target of the policies that have one
    baseline_time_s: float  #: iteration time at full clocks without stragglers, seconds
    policies: tuple[PolicyFigures, ...]  #: the first is the baseline
    left_out: tuple[str, ...]  #: policies that do not apply, each with the reason


def summarize_cluster(
    cluster: Cluster, outcomes: Sequence[Outcome], slowdown: float, left_out: Sequence[str] = ()
) -> ClusterSummary:
    """Summarize a job under several policies.

    Args:
        cluster: the job.
        outcomes: its outcomes; the first is that of the policy `max`, the baseline of the others.
        slowdown: the target of the policies that have one.
        left_out: policies that do not apply, each with the reason.
    """
    return ClusterSummary(
        context=context_of_profile(cluster.frontier.profile, cluster.frontier.dag.iteration),
        pipelines=cluster.pipelines,
        gpus=cluster.gpus,
        iterations=cluster.iterations,
        stragglers=len(cluster.stragglers),
        reaction_delay_s=cluster.delay_s,
        slowdown=slowdown,
        baseline_time_s=cluster.frontier.baseline_time_s,
        policies=tuple(_policy(cluster, outcome, outcomes[0].energy_j) for outcome in outcomes),
        left_out=tuple(left_out),
    )


def _policy(cluster: Cluster, outcome: Outcome, baseline_j: float) -> PolicyFigures:
    energy_j = outcome.energy_j
    # The mean, as iterations beside a straggler are longer than others.
    iteration_s = outcome.time_s / outcome.iterations
    return PolicyFigures(
        policy=outcome.policy,
        time_s=outcome.time_s,
        iteration_s=iteration_s,
        time_ratio=iteration_s / cluster.frontier.baseline_time_s,
        iterations_per_s=outcome.iterations / outcome.time_s,
        energy_j=energy_j,
        power_w=outcome.power_w,
        idle_share=math.fsum(outcome.idle_s.flat) / (outcome.idle_s.size * outcome.time_s),
        saved_j=baseline_j - energy_j,
        saved_share=share(baseline_j - energy_j, baseline_j),
    )


def cluster_text(summary: ClusterSummary) -> str:
    """Return the text that `planner simulate` prints: a row for each policy."""
    context = summary.context
    columns = lay_out(
        summary.policies,
        Column("policy", "policy", "<"),
        Column("iteration {}", "iteration_s", "s"),
        Column("x baseline", "time_ratio", ".4f"),
        Column("iterations/s", "iterations_per_s", "#"),
        Column("energy {}", "energy_j", "J"),
        Column("power {}", "power_w", "W"),
        Column("idle %", "idle_share", "%"),
        Column("saved %", "saved_share", "%"),
    )
    assert context.ranks is not None  # a frontier is one of a schedule
    pipelines = (
        f"{counted(summary.pipelines, 'pipeline')} x {counted(context.ranks, 'rank')} x "
        f"{counted(context.gpus_per_stage, 'GPU')}"
    )
    notes = [
        f"x baseline: mean iteration over {si(summary.baseline_time_s, 's', 6)}, {ALL_MAXIMUM} "
        f"without stragglers; the target is {summary.slowdown:g}x.",
        f"Baseline of every saving: {ALL_MAXIMUM} (max) with the same stragglers, for as many "
        "iterations.",
        *(f"Left out: {reason}." for reason in summary.left_out),
    ]
    return Sheet(
        f"Cluster of {counted(summary.gpus, 'GPU')}: {pipelines}, each pipeline "
        f"{pipeline_text(context)}",
        f"{origin_text(context.origin)}, in simulated time: "
        f"{counted(summary.iterations, 'iteration')}, "
        f"{counted(summary.stragglers, 'straggler')}; policies learn of them "
        f"{summary.reaction_delay_s:g} s late.",
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


@dataclass(frozen=True)
class BatchFigures:
    """What a job of unlike microbatches comes to under one policy."""

    policy: str  #: name of the policy
    iteration_s: float  #: mean iteration time, seconds
    later_share: float  #: of the mean iteration time, against the baseline
    worst_share: float  #: the same of the iteration that is latest
    energy_j: float  #: over all GPUs, waiting included, joules
    saved_share: float  #: of the baseline's energy


@dataclass(frozen=True)
class Spread:
    """How unlike the microbatches of a job are."""

    iterations: int  #: number of iterations
    pipelines: int  #: number of pipelines
    microbatches: int  #: number of microbatches of a pipeline
    of_sequences: bool  #: whether work was computed from lengths of sequences
    spread: float  #: of work, a relative standard deviation
    longest: float  #: the most work of a microbatch, as a multiple of the mean
    slowest: float  #: mean work of the slowest pipeline, as a multiple of the mean
    moves: float  #: share of iterations in which the slowest pipeline is another one


@dataclass(frozen=True)
class LengthsSummary:
    """A job of unlike microbatches under several policies."""

    context: Context  #: the profile and the iteration of each pipeline
    lengths: Spread
    slowdown: float  #: the target
    policies: tuple[BatchFigures, ...]  #: the first is the baseline
    reordered_share: float  #: of the time at full clocks, that another order would take less


def summarize_lengths(
    job: UnlikeJob, outcomes: Sequence[BatchOutcome], slowdown: float
) -> LengthsSummary:
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
    return LengthsSummary(
        context=context_of_profile(frontier.profile, frontier.dag.iteration),
        lengths=_spread_of(job.lengths),
        slowdown=slowdown,
        policies=tuple(_batch_figures(outcome, baseline) for outcome in outcomes),
        reordered_share=1.0 - reordered_s / as_is_s,
    )


def _batch_figures(outcome: BatchOutcome, baseline: BatchOutcome) -> BatchFigures:
    total_s = math.fsum(outcome.times_s)
    pairs = zip(outcome.times_s, baseline.times_s, strict=True)
    return BatchFigures(
        policy=outcome.policy,
        iteration_s=total_s / len(outcome.times_s),
        later_share=total_s / math.fsum(baseline.times_s) - 1.0,
        worst_share=max(time_s / before_s - 1.0 for time_s, before_s in pairs),
        energy_j=outcome.energy_j,
        saved_share=share(baseline.energy_j - outcome.energy_j, baseline.energy_j),
    )


def _spread_of(lengths: Lengths) -> Spread:
    iterations, pipelines, microbatches = lengths.work.shape
    return Spread(
        iterations=iterations,
        pipelines=pipelines,
        microbatches=microbatches,
        of_sequences=lengths.of_sequences,
        spread=lengths.spread,
        longest=float(lengths.work.max()),
        slowest=lengths.slowest,
        moves=lengths.moves,
    )


def lengths_text(summary: LengthsSummary) -> str:
    """Return the text that `planner simulate --lengths` prints: a row for each policy."""
    context = summary.context
    columns = lay_out(
        summary.policies,
        Column("policy", "policy", "<"),
        Column("iteration {}", "iteration_s", "s"),
        Column("later %", "later_share", "%"),
        Column("worst %", "worst_share", "%"),
        Column("energy {}", "energy_j", "J"),
        Column("saved %", "saved_share", "%"),
    )
    notes = [
        f"Baseline of time and saving: {ALL_MAXIMUM} (max), in the same iterations; the target is "
        f"{summary.slowdown:g}x of it.",
        *_spread_notes(summary.lengths),
        _order_note(summary.reordered_share),
    ]
    spread = summary.lengths
    return Sheet(
        f"{counted(spread.pipelines, 'pipeline')} of different microbatches, each "
        f"{pipeline_text(context)}",
        f"{origin_text(context.origin)}, in simulated time: "
        f"{counted(spread.iterations, 'iteration')}; the work of each batch is known before it "
        "runs.",
        columns,
        notes,
    ).text()


def _spread_notes(spread: Spread) -> list[str]:
    from perseus_planner.extensions.lab.lengths import WORK_OF_LENGTHS

    notes = [
        f"Microbatches: work spreads by {100 * spread.spread:.1f} %, the longest has "
        f"{spread.longest:.2f} times the mean.",
        f"Pipelines: the slowest has {spread.slowest:.2f} times the mean work, and is another "
        f"one than before in {100 * spread.moves:.0f} % of iterations.",
    ]
    if spread.of_sequences:
        notes.append(f"Work of a microbatch: {WORK_OF_LENGTHS}.")
    return notes


def _order_note(reordered_share: float) -> str:
    return (
        "Order: with the microbatches inside each pipeline in another order, iterations take "
        f"{100 * reordered_share:.1f} % less time at maximum clocks."
    )


@dataclass(frozen=True)
class ShownPipeline:
    """What plans would bring on a pipeline of so many stages, against full clocks."""

    stages: int  #: number of stages
    static_later_share: float  #: of the time, by a plan for microbatches that are alike
    one_clock_saved_share: float  #: of the energy, by one clock for each batch
    batch_saved_share: float  #: of the energy, by a plan of each batch
    batch_later_share: float  #: of the time, by the same
    reordered_share: float  #: of the time, that another order would take less


@dataclass(frozen=True)
class ShownLengths:
    """A file of lengths, and what plans of its batches would bring."""

    lengths: Spread
    gpu: str  #: the simulated GPU
    replayed_iterations: int  #: how many iterations of the file were replayed
    pipelines: tuple[ShownPipeline, ...]  #: of several depths


def show_lengths(path: Path) -> tuple[ShownLengths, str]:
    """Return a file of lengths as `planner show` wants it: what plans of the batch would bring, on
    pipelines of a simulated GPU.
    """
    from perseus_planner.extensions.lab.lengths import read_lengths

    lengths = read_lengths(path)
    # Plans of the batch take time, so fewer iterations of larger jobs are replayed.
    replayed = lengths.first(max(1, _MOST_PLANS // lengths.work.shape[1]))
    summary = ShownLengths(
        lengths=_spread_of(lengths),
        gpu=_SHOWN_GPU,
        replayed_iterations=len(replayed.work),
        # Several depths, as the reader's pipeline is not known.
        pipelines=tuple(_shown_pipeline(stages, replayed) for stages in _SHOWN_STAGES),
    )
    return summary, _shown_text(summary)


def _shown_pipeline(stages: int, lengths: Lengths) -> ShownPipeline:
    from perseus_planner import solve
    from perseus_planner.extensions.lab.lengths import UnlikeJob
    from perseus_planner.profiler.simulated_pipeline import profile_simulated

    profile = profile_simulated(_SHOWN_GPU, stages)
    frontier = solve(profile, "1f1b", microbatches=lengths.work.shape[2])
    job = UnlikeJob(frontier, lengths)
    # Full clocks first, with which all others are compared.
    outcomes = [job.outcome(name) for name in ("max", "planner-fixed", "one-clock", "batch")]
    summary = summarize_lengths(job, outcomes, 1.0)
    _, static, one_clock, batch = summary.policies
    return ShownPipeline(
        stages=stages,
        static_later_share=static.later_share,
        one_clock_saved_share=one_clock.saved_share,
        batch_saved_share=batch.saved_share,
        batch_later_share=batch.later_share,
        reordered_share=summary.reordered_share,
    )


def _shown_text(summary: ShownLengths) -> str:
    columns = lay_out(
        summary.pipelines,
        Column("stages", "stages"),
        Column("static plan: later %", "static_later_share", "%"),
        Column("one clock: saved %", "one_clock_saved_share", "%"),
        Column("plan of the batch: saved %", "batch_saved_share", "%"),
        Column("later %", "batch_later_share", "%"),
        Column("other order: less time %", "reordered_share", "%"),
    )
    spread = summary.lengths
    notes = [
        *_spread_notes(spread),
        "Static plan: for microbatches that are alike. One clock, and the plan of the batch, are "
        "chosen for each pipeline and iteration from the work of all pipelines.",
        "Other order: of the microbatches inside each pipeline, at maximum clocks. It changes the "
        "order in which gradients are summed.",
        "For your own pipeline: planner simulate frontier.npz --lengths FILE",
    ]
    title = (
        f"Lengths of {counted(spread.iterations, 'iteration')} x "
        f"{counted(spread.pipelines, 'pipeline')} x "
        f"{counted(spread.microbatches, 'microbatch')}"
    )
    source = (
        f"What plans of the batch would bring on {summary.gpu} (simulated: no GPU was touched), "
        f"1F1B, replayed: {counted(summary.replayed_iterations, 'iteration')}"
    )
    return Sheet(title, source, columns, notes).text()
