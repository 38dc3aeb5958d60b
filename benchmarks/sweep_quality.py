"""Number 14: compare plans from the few clocks that the sweep chooses with plans from all
clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from data import STAGES, Case, Size, profile_of
from replay_gpu import ReplayGpu
from results import Check, Section, Table

from perseus_planner import Frontier, Profile, schedules, solve
from perseus_planner.profiler.stage import StageRows, assemble_profile
from perseus_planner.profiler.sweep import SweepSettings, measure_stage
from perseus_planner.profiles.measurement import Measurement

_MICROBATCHES = 12
_SLOWDOWNS = (1.00, 1.02, 1.05, 1.10, 1.20)
_GOAL = 0.5  #: percent
_WITHIN_GOAL = 0.95  #: the share of the plans
_MOST_CLOCKS = 12
_OUTLIERS = 0.05
_WITHIN = 0.003  #: how far the saving is to be known
_COLUMNS = {
    "profile": ("profile", ""),
    "top": ("top clock", "d"),
    "noise": ("noise, %", ".1f"),
    "sweep": ("sweep", ""),
    "clocks": ("clocks", ".1f"),
    "windows": ("windows", ".1f"),
    "minutes": ("minutes", ".0f"),
    **{f"extra{slowdown:.2f}": (f"{slowdown:.2f}x, %", ".2f") for slowdown in _SLOWDOWNS},
    "late": ("time, %", "+.2f"),
    "off": ("saving off, points", ".2f"),
}


def measure(size: Size) -> Section:
    """Sweep a replay of each measured profile, plan with the result, and evaluate the plans on
    the smoothed profile.
    """
    rows = [row for case in size.cases for row in _rows(case, size)]
    chosen = [row for row in rows if row["sweep"] == "adaptive"]
    extras = [row[f"extra{slowdown:.2f}"] for row in chosen for slowdown in _SLOWDOWNS]
    clocks = fmean(row["clocks"] for row in chosen)
    within = sum(extra <= _GOAL for extra in extras)
    return Section(
        14,
        "Plans from few clocks",
        f"Replayed from the measured profiles: {STAGES} stages, 1F1B, {_MICROBATCHES} "
        "microbatches. The sweep measures a GPU in virtual time that replays them as they were "
        "published. The plan for each deadline is made from the expected values at every clock "
        "(`Profile.estimated().mean`, `on_time=None`), and evaluated on the smoothed "
        "profile: running medians of 5 clocks, and means of 3 of these, of the logarithms of "
        "time and energy; for "
        "neighbouring rows of the A40, which the power limit slows alike, were published up to 4 "
        f"% apart. Goal: at most {_MOST_CLOCKS} clocks; at most {_GOAL} % more energy for "
        f"{_WITHIN_GOAL:.0%} of the plans.",
        [Table(_COLUMNS, rows)],
        [
            Check(
                f"{clocks:.1f} clocks for each stage and kind (limit {_MOST_CLOCKS})",
                clocks <= _MOST_CLOCKS,
            ),
            Check(
                f"{within} of the {len(extras)} plans of the adaptive sweep take at most {_GOAL} "
                f"% more energy (at least {_WITHIN_GOAL:.0%})",
                within >= _WITHIN_GOAL * len(extras),
            ),
            Check(
                "no plan is below the bound of the smoothed profile",
                min(row["above_bound"] for row in rows) >= -1e-9,
            ),
        ],
        [
            f"The plans of the adaptive sweep take {fmean(extras):.2f} % more energy in the mean, "
            f"at most {max(extras):.2f} %.",
            "*1.00x* and so on: the deadline, a multiple of the time that the sweep found with "
            "all clocks at maximum; below it, how much more energy the plan takes than the best "
            "plan of the smoothed profile with the same time. *Time*: by how much the plan "
            "exceeds the deadline on the smoothed profile; the maximum over the seeds. All other "
            "columns are means over the seeds.",
            "*Noise*: standard deviation of each window's time and energy; with noise, "
            f"{100 * _OUTLIERS:.0f} % of the windows are outliers that take 5 to 50 % more. "
            "Repetitions do not average it away, so it is larger than that of a GPU. *Full*: "
            f"every clock is measured, with the same noise. *Even*: of these, {_MOST_CLOCKS} "
            "evenly spaced ones; their minutes are those of the full sweep. *Goal*: clocks are "
            f"measured, and measured again, until the saving is known within {100 * _WITHIN:.1f} "
            "points (`--saving-within`). *Saving off*: by how much the energy that a plan saves, "
            "in percent of that at maximum clocks, is more or less than the plan says; the "
            "maximum over deadlines and seeds.",
            "*Top clock*: the profile without the clocks above it, so that the sweep's grid "
            "differs. *Minutes*: virtual time of the longest stage; all stages are measured at "
            "once.",
        ],
    )


def _rows(case: Case, size: Size) -> Iterator[dict[str, Any]]:
    full = size.repetitions > 2
    for drop in (0, 1, 3, 5) if full else (0,):
        for sweep in ("adaptive", "even") if full else ("adaptive",):
            yield _row(case, drop, 0.0, (0,), sweep)
    for noise in (0.003, 0.01) if full else (0.01,):
        for sweep in (
            ("adaptive", "even", "full", *(["goal"] if noise < 0.01 else []))
            if full
            else ("adaptive",)
        ):
            yield _row(case, 0, noise, tuple(range(size.repetitions // 2)), sweep)


def _row(case: Case, drop: int, noise: float, seeds: Iterable[int], sweep: str) -> dict[str, Any]:
    published, whole = _published(case, drop), _whole(case, drop)
    found = [_swept(published, noise, seed, sweep) for seed in seeds]
    plans = [_plans(whole, profile.estimated().mean) for profile, _ in found]
    measured = [
        row for profile, _ in found for rows in profile.measurements.values() for row in rows
    ]
    windows = [row.evidence.windows for row in measured if row.evidence is not None]
    extras = {
        f"extra{slowdown:.2f}": fmean(of[slowdown].extra for of in plans) for slowdown in _SLOWDOWNS
    }
    return {
        "profile": case.name,
        "top": whole.profile.measurements[0, "F"][0].clock_mhz,
        "noise": 100 * noise,
        "sweep": sweep,
        "clocks": len(measured) / len(found) / len(whole.profile.measurements),
        "windows": fmean(windows),
        "minutes": max(time_s for _, time_s in found) / 60,
        **extras,
        "late": max(each.late for of in plans for each in of.values()),
        "off": max(abs(each.off) for of in plans for each in of.values()),
        "above_bound": min(each.above_bound_j for of in plans for each in of.values()),
    }


def _published(case: Case, drop: int) -> Profile:
    """Return the profile without its `drop` highest clocks."""
    profile = profile_of(case)
    return replace(
        profile, measurements={key: rows[drop:] for key, rows in profile.measurements.items()}
    )


@cache
def _whole(case: Case, drop: int) -> Frontier:
    """Return the frontier of the smoothed profile without its `drop` highest clocks."""
    profile = _published(case, drop)
    smoothed = {key: _smoothed(rows) for key, rows in profile.measurements.items()}
    return solve(
        replace(profile, measurements=smoothed), schedules.one_f_one_b(STAGES, _MICROBATCHES)
    )


def _smoothed(rows: Sequence[Measurement]) -> tuple[Measurement, ...]:
    """Return rows with smoothed times and energies; no model of the planner is used for it."""
    times_s, energies_j = (
        np.exp(_running(_running(np.log(values), 2, np.median), 1, np.mean)).tolist()
        for values in ([row.time_s for row in rows], [row.energy_j for row in rows])
    )
    return tuple(
        Measurement(row.clock_mhz, time_s, energy_j)
        for row, time_s, energy_j in zip(rows, times_s, energies_j, strict=True)
    )


def _running(values: Any, reach: int, middle: Callable[[Any], Any]) -> Any:
    """Return the middle of each value and its neighbours, up to `reach` of them on both sides,
    fewer at the ends.
    """
    last = len(values) - 1
    sides = [min(reach, index, last - index) for index in range(len(values))]
    return np.array(
        [middle(values[index - side : index + side + 1]) for index, side in enumerate(sides)]
    )


def _swept(profile: Profile, noise: float, seed: int, sweep: str) -> tuple[Profile, float]:
    """Return the profile that the sweep measures, and the virtual seconds of its longest stage."""
    stages: list[StageRows] = []
    longest_s = 0.0
    for number in range(profile.stages):
        gpu = ReplayGpu(
            profile, number, noise, _OUTLIERS if noise else 0.0, seed=1000 * seed + number
        )
        settings = SweepSettings(
            full=sweep in ("even", "full"), saving_within=_WITHIN if sweep == "goal" else None
        )
        stages.append(measure_stage(gpu, gpu.stage(), number, settings, stages=profile.stages))
        longest_s = max(longest_s, gpu.now_s())
    found = assemble_profile(stages)
    return (_evenly(found) if sweep == "even" else found), longest_s


def _evenly(profile: Profile) -> Profile:
    """Return `profile` with as many evenly spaced rows as an adaptive sweep measures at most."""
    return replace(
        profile,
        measurements={
            key: tuple(
                rows[round(index * (len(rows) - 1) / (_MOST_CLOCKS - 1))]
                for index in range(_MOST_CLOCKS)
            )
            for key, rows in profile.measurements.items()
        },
    )


class _Judged(NamedTuple):
    """A plan, evaluated on the smoothed profile."""

    extra: float  #: % of energy
    late: float  #: % of time past the deadline
    off: float  #: points of saving that it promises too much
    above_bound_j: float


def _plans(whole: Frontier, found: Profile) -> dict[float, _Judged]:
    """Return slowdown -> the plan from what was found, judged by `whole`."""
    frontier = solve(found, schedules.one_f_one_b(STAGES, _MICROBATCHES))
    judged = {}
    for slowdown in _SLOWDOWNS:
        until_s = min(slowdown * frontier.baseline_time_s, frontier.max_time_s)
        plan = frontier.plan_until(until_s, on_time=None)
        real = whole.plan_of(plan.clocks)
        # Beyond the slowest point the best plan is that one, and its GPUs wait.
        until_s = min(max(real.time_s, whole.min_time_s), whole.max_time_s)
        best = whole.plan_until(until_s, on_time=None)
        best_j = best.energy_j + whole.dag.waiting_w * (real.time_s - best.time_s)
        deadline_s = min(slowdown * whole.baseline_time_s, whole.max_time_s)
        judged[slowdown] = _Judged(
            100 * (real.energy_j / best_j - 1),
            100 * (real.time_s / deadline_s - 1),
            100
            * (
                real.energy_j / whole.baseline_energy_j - plan.energy_j / frontier.baseline_energy_j
            ),
            real.energy_j
            - whole.bound_j(until_s)
            - whole.dag.waiting_w * max(0.0, real.time_s - until_s),
        )
    return judged
