"""Number 19: what plans from noisy rows keep of what they promise, with and without a
probability of being on time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

from data import STAGES, Case, Size, profile_of
from noisy_rows import interpolated, noisy_rows, unlike_stages
from results import Check, Section, Table

from perseus_planner import Frontier, Plan, schedules, solve

_MICROBATCHES = 24
_CLOCKS = (12, None)  #: None for all
_SLOWDOWNS = (1.00, 1.02, 1.05, 1.10)
_PROBABILITY, _TOLERANCE = 0.95, 0.001
_LATE = 0.001  #: relative: a plan is late if it takes so much longer than allowed
_COLUMNS = {
    "profile": ("profile", ""),
    "noise": ("noise, %", ".2f"),
    "clocks": ("clocks", ""),
    "plans": ("plans", ""),
    "late": ("late data sets, %", ".0f"),
    "worst": ("latest, %", "+.2f"),
    **{f"gap{slowdown:.2f}": (f"gap at {slowdown:.2f}x, %", ".2f") for slowdown in _SLOWDOWNS},
    "promise": ("promised - true, points", "+.2f"),
    "kept": ("kept at 1.00x, %", ".0f"),
    "time_within": ("time within, %", ".0f"),
    "saving_within": ("saving within, %", ".0f"),
}
_CLEAN_COLUMNS = {
    "profile": ("profile", ""),
    "clocks": ("clocks", ""),
    "compared": ("compared with", ""),
    **{f"extra{slowdown:.2f}": (f"{slowdown:.2f}x, %", "+.3f") for slowdown in _SLOWDOWNS},
}


@dataclass(frozen=True)
class _DataSet:
    """Rows of a profile with unlike stages; all that is random in it follows from the seed."""

    case: Case
    seed: int
    noise: float
    clocks: int | None


def measure(size: Size) -> Section:
    """Make data sets of simulated noise, plan from them, and evaluate the plans on the truth."""
    sets = [
        _DataSet(case, seed, noise, clocks)
        for case in size.cases
        for noise in size.row_noises
        for clocks in _CLOCKS[: len(size.row_noises)]
        for seed in range(size.noise_seeds)
    ]
    seeds = range(min(size.noise_seeds, 4))
    clean = [
        _DataSet(case, seed, 0.0, clocks)
        for case in size.cases
        for clocks in _CLOCKS
        for seed in seeds
    ]
    with ProcessPoolExecutor() as pool:
        plans = [plan for found in pool.map(_plans, sets) for plan in found]
        extras = _means(list(pool.map(_extra, clean)))
    cells = [
        _row(case, noise, clocks, kind, plans)
        for case in size.cases
        for noise in size.row_noises
        for clocks in _CLOCKS[: len(size.row_noises)]
        for kind in ("measured", "on time")
    ]
    return Section(
        19,
        "Plans from noisy rows",
        f"Simulated: {STAGES} stages of the measured profiles, each with its time, energy and "
        f"slope changed by up to 5 %, 1F1B, {_MICROBATCHES} microbatches; rows with simulated "
        "noise. Each plan is evaluated on the profile without noise.",
        [Table(_COLUMNS, [*cells, *_totals(plans)]), Table(_CLEAN_COLUMNS, extras)],
        list(_checks(plans, extras)),
        [
            "*Plans*: *measured* takes the rows for the truth; *on time* is `plan_for(..., "
            f"on_time={_PROBABILITY})`. *Late*: a data set with a plan, of those for the four "
            f"deadlines, that takes over {100 * _LATE:g} % of time more than its deadline; for "
            f"plans on time at 1.00x, than its tolerance of {100 * _TOLERANCE:g} %. *Latest*: the "
            "largest such excess, early if negative.",
            "*Gap*: energy above the bound of the true profile at the plan's own true time; mean. "
            "*Promised - true*: saving, in percent of all clocks at maximum; mean. *Kept*: true "
            "saving at 1.00x over that of a plan from the true profile. *Within*: plans whose "
            "true time and saving lie in their 90 % intervals.",
            "The second table has no noise and no standard errors: how much more energy plans "
            "from the expected values of `Profile.estimated()` take than others, both above the "
            "true bound at their own times; mean. *Measured*: from the rows. *Interpolated*: from "
            "straight lines between them.",
        ],
    )


def _plans(data: _DataSet) -> list[dict[str, Any]]:
    """Return the plans of a data set, evaluated on the truth."""
    truth = _truth(data.case, data.seed)
    frontier = solve(
        noisy_rows(truth.profile, data.noise, data.clocks, data.seed),
        schedules.one_f_one_b(STAGES, _MICROBATCHES),
    )
    found = []
    for slowdown in _SLOWDOWNS:
        deadline_s = slowdown * frontier.baseline_time_s
        for kind, limits in (
            ("measured", {}),
            ("on time", {"on_time": _PROBABILITY, "tolerance": _TOLERANCE}),
        ):
            plan = frontier.plan_until(min(deadline_s, frontier.max_time_s), **limits)
            found.append(
                {"set": data, "slowdown": slowdown, "plans": kind, **_judged(truth, plan, slowdown)}
            )
    return found


def _judged(truth: Frontier, plan: Plan, slowdown: float) -> dict[str, Any]:
    real = truth.plan_of(plan.clocks)
    ratio, saved = real.time_s / truth.baseline_time_s, real.saving_j / real.baseline_energy_j
    sure, allowed = plan.on_time, slowdown
    if sure is not None:
        allowed = max(slowdown, 1 + _TOLERANCE)
    return {
        "excess": ratio - allowed,
        "gap": _gap(truth, plan),
        "saved": saved,
        "possible": _possible(truth, slowdown) if slowdown == 1.0 else None,
        "promised": saved_share(plan),
        "time_within": None
        if sure is None
        else sure.time_ratio.low <= ratio <= sure.time_ratio.high,
        "saving_within": None
        if sure is None
        else sure.saved_share.low <= saved <= sure.saved_share.high,
    }


def saved_share(plan: Plan) -> float:
    """Return what a plan promises to save, over the energy with all clocks at maximum."""
    return (
        plan.saving_j / plan.baseline_energy_j
        if plan.on_time is None
        else plan.on_time.saved_share.expected
    )


def _gap(truth: Frontier, plan: Plan) -> float:
    """Return the plan's true energy over the true bound at its true time, less 1."""
    real = truth.plan_of(plan.clocks)
    until_s = min(real.time_s, truth.max_time_s)  # beyond it GPUs only wait
    bound_j = truth.bound_j(until_s) + truth.dag.waiting_w * (real.time_s - until_s)
    return real.energy_j / bound_j - 1


