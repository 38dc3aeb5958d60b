"""What a plan would gain if the rows that it uses were measured again, told before anybody does."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from perseus_planner.plans.again import VISITS, rows_again
from perseus_planner.profiles.measurement import Evidence, Measurement

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from perseus_planner.plans.plan import Plan
    from perseus_planner.profiles.estimation import Estimate
    from perseus_planner.profiles.profiles import Profile

LEAST_SHARE = 5e-4
"""Of the energy with all clocks at maximum: what is saved more, if it is less, is not told apart
from chance."""
_TEMPERATURE_C = 60.0  #: of rows that were not measured yet; nothing depends on it


@dataclass(frozen=True)
class MeasuringAgain:
    """What `planner profile --for` would bring for a plan."""

    rows: int  #: the number of rows that it measures, each some times
    #: by how much less it costs to be sure then, over the energy with all clocks at maximum; at
    #: most what it costs now.
    more_share: float


def measured_again(
    profile: Profile, estimate: Estimate[Profile], plan: Plan
) -> tuple[Profile, int]:
    """Return the profile as it is expected to be after a second sweep of the rows of a plan, and
    how many rows that sweep measures.

    Each of them is measured as it is expected to be, in as many windows as a typical row at each
    visit.

    Args:
        profile: rows with standard errors.
        estimate: what is known of them.
        plan: a plan of it.
    """
    expected = estimate.mean.measurements
    possible = {key: [row.clock_mhz for row in rows] for key, rows in expected.items()}
    again = rows_again(plan, possible)
    rows = dict(profile.measurements)
    evidence = [
        row.evidence
        for class_rows in rows.values()
        for row in class_rows
        if row.evidence is not None
    ]
    # How many windows a new row has: no row says it before it is measured.
    typical = median(row_evidence.windows for row_evidence in evidence)
    for key, clocks in again.items():
        rows[key] = _rows(rows[key], expected[key], clocks, estimate.noise[key], typical)
    return replace(profile, measurements=rows), sum(map(len, again.values()))


def _rows(
    before: Sequence[Measurement],
    expected: Sequence[Measurement],
    clocks: Collection[int],
    noise: tuple[float, float],
    typical: float,
) -> tuple[Measurement, ...]:
    """Return the rows of a computation after the second sweep.

    Args:
        before: its rows.
        expected: those that it is expected to have, at every clock.
        clocks: what is measured again.
        noise: relative standard errors of the time and the energy of a typical row.
        typical: the number of windows of a typical row.
    """
    table: dict[int, Measurement] = {row.clock_mhz: row for row in before}
    values: Mapping[int, Measurement] = {row.clock_mhz: row for row in expected}
    more = round(VISITS * typical)
    for clock in clocks:
        old = table.get(clock)
        has = 0 if old is None or old.evidence is None else old.evidence.windows
        windows = has + more
        # Old and new windows count alike in the mean, and the error falls with the root of their
        # number.
        part = more / windows
        now = values[clock]
        time_s = part * now.time_s + (1 - part) * (now if old is None else old).time_s
        energy_j = part * now.energy_j + (1 - part) * (now if old is None else old).energy_j
        less = math.sqrt(typical / windows)
        errors = noise[0] * less * time_s, noise[1] * less * energy_j
        order = None if old is None or old.evidence is None else old.evidence.order
        evidence = Evidence(clock, *errors, windows, _TEMPERATURE_C, order=order)
        table[clock] = Measurement(clock, time_s, energy_j, evidence)
    return tuple(table.values())
