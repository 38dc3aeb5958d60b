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

from perseus_planner.runtime.service.outcomes import Expected, PipelineStatus
from perseus_planner.runtime.service.state import JobState

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
        each.baseline_energy_j + waiting_w * max(0.0, iteration_s - each.baseline_time_s) for each in _costs(state)
    )


def expected(state: JobState) -> Expected:
    """What all GPUs draw on average by the newest plans, while the slowest pipeline takes as long as decided."""
    costs, waiting_w = _costs(state), state.curve.waiting_w
    iteration_s = max(state.decision.straggler_time_s, *(each.time_s for each in costs))
    energy_j = math.fsum(each.energy_j + waiting_w * (iteration_s - each.time_s) for each in costs)
    return Expected(energy_j / iteration_s, baseline_j(state, iteration_s) / iteration_s, state.curve.origin)


def pipelines(state: JobState) -> tuple[PipelineStatus, ...]:
    """Each pipeline, in order."""
    decision = state.decision
    return tuple(
        PipelineStatus(
            number, costs.time_s, costs.energy_j, target.time_s, target.slow_stages, decision.stragglers.get(number)
        )
        for number, (costs, target) in enumerate(zip(_costs(state), decision.targets, strict=True))
    )


def _costs(state: JobState) -> list[_Costs]:
    """Of each pipeline, in order."""
    of_text = [_costs_of(text) for text in state.published.texts]
    return [of_text[place] for place in state.published.of_pipeline]


@lru_cache(_KEPT)
def _costs_of(text: str) -> _Costs:
    """Of a plan; many times as fast as `Plan.loads`, which reads all of it."""
    values = json.loads(text)
    return _Costs(*(float(values[name]) for name in _NAMES))
