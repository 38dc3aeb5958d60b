"""Number 47: what a second, short sweep of the rows that a plan uses is worth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Any

from data import CASES, STAGES, Size, profile_of
from noisy_rows import unlike_stages
from replay_gpu import ReplayGpu
from results import Check, Section, Table

from perseus_planner import Frontier, Plan, Profile, schedules, solve
from perseus_planner.profiler.again import Again
from perseus_planner.profiler.stage import assemble_profile
from perseus_planner.profiler.sweep import measure_stage

NUMBER = 47
_MICROBATCHES = 12
_SPREAD = 0.01  #: that is assumed of other GPUs, in the plan from exact rows too
_WINDOW_NOISE = 0.035  #: of a window; 12 of them, which is the most of a row, leave 1 %
_LEAST_KEPT = 90.0  #: percent
_LATE = 0.001
_SEEDS = 3  #: at most, of each profile
_PROCESSES = 2


@dataclass(frozen=True)
class _Exact(Profile):
    """A profile whose rows are the truth, kinks and all."""

    is_exact = True  # type: ignore[assignment,misc]


def measure(size: Size) -> Section:
    """Sweep a replay of each profile twice, and plan after each sweep."""
    sets = [
        (CASES.index(case), seed)
        for case in size.cases
        for seed in range(min(size.noise_seeds, _SEEDS))
    ]
    with ProcessPoolExecutor(_PROCESSES) as pool:
        found = [row for rows in pool.map(_plans, *zip(*sets, strict=True)) for row in rows]
    rows = [
        {"profile": case.name, "sweeps": sweeps, **_summary(chosen)}
        for case in size.cases
        for sweeps in ("one", "two")
        if (chosen := [row for row in found if (row["case"], row["sweeps"]) == (case.name, sweeps)])
    ]
    return Section(
        NUMBER,
        "Measuring again what a plan uses",
        f"Simulated: {STAGES} stages of the measured profiles, each with its time, energy and "
        f"slope changed by up to 5 %, 1F1B, {_MICROBATCHES} microbatches, default plans at 1.00x. "
        "The sweeps measure a GPU in virtual time that replays the profile, with noise of "
        f"{100 * _WINDOW_NOISE:g} % in each window, which leaves 1 % in a row; "
        f"{len(sets) // len(size.cases)} data sets of each profile.",
        [
            Table(
                {
                    "profile": ("profile", ""),
                    "sweeps": ("sweeps", ""),
                    "rows": ("rows", ".0f"),
                    "minutes": ("minutes", ".0f"),
                    "kept": ("kept, %", ".0f"),
                    "least": ("least kept, %", ".0f"),
                    "saved": ("saved, %", ".2f"),
                    "possible": ("from exact rows, %", ".2f"),
                    "foretold": ("foretold gain, points", ".2f"),
                    "worst": ("latest, %", "+.2f"),
                },
                rows,
            )
        ],
        list(_checks(rows)),
        [
            "*Kept*: true saving over that of the default plan from exact rows with the same "
            f"assumed spread of GPUs ({100 * _SPREAD:g} %); mean, and least of a data set. *Rows* "
            "and *minutes*: of the sweep alone; minutes of virtual time, of the longest stage. "
            "*Foretold gain*: what `planner plan` says that the second sweep would save more. "
            "*Latest*: true time over that with all clocks at maximum, less 1.",
        ],
    )


def _plans(case_number: int, seed: int) -> list[dict[str, Any]]:
    case = CASES[case_number]
    truth = solve(
        _exact(replace(unlike_stages(profile_of(case), seed), gpu_spread=_SPREAD)),
        schedules.one_f_one_b(STAGES, _MICROBATCHES),
    )
    best, _ = _true(truth, truth.plan_for(truth.baseline_time_s))
    first, first_s = _swept(truth.profile, seed, None)
    plan, gain = _plan(first)
    again = Again(plan, first)
    second, second_s = _swept(truth.profile, 1000 + seed, again)
    joined = again.joined(second)
    planned, _ = _plan(joined)
    found = []
    for sweeps, of, own, rows, sweep_s in (
        ("one", plan, gain, first, first_s),
        ("two", planned, None, second, second_s),
    ):
        saved, late = _true(truth, of)
        found.append(
            {
                "case": case.name,
                "sweeps": sweeps,
                "rows": sum(map(len, rows.measurements.values())),
                "minutes": sweep_s / 60,
                "saved": saved,
                "possible": best,
                "late": late,
                "gain": own,
            }
        )
    return found


def _plan(profile: Profile) -> tuple[Plan, float]:
    """Return the default plan at 1.00x, and what a second sweep is foretold to save more."""
    frontier = solve(profile, schedules.one_f_one_b(STAGES, _MICROBATCHES))
    plan = frontier.plan_for(frontier.baseline_time_s)
    again = frontier.measuring_again(plan)
    return plan, 0.0 if again is None else again.more_share


def _swept(truth: Profile, seed: int, again: Again | None) -> tuple[Profile, float]:
    """Return what a sweep finds, and the virtual seconds of its longest stage."""
    stages = []
    longest_s = 0.0
    for number in range(truth.stages):
        gpu = ReplayGpu(truth, number, _WINDOW_NOISE, seed=1000 * seed + number)
        begin_s = gpu.now_s()
        stages.append(measure_stage(gpu, gpu.stage(), number, stages=truth.stages, again=again))
        longest_s = max(longest_s, gpu.now_s() - begin_s)
    return assemble_profile(stages), longest_s


def _exact(profile: Profile) -> Profile:
    return _Exact(**{each.name: getattr(profile, each.name) for each in fields(Profile)})


def _true(truth: Frontier, plan: Plan) -> tuple[float, float]:
    """Return the true saving of a plan, and how much longer it takes than all clocks at maximum."""
    real = truth.plan_of(plan.clocks)
    return real.saving_j / real.baseline_energy_j, real.time_s / real.baseline_time_s - 1


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    gains = [row["gain"] for row in rows if row["gain"] is not None]
    return {
        "rows": fmean(row["rows"] for row in rows),
        "minutes": fmean(row["minutes"] for row in rows),
        "kept": 100 * sum(row["saved"] for row in rows) / sum(row["possible"] for row in rows),
        "least": 100 * min(row["saved"] / row["possible"] for row in rows),
        "saved": 100 * fmean(row["saved"] for row in rows),
        "possible": 100 * fmean(row["possible"] for row in rows),
        "foretold": 100 * fmean(gains) if gains else None,
        "worst": 100 * max(row["late"] for row in rows),
    }


def _checks(rows: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    for row in rows:
        if row["sweeps"] == "two":
            yield Check(
                f"{row['profile']}: {row['kept']:.1f} % of the saving is kept after the second "
                f"sweep (limit {_LEAST_KEPT:g} %)",
                row["kept"] >= _LEAST_KEPT,
            )
            yield Check(
                f"{row['profile']}: plans after it are at most {row['worst']:+.2f} % late (limit "
                f"{100 * 2 * _LATE:g} %)",
                row["worst"] <= 100 * 2 * _LATE,
            )
