"""A job on a cluster under several policies: what `planner simulate` prints, and its CSV with a row for each GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perseus_planner.quantities import si
from perseus_planner.views.columns import Sheet, column, numbers, quantities
from perseus_planner.views.context import (
    ALL_MAXIMUM,
    Context,
    context_of_profile,
    origin_text,
    pipeline_text,
    share,
)

if TYPE_CHECKING:
    from perseus_planner.cluster.replay import Cluster, Outcome

_HEADER = "policy,pipeline,rank,gpu,energy_j,busy_s,idle_s\n"


@dataclass(frozen=True)
class PolicySummary:
    """A job under one policy; energies, powers and shares are over all GPUs of the cluster.

    Attributes:
        policy: name of the policy.
        time_s: time of all iterations, seconds.
        iteration_s: mean iteration time, seconds.
        time_ratio: mean iteration time over that with all clocks at maximum and no straggler.
        iterations_per_s: iterations per second.
        energy_j: energy of all iterations, waiting included, joules.
        power_w: average power, watts.
        idle_share: share of their time that GPUs wait.
        saved_j: energy saved against all clocks at maximum with the same stragglers and iterations, joules.
        saved_share: that saving over the energy of all clocks at maximum.
    """

    policy: str
    time_s: float
    iteration_s: float
    time_ratio: float
    iterations_per_s: float
    energy_j: float
    power_w: float
    idle_share: float
    saved_j: float
    saved_share: float


@dataclass(frozen=True)
class ClusterSummary:
    """A job on a cluster under several policies.

    Attributes:
        context: the profile, and the iteration of a pipeline.
        pipelines: number of data-parallel pipelines.
        gpus: number of GPUs of the cluster.
        iterations: number of iterations of the job.
        stragglers: number of stragglers.
        reaction_delay_s: how late policies learn of a straggler, seconds.
        slowdown: the target of the policies that have one.
        baseline_time_s: iteration time with all clocks at maximum and no straggler, seconds.
        policies: the job under each policy.
        left_out: policies that do not apply, each with the reason.
    """

    context: Context
    pipelines: int
    gpus: int
    iterations: int
    stragglers: int
    reaction_delay_s: float
    slowdown: float
    baseline_time_s: float
    policies: tuple[PolicySummary, ...]
    left_out: tuple[str, ...]


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


def _policy(cluster: Cluster, outcome: Outcome, baseline_j: float) -> PolicySummary:
    energy_j, iteration_s = outcome.energy_j, outcome.time_s / outcome.iterations
    return PolicySummary(
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
    context, rows = summary.context, summary.policies
    columns = [
        ["policy", *(row.policy for row in rows)],
        *quantities(["iteration {}"], "s", [row.iteration_s for row in rows]),
        column("x baseline", [f"{row.time_ratio:.4f}" for row in rows]),
        column("iterations/s", numbers([row.iterations_per_s for row in rows])),
        *quantities(["energy {}"], "J", [row.energy_j for row in rows]),
        *quantities(["power {}"], "W", [row.power_w for row in rows]),
        column("idle %", [f"{100 * row.idle_share:.2f}" for row in rows]),
        column("saved %", [f"{100 * row.saved_share:.2f}" for row in rows]),
    ]
    size = f"{summary.gpus} GPUs: {summary.pipelines} pipelines x {context.ranks} ranks x {context.gpus_per_stage} GPUs"
    notes = [
        f"x baseline: mean iteration over {si(summary.baseline_time_s, 's', 6)}, {ALL_MAXIMUM} without stragglers; "
        f"the target is {summary.slowdown:g}x.",
        f"Baseline of every saving: {ALL_MAXIMUM} (max) with the same stragglers, for as many iterations.",
        *(f"Left out: {reason}." for reason in summary.left_out),
    ]
    return Sheet(
        f"Cluster of {size}, each pipeline {pipeline_text(context)}",
        f"{origin_text(context.origin)}, in simulated time: {summary.iterations} iterations, "
        f"{summary.stragglers} stragglers; policies learn of them {summary.reaction_delay_s:g} s late.",
        columns,
        "\n".join(notes),
    ).text()


def gpu_csv(outcomes: Sequence[Outcome]) -> bytes:
    """Return a CSV with the energy, busy time and idle time of each GPU under each policy.

    The column `gpu` counts within a rank.
    """
    return "".join([_HEADER, *(row for outcome in outcomes for row in _gpu_rows(outcome))]).encode()


def _gpu_rows(outcome: Outcome) -> Iterator[str]:
    columns = zip(outcome.energy_per_gpu_j.tolist(), outcome.busy_s.tolist(), outcome.idle_s.tolist(), strict=True)
    for pipeline, ranks in enumerate(columns):
        for rank, (energy_j, busy_s, idle_s) in enumerate(zip(*ranks, strict=True)):
            figures = f"{energy_j!r},{busy_s!r},{idle_s!r}\n"
            for gpu in range(outcome.gpus_per_stage):
                yield f"{outcome.policy},{pipeline},{rank},{gpu},{figures}"
