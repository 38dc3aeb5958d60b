"""What is said of a running job: its status, its totals, and the status of each of its pipelines.

The newest plans predict energy. An iteration that lasts longer than its plan waits for the rest of
the time: with `e` and `t` of the plan and `P` the power of the pipeline's GPUs while they wait, an
iteration of T seconds takes e + P * max(0, T - t) joules. The same holds for the baseline, all
clocks at maximum, so that a saving beside a straggler is not overstated.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.extensions.service.headline import headline, power_now_w
from perseus_planner.extensions.service.look import is_over
from perseus_planner.extensions.service.models import (
    Expected,
    JobStatus,
    JobTotals,
    PipelineStatus,
    Report,
    shared,
)

if TYPE_CHECKING:
    from perseus_planner.extensions.service.jobs import JobState

_KEPT = 1024


_KEPT_EVENTS = 20  #: of a job that has ended; all of those that are listed have 2 MB then


def totals_of(state: JobState, ended_s: float | None = None) -> JobTotals:
    """Return the totals of a job; `ended_s` is None if it runs."""
    job = state.job
    tally = state.tally
    plans = () if tally is None else tally.plans
    events = () if ended_s is None else state.events[-_KEPT_EVENTS:]
    return JobTotals(job.name, job.pipelines, job.since_s, ended_s, tally, plans, events)


def status_of(state: JobState, now_s: float) -> JobStatus:
    """Return the status of a job."""
    computed = {
        "version": state.published.version,
        "reports": current_reports(state, now_s),
        "expected_saving_w": state.saving_w,
        "expected": expected(state),
        "telemetry": state.tally,
        "gpus": state.job.pipelines * state.curve.gpus,
    }
    # The last message first, so that what is computed here wins over it.
    latest = {} if state.tally is None else shared(JobStatus, state.tally.latest)
    status = JobStatus(**{**latest, **shared(JobStatus, state), **computed})
    saves_w = None
    # Against iterations as long as those of which the power is known.
    if status.unlike_plan is None and status.silent_since_s is None:
        saves_w = _baseline_w_now(state, status) - power_now_w(status)
    return replace(status, saves_w=saves_w, state=headline(state, status))


def _baseline_w_now(state: JobState, status: JobStatus) -> float:
    """Return the power of all GPUs with all clocks at maximum in iterations as long as those that
    ran of late, or as those by the plans if none is known, watts.
    """
    sent = status.telemetry
    if sent is None or sent.power_w is None:
        return status.expected.baseline_power_w
    return _baseline_j(state, sent.iteration_s) / sent.iteration_s


def current_reports(state: JobState, now_s: float) -> tuple[Report, ...]:
    """Return the reports of a job that count now or will count, in order of arrival."""
    return tuple(report for report in state.reports.values() if not is_over(report, now_s))


def _baseline_j(state: JobState, iteration_s: float) -> float:
    """Return the energy of all pipelines in an iteration of that time with all clocks at
    maximum, joules.
    """
    waiting_w = state.curve.waiting_w
    # Plans of pipelines with slow stages have slower baselines, so each waits for another time.
    return math.fsum(
        count
        * (costs.baseline_energy_j + waiting_w * max(0.0, iteration_s - costs.baseline_time_s))
        for costs, count in _plans(state)
    )


def expected(state: JobState) -> Expected:
    """Return the power that the newest plans predict while the slowest pipeline takes the
    decided time.
    """
    plans = _plans(state)
    waiting_w = state.curve.waiting_w
    waited_s = state.decision.straggler_time_s
    # While plans are being made, nobody runs their time yet: that of the plans that run counts. A
    # straggler is as slow as it is whatever is planned.
    if not state.is_planned and not state.decision.stragglers:
        waited_s = 0.0 if state.planned.stragglers else state.planned.straggler_time_s
    iteration_s = max(waited_s, *(costs.time_s for costs, _ in plans))
    energy_j = math.fsum(
        count * (costs.energy_j + waiting_w * (iteration_s - costs.time_s))
        for costs, count in plans
    )
    return Expected(
        energy_j / iteration_s,
        _baseline_j(state, iteration_s) / iteration_s,
        state.curve.origin,
        iteration_s,
    )


def pipeline_statuses(state: JobState) -> tuple[PipelineStatus, ...]:
    """Return the status of each pipeline, in order."""
    decision = state.decision
    plans = [costs for costs, _ in _plans(state)]
    of_pipeline = [plans[index] for index in state.published.of_pipeline]
    return tuple(
        PipelineStatus(
            number,
            costs.time_s,
            costs.energy_j,
            target.time_s,
            target.slow_stages,
            decision.stragglers.get(number),
            target.reason,
        )
        for number, (costs, target) in enumerate(zip(of_pipeline, decision.each, strict=True))
    )


class _Costs(NamedTuple):
    """An iteration of one pipeline with its plan, and with all clocks at maximum; seconds and
    joules.
    """

    time_s: float
    energy_j: float
    baseline_time_s: float
    baseline_energy_j: float


def _plans(state: JobState) -> list[tuple[_Costs, int]]:
    """Return the distinct plans of the newest version, each with the number of pipelines that
    have it.
    """
    published = state.published
    return [
        (_costs_of(text), published.of_pipeline.count(index))
        for index, text in enumerate(published.texts)
    ]


@lru_cache(_KEPT)
def _costs_of(text: str) -> _Costs:
    """Read the costs of a plan; much faster than `Plan.loads`, which reads all of it."""
    values = json.loads(text)
    return _Costs(*(float(values[name]) for name in _Costs._fields))
