"""Profiles as a sweep would find them: a true profile with unlike stages, and rows of it with
noise.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from perseus_planner import Profile
from perseus_planner.profiles.measurement import Evidence, Measurement

_WINDOWS = 5  #: of each row, from which its standard error is found


def unlike_stages(profile: Profile, seed: int, by: float = 0.05) -> Profile:
    """Return the profile with each stage's time, energy, and slope of both over the clock,
    changed by up to `by`.
    """
    changes = np.random.default_rng([seed, 7]).uniform(-by, by, (profile.stages, 3)).tolist()
    measurements = {}
    for (stage, kind), rows in profile.measurements.items():
        time, energy, slope = changes[stage]
        steeper = [(rows[0].clock_mhz / row.clock_mhz) ** slope for row in rows]
        measurements[stage, kind] = tuple(
            Measurement(
                row.clock_mhz,
                row.time_s * (1 + time) * factor,
                row.energy_j * (1 + energy) * factor,
            )
            for row, factor in zip(rows, steeper, strict=True)
        )
    return replace(profile, measurements=measurements)


def noisy_rows(profile: Profile, noise: float, clocks: int | None, seed: int) -> Profile:
    """Return rows at `clocks` evenly spaced clocks, None for all, with standard errors of `noise`.

    The standard error that a row states is found from a few windows, so it is uncertain itself.
    Rows without noise state none.
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
        found = []
        for i in kept:
            clock, (time, energy) = rows[i].clock_mhz, np.exp(noise * deviations[i]).tolist()
            time_s, energy_j = rows[i].time_s * time, rows[i].energy_j * energy
            errors = time_s * float(stated[i, 0]), energy_j * float(stated[i, 1])
            found.append(
                Measurement(
                    clock,
                    time_s,
                    energy_j,
                    Evidence(clock, *errors, _WINDOWS, 60.0) if noise else None,
                )
            )
        measurements[key] = tuple(found)
    return replace(profile, measurements=measurements)


def interpolated(profile: Profile, clocks_mhz: tuple[int, ...]) -> Profile:
    """Return the profile at these clocks, on straight lines between the logarithms of
    neighbouring rows.
    """
    x = -np.log(clocks_mhz)
    measurements = {}
    for key, rows in profile.measurements.items():
        at = -np.log([row.clock_mhz for row in rows])
        times_s, energies_j = (
            np.exp(np.interp(x, at, np.log(values))).tolist()
            for values in ([row.time_s for row in rows], [row.energy_j for row in rows])
        )
        measurements[key] = tuple(map(Measurement, clocks_mhz, times_s, energies_j))
    return replace(profile, measurements=measurements)