def _possible(truth: Frontier, slowdown: float) -> float:
    plan = truth.plan_until(min(slowdown * truth.baseline_time_s, truth.max_time_s))
    return plan.saving_j / plan.baseline_energy_j


@cache
def _truth(case: Case, seed: int) -> Frontier:
    return solve(
        unlike_stages(profile_of(case), seed), schedules.one_f_one_b(STAGES, _MICROBATCHES)
    )


def _extra(data: _DataSet) -> dict[str, Any]:
    """Return how much more energy plans from estimates of rows without noise take than other
    plans.
    """
    truth, schedule = _truth(data.case, data.seed), schedules.one_f_one_b(STAGES, _MICROBATCHES)
    rows = noisy_rows(truth.profile, 0.0, data.clocks, data.seed)
    clocks = tuple(row.clock_mhz for row in truth.profile.measurements[0, "F"])
    other = truth if data.clocks is None else solve(interpolated(rows, clocks), schedule)
    estimated = solve(rows.estimated().mean, schedule)
    extras = {}
    for slowdown in _SLOWDOWNS:
        gaps = [
            _gap(truth, each.plan_until(slowdown * each.baseline_time_s))
            for each in (estimated, other)
        ]
        extras[f"extra{slowdown:.2f}"] = 100 * (gaps[0] - gaps[1])
    compared = "measured" if data.clocks is None else "interpolated"
    return {
        "profile": data.case.name,
        "clocks": _named(data.clocks),
        "compared": compared,
        **extras,
    }


