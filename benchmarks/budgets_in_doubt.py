"""Number 52: plans within switch budgets where rows are uncertain and computations jitter. Do they
save more with a later deadline and with more changes, and no less than a local search over one
clock for each rank?
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from data import CASES, STAGES, Size, profile_of
from noisy_rows import noisy_rows, unlike_stages
from results import Check, Section, Table

from perseus_planner import Frontier, schedules, solve
from perseus_planner.base.units import ON_TIME
from perseus_planner.solver.drawn_plans import DrawnPlans

NUMBER = 52
_MICROBATCHES = 12
_NOISE = 0.005  #: of rows
#: relative standard deviations; each has a data set of its own, which keeps the run short
_JITTERS = (0.0025, 0.0125, 0.02, 0.03)
_SLOWDOWNS = (1.00, 1.0025, 1.005, 1.0075, 1.01)
_CHANGES = (0, 2, 4)
_SEARCHED = (1.00, 1.0075)  #: slowdowns at which the local search is run too
_TRIES = 1500  #: moves of a local search
_REACHES = (1, 2, 4, 8)  #: how many clocks away the next one of a rank may be
_TOLERANCE = 0.001
_PROCESSES = 2
_ROUNDING = 1e-7  #: of a saving, percent


def measure(size: Size) -> Section:
    """Plan for each deadline within each budget."""
    sets = [
        (CASES.index(case), seed, jitter)
        for case in size.cases
        for seed, jitter in enumerate(_JITTERS if size.noise_seeds > 1 else _JITTERS[1:2])
    ]
    with ProcessPoolExecutor(_PROCESSES) as pool:
        rows = [row for rows in pool.map(_plans, *zip(*sets, strict=True)) for row in rows]
    columns = {f"changes_{most}": (f"{most} changes, %", ".2f") for most in _CHANGES}
    return Section(
        NUMBER,
        "Switch budgets where rows are uncertain",
        f"Simulated: {STAGES} stages of the measured profiles, each with its time, energy and "
        f"slope changed by up to 5 %, rows with noise of {100 * _NOISE:g} %, 1F1B, {_MICROBATCHES} "
        "microbatches, default plans; a data set for each jitter.",
        [
            Table(
                {
                    "profile": ("profile", ""),
                    "jitter": ("jitter, %", ".2f"),
                    "slowdown": ("deadline", ".4f"),
                    **columns,
                    "searched": ("local search, one clock, %", ".2f"),
                },
                rows,
            )
        ],
        list(_checks(rows)),
        [
            "*Changes*: energy that the plan is expected to save in an iteration that lasts until "
            "the deadline, of that with all clocks at maximum. *Local search*: from full clocks, "
            "one rank gets a slower clock, or one a slower and another a faster one, where that "
            f"saves and is on time, {_TRIES} random moves; what is on time is judged as the "
            "planner does.",
        ],
    )


def _plans(case_number: int, seed: int, jitter: float) -> list[dict[str, Any]]:
    """Return the savings of a data set, a row for each deadline."""
    case = CASES[case_number]
    # The GPUs that run are those that were profiled; number 43 has others.
    exact = unlike_stages(replace(profile_of(case), gpu_spread=0.0), seed)
    profile = replace(noisy_rows(exact, _NOISE, None, seed), jitter=jitter)
    frontier = solve(profile, schedules.one_f_one_b(STAGES, _MICROBATCHES))
    judge = DrawnPlans(frontier)
    full_j = judge.effective_j(judge.replayed([*frontier.baseline_plan.clocks.values()], None))
    found = []
    for slowdown in _SLOWDOWNS:
        row = {"profile": case.name, "jitter": 100 * jitter, "slowdown": slowdown}
        # The largest budget first: its search goes through the smaller ones.
        for most in reversed(_CHANGES):
            plan = frontier.plan_until(slowdown * frontier.baseline_time_s, max_changes=most)
            own_j = judge.effective_j(judge.replayed([*plan.clocks.values()], None))
            row[f"changes_{most}"] = 100 * (full_j - own_j) / frontier.baseline_energy_j
        if slowdown in _SEARCHED:
            least_j = _local_search(frontier, judge, slowdown, seed)
            row["searched"] = 100 * (full_j - least_j) / frontier.baseline_energy_j
        found.append(row)
    return found


def _local_search(frontier: Frontier, judge: DrawnPlans, slowdown: float, seed: int) -> float:
    """Return the least effective energy that was found with one clock for each rank, joules."""
    random = np.random.default_rng([seed, 5])
    iteration = frontier.dag.iteration
    rank_of = iteration.rank_of[: len(iteration.keys)]
    rows = judge.mean.profile.measurements
    # The clocks of all that a rank runs, the fastest first.
    clocks: list[list[int]] = []
    for rank in range(STAGES):
        keys = {key for key, of in zip(iteration.keys, rank_of, strict=True) if of == rank}
        common = set.intersection(*({row.clock_mhz for row in rows[key]} for key in keys))
        clocks.append(sorted(common, reverse=True))
    limits = {"ratio": slowdown, "probability": ON_TIME, "tolerance": _TOLERANCE}
    chosen = [0] * STAGES
    best_j = judge.effective_j(judge.replayed([clocks[rank][0] for rank in rank_of], None))
    for _ in range(_TRIES):
        tried = list(chosen)
        slower, faster = random.choice(STAGES, 2, replace=False).tolist()
        tried[slower] += int(random.choice(_REACHES))
        # Every second move is one of two ranks.
        if random.random() < 0.5:
            tried[faster] = max(0, tried[faster] - int(random.choice(_REACHES)))
        if tried[slower] >= len(clocks[slower]):
            continue
        drawn = judge.replayed([clocks[rank][tried[rank]] for rank in rank_of], None)
        own_j = judge.effective_j(drawn)
        if own_j < best_j and judge.lateness(drawn.time_s, **limits) <= 0.0:
            chosen = tried
            best_j = own_j
    return best_j


def _checks(rows: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """Compare plans; savings that differ by less than rounding are equal."""
    falls = [
        (earlier[name] - later[name], f"{name} at {later['slowdown']}x")
        for earlier, later in pairwise(rows)
        if later["slowdown"] > earlier["slowdown"]
        for name in (f"changes_{most}" for most in _CHANGES)
    ]
    fall, where = max(falls)
    yield Check(
        f"a later deadline never saves less: by {max(fall, 0.0):.3f} points at most "
        f"({sum(each > _ROUNDING for each, _ in falls)} of {len(falls)} fall; worst {where})",
        fall <= _ROUNDING,
    )
    fewer = max(
        row[f"changes_{few}"] - row[f"changes_{many}"]
        for row in rows
        for few, many in pairwise(_CHANGES)
    )
    yield Check(
        f"more changes never save less: by {max(fewer, 0.0):.3f} points at most",
        fewer <= _ROUNDING,
    )
    beaten = max(row["searched"] - row["changes_0"] for row in rows if "searched" in row)
    yield Check(
        f"plans save no less than the local search: by {max(beaten, 0.0):.3f} points at most",
        beaten <= _ROUNDING,
    )
