"""The proved optimum of small plans with few clock changes, as a mixed-integer program that HiGHS
solves, apart from the solver.

Each computation has one of its rows, each rank changes its clock at most so often, and an iteration
that lasts until the deadline takes the least energy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from data import CASES, STAGES, MissingError, profile_of
from noisy_rows import unlike_stages

from perseus_planner import Frontier, Profile, schedules, solve

_SIZES = ((3, 4), (4, 4))  #: stages and microbatches
_CLOCKS = 8
_SLOWEST = 1.15
_LIMIT_S = 60.0
_GAP = 2e-5  #: relative; closer to its bound an optimum counts as proved


def drawn(cases: int) -> Iterator[tuple[Frontier, float]]:
    """Yield so many small pipelines of the measured profiles, each with a deadline in seconds."""
    random = np.random.default_rng(0)
    for number in range(cases):
        case, (stages, microbatches) = CASES[number // 2 % len(CASES)], _SIZES[number % 2]
        whole = unlike_stages(profile_of(case), number)
        some = sorted(random.choice(STAGES, stages, replace=False).tolist())
        frontier = solve(_part(whole, some), schedules.one_f_one_b(stages, microbatches))
        yield frontier, random.uniform(1.0, _SLOWEST) * frontier.baseline_time_s


def _part(profile: Profile, stages: list[int]) -> Profile:
    """Return the profile of some stages at a few clocks."""
    measurements = {}
    for (stage, kind), rows in profile.measurements.items():
        if stage in stages:
            kept = [round(i * (len(rows) - 1) / (_CLOCKS - 1)) for i in range(_CLOCKS)]
            measurements[stages.index(stage), kind] = tuple(rows[i] for i in kept)
    return replace(profile, measurements=measurements)


def least_j(frontier: Frontier, deadline_s: float, changes: int) -> float | None:
    """Return the least energy of an iteration that lasts until the deadline, over all plans with
    at most so many changes, joules; None if it is not proved in a minute.

    Raises:
        MissingError: If there is no scipy.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError:
        raise MissingError("no HiGHS: install scipy") from None
    dag, keys = frontier.dag, frontier.dag.iteration.keys
    rows = [frontier.profile.measurements[key] for key in keys]
    clocks = [row.clock_mhz for row in rows[0]]
    n, k = len(keys), len(clocks)
    changed, end = n * k, n * k + n  # the variables: n x k choices, n changes after, n ends
    entries: list[dict[int, float]] = []
    limits: list[tuple[float, float]] = []

    def add(entry: dict[int, float], low: float, high: float) -> None:
        entries.append(entry)
        limits.append((low, high))

    for place, waits in enumerate(dag.iteration.waits):
        times = {place * k + i: -row.time_s for i, row in enumerate(rows[place])}
        add({place * k + i: 1.0 for i in range(k)}, 1.0, 1.0)
        for other, lag_s in (*waits, (None, 0.0)):
            before = {} if other is None else {end + other: -1.0}
            add({end + place: 1.0, **before, **times}, lag_s, np.inf)
    for program in dag.iteration.programs:
        for place, following in zip(program, (*program[1:], program[0]), strict=True):
            for i in range(k):
                clock = {place * k + i: -1.0, following * k + i: 1.0}
                add({changed + place: 1.0, **clock}, 0.0, np.inf)
        add({changed + place: 1.0 for place in program}, 0.0, changes)
    matrix = np.zeros((len(entries), end + n))
    for line, entry in zip(matrix, entries, strict=True):
        line[list(entry)] = list(entry.values())
    cost_j = [
        row.energy_j - frontier.profile.blocking_w(stage) * row.time_s
        for (stage, _), of_key in zip(keys, rows, strict=True)
        for row in of_key
    ]
    found = milp(
        np.concatenate([cost_j, np.zeros(2 * n)]),
        constraints=LinearConstraint(matrix, *np.transpose(limits)),
        bounds=Bounds(0, np.repeat([1.0, deadline_s - frontier.profile.overhead_s], [end, n])),
        integrality=np.repeat([1, 0, 0], [n * k, n, n]),
        options={"mip_rel_gap": _GAP, "time_limit": _LIMIT_S},
    )
    return float(found.fun) + dag.waiting_w * deadline_s if found.status == 0 else None
