"""Number 19: what the plans that people get keep of what they promise where rows are uncertain,
beside plans that take the rows for the truth.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean
from typing import Any

import numpy as np
from data import STAGES, Case, Size, profile_of
from noisy_rows import noisy_rows, smoothed, unlike_stages
from results import Check, Section, Table

from perseus_planner import Frontier, Plan, schedules, solve
from perseus_planner.plans.replay import end_times
from perseus_planner.schedules.dag import PipelineDag

_MICROBATCHES = 12
_CLOCKS = (12, None)  #: None for all
_SLOWDOWNS = (1.00, 1.02, 1.05, 1.10)
_TOLERANCE = 0.001
_LATE = 0.001  #: relative: a plan is late if it takes so much longer than allowed
_MOST_LATE = {"hot": 10.0}  #: kind of error -> percent of the plans
_LEAST_KEPT = 60.0  #: percent of the possible saving
_KEPT_AT = 0.01  #: the noise at which so much is to be kept
_PROCESSES = 2
_JITTER = "jitter"  #: the kind of errors that is of the run, not of rows
_NOISE, _ITERATIONS = 0.005, 100  #: of its rows, and in which it is seen
_COLUMNS = {
    "what": ("rows", ""),
    "clocks": ("clocks", ""),
    "plans": ("plans", ""),
    "late": ("late, %", ".1f"),
    "worst": ("latest, %", "+.2f"),
    **{f"kept{slowdown:.2f}": (f"kept at {slowdown:.2f}x, %", ".0f") for slowdown in _SLOWDOWNS},
    "least": ("least kept at 1.00x, %", ".0f"),
    "promise": ("promised - true, points", "+.2f"),
    "time_within": ("time within, %", ".0f"),
    "saving_within": ("saving within, %", ".0f"),
}


@dataclass(frozen=True)
class _DataSet:
    """Rows of a profile with unlike stages; all that is random in it follows from the seed."""

    case: Case
    seed: int
    what: tuple[str, float]
    clocks: int | None


def measure(size: Size) -> Section:
    """Make data sets of simulated errors, plan from them, and evaluate the plans on the truth."""
    sets = [
        _DataSet(size.cases[seed % len(size.cases)], seed, what, clocks)
        for what in size.row_errors
        for clocks in _CLOCKS
        for seed in range(size.noise_seeds)
    ]
    with ProcessPoolExecutor(_PROCESSES) as pool:
        plans = [plan for found in pool.map(_plans, sets) for plan in found]
    rows = [
        {"what": _named(what), "clocks": str(clocks or "all"), "plans": kind, **_summary(chosen)}
        for what in size.row_errors
        for clocks in _CLOCKS
        for kind in ("as measured", "default")
        if (chosen := _chosen(plans, kind, what, clocks))
    ]
    totals = [
        {"what": "all", "clocks": "", "plans": kind, **_summary(_chosen(plans, kind))}
        for kind in ("as measured", "default")
    ]
    return Section(
        19,
        "Plans from uncertain rows",
        f"Simulated: {STAGES} stages of the measured profiles, each with its time, energy and "
        f"slope changed by up to 5 %, 1F1B, {_MICROBATCHES} microbatches; rows with simulated "
        f"errors; {size.noise_seeds} data sets a row of the table, of "
        f"{' and '.join(case.name for case in size.cases)} in turn, half of them with standard "
        "errors. Each plan is evaluated on the profile without errors.",
        [Table(_COLUMNS, [*rows, *totals])],
        list(_checks(plans, rows, size)),
        [
            "*Default*: what `plan_for` returns without options; *as measured*: with "
            f"`on_time=None`. *Late*: a plan that takes over {100 * _LATE:g} % of time more than "
            f"its deadline, and at 1.00x than its tolerance of {100 * _TOLERANCE:g} %. *Latest*: "
            "the largest such excess, early if negative.",
            "*Kept*: true saving over that of a plan from the true profile, in percent of all "
            "clocks at maximum; mean, and least of a data set. *Promised - true*: saving; mean. "
            "*Within*: plans whose true time and saving lie in their 90 % intervals.",
            "*Tails*: Student's t with 3 degrees of freedom. *Outlier*: one row of a data set "
            "takes 5 % less time than it should. *Missing*: 40 % of the rows, but the top clock's. "
            "*Hot*: one of three visits to each stage's top clock takes 1 % longer; their spread "
            "is in the profile. *Jitter*: rows with errors of 0.5 %, and computations that vary by "
            f"so much in the run, as the profile says; times: means of {_ITERATIONS} iterations.",
        ],
    )


def default_plan(frontier: Frontier, deadline_s: float) -> Plan:
    """Return the plan that people get."""
    return frontier.plan_for(deadline_s)


def _named(what: tuple[str, float]) -> str:
    kind, noise = what
    return " ".join(filter(None, [f"{100 * noise:g} %", kind]))


def _plans(data: _DataSet) -> list[dict[str, Any]]:
    """Return the plans of a data set, evaluated on the truth."""
    (kind, noise), truth = data.what, _truth(data.case, data.seed)
    states_errors = kind == "hot" or data.seed // 2 % 2 == 0
    is_jitter = kind == _JITTER
    errors = (
        (_NOISE, data.clocks, data.seed) if is_jitter else (noise, data.clocks, data.seed, kind)
    )
    rows = noisy_rows(truth.profile, *errors, states_errors=states_errors)
    longer = np.ones((1, len(truth.dag.computations)))
    if is_jitter:
        rows = replace(rows, jitter=noise)
        random = np.random.default_rng([data.seed, 13])
        longer = np.exp(noise * random.standard_normal((_ITERATIONS, longer.shape[1])))
    frontier = solve(rows, schedules.one_f_one_b(STAGES, _MICROBATCHES))
    found = []
    for slowdown in _SLOWDOWNS:
        deadline_s = slowdown * frontier.baseline_time_s
        until_s = min(deadline_s, frontier.max_time_s)
        plans = {
            "as measured": frontier.plan_for(until_s, on_time=None),
            "default": default_plan(frontier, until_s),
        }
        for name, plan in plans.items():
            found.append(
                {
                    "set": data,
                    "slowdown": slowdown,
                    "plans": name,
                    **_judged(truth, plan, slowdown, longer),
                }
            )
    return found


def _judged(truth: Frontier, plan: Plan, slowdown: float, longer: np.ndarray) -> dict[str, Any]:
    real = truth.plan_of(plan.clocks)
    ratio = _mean_s(truth.dag, real.clocks.values(), longer) / _mean_s(
        truth.dag, [row.clock_mhz for row in truth.dag.baseline_measurements()], longer
    )
    saved = real.saving_j / real.baseline_energy_j
    sure = plan.on_time
    return {
        "excess": ratio - max(slowdown, 1 + _TOLERANCE),
        "saved": saved,
        "possible": _possible(truth, slowdown),
        "promised": saved_share(plan),
        "time_within": None
        if sure is None
        else sure.time_ratio.low <= ratio <= sure.time_ratio.high,
        "saving_within": None
        if sure is None
        else sure.saved_share.low <= saved <= sure.saved_share.high,
    }


def _mean_s(dag: PipelineDag, clocks_mhz: Iterable[int], longer: np.ndarray) -> float:
    """Return the mean seconds of iterations in which each computation takes so many times as
    long.
    """
    rows = [
        {m.clock_mhz: m.time_s for m in of_key}
        for of_key in map(dag.profile.measurements.get, dag.iteration.keys)
    ]
    times_s = [row[clock] for row, clock in zip(rows, clocks_mhz, strict=True)]
    return fmean(max(end_times(dag, (times_s * each).tolist())) for each in longer)


def saved_share(plan: Plan) -> float:
    """Return what a plan promises to save, over the energy with all clocks at maximum."""
    return (
        plan.saving_j / plan.baseline_energy_j
        if plan.on_time is None
        else plan.on_time.saved_share.expected
    )


@cache
def _possible(truth: Frontier, slowdown: float) -> float:
    until_s = min(slowdown * truth.baseline_time_s, truth.max_time_s)
    plan = truth.plan_for(until_s, on_time=None)
    return plan.saving_j / plan.baseline_energy_j


@cache
def _truth(case: Case, seed: int) -> Frontier:
    # The GPUs that run are those that were profiled; number 43 has others.
    same_gpus = replace(profile_of(case), gpu_spread=0.0)
    return solve(unlike_stages(same_gpus, seed), schedules.one_f_one_b(STAGES, _MICROBATCHES))


def _chosen(plans: Sequence[Mapping[str, Any]], kind: str, *of: object) -> list[Mapping[str, Any]]:
    """Return the plans of a kind, of all data sets or of those of some rows and clocks."""
    return [
        plan
        for plan in plans
        if plan["plans"] == kind and (not of or of == (plan["set"].what, plan["set"].clocks))
    ]


def _summary(plans: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    at = {
        slowdown: [plan for plan in plans if plan["slowdown"] == slowdown]
        for slowdown in _SLOWDOWNS
    }
    kept = {
        f"kept{slowdown:.2f}": 100
        * sum(plan["saved"] for plan in each)
        / sum(plan["possible"] for plan in each)
        for slowdown, each in at.items()
    }
    sure = [plan for plan in plans if plan["time_within"] is not None]
    return {
        "late": 100 * fmean(plan["excess"] > _LATE for plan in plans),
        "worst": 100 * max(plan["excess"] for plan in plans),
        **kept,
        "least": 100 * min(plan["saved"] / plan["possible"] for plan in at[1.0]),
        "promise": 100 * fmean(plan["promised"] - plan["saved"] for plan in plans),
        "time_within": 100 * fmean(plan["time_within"] for plan in sure) if sure else None,
        "saving_within": 100 * fmean(plan["saving_within"] for plan in sure) if sure else None,
    }


def _checks(
    plans: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], size: Size
) -> Iterator[Check]:
    schedule = schedules.one_f_one_b(STAGES, _MICROBATCHES)
    exact = [solve(smoothed(profile_of(case)), schedule) for case in size.cases]
    deadlines = [
        (each, slowdown * each.baseline_time_s) for each in exact for slowdown in _SLOWDOWNS
    ]
    yield Check(
        "rows without errors, of a smooth curve, have the plan as measured",
        all(
            default_plan(each, deadline_s) == each.plan_for(deadline_s, on_time=None)
            for each, deadline_s in deadlines
        ),
    )
    default = _chosen(plans, "default")
    for kind in dict.fromkeys(kind for kind, _ in size.row_errors):
        found = _summary([plan for plan in default if plan["set"].what[0] == kind])
        most, name = _MOST_LATE.get(kind, 5.0), kind or "independent errors"
        yield Check(
            f"{name}: {found['late']:.1f} % of plans are late (limit {most:g} %), by at most "
            f"{found['worst']:.2f} % (limit 0.3 %)",
            found["late"] <= most and (kind == "hot" or found["worst"] <= 0.3),
        )
    for row in rows:
        if row["plans"] == "default" and row["what"] == _named(("", _KEPT_AT)):
            yield Check(
                f"{row['what']}, {row['clocks']} clocks: {row['kept1.00']:.0f} % of the saving at "
                f"1.00x is kept, {row['least']:.0f} % in the worst set (limit {_LEAST_KEPT:g} %)",
                row["kept1.00"] >= _LEAST_KEPT,
            )
    total = _summary(default)
    yield Check(
        f"savings are promised {total['promise']:+.2f} points too high (limit 0.2)",
        abs(total["promise"]) <= 0.2,
    )
    for what in ("time", "saving"):
        within = total[f"{what}_within"]
        yield Check(
            f"the true {what} is in {within:.0f} % of the 90 % intervals (limit 90 %)", within >= 90
        )
