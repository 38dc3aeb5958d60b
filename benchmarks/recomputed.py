"""A profile in which recompute is the training's own way, made of one without recompute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from perseus_planner import Profile
from perseus_planner.profiles.modes import OWN, Mode, Modes

KEEP = "keep"


def recomputed(
    plain: Profile, memory_bytes: float | None, kept: float = 0.1, **others: Any
) -> Profile:
    """Return the profile with activations kept in the mode "keep"; a microbatch of them takes a
    byte.

    A backward with recompute is taken to be one without it and a forward at the same clock.

    Args:
        plain: The profile.
        memory_bytes: The limit; None for none.
        kept: What recompute keeps of a microbatch until its backward, which then takes the rest.
        others: Other fields of the profile.
    """
    rows = dict(plain.measurements)
    for key, points in plain.measurements.items():
        rows[key.in_mode(KEEP)] = points
        if key.kind == "B":
            again = {row.clock_mhz: row for row in plain.measurements[key.stage, "F"]}
            rows[key] = tuple(
                replace(
                    row,
                    time_s=row.time_s + again[row.clock_mhz].time_s,
                    energy_j=row.energy_j + again[row.clock_mhz].energy_j,
                )
                for row in points
                if row.clock_mhz in again
            )
    ways = {
        OWN: Mode({"recompute": "full"}, kept, 1 - kept),
        KEEP: Mode({"recompute": "none"}, 1.0),
    }
    modes = Modes(ways, shared_by="microbatch", memory_bytes=memory_bytes)
    return replace(plain, measurements=rows, modes=modes, **others)
