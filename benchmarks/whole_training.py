"""Number 30: training without a pipeline in virtual time: what one clock for whole iterations saves
in the noise of real training, and how much longer iterations are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from statistics import fmean
from typing import Any

from data import Size, profile_of
from results import Check, Section, Table
from whole_world import MeasuredWorld, World, noise, trained

from perseus_planner.profiles.measurement import Measurement

NUMBER = 30
_SLOWDOWN, _OVER = 1.05, 0.001
_SEEDS = (1, 2, 3)
_TO_REACH = {
    "quiet": 0.95,
    "lengths 5": 0.85,
    "lengths 10": 0.7,
    "lengths 15": 0.6,
    "tails": 0.8,
    "shared": 0.8,
    "drift": 0.8,
    "loader": 0.8,
    "pauses": 0.8,
}
_COLUMNS = {
    "curve": ("time and power of", ""),
    "noise": ("noise", ""),
    "best": ("one clock saves, %", ".2f"),
    "saved": ("saved, %", ".2f"),
    "share": ("share of it, mean", ".0%"),
    "least": ("least", ".0%"),
    "slower": ("longer, mean, %", "+.2f"),
    "slowest": ("most", "+.2f"),
    "full": ("at full clocks", ".0%"),
    "forced": ("forced", ".1%"),
}


def measure(size: Size) -> Section:
    """Train at one clock under each noise."""
    is_small = size.noise_seeds == 1
    iterations, seeds = (600, _SEEDS[:1]) if is_small else (3000, _SEEDS)
    rows = []
    for curve, measured in list(_curves(size))[: 1 if is_small else None]:
        for kind in _TO_REACH:
            rows.append(_row(curve, measured, kind, iterations, seeds))
            print(rows[-1], file=sys.stderr, flush=True)
    checks = [
        Check(
            f"{row['curve']}, {row['noise']}: at most {_OVER:.1%} over the agreed time",
            row["slowest"] <= 100 * (_SLOWDOWN - 1.0 + _OVER),
        )
        for row in rows
    ]
    checks += [
        Check(
            f"{row['curve']}, {row['noise']}: saves {_TO_REACH[row['noise']]:.0%} of what one "
            "clock can",
            row["share"] >= _TO_REACH[row["noise"]],
        )
        for row in rows
        if not is_small
    ]
    return Section(
        NUMBER,
        "Training without a pipeline in virtual time",
        f"Simulated: {iterations} iterations of 0.5 s on two ranks at {_SLOWDOWN}x, each run "
        f"beside its twin at full clocks under the same noise, {len(seeds)} seeds; energy counters "
        "step every 100 ms, decisions are two iterations late, each iteration has a jitter of "
        "0.3 % more.",
        [Table(_COLUMNS, rows)],
        checks,
        [
            "*One clock*: the one of least energy within the agreed time, set from the first "
            "iteration on. A mean of several clocks, and of full clocks, can save more. *Saved*: "
            "of the whole run, learning included. *Forced*: to full clocks by the ledger.",
            "*Lengths 5*: log-normal, 5 % an iteration. *Tails*: a tenth of iterations is longer, "
            "10 % in the mean, and 3e-4 take 2 to 5 times as long. *Shared*: .5 % that iterations "
            "near each other share. *Drift*: 1 % per 100 iterations. *Loader*: each tenth waits "
            "5 %. *Pauses*: one in fifty takes 3 times as long.",
        ],
    )


def _curves(size: Size) -> Iterator[tuple[str, tuple[Measurement, ...] | None]]:
    """Yield what an iteration may take and draw: a forward and a backward of a measured stage, and
    physics of which 60 % do not depend on the clock.
    """
    for case in size.cases:
        profile = profile_of(case)
        forward, backward = (
            {row.clock_mhz: row for row in profile.measurements[0, kind]} for kind in "FB"
        )
        yield (
            case.name,
            tuple(
                Measurement(
                    clock,
                    forward[clock].time_s + backward[clock].time_s,
                    forward[clock].energy_j + backward[clock].energy_j,
                )
                for clock in sorted(forward.keys() & backward.keys(), reverse=True)
            ),
        )
    yield "a formula", None


def _row(
    curve: str,
    measured: tuple[Measurement, ...] | None,
    kind: str,
    iterations: int,
    seeds: tuple[int, ...],
) -> dict[str, Any]:
    runs = []
    for seed in seeds:
        factor = noise(kind, seed)
        world = MeasuredWorld(measured, factor, seed) if measured else World(0.6, factor=factor)
        found = trained(world, iterations, _SLOWDOWN)
        top = world.clocks[0]
        top_j = world.ranks * world.power_w(top) * sum(world.top_times_s)
        best = 1.0 - world.cost_j(world.best_mhz(_SLOWDOWN)) / world.cost_j(top)
        runs.append(
            {
                "saved": 1.0 - world.energy_j / top_j,
                "best": best,
                "slower": sum(world.times_s) / sum(world.top_times_s) - 1.0,
                "full": sum(each.version == 0 for each in found.decisions) / iterations,
                "forced": found.forced / iterations,
            }
        )
    shares, slower = ([run["saved"] / run["best"] for run in runs], [run["slower"] for run in runs])
    return {
        "curve": curve,
        "noise": kind,
        "best": 100 * runs[0]["best"],
        "saved": 100 * fmean(run["saved"] for run in runs),
        "share": fmean(shares),
        "least": min(shares),
        "slower": 100 * fmean(slower),
        "slowest": 100 * max(slower),
        "full": fmean(run["full"] for run in runs),
        "forced": fmean(run["forced"] for run in runs),
    }
