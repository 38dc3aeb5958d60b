"""How far the saving of plans is known during a sweep, and which measurement tells most about it.

For each computation a plan minimises energy + price * time over the settings, where the price of a
second, in watts, follows from the deadline (see `choosing.py`); a plan that is late pays that price
too. So under each joint draw of the curves (`estimation.py`), and at each price, the plan has a
saving, and so has the best plan of that draw. What the first one varies by is not known yet. What
the second one varies by says where to measure: at settings that plans use, at the top one with
which they are compared, and at those that may turn out to be better.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.plans.plan import INTERVAL, WIDER_SAVING
from perseus_planner.profiler.choosing import PRICES, highest_below_cap
from perseus_planner.profiles.profiles import Profile

if TYPE_CHECKING:
    from perseus_planner.profiler.choosing import RowTable
    from perseus_planner.profiles.measurement import Measurement
    from perseus_planner.profiles.smoothing import Floats

_DRAWS = 1000
_MOST_WINDOWS = 48  # a row of as many is not measured again
_TINY, _SINGULAR = 1e-300, 1e-6


class Doubt(NamedTuple):
    """How far the saving is known."""

    #: Half of the 90 % interval of the share of energy that plans save, the mean over the prices of
    #: time. It is cautious: a wrong time counts at its price, and rows of different settings do not
    #: average out.
    share: float
    #: The setting to measure next, perhaps again; None if no other measurement helps.
    setting: int | None


def find_doubt(
    settings: Sequence[int],
    rows: RowTable,
    blocking_w: float,
    *,
    control: str = "clock",
    stages: int = 1,
) -> Doubt:
    """Return how far the saving is known, and what to measure next: one function, as all its parts
    share the draws and the prices.

    The result depends on the arguments alone, so a resumed sweep chooses as one that was not
    interrupted.

    Args:
        settings: All settings, highest first.
        rows: The rows measured so far, at two settings at least. All kinds have the same settings.
        blocking_w: Power of the GPUs while they wait, watts.
        control: What is set for each row, "clock" or "power-limit".
        stages: Number of stages of the pipeline. Each is measured as well as this one, with noise
            of its own.

    Raises:
        ProfileError: If a row has an energy of 0.
    """
    measured = next(iter(rows.values()))
    capped = highest_below_cap(settings, rows) if control == "clock" else settings[0]
    useful = [
        clock
        for clock in settings
        if min(measured) <= clock and (clock <= capped or clock in measured)
    ]
    profile = Profile(
        {
            (0, kind): tuple(table[clock] for clock in sorted(table, reverse=True))
            for kind, table in rows.items()
        },
        blocking_w,
        control=control,
    )
    estimate = profile.estimated(useful)
    draws = estimate.draws(_DRAWS)
    rows_at = [i for i, clock in enumerate(useful) if clock in measured]
    told, variance, baseline_j = np.zeros(len(useful)), np.zeros(len(PRICES)), 0.0
    for kind, table in rows.items():
        key, top = (0, kind), table[max(table)]
        time_s, energy_j, expected = (
            draws.time_s[key],
            draws.energy_j[key],
            estimate.mean.measurements[key],
        )
        saved_j, possible_j = np.empty((2, len(PRICES), _DRAWS))
        for number, price in enumerate(PRICES):
            # A busy GPU does not wait, so a second costs its price less the power of waiting.
            second_w = price * top.energy_j / top.time_s - blocking_w
            planned = min(
                range(len(expected)),
                key=lambda i: expected[i].energy_j + second_w * expected[i].time_s,
            )
            cost_j = energy_j + second_w * time_s
            saved_j[number] = cost_j[0] - cost_j[planned]
            possible_j[number] = cost_j[0] - cost_j.min(axis=0)
        logs = np.log(time_s), np.log(energy_j)
        for quantity, noise in zip(logs, estimate.noise[kind], strict=True):
            told += _explained(possible_j, quantity, noise)
        # Like stages share what exact rows would leave unknown, between the settings, but not the
        # noise of their rows.
        between = _unexplained(saved_j, np.concatenate([quantity[rows_at] for quantity in logs]))
        variance += between + np.maximum(saved_j.var(axis=1) - between, 0.0) / stages
        baseline_j += expected[0].energy_j
    half = WIDER_SAVING * NormalDist().inv_cdf((1 + INTERVAL) / 2)
    allowed = [
        i
        for i, clock in enumerate(useful)
        if clock not in measured or any(_may_repeat(table[clock]) for table in rows.values())
    ]
    best = max(allowed, key=told.__getitem__, default=None)
    return Doubt(
        half * float(np.mean(np.sqrt(variance))) / baseline_j,
        None if best is None else useful[best],
    )


def _may_repeat(row: Measurement) -> bool:
    return row.evidence is not None and row.evidence.windows < _MOST_WINDOWS


def _explained(of: Floats, by: Floats, noise: float) -> Floats:
    """Return how much of the variances of `of` (values, draws), in all, a noisy value of each of
    `by` explains.
    """
    of, by = _about_mean(of), _about_mean(by)
    together = of @ by.T / of.shape[1]
    explained: Floats = (together**2).sum(axis=0) / (np.mean(by**2, axis=1) + noise**2)
    return explained


def _unexplained(of: Floats, by: Floats) -> Floats:
    """Return the variance of each of `of` (values, draws) that is left if all of `by` are known."""
    of, by = _about_mean(of), _about_mean(by)
    scaled = by / np.maximum(by.std(axis=1, keepdims=True), _TINY)
    weights = np.linalg.lstsq(scaled.T, of.T, rcond=_SINGULAR)[0]
    left: Floats = np.mean((of - weights.T @ scaled) ** 2, axis=1)
    return left


def _about_mean(values: Floats) -> Floats:
    centred: Floats = values - values.mean(axis=1, keepdims=True)
    return centred
