"""What a job's newest plans foresee: of each pipeline, of all together, and against all clocks at maximum.

An iteration that takes longer than its plan waits for the rest of the time: with `e` and `t` of the plan, and `P` what
the GPUs of its pipeline draw while they wait, it takes e + P * max(0, T - t) joules if it lasts T seconds. The same is
true of the baseline, all clocks at maximum, so that a saving beside a straggler is not said to be more than it is.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING

from perseus_planner.service.outcomes import Expected, PipelineStatus

if TYPE_CHECKING:
    from perseus_planner.service.state import JobState

_KEPT = 1024


@dataclass(frozen=True)
class _Costs:
    """Of an iteration of one pipeline: by its plan, and with all clocks at maximum; seconds and joules."""

    time_s: float
    energy_j: float
    baseline_time_s: float
    baseline_energy_j: float


_NAMES = tuple(each.name for each in fields(_Costs))


def baseline_j(state: JobState, iteration_s: float) -> float:
    """What all pipelines take with all clocks at maximum in an iteration of `iteration_s` seconds, joules."""
    waiting_w = state.curve.waiting_w
    return math.fsum(
        count * (each.baseline_energy_j + waiting_w * max(0.0, iteration_s - each.baseline_time_s))
        for each, count in _plans(state)
    )


def expected(state: JobState) -> Expected:
    """What all GPUs draw on average by the newest plans, while the slowest pipeline takes as long as decided."""
    plans, waiting_w = _plans(state), state.curve.waiting_w
    iteration_s = max(state.decision.straggler_time_s, *(each.time_s for each, _ in plans))
    energy_j = math.fsum(count * (each.energy_j + waiting_w * (iteration_s - each.time_s)) for each, count in plans)
    return Expected(energy_j / iteration_s, baseline_j(state, iteration_s) / iteration_s, state.curve.origin)


def pipelines(state: JobState) -> tuple[PipelineStatus, ...]:
    """Each pipeline, in order."""
    decision, plans = state.decision, [each for each, _ in _plans(state)]
    costs = [plans[place] for place in state.published.of_pipeline]
    return tuple(
        PipelineStatus(
            number, each.time_s, each.energy_j, target.time_s, target.slow_stages, decision.stragglers.get(number)
        )
        for number, (each, target) in enumerate(zip(costs, decision.targets, strict=True))
    )


def _plans(state: JobState) -> list[tuple[_Costs, int]]:
    """The newest plans, equal ones once, and how many pipelines have each."""
    published = state.published
    return [(_costs_of(text), published.of_pipeline.count(place)) for place, text in enumerate(published.texts)]


@lru_cache(_KEPT)
def _costs_of(text: str) -> _Costs:
    """Of a plan; many times as fast as `Plan.loads`, which reads all of it."""
    values = json.loads(text)
    return _Costs(*(float(values[name]) for name in _NAMES))
