"""Profiles as a sweep would find them: a true profile with unlike stages, and rows of it with
noise.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from perseus_planner import Profile
from perseus_planner.profiles.measurement import Evidence, Measurement

KINDS = ("", "tails", "outlier", "missing", "hot")
_WINDOWS = 5  #: of each row, from which its standard error is found
_OFF = 0.05  #: an outlier takes so much less time
_MISSING = 0.4  #: share of the rows
_HOT, _VISITS = 0.01, 3  #: of the visits to the top clock, one takes so much more time


def unlike_stages(profile: Profile, seed: int, by: float = 0.05) -> Profile:
    """Return the profile with each stage's time, energy, and slope of both over the clock,
    changed by up to `by`.
    """
    changes = np.random.default_rng([seed, 7]).uniform(-by, by, (profile.stages, 3)).tolist()
    measurements = {}
    for key, rows in profile.measurements.items():
        time, energy, slope = changes[key.stage]
        steeper = [(rows[0].clock_mhz / row.clock_mhz) ** slope for row in rows]
        measurements[key] = tuple(
            Measurement(
                row.clock_mhz,
                row.time_s * (1 + time) * factor,
                row.energy_j * (1 + energy) * factor,
            )
            for row, factor in zip(rows, steeper, strict=True)
        )
    return replace(profile, measurements=measurements)


def noisy_rows(
    profile: Profile,
    noise: float,
    clocks: int | None,
    seed: int,
    kind: str = "",
    *,
    states_errors: bool = True,
) -> Profile:
    """Return rows at `clocks` evenly spaced clocks, None for all, with standard errors of `noise`.

    The standard error that a row states is found from a few windows, so it is uncertain itself.
    Rows without noise state none.

    Args:
        profile: the truth.
        noise: standard deviation of the rows, relative.
        clocks: how many are measured, None for all.
        seed: of all that is random.
        kind: what is wrong with the rows besides; one of `KINDS`.
        states_errors: whether rows state standard errors.
    """
    random = np.random.default_rng([seed, 11])
    measurements = {}
    for key, rows in profile.measurements.items():
        last = len(rows) - 1
        kept = (
            range(len(rows))
            if clocks is None
            else [round(i * last / (clocks - 1)) for i in range(clocks)]
        )
        deviations = random.standard_normal((len(rows), 2))
        stated = noise * np.sqrt(random.chisquare(_WINDOWS - 1, (len(rows), 2)) / (_WINDOWS - 1))
        if kind == "tails":  # a t distribution of the same standard deviation
            deviations = random.standard_t(3, (len(rows), 2)) / math.sqrt(3)
        if kind == "missing":
            kept = [i for i in kept if i == 0 or random.random() >= _MISSING]
        deviations *= noise
        if kind == "hot":
            deviations[0, 0] += _HOT / _VISITS
        found = []
        for i in kept:
            clock, (time, energy) = rows[i].clock_mhz, np.exp(deviations[i]).tolist()
            time_s, energy_j = rows[i].time_s * time, rows[i].energy_j * energy
            errors = time_s * float(stated[i, 0]), energy_j * float(stated[i, 1])
            found.append(
                Measurement(
                    clock,
                    time_s,
                    energy_j,
                    Evidence(clock, *errors, _WINDOWS, 60.0) if noise and states_errors else None,
                )
            )
        measurements[key] = tuple(found)
    if kind == "outlier":
        key = list(measurements)[random.integers(len(measurements))]
        found = list(measurements[key])
        place = random.integers(1, len(found))
        found[place] = replace(found[place], time_s=found[place].time_s * (1 - _OFF))
        measurements[key] = tuple(found)
    shared_time_error = _HOT / math.sqrt(_VISITS) if kind == "hot" else 0.0
    return replace(profile, measurements=measurements, shared_time_error=shared_time_error)


def smoothed(profile: Profile) -> Profile:
    """Return the profile on smooth curves: the logarithms as polynomials of the clock's."""
    measurements = {}
    for key, rows in profile.measurements.items():
        x = np.log([row.clock_mhz for row in rows])
        values = (
            np.polynomial.Polynomial.fit(x, np.log(of_rows), 4)(x)
            for of_rows in ([row.time_s for row in rows], [row.energy_j for row in rows])
        )
        measurements[key] = tuple(
            Measurement(row.clock_mhz, *np.exp(logs).tolist())
            for row, logs in zip(rows, np.transpose(list(values)), strict=True)
        )
    return replace(profile, measurements=measurements)
