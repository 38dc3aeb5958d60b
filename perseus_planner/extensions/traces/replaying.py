"""Replay traced iterations: each computation begins when its rank and its input are there, as in a
plan's replay. Whether that explains the measured iterations says whether a plan's numbers can be
believed; the gaps between computations are learnt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from typing import TypeAlias

    from numpy.typing import NDArray

    from perseus_planner.extensions.traces.job import TracedJob

    Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Gaps:
    """What passes between computations beside themselves, seconds."""

    own_s: float  #: from one computation of a rank to its next, whose input is there already
    transfer_s: float  #: from the end of a computation until another rank can use its output
    rest_s: float  #: of an iteration outside its computations: the optimizer, say


def learn_gaps(job: TracedJob) -> Gaps:
    """Return the gaps that a job's steps have in the median."""
    iteration = job.iteration
    own_s_of_steps: list[Floats] = []
    transfer: list[Floats] = []
    # Each computation waits for the one before it on its rank, and for its input from others.
    for node, waits in enumerate(iteration.waits):
        rank = iteration.rank_of[node]
        of_own = [
            job.ends_s[..., before] for before, _ in waits if iteration.rank_of[before] == rank
        ]
        of_others = [
            job.ends_s[..., before] for before, _ in waits if iteration.rank_of[before] != rank
        ]
        begins_s = job.begins_s[..., node]
        own_s = np.max(of_own, axis=0) if of_own else np.full(begins_s.shape, -np.inf)
        others_s = np.max(of_others, axis=0) if of_others else np.full(begins_s.shape, -np.inf)
        # What was there last is what it waited for.
        waited = others_s > own_s
        if of_own:
            # The gap counts only after the one that it waited for, as the other was there long
            # before.
            own_s_of_steps.append((begins_s - own_s)[~waited])
        if of_others:
            transfer.append((begins_s - others_s)[waited])
    gaps = Gaps(_median(own_s_of_steps), _median(transfer), 0.0)
    # What is left of the iterations after their own replay is the rest.
    rest_s = float(np.median(job.iterations_s - replay_s(job, job.times_s, gaps)))
    return Gaps(gaps.own_s, gaps.transfer_s, rest_s)


def _median(found: list[Floats]) -> float:
    values = np.concatenate(found) if found else np.zeros(0)
    return max(0.0, float(np.median(values))) if len(values) else 0.0


def replay_s(job: TracedJob, times_s: Floats, gaps: Gaps) -> Floats:
    """Return how long iterations take, seconds.

    Args:
        job: the job.
        times_s: (..., computations) how long each computation runs.
        gaps: what passes between them.
    """
    iteration = job.iteration
    ends_s = np.zeros_like(times_s)
    for node in iteration.order:
        begin_s = np.zeros(times_s.shape[:-1])
        for before, _ in iteration.waits[node]:
            is_own = iteration.rank_of[before] == iteration.rank_of[node]
            gap_s = gaps.own_s if is_own else gaps.transfer_s
            begin_s = np.maximum(begin_s, ends_s[..., before] + gap_s)
        ends_s[..., node] = begin_s + times_s[..., node]
    longest_s: Floats = ends_s.max(axis=-1) + gaps.rest_s
    return longest_s


def mean_times_s(job: TracedJob) -> Floats:
    """Return how long each computation runs in the mean of its worker and kind, with the shape
    (pipelines, 1, computations).
    """
    means_s = np.zeros((job.pipelines, 1, len(job.computations)))
    for key in job.keys:
        places = job.places(key)
        means_s[:, :, places] = job.times_s[:, :, places].mean(axis=(1, 2), keepdims=True)
    return means_s
