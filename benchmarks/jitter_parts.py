"""Number 48: how late default plans are where jitter has a part that a GPU's computations have in
common and a tail, after `planner calibrate` has seen a run.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from data import CASES, STAGES, Size, profile_of
from noisy_rows import noisy_rows, unlike_stages
from results import Check, Section, Table

from perseus_planner import Frontier, Plan, Profile, Run, schedules, solve
from perseus_planner.plans.calibration import calibrate
from perseus_planner.plans.replay import end_times, replay
from perseus_planner.runs.run import calibration_of
from perseus_planner.runtime.marks import IterationTimes

NUMBER = 48
_MICROBATCHES = 12
_NOISE = 0.005  #: of rows
_JITTERS = (0.0025, 0.005, 0.01, 0.015, 0.03)  #: relative standard deviations, without the tail
_COMMON = 0.3  #: of their variance, common to a GPU
_TAIL_SHARE = 0.01  #: of all computations
_TAIL = 1.3  #: how many times as long they take
_SLOWDOWNS = (1.00, 1.05)
_SEEDS = 2
_RECORDED = 60  #: iterations of the run that is calibrated
_JUDGED = 1000  #: iterations that judge a plan
_MOST_LATE = 0.2  #: percent, in the mean of iterations
_PROCESSES = 2
_KNOWN = ("nothing", "calibrated")


def measure(size: Size) -> Section:
    """Plan before and after a calibration, and judge the plans by iterations of their own."""
    sets = [
        (CASES.index(case), seed, jitter)
        for case in size.cases
        for seed in range(min(size.noise_seeds, _SEEDS))
        for jitter in (_JITTERS if size.noise_seeds > 1 else _JITTERS[1:2])
    ]
    with ProcessPoolExecutor(_PROCESSES) as pool:
        found = [row for rows in pool.map(_plans, *zip(*sets, strict=True)) for row in rows]
    rows = [
        {"profile": case.name, "jitter": 100 * jitter, "known": known, **_summary(chosen)}
        for case in size.cases
        for jitter in _JITTERS
        for known in _KNOWN
        if (chosen := _chosen(found, case=case.name, jitter=jitter, known=known))
    ]
    return Section(
        NUMBER,
        "Jitter with a common part and a tail",
        f"Simulated: {STAGES} stages of the measured profiles, each with its time, energy and "
        f"slope changed by up to 5 %, rows with noise of {100 * _NOISE:g} %, 1F1B, {_MICROBATCHES} "
        f"microbatches, default plans at {' and '.join(f'{x:.2f}x' for x in _SLOWDOWNS)}. "
        f"{100 * _COMMON:g} % of the variance is common to a GPU in an iteration, and "
        f"{100 * _TAIL_SHARE:g} % of all computations take {_TAIL:g} times as long. A run of "
        f"{_RECORDED} such iterations is recorded and calibrated.",
        [
            Table(
                {
                    "profile": ("profile", ""),
                    "jitter": ("jitter, %", ".2f"),
                    "known": ("known of it", ""),
                    "late": ("late, mean, %", "+.2f"),
                    "latest": ("latest, %", "+.2f"),
                    "saved": ("saved, %", ".2f"),
                    "own": ("own found, %", ".2f"),
                    "common": ("common found, %", ".2f"),
                    "tail": ("tail found, %", ".2f"),
                    "factor": ("its factor", ".2f"),
                },
                rows,
            )
        ],
        list(_checks(rows)),
        [
            f"*Late*: mean time of {_JUDGED} iterations over that with all clocks at maximum, less "
            "what was allowed: plans of both deadlines, "
            f"{min(size.noise_seeds, _SEEDS)} data sets. *Found*: what the calibration wrote into "
            "the profile, mean.",
        ],
    )


def _plans(case_number: int, seed: int, jitter: float) -> list[dict[str, Any]]:
    """Return the plans of a data set, judged by the truth."""
    case = CASES[case_number]
    # The GPUs that run are those that were profiled; number 43 has others.
    exact = unlike_stages(replace(profile_of(case), gpu_spread=0.0), seed)
    truth = solve(exact, schedules.one_f_one_b(STAGES, _MICROBATCHES))
    rows = noisy_rows(exact, _NOISE, None, seed)
    with tempfile.TemporaryDirectory() as name:
        calibrated = _calibrated(Path(name), rows, jitter, seed)
    found = []
    for known, profile in zip(_KNOWN, (rows, calibrated), strict=True):
        frontier = solve(profile, schedules.one_f_one_b(STAGES, _MICROBATCHES))
        for slowdown in _SLOWDOWNS:
            plan = frontier.plan_for(slowdown * frontier.baseline_time_s)
            late, saved = _judged(truth, plan, jitter, seed)
            tail = profile.jitter_tail
            found.append(
                {
                    "case": case.name,
                    "jitter": jitter,
                    "known": known,
                    "late": 100 * (late - slowdown),
                    "saved": 100 * saved,
                    "own": 100 * profile.jitter,
                    "common": 100 * profile.jitter_common,
                    "tail": 0.0 if tail is None else 100 * tail.share,
                    "factor": 1.0 if tail is None else tail.factor,
                }
            )
    return found


def _calibrated(folder: Path, rows: Profile, jitter: float, seed: int) -> Profile:
    """Return the rows with what a calibration finds in a run by a default plan from them."""
    # The support of the tests writes run folders with the product's own writers.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
    from made_runs import write_run

    path = folder / "profile.yaml"
    rows.save(path)
    frontier = solve(Profile.load(path), schedules.one_f_one_b(STAGES, _MICROBATCHES))
    plan = frontier.plan_for(frontier.baseline_time_s)
    factors = _draw(frontier, jitter, [seed, 1], _RECORDED)
    place_of = {str(each): place for place, each in enumerate(frontier.dag.computations)}
    spans = replay(plan).spans

    def times(plan: Plan, rank: int, number: int, begin_ns: int) -> IterationTimes:
        spans_ns = []
        for computation in plan.schedule.ranks[rank]:
            span = spans[str(computation)]
            start_ns = begin_ns + round(1e9 * span.start_s)
            longer = factors[place_of[str(computation)], number]
            spans_ns.append(
                (start_ns, start_ns + round(1e9 * (span.end_s - span.start_s) * longer))
            )
        return IterationTimes(
            number, begin_ns, tuple(spans_ns), begin_ns + round(1e9 * plan.time_s)
        )

    write_run(folder / "run", plan, _RECORDED, times=times)
    _, text = calibrate(path, [calibration_of(Run.load(folder / "run"))])
    path.write_text(text)
    return replace(Profile.load(path), overhead_s=rows.overhead_s)


def _draw(frontier: Frontier, jitter: float, seed: Sequence[int], iterations: int) -> np.ndarray:
    """Return (computations, iterations) how many times as long each takes."""
    random = np.random.default_rng(seed)
    count = len(frontier.dag.computations)
    rank_of = list(frontier.dag.iteration.rank_of[:count])
    of_gpu = jitter * math.sqrt(_COMMON) * random.standard_normal((STAGES, iterations))
    own = jitter * math.sqrt(1 - _COMMON) * random.standard_normal((count, iterations))
    tail = np.where(random.random((count, iterations)) < _TAIL_SHARE, _TAIL, 1.0)
    factors: np.ndarray = np.exp(of_gpu[rank_of] + own) * tail
    return factors


def _judged(truth: Frontier, plan: Plan, jitter: float, seed: int) -> tuple[float, float]:
    """Return the mean time of a plan over that of all clocks at maximum, and its true saving."""
    factors = _draw(truth, jitter, [seed, 2], _JUDGED)
    dag = truth.dag
    real = truth.plan_of(plan.clocks)
    tables = [
        {row.clock_mhz: row.time_s for row in dag.profile.measurements[key]}
        for key in dag.iteration.keys
    ]
    top_mhz = [row.clock_mhz for row in dag.baseline_measurements()]
    seconds = []
    for clocks_mhz in (real.clocks.values(), top_mhz):
        own_s = [table[mhz] for table, mhz in zip(tables, clocks_mhz, strict=True)]
        ends_s = [max(end_times(dag, (own_s * each).tolist())) for each in factors.T]
        seconds.append(fmean(ends_s))
    return seconds[0] / seconds[1], real.saving_j / real.baseline_energy_j


def _chosen(found: Sequence[Mapping[str, Any]], **wanted: Any) -> list[Mapping[str, Any]]:
    return [row for row in found if all(row[name] == value for name, value in wanted.items())]


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = ("late", "saved", "own", "common", "tail", "factor")
    means = {name: fmean(row[name] for row in rows) for name in names}
    return {**means, "latest": max(row["late"] for row in rows)}


def _checks(rows: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    for row in rows:
        if row["known"] == "calibrated":
            yield Check(
                f"{row['profile']}, jitter {row['jitter']:g} %: plans are at most "
                f"{row['latest']:+.2f} % late (limit {_MOST_LATE:g} %)",
                row["latest"] <= _MOST_LATE,
            )
