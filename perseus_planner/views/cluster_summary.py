"""What a command says of a replayed cluster: plain values, for its text and its JSON, and a CSV row for each GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perseus_planner.views.summary import share

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from perseus_planner.cluster.replay import Cluster, Outcome

_HEADER = "policy,pipeline,rank,gpu,energy_j,busy_s,idle_s\n"


@dataclass(frozen=True)
class PolicySummary:
    """A job under one policy; energies, powers and shares are over all GPUs of the cluster.

    Attributes:
        policy: its name.
        time_s: how long all iterations took, seconds.
        iteration_s: the mean of that, seconds.
        time_ratio: the mean over the iteration time with all clocks at maximum and no straggler.
        iterations_per_s: how many there were a second.
        energy_j: joules of all iterations, waiting included.
        power_w: that as an average, watts.
        idle_share: the part of their time that GPUs waited.
        saved_j: joules below those of all clocks at maximum with the same stragglers, for the same iterations.
        saved_share: that over the joules of all clocks at maximum.
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
    """A job on a cluster under some policies; fields as `Cluster`, `Profile` and `Frontier` have them.

    `ranks` are those of a pipeline, `stragglers` is their number, `left_out` has the policies that do not apply, each
    with the reason.
    """

    origin: str
    gpu: str | None
    schedule: str
    stages: int
    microbatches: int
    pipelines: int
    ranks: int
    gpus_per_stage: int
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
    """What `planner simulate` says.

    Args:
        cluster: the job.
        outcomes: of it; the first is that of the policy `max`, which the others are compared with.
        slowdown: the target of the policies that have one.
        left_out: policies that do not apply, each with the reason.
    """
    profile, schedule = cluster.frontier.profile, cluster.frontier.schedule
    return ClusterSummary(
        origin=profile.origin,
        gpu=profile.gpu,
        schedule=schedule.name,
        stages=schedule.stages,
        microbatches=schedule.microbatches,
        pipelines=cluster.pipelines,
        ranks=len(schedule.ranks),
        gpus_per_stage=profile.gpus_per_stage,
        gpus=cluster.gpus,
        iterations=cluster.iterations,
        stragglers=len(cluster.stragglers),
        reaction_delay_s=cluster.delay_s,
        slowdown=slowdown,
        baseline_time_s=cluster.frontier.baseline_time_s,
        policies=tuple(_policy(cluster, outcome, outcomes[0].energy_j) for outcome in outcomes),
        left_out=tuple(left_out),
    )


def gpu_rows(outcomes: Sequence[Outcome]) -> bytes:
    """CSV: for each policy and GPU its joules, and its busy and idle seconds; `gpu` counts within a rank."""
    return "".join([_HEADER, *(row for outcome in outcomes for row in _rows(outcome))]).encode()


def _rows(outcome: Outcome) -> Iterator[str]:
    columns = zip(outcome.energy_per_gpu_j.tolist(), outcome.busy_s.tolist(), outcome.idle_s.tolist(), strict=True)
    for pipeline, ranks in enumerate(columns):
        for rank, (energy_j, busy_s, idle_s) in enumerate(zip(*ranks, strict=True)):
            figures = f"{energy_j!r},{busy_s!r},{idle_s!r}\n"
            for gpu in range(outcome.gpus_per_stage):
                yield f"{outcome.policy},{pipeline},{rank},{gpu},{figures}"


def _policy(cluster: Cluster, outcome: Outcome, baseline_j: float) -> PolicySummary:
    energy_j, iteration_s = outcome.energy_j, outcome.time_s / outcome.iterations
    saved_j = baseline_j - energy_j
    return PolicySummary(
        policy=outcome.policy,
        time_s=outcome.time_s,
        iteration_s=iteration_s,
        time_ratio=iteration_s / cluster.frontier.baseline_time_s,
        iterations_per_s=outcome.iterations / outcome.time_s,
        energy_j=energy_j,
        power_w=outcome.power_w,
        idle_share=math.fsum(outcome.idle_s.flat) / (outcome.idle_s.size * outcome.time_s),
        saved_j=saved_j,
        saved_share=share(saved_j, baseline_j),
    )
