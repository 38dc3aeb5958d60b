"""The times of iterations of configurations, quickly: what is fitted replays thousands of them.

An iteration is replayed over the graph of its own schedule, of which few microbatches give many.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from perseus_planner.extensions.explore.configuration import Configuration, schedule_of
from perseus_planner.extensions.explore.operations import LayerTimes, System
from perseus_planner.schedules.pipeline import pipeline_iteration

_SETTLED = (
    12  # multiples of the ranks after which further microbatches take the same time, within 0.1 %
)


def iteration_s(job: Configuration, system: System, times: LayerTimes | None = None) -> float:
    """Return the seconds of an iteration at the top clocks, as far as the power limit allows
    them.
    """
    top_mhz = system.top_mhz
    stages = [
        {kind: phases.load(system).time_s(top_mhz) for kind, phases in kinds.items()}
        for kinds in job.stage_phases(system, times)
    ]
    return replay_s(job, system, stages)


def replay_s(job: Configuration, system: System, stages: Sequence[dict[str, float]]) -> float:
    """Return the seconds of an iteration whose computations take so many seconds, by stage
    and kind.
    """
    ranks = job.stage_ranks
    both_s = np.zeros(job.ranks)
    for stage, rank in enumerate(ranks):
        both_s[rank] += stages[stage]["F"] + stages[stage]["B"]
    hop_s, ends_s = job.transfer_s(system), job.end_s(system, both_s)
    settled = _SETTLED * job.ranks
    if job.microbatches <= settled + job.ranks:
        count, more = job.microbatches, 0
    else:
        more, count = divmod(job.microbatches - settled, job.ranks)
        count += settled
    first_s = _replayed_s(job, count, stages, hop_s, ends_s)
    if more:
        first_s += more * (_replayed_s(job, count + job.ranks, stages, hop_s, ends_s) - first_s)
    return first_s


def _replayed_s(
    job: Configuration,
    microbatches: int,
    stages: Sequence[dict[str, float]],
    hop_s: float,
    ends_s: Sequence[float],
) -> float:
    nodes, last = _nodes(job.schedule, len(job.split), microbatches, job.virtual_stages)
    ends: list[float] = [0.0] * len(nodes)
    for place, stage, kind, before, sent in nodes:
        start = ends[before] if before >= 0 else 0.0
        if sent is not None:
            other, away = sent
            arrived = ends[other] + hop_s if away else ends[other]
            start = arrived if arrived > start else start
        ends[place] = start + stages[stage][kind]
    return max(ends[place] + end_s for place, end_s in zip(last, ends_s, strict=True))


@lru_cache(maxsize=512)
def _nodes(
    name: str, stages: int, microbatches: int, virtual_stages: int
) -> tuple[tuple[tuple[int, int, str, int, tuple[int, bool] | None], ...], tuple[int, ...]]:
    """Return the computations in an order in which they can be replayed, and the last of each rank.

    A computation is its place, stage and kind, the place before it on its rank (or -1), and the
    place whose result it takes, with whether that is on another rank.
    """
    iteration = pipeline_iteration(schedule_of(name, stages, microbatches, virtual_stages))
    previous: dict[int, int] = {}
    for program in iteration.programs:
        previous.update(zip(program, (-1, *program), strict=False))
    nodes = []
    for place in iteration.order:
        others = [other for other in iteration.predecessors[place] if other != previous[place]]
        sent = (
            (others[0], iteration.rank_of[others[0]] != iteration.rank_of[place])
            if others
            else None
        )
        computation = iteration.computations[place]
        nodes.append((place, computation.stage, computation.kind, previous[place], sent))
    return tuple(nodes), tuple(program[-1] for program in iteration.programs)
