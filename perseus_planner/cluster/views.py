"""A job on a cluster under several policies: what `planner simulate` prints, and its CSV with a
row for each GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from perseus_planner.base.prefixes import si
from perseus_planner.base.tables import Column, Sheet, lay_out
from perseus_planner.plans.replay import ALL_MAXIMUM, origin_text
from perseus_planner.views.context import context_of_profile, pipeline_text, share

if TYPE_CHECKING:
    from perseus_planner.cluster.replay import Cluster, Outcome

_HEADER = "policy,pipeline,rank,gpu,energy_j,busy_s,idle_s\n"


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
    energy_j, iteration_s = outcome.energy_j, outcome.time_s / outcome.iterations
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
        f"{summary['pipelines']} pipelines x {context.ranks} ranks x {context.gpus_per_stage} GPUs"
    )
    notes = [
        f"x baseline: mean iteration over {si(summary['baseline_time_s'], 's', 6)}, {ALL_MAXIMUM} "
        f"without stragglers; the target is {summary['slowdown']:g}x.",
        f"Baseline of every saving: {ALL_MAXIMUM} (max) with the same stragglers, for as many "
        "iterations.",
        *(f"Left out: {reason}." for reason in summary["left_out"]),
    ]
    return Sheet(
        f"Cluster of {summary['gpus']} GPUs: {pipelines}, each pipeline {pipeline_text(context)}",
        f"{origin_text(context.origin)}, in simulated time: {summary['iterations']} iterations, "
        f"{summary['stragglers']} stragglers; policies learn of them "
        f"{summary['reaction_delay_s']:g} s late.",
        columns,
        "\n".join(notes),
    ).text()


def gpu_csv(outcomes: Sequence[Outcome]) -> bytes:
    """Return a CSV with the energy, busy time and idle time of each GPU under each policy.

    The column `gpu` counts within a rank.
    """
    return "".join([_HEADER, *(row for outcome in outcomes for row in _gpu_rows(outcome))]).encode()


def _gpu_rows(outcome: Outcome) -> Iterator[str]:
    columns = zip(
        outcome.energy_per_gpu_j.tolist(),
        outcome.busy_s.tolist(),
        outcome.idle_s.tolist(),
        strict=True,
    )
    for pipeline, ranks in enumerate(columns):
        for rank, (energy_j, busy_s, idle_s) in enumerate(zip(*ranks, strict=True)):
            figures = f"{energy_j!r},{busy_s!r},{idle_s!r}\n"
            for gpu in range(outcome.gpus_per_stage):
                yield f"{outcome.policy},{pipeline},{rank},{gpu},{figures}"
