"""What a traced job shows: bubbles, the bottleneck, slow workers, jitter, waiting for hosts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from perseus_planner.base.prefixes import si
from perseus_planner.extensions.traces.replaying import (
    Gaps,
    learn_gaps,
    mean_times_s,
    replay_s,
)

if TYPE_CHECKING:
    from typing import TypeAlias

    from numpy.typing import NDArray

    from perseus_planner.extensions.traces.job import TracedJob
    from perseus_planner.profiles.keys import Key

    Floats: TypeAlias = NDArray[np.float64]

_SLOW = 1.1
"""How much longer than its peers' a worker's computations take before it is named. Healthy ones of
three production jobs are within 1.02 (ByteDance's StragglerAnalysis)."""
_VARIES = 0.08
"""Relative deviation from which equal computations are no longer equal: jobs of fixed lengths have
.013 to .04, those of variable ones .18 to .44, and a plan of means is 14 % late there."""
_UNEXPLAINED = 0.03  #: how far a replay by means may be off: by hand, twice the worst seen
_HOST_BOUND = 0.5  #: the share of a computation in which no kernel runs that is worth a sentence
_LONGER = 1.05  #: how much more than the mean work a bottleneck has, by hand


@dataclass(frozen=True)
class RankUse:
    """What a worker does in an iteration."""

    worker: str  #: its name
    pipeline: int  #: which pipeline it is in
    rank: int  #: its rank in the pipeline
    stages: str  #: the stages that it holds
    busy_share: float  #: share of the iteration in which it computes
    bubble_share: float  #: the rest
    #: share of its computations in which no kernel runs, as its host is late; None if not known
    host_share: float | None
    slowdown: float  #: its computations over those of its peers in other pipelines


@dataclass(frozen=True)
class Analysis:
    """What a job shows."""

    iteration_s: float  #: median iteration time
    iteration_deviation: float  #: relative standard deviation of iterations
    steps: int  #: steps that were looked at
    ranks: tuple[RankUse, ...]
    bubble_share: float  #: share of the GPUs' time in which they do not compute
    #: share of an even pipeline of this schedule whose stages take equal times
    even_bubble_share: float
    bottleneck: str  #: the rank that computes most, and why
    slow: tuple[RankUse, ...]  #: workers slower than their peers
    slow_cost: float  #: the share of an iteration that they cost; 0 for none
    jitter: float  #: relative standard deviation of a computation
    varies: bool  #: whether equal computations are too unlike for one plan
    replay_error: float  #: relative error of the replay of iterations by means
    rest_s: float  #: what an iteration takes beside its replay by mean times
    gaps: Gaps = field(repr=False)
    remarks: tuple[str, ...]  #: what to do first, or not to believe


def analyse(job: TracedJob) -> Analysis:
    """Return what a job shows."""
    gaps = learn_gaps(job)
    slowdowns = _slowdowns(job)
    uses = _uses(job, slowdowns)
    slow = tuple(use for use in uses if use.slowdown >= _SLOW)
    # Pipelines side by side wait for the slowest.
    # A step is as long as its slowest pipeline.
    lengths_s = job.iterations_s.max(axis=0)
    iteration_s = float(np.median(lengths_s))
    # If means explain the iterations, a plan of means can be believed.
    by_means_s = replay_s(job, mean_times_s(job), gaps)
    replay_error = float(np.mean(by_means_s) / np.mean(job.iterations_s) - 1.0)
    jitter = _jitter(job)
    slow_cost = _slow_cost(job, gaps) if slow else 0.0
    # Times of hosts vary by the hosts, which says nothing of microbatches.
    varies = jitter > _VARIES and job.has_gpu_times
    analysis = Analysis(
        iteration_s=iteration_s,
        iteration_deviation=float(np.std(lengths_s) / np.mean(lengths_s)),
        steps=job.steps,
        ranks=uses,
        bubble_share=float(np.mean([use.bubble_share for use in uses])),
        even_bubble_share=_even_bubble_share(job),
        bottleneck=_bottleneck(job, uses),
        slow=slow,
        slow_cost=slow_cost,
        jitter=jitter,
        varies=varies,
        replay_error=replay_error,
        rest_s=_rest_s(job),
        gaps=gaps,
        remarks=(),
    )
    return _with_remarks(job, analysis)


def healthy_times_s(job: TracedJob) -> dict[Key, Floats]:
    """Return the times of each stage and kind, of the workers that are not slow."""
    slowdowns = _slowdowns(job)
    iteration = job.iteration
    times: dict[Key, Floats] = {}
    for key in job.keys:
        places = job.places(key)
        rank = iteration.rank_of[places[0]]
        healthy = slowdowns[:, rank] < _SLOW
        times[key] = job.times_s[healthy][:, :, places].ravel()
    return times


def _slowdowns(job: TracedJob) -> Floats:
    """Return (pipelines, ranks) how much longer a worker's computations take than the median of its
    peers'; 1 where it has none.
    """
    ranks = len(job.schedule.ranks)
    slowdowns = np.ones((job.pipelines, ranks))
    if job.pipelines == 1:
        return slowdowns
    rank_of = np.array(job.iteration.rank_of[: len(job.computations)])
    for rank in range(ranks):
        work_s = job.times_s[:, :, rank_of == rank].sum(axis=2).mean(axis=1)
        slowdowns[:, rank] = work_s / np.median(work_s)
    return slowdowns


def _uses(job: TracedJob, slowdowns: Floats) -> tuple[RankUse, ...]:
    uses = []
    rank_of = np.array(job.iteration.rank_of[: len(job.computations)])
    for pipeline in range(job.pipelines):
        for rank, row in enumerate(job.schedule.ranks):
            of_rank = rank_of == rank
            busy_s = job.times_s[pipeline][:, of_rank].sum(axis=1)
            # The share is of the job's iteration, in which faster pipelines wait.
            busy_share = float(np.mean(busy_s / job.iterations_s.max(axis=0)))
            host_share = None
            # What a computation lasts without a kernel, it waits for its host.
            if job.has_computing_times:
                computing_s = job.computing_s[pipeline][:, of_rank].sum()
                host_share = float(1.0 - computing_s / busy_s.sum())
            stages = ", ".join(map(str, sorted({computation.stage for computation in row})))
            uses.append(
                RankUse(
                    job.workers[pipeline][rank],
                    pipeline,
                    rank,
                    stages,
                    busy_share,
                    1.0 - busy_share,
                    host_share,
                    float(slowdowns[pipeline, rank]),
                )
            )
    return tuple(uses)


def _jitter(job: TracedJob) -> float:
    """Return the relative standard deviation of computations of one worker and kind, the median
    over these.
    """
    deviations = []
    for key in job.keys:
        times_s = job.times_s[:, :, job.places(key)]
        means_s = times_s.mean(axis=(1, 2), keepdims=True)
        if float(means_s.min()) > 0.0:
            deviations.extend((times_s / means_s).std(axis=(1, 2)).tolist())
    return float(np.median(deviations)) if deviations else 0.0


def _even_bubble_share(job: TracedJob) -> float:
    """Return the bubbles if all stages took equally long, at the mean times of each kind."""
    # No gaps and no differences between stages, so that the order alone is left.
    times_s = np.zeros((1, 1, len(job.computations)))
    for kind in {key.kind for key in job.keys}:
        places = [
            position
            for position, computation in enumerate(job.computations)
            if computation.kind == kind
        ]
        times_s[:, :, places] = job.times_s[:, :, places].mean()
    length_s = float(replay_s(job, times_s, Gaps(0.0, 0.0, 0.0))[0, 0])
    return 1.0 - float(times_s.sum()) / (length_s * len(job.schedule.ranks))


def _bottleneck(job: TracedJob, uses: tuple[RankUse, ...]) -> str:
    ranks = range(len(job.schedule.ranks))
    # Over all pipelines, so that one slow worker makes no bottleneck of its rank.
    shares = [
        float(np.mean([use.busy_share for use in uses if use.rank == rank])) for rank in ranks
    ]
    most = int(np.argmax(shares))
    others = (sum(shares) - shares[most]) / max(1, len(shares) - 1)
    stages = next(use.stages for use in uses if use.rank == most)
    word = "stages" if "," in stages else "stage"
    # Differences this small say nothing of the stages.
    if len(shares) == 1 or shares[most] < _LONGER * others:
        return "none: the ranks compute equally long, and wait by the order of the schedule"
    return (
        f"rank {most} ({word} {stages}): computes {100 * shares[most]:.0f} % of an iteration, the "
        f"others {100 * others:.0f} %, as it has {shares[most] / others:.2f} times their work"
    )


def _slow_cost(job: TracedJob, gaps: Gaps) -> float:
    """Return the share of an iteration that some slow workers cost."""
    slowdowns = _slowdowns(job)
    rank_of = np.array(job.iteration.rank_of[: len(job.computations)])
    # Slow workers are made as fast as their peers, and fast ones stay as they are.
    healed_s = job.times_s / np.maximum(slowdowns, 1.0)[:, None, :][..., rank_of]
    # Both are replayed, so that what the replay leaves out cancels.
    as_is = replay_s(job, job.times_s, gaps).max(axis=0).mean()
    healed = replay_s(job, healed_s, gaps).max(axis=0).mean()
    return float(1.0 - healed / as_is)


def _rest_s(job: TracedJob) -> float:
    """Return what an iteration takes beside the replay of the healthy workers' mean times, as a
    plan replays it: without gaps.
    """
    # Means of healthy workers, as the plan is for these.
    times_s = np.zeros((1, 1, len(job.computations)))
    for key, of_key_s in healthy_times_s(job).items():
        times_s[:, :, job.places(key)] = of_key_s.mean()
    replayed_s = float(replay_s(job, times_s, Gaps(0.0, 0.0, 0.0))[0, 0])
    # Pipelines with a slow worker are longer for another reason.
    healthy = (_slowdowns(job) < _SLOW).all(axis=1)
    iterations_s = job.iterations_s[healthy] if healthy.any() else job.iterations_s
    # Noise may make the replay longer, and nothing takes less than no time.
    return max(0.0, float(np.median(iterations_s)) - replayed_s)


def _with_remarks(job: TracedJob, seen: Analysis) -> Analysis:
    said = list(job.remarks)
    said.extend(
        f"{use.worker} (stage {use.stages}) is {use.slowdown:.1f} times slower than its peers: "
        f"mend it first, it costs {100 * seen.slow_cost:.0f} % of an iteration. The saving is of "
        "the healthy workers."
        for use in seen.slow
    )
    if seen.varies:
        said.append(
            f"Equal computations vary by {100 * seen.jitter:.0f} %: microbatches are unlike, and a "
            "plan of their means would be late. Let clocks follow each batch: "
            "planner_runtime(engine, work=...), docs/batches.md."
        )
    if abs(seen.replay_error) > _UNEXPLAINED:
        said.append(
            f"A replay by mean times is {100 * seen.replay_error:+.1f} % off the iterations: "
            "something beside the computations takes time. Trace more steps, without other work "
            "on the nodes, before you believe a plan's time."
        )
    # Of all workers the one that waits the most is named, as the remedy is the same for all.
    bound = [use for use in seen.ranks if (use.host_share or 0.0) >= _HOST_BOUND]
    if bound:
        worst = max(bound, key=lambda use: use.host_share or 0.0)
        said.append(
            f"{worst.worker} waits for its host in {100 * (worst.host_share or 0.0):.0f} % of its "
            "computations: launches are the bottleneck. Larger microbatches, or graphs, gain more "
            "than clocks do."
        )
    if not job.has_gpu_times:
        said.append(
            "There are no kernels in these traces: order and bubbles are those of the hosts, and "
            "no saving is estimated. Trace with ProfilerActivity.CUDA too."
        )
    if job.widths_s is not None:
        said.append(f"Clocks of ranks are aligned within {si(float(job.widths_s.max()), 's', 2)}.")
    return replace(seen, remarks=tuple(said))
