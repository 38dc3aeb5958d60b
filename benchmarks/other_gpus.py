"""Number 43: default plans on other GPUs than those that were profiled, or from sweeps whose errors
go together.

The true GPUs and the replay of what they run are made here, with numpy and without the planner.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from data import CASES, STAGES, Size, profile_of
from noisy_rows import unlike_stages
from results import Check, Section, Table

from perseus_planner import Profile, schedules, solve
from perseus_planner.profiles.keys import Key
from perseus_planner.profiles.measurement import Evidence, Measurement

NUMBER = 43
WORLDS = ("stages", "walk", "cooler", "neighbours", "independent")
_MICROBATCHES = 12
_SLOWDOWNS = (1.00, 1.05)
_ERROR = 0.01  #: of what rows share, relative: by so much GPUs of one type differ, and more
_NOISE = 0.0025  #: of each row beside it
_INDEPENDENT = 0.01  #: of each row, where nothing is shared
_CORRELATION = 0.8  #: of a row's error with that of the next clock
_WINDOWS = 5  #: of each row
_LATE = 0.001  #: relative to the deadline
_MOST_LATE, _LATEST = 10.0, 0.3  #: percent of the plans, and of time
_SEEDS = 2  #: at most, every second one, so that half of them state standard errors
_PROCESSES = 2
_BEFORE = "PLANNER_BEFORE"  #: names the checkout of another build that plans from the same rows


def measure(size: Size) -> Section:
    """Plan from rows with shared errors, and run the plans on the true GPUs."""
    plans = [{"build": "this", **plan} for plan in _all_plans(size)]
    if before := os.environ.get(_BEFORE):
        plans += [{"build": "before", **plan} for plan in _plans_before(Path(before), size)]
    rows = [
        {"build": build, "world": world, **_summary(chosen)}
        for build in dict.fromkeys(plan["build"] for plan in plans)
        for world in ("shared", *WORLDS)
        if (
            chosen := [
                plan
                for plan in plans
                if plan["build"] == build and _is_in(world, str(plan["world"]))
            ]
        )
    ]
    return Section(
        NUMBER,
        "Plans on other GPUs than profiled",
        f"Simulated: {STAGES} stages of the measured profiles of "
        f"{' and '.join(case.name for case in size.cases)}, each with its time, energy and slope "
        f"changed by up to 5 %, 1F1B, {_MICROBATCHES} microbatches, at "
        f"{' and '.join(f'{slowdown:.2f}x' for slowdown in _SLOWDOWNS)}; "
        f"{min(size.noise_seeds, _SEEDS)} data sets of each profile and world. Each "
        "default plan is replayed on the true GPUs.",
        [
            Table(
                {
                    "build": ("build", ""),
                    "world": ("rows", ""),
                    "plans": ("plans", "d"),
                    "late": ("late by over .1 %", "d"),
                    "worst": ("latest, %", "+.2f"),
                    "expected": ("expected ratio at 1.00x, most", ".5f"),
                    "saved1.00": ("saved at 1.00x, %", ".2f"),
                    "saved1.05": ("saved at 1.05x, %", ".2f"),
                },
                rows,
            )
        ],
        list(_checks(rows)),
        [
            f"*Stages*: all rows of a stage, its top clock's too, are off by {100 * _ERROR:g} % "
            "(standard deviation), as if another GPU had been profiled. *Walk*: the error walks at "
            "random over a stage's sweep from the highest clock down, to that size at the end. "
            f"*Cooler*: the lowest clock is {100 * _ERROR:g} % slower in truth, clocks between in "
            f"proportion. *Neighbours*: errors of {100 * _ERROR:g} % that are correlated by "
            f"{_CORRELATION:g} from clock to clock. *Shared*: these four. All of them have "
            f"independent noise of {100 * _NOISE:g} % besides. *Independent*: noise of "
            f"{100 * _INDEPENDENT:g} %, and nothing shared. Half of the data sets state standard "
            "errors, of the independent noise alone.",
            f"*Late*: by over {100 * _LATE:g} % of the time with all clocks at maximum beyond the "
            "slowdown. *Saved*: true saving, mean. *Before*: the build of the checkout that "
            f"{_BEFORE} names.",
        ],
    )


def _is_in(world: str, own: str) -> bool:
    return own == world or (world == "shared" and own != "independent")


def _all_plans(size: Size) -> list[dict[str, Any]]:
    sets = [
        (CASES.index(case), world, seed)
        for case in size.cases
        for world in WORLDS
        for seed in range(0, 2 * min(size.noise_seeds, _SEEDS), 2)
    ]
    with ProcessPoolExecutor(_PROCESSES) as pool:
        return [plan for found in pool.map(_plans, *zip(*sets, strict=True)) for plan in found]


def _plans_before(checkout: Path, size: Size) -> list[dict[str, Any]]:
    """Return the same with the planner of another checkout."""
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
    environment.pop(_BEFORE)
    program = "import json, sys, data, other_gpus as own; size = getattr(data, sys.argv[1])\n"
    program += "print(json.dumps(own._all_plans(size)))"
    done = subprocess.run(
        [sys.executable, "-c", program, "SMOKE" if len(size.cases) == 1 else "FULL"],
        cwd=Path(__file__).parent,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    plans: list[dict[str, Any]] = json.loads(done.stdout)
    return plans


def _plans(case_number: int, world: str, seed: int) -> list[dict[str, Any]]:
    """Return the plans of a data set, as they run on the true GPUs."""
    truth = unlike_stages(profile_of(CASES[case_number]), seed)
    rows = _as_profiled(truth, world, seed, states_errors=seed // 2 % 2 == 0)
    frontier = solve(rows, schedules.one_f_one_b(STAGES, _MICROBATCHES))
    found = []
    for slowdown in _SLOWDOWNS:
        plan = frontier.plan_for(slowdown * frontier.baseline_time_s)
        top = {name: truth.measurements[_key(name)][0].clock_mhz for name in plan.clocks}
        base_s, base_j = _run(truth, top)
        time_s, energy_j = _run(truth, plan.clocks)
        found.append(
            {
                "world": world,
                "slowdown": slowdown,
                "excess": time_s / base_s - slowdown,
                "saved": 1 - energy_j / base_j,
                "expected": plan.on_time.time_ratio.expected if plan.on_time else 1.0,
            }
        )
    return found


def _as_profiled(truth: Profile, world: str, seed: int, *, states_errors: bool) -> Profile:
    """Return what a sweep would have found of the true rows."""
    random = np.random.default_rng([seed, 43, WORLDS.index(world)])
    noise = _INDEPENDENT if world == "independent" else _NOISE
    stages = _ERROR * random.standard_normal(STAGES)
    walks: dict[int, np.ndarray] = {}
    measurements = {}
    for key, rows in truth.measurements.items():
        clocks = np.array([row.clock_mhz for row in rows])
        shared = np.zeros(len(rows))
        if world == "stages":
            shared += stages[key[0]]
        elif world == "walk":  # forwards and backwards of a stage are measured side by side
            steps = random.standard_normal(len(rows)) / np.sqrt(len(rows))
            shared += walks.setdefault(key[0], _ERROR * np.cumsum(steps))
        elif world == "cooler":
            shared -= _ERROR * (clocks[0] - clocks) / (clocks[0] - clocks[-1])
        elif world == "neighbours":
            shared += _ERROR * _correlated(random.standard_normal(len(rows)))
        errors = np.exp(shared[:, None] + noise * random.standard_normal((len(rows), 2)))
        stated = noise * np.sqrt(random.chisquare(_WINDOWS - 1, (len(rows), 2)) / (_WINDOWS - 1))
        found = []
        for row, (time, energy), (of_time, of_energy) in zip(rows, errors, stated, strict=True):
            time_s, energy_j = row.time_s * float(time), row.energy_j * float(energy)
            stderrs = float(of_time) * time_s, float(of_energy) * energy_j
            evidence = Evidence(row.clock_mhz, *stderrs, _WINDOWS, 60.0) if states_errors else None
            found.append(Measurement(row.clock_mhz, time_s, energy_j, evidence))
        measurements[key] = tuple(found)
    return replace(truth, measurements=measurements)


def _correlated(steps: np.ndarray) -> np.ndarray:
    """Return values of variance 1, each correlated with the one before."""
    values = [steps[0]]
    for step in steps[1:]:
        values.append(_CORRELATION * values[-1] + np.sqrt(1 - _CORRELATION**2) * step)
    return np.array(values)


def _key(name: str) -> tuple[int, str]:
    stage, kind, _number = name.partition("F" if "F" in name else "B")
    return int(stage), kind


def _run(truth: Profile, clocks: Mapping[str, int]) -> tuple[float, float]:
    """Return the seconds and joules of an iteration of 1F1B on the true GPUs."""
    rows: dict[Key, dict[int, Measurement]] = {
        key: {row.clock_mhz: row for row in of_key} for key, of_key in truth.measurements.items()
    }
    programs = [list(_program(stage)) for stage in range(STAGES)]
    end_s: dict[tuple[str, int, int], float] = {}
    free_s, busy_s, energy_j = [0.0] * STAGES, [0.0] * STAGES, 0.0
    while any(programs):
        for stage, program in enumerate(programs):
            while program:
                kind, number = program[0]
                other = stage - 1 if kind == "F" else stage + 1
                after = (kind, other, number) if 0 <= other < STAGES else ("F", stage, number)
                is_first = kind == "F" and stage == 0
                if not is_first and after not in end_s:
                    break
                program.pop(0)
                row = rows[Key(stage, kind)][clocks[f"{stage}{kind}{number}"]]
                start_s = max(free_s[stage], 0.0 if is_first else end_s[after])
                free_s[stage] = end_s[kind, stage, number] = start_s + row.time_s
                busy_s[stage] += row.time_s
                energy_j += row.energy_j
    time_s = max(free_s)
    waiting_j = sum(truth.blocking_w(stage) * (time_s - busy_s[stage]) for stage in range(STAGES))
    return time_s, energy_j + waiting_j


def _program(stage: int) -> Iterator[tuple[str, int]]:
    ahead = min(STAGES - stage, _MICROBATCHES)
    for number in range(ahead):
        yield "F", number
    for number in range(_MICROBATCHES):
        yield "B", number
        if ahead + number < _MICROBATCHES:
            yield "F", ahead + number


def _summary(plans: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "plans": len(plans),
        "late": sum(plan["excess"] > _LATE for plan in plans),
        "worst": 100 * max(plan["excess"] for plan in plans),
        "expected": max(plan["expected"] for plan in plans if plan["slowdown"] == 1.0),
        **{
            f"saved{slowdown:.2f}": 100
            * fmean(plan["saved"] for plan in plans if plan["slowdown"] == slowdown)
            for slowdown in _SLOWDOWNS
        },
    }


def _checks(rows: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    for row in rows:
        if row["build"] != "this" or row["world"] not in ("shared", "independent"):
            continue
        late = 100 * row["late"] / row["plans"]
        yield Check(
            f"{row['world']} errors: {late:.1f} % of plans are late (limit {_MOST_LATE:g} %), by "
            f"at most {row['worst']:.2f} % (limit {_LATEST:g} %)",
            late <= _MOST_LATE and row["worst"] <= _LATEST,
        )
        yield Check(
            f"{row['world']} errors: plans at 1.00x are expected at {row['expected']:.5f}x at most "
            "(limit 1.00000)",
            row["expected"] <= 1 + 1e-9,
        )
