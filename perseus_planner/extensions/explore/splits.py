"""Splits of the layers of a model among the stages of a pipeline: even, and balanced beside
embedding and head.
"""

from __future__ import annotations

import heapq
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from perseus_planner.extensions.explore.memory import balanced, memory, slowest_rank_s
from perseus_planner.extensions.explore.transformer import split_layers
from perseus_planner.schedules.layouts import Layout, balance

if TYPE_CHECKING:
    from perseus_planner.extensions.explore.configuration import Configuration
    from perseus_planner.extensions.explore.operations import LayerTimes, System


_ALIKE = 1e-9  # ranks whose times differ by less, relative to each other, are equal in floats


def split_choices(
    job: Configuration, system: System, times: LayerTimes, given: Layout | None = None
) -> list[Configuration]:
    """Return the splits of its layers to try: as even as possible, and with fewer layers beside
    embedding and head.

    The latter make the slowest stage, and the slowest rank, as fast as whole layers allow. If the
    last of these does not fit in memory, the fastest split that fits is tried too. A given layout
    comes first, and keeps its modules of multi-token prediction.
    """
    layers = job.shape.layers
    stages = len(job.split)
    if given is not None:
        # A layout that is given keeps its modules of prediction.
        predictions = given.predictions if any(given.predictions) else ()
        job = replace(job, split=given.layers, predictions=predictions)
        choices = [job]
    else:
        choices = [replace(job, split=split_layers(layers, stages))]
    if stages == 1:
        return choices
    # Embedding and head take time, so stages with them should have fewer layers.
    parts_s = times.training_s(system.top_mhz)
    if given is None:
        choices.append(replace(job, split=_balanced_stages(layers, stages, *parts_s)))
    # Ranks with several stages are balanced by their sums, without regard to memory first.
    if job.predictions:
        by_rank = balanced(job, system, times, within_memory=False)
        split = None if by_rank is None else by_rank.split
    else:
        split = _balanced_ranks(layers, job.stage_ranks, *parts_s)
    if split is not None:
        # Of equally fast slowest ranks, stages that are alike come first.
        by_rank = replace(job, split=split)
        least_s = (1 - _ALIKE) * min(slowest_rank_s(choice, system, times) for choice in choices)
        if slowest_rank_s(by_rank, system, times) < least_s:
            choices.append(by_rank)
    # A rank with more layers may not fit, so the best split that does is tried as well.
    if not memory(choices[-1], system).fits:
        fitting = balanced(job, system, times)
        choices += [] if fitting is None else [fitting]
    return list(dict.fromkeys(choices))


@lru_cache(maxsize=4096)
def _balanced_ranks(
    layers: int, stage_ranks: tuple[int, ...], layer_s: float, first_s: float, last_s: float
) -> tuple[int, ...] | None:
    """Return the split whose slowest rank is fastest, with so many seconds of a layer and beside
    the layers.
    """
    beside_s = [0.0] * len(stage_ranks)
    beside_s[0] += first_s
    beside_s[-1] += last_s
    return balance(layers, stage_ranks, layer_s, beside_s)


@lru_cache(maxsize=4096)
def _balanced_stages(
    layers: int, stages: int, layer_s: float, first_s: float, last_s: float
) -> tuple[int, ...]:
    """Return the split whose slowest stage is fastest, with so many seconds of a layer and
    beside the layers.
    """
    # Of equally fast stages the last one gets the next layer: it keeps fewer microbatches.
    free = [
        (layer_s + beside_s, -stage)
        for stage, beside_s in enumerate([first_s, *[0.0] * (stages - 2), last_s])
    ]
    heapq.heapify(free)
    # Every stage has a layer, and the others go to the stage that is the fastest so far.
    split = [1] * stages
    for _ in range(layers - stages):
        least_s, stage = free[0]
        split[-stage] += 1
        heapq.heapreplace(free, (least_s + layer_s, stage))
    return tuple(split)
