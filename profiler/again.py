"""A second, short sweep of the rows that a plan uses and their neighbours, joined to the profile.

What a plan leaves as a margin follows from how well its own rows are known, which are few. A row
that was measured in both sweeps has the windows of both, so its noise is that of so many more. What
the rows of a sweep share, its drift, is not taken to be less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

from perseus_planner.base.errors import UsageError
from perseus_planner.plans.again import clocks_in_use, with_neighbours
from perseus_planner.profiler.stage import together
from perseus_planner.profiler.windows import merge
from perseus_planner.profiles.groups import one_or_each
from perseus_planner.profiles.keys import Key

if TYPE_CHECKING:
    from perseus_planner.plans.plan import Plan
    from perseus_planner.profiles.measurement import Measurement
    from perseus_planner.profiles.profiles import Profile

MEASURED_AGAIN = "measured again"
"""The condition that says how many rows were."""

_ALIKE = ("gpu", "control", "gpus_per_stage", "stages", "modes")


@dataclass(frozen=True)
class Again:
    """What to measure again, and what to join it to.

    Raises:
        UsageError: If the plan is not one of the profile's stages and kinds, or nothing was set.
    """

    plan: Plan  #: the plan that the rows are for
    profile: Profile  #: the profile that they are joined to

    def __post_init__(self) -> None:
        if self.profile.control == "observed":
            raise UsageError("the profile: nothing was set for its rows; profile the stages anew")
        for key in clocks_in_use(self.plan):
            if key not in self.profile.measurements:
                raise UsageError(
                    f"the plan: runs {key.name} of stage {key.stage}, which the profile does not "
                    "have; give the profile that the plan was made from"
                )
        if self.plan.control != self.profile.control:
            raise UsageError(
                f"the plan: sets a {self.plan.control}, and the profile was measured by "
                f"{self.profile.control}; give the profile that the plan was made from"
            )

    def settings_of(
        self, stage: int, kinds: Sequence[str], settings: Sequence[int]
    ) -> dict[str, tuple[int, ...]]:
        """Return the settings to measure of each kind of a stage, highest first.

        Args:
            stage: the number of the stage.
            kinds: those that are measured; one that no computation of the plan is has its highest
                setting alone.
            settings: all settings of the GPU, highest first.
        """
        used = clocks_in_use(self.plan)
        return {
            kind: with_neighbours(used.get(Key.named(stage, kind), ()), settings) for kind in kinds
        }

    def joined(self, second: Profile) -> Profile:
        """Return the profile with the rows of the second sweep.

        Raises:
            UsageError: If they are of another GPU or other stages.
        """
        first = self.profile
        for name in _ALIKE:
            if getattr(first, name) != getattr(second, name):
                raise UsageError(
                    f"the rows measured again differ from those of the profile in {name}: "
                    f"{getattr(second, name)!r} instead of {getattr(first, name)!r}; measure on "
                    "the same kind of GPU, as before"
                )
        if missing := first.measurements.keys() - second.measurements.keys():
            first_missing = min(missing)
            raise UsageError(
                f"the second sweep lacks {first_missing.name} of stage {first_missing.stage}; "
                "measure as before"
            )
        rows = dict(first.measurements)
        for key in rows:
            # A kind without work has rows of 0 s, which nobody measures again.
            if rows[key][0].has_work:
                rows[key] = _joined(rows[key], second.measurements[key])
        shared = [self._shared_errors(second, stage) for stage in range(first.stages)]
        again = sum(map(len, second.measurements.values()))
        return replace(
            first,
            measurements=rows,
            shared_time_error=one_or_each(time for time, _ in shared),
            shared_energy_error=one_or_each(energy for _, energy in shared),
            gpu_spread=second.gpu_spread if first.gpu_spread is None else first.gpu_spread,
            conditions={**first.conditions, MEASURED_AGAIN: f"{again} rows, for a plan"},
        )

    def _shared_errors(self, second: Profile, stage: int) -> tuple[float, float]:
        """Return the errors of time and of energy that the rows of a stage share: those of both
        sweeps, or more, if its highest settings differ by more than their windows do.
        """
        sweeps = self.profile.shared_errors(stage), second.shared_errors(stage)
        # The highest setting of each kind was measured in both sweeps.
        pairs = [
            (rows[0], second.measurements[key][0])
            for key, rows in self.profile.measurements.items()
            if key.stage == stage and rows[0].has_work
        ]
        times = [_difference(*pair, "time_s", "time_stderr_s") for pair in pairs]
        energies = [_difference(*pair, "energy_j", "energy_stderr_j") for pair in pairs]
        return (
            max(together([errors[0] for errors in sweeps]) or 0.0, _beyond(times)),
            max(together([errors[1] for errors in sweeps]) or 0.0, _beyond(energies)),
        )


def _difference(
    before: Measurement, now: Measurement, quantity: str, error: str
) -> tuple[float, float]:
    """Return the relative difference of two rows, and its standard error from their windows."""
    values = getattr(before, quantity), getattr(now, quantity)
    errors = (
        getattr(row.evidence, error) / value if row.evidence is not None else 0.0
        for row, value in zip((before, now), values, strict=True)
    )
    return math.log(values[1] / values[0]), math.hypot(*errors)


def _beyond(differences: Sequence[tuple[float, float]]) -> float:
    """Return the standard deviation of two sweeps from each other, beyond that of their windows,
    given the differences of the kinds of a stage, which share it.
    """
    if not differences:
        return 0.0
    mean = fmean(difference for difference, _ in differences)
    error = math.hypot(*(error for _, error in differences)) / len(differences)
    return math.sqrt(max(0.0, mean**2 - error**2) / 2)


def _joined(first: Sequence[Measurement], second: Sequence[Measurement]) -> tuple[Measurement, ...]:
    """Return the rows of both sweeps, those at one clock together; a row that does not say how it
    was measured gives way.
    """
    table = {row.clock_mhz: row for row in first}
    orders = [row.evidence.order for row in first if row.evidence is not None]
    # Rows of the second sweep come after all of the first, in the order they were measured.
    after = 1 + max((order for order in orders if order is not None), default=-1)
    for row in second:
        assert row.evidence is not None
        order = None if row.evidence.order is None else after + row.evidence.order
        row = replace(row, evidence=replace(row.evidence, order=order))
        before = table.get(row.clock_mhz)
        both = before is not None and before.evidence is not None
        table[row.clock_mhz] = merge([before, row]) if before is not None and both else row
    return tuple(table.values())