def _means(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each profile and number of clocks, with the means over the seeds."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["profile"], row["clocks"]), []).append(row)
    names = [name for name in _CLEAN_COLUMNS if name.startswith("extra")]
    return [
        {**group[0], **{name: fmean(row[name] for row in group) for name in names}}
        for group in groups.values()
    ]


def _named(clocks: int | None) -> str:
    return "all" if clocks is None else str(clocks)


def _row(
    case: Case, noise: float, clocks: int | None, kind: str, plans: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    chosen = [
        p
        for p in plans
        if (p["set"].case, p["set"].noise, p["set"].clocks, p["plans"])
        == (case, noise, clocks, kind)
    ]
    return {
        "profile": case.name,
        "noise": 100 * noise,
        "clocks": _named(clocks),
        "plans": kind,
        **_summary(chosen),
    }


def _totals(plans: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for kind in ("measured", "on time"):
        yield {
            "profile": "all",
            "clocks": "",
            "plans": kind,
            **_summary([p for p in plans if p["plans"] == kind]),
        }


def _summary(plans: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    late: dict[_DataSet, bool] = {}
    for plan in plans:
        late[plan["set"]] = late.get(plan["set"], False) or plan["excess"] > _LATE
    at = {
        slowdown: [plan for plan in plans if plan["slowdown"] == slowdown]
        for slowdown in _SLOWDOWNS
    }
    sure = [plan for plan in plans if plan["time_within"] is not None]
    return {
        "late": 100 * fmean(late.values()),
        "worst": 100 * max(plan["excess"] for plan in plans),
        **{
            f"gap{slowdown:.2f}": 100 * fmean(plan["gap"] for plan in each)
            for slowdown, each in at.items()
        },
        "promise": 100 * fmean(plan["promised"] - plan["saved"] for plan in plans),
        "kept": 100
        * sum(plan["saved"] for plan in at[1.0])
        / sum(plan["possible"] for plan in at[1.0]),
        "time_within": 100 * fmean(plan["time_within"] for plan in sure) if sure else None,
        "saving_within": 100 * fmean(plan["saving_within"] for plan in sure) if sure else None,
    }


def _checks(
    plans: Sequence[Mapping[str, Any]], extras: Sequence[Mapping[str, Any]]
) -> Iterator[Check]:
    raw, sure = _totals(plans)
    yield Check(
        f"{sure['late']:.1f} % of data sets have a late plan on time (limit 5 %)", sure["late"] <= 5
    )
    yield Check(f"the latest is {sure['worst']:.2f} % late (limit 0.3 %)", sure["worst"] <= 0.3)
    for slowdown in _SLOWDOWNS[1:]:
        name = f"gap{slowdown:.2f}"
        text = (
            f"{sure[name]:.2f} % above the true bound at {slowdown:.2f}x (limit: "
            f"{raw[name]:.2f} % of measured rows)"
        )
        yield Check(text, sure[name] <= raw[name])
    yield Check(
        f"savings are promised {sure['promise']:+.2f} points too high (limit 0.2)",
        abs(sure["promise"]) <= 0.2,
    )
    quiet = [plan for plan in plans if plan["plans"] == "on time" and plan["set"].noise <= 0.005]
    if quiet:
        kept = _summary(quiet)["kept"]
        yield Check(
            f"{kept:.0f} % of the saving at 1.00x is kept with noise up to 0.5 % (limit 60 %)",
            kept >= 60,
        )
    for what in ("time", "saving"):
        within = sure[f"{what}_within"]
        yield Check(
            f"the true {what} is in {within:.0f} % of the 90 % intervals (limit 90 %)", within >= 90
        )
    for row in extras:
        worst = max(row[f"extra{slowdown:.2f}"] for slowdown in _SLOWDOWNS)
        yield Check(
            f"{row['profile']}, {row['clocks']} clocks without noise: {worst:+.3f} % (limit 0.1 %)",
            worst <= 0.1,
        )
