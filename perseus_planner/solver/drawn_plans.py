"""Plans under joint draws of what is uncertain: the times and energies of rows, the GPUs that run,
and jitter.

A plan's time is compared with that of all clocks at their maximum under the same joint draw, so
that what is common to both cancels out. A draw has times of the rows, and a factor for each GPU on
all of its rows, the maximum clock's too: a job runs on other GPUs than those that were profiled,
and which stage is the slowest is uncertain as well.

Expected times and energies are scaled by two numbers, near 1, such that an iteration with all
clocks at their maximum takes what it takes with the measured rows: there is one baseline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.plans.replay import time_and_energy
from perseus_planner.profiles.estimation import Draws, exact_draws, on_other_gpus
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.solver.curve import TimeEnergyCurve
from perseus_planner.solver.drawn_replay import DrawnReplay
from perseus_planner.solver.modes import baseline
from perseus_planner.solver.planner import Planner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.plans.plan import Plan
    from perseus_planner.profiles.estimation import Estimate
    from perseus_planner.profiles.keys import Key
    from perseus_planner.profiles.profiles import Profile
    from perseus_planner.profiles.smoothing import Floats
    from perseus_planner.solver.network import Integers

    Lateness = Callable[[Floats], Floats]
    """Says how late plans of (..., draws) seconds are, (...,); at most 0 for what is on time."""

_DRAWS = 500  #: by hand
_ITERATIONS = 100  #: with jitter, of which the mean is taken; by hand
ROUNDING = 1e-9  #: of a ratio
EXPECTED = 4.9e-5
"""By how much an expected time may be above its limit, relative. No draw is faster than all clocks
at maximum, so a mean of exactly 1 would allow no draw that is slower. A mean that is 1.0000 in the
digits that are printed does."""
_SCALINGS = 20  #: rounds at most, to find the scale of times
SAME = 1e-13
"""Times that differ by less, relative, are equal."""
_HAIR = 2e-13  #: relative: more than `SAME` and the rounding of a sum of times


class Drawn(NamedTuple):
    """The clocks of a plan, MHz, replayed under the draws."""

    clocks_mhz: list[int]
    margin: float | None  #: standard errors; None if the clocks are not of a plan with a margin
    time_s: Floats  #: (draws,)
    energy_j: Floats  #: (draws,)


class DrawnPlans:
    """Replays plans of one frontier under the draws.

    Args:
        curve: the frontier of the measured rows.
    """

    def __init__(self, curve: TimeEnergyCurve) -> None:
        self.curve = curve

    @cached_property
    def estimate(self) -> Estimate[Profile] | None:
        """What is known of the rows; None if they are exact."""
        return None if self.curve.profile.is_exact else self.curve.profile.estimated()

    @cached_property
    def draws(self) -> Draws:
        """What times and energies may really be, scaled as the expected ones."""
        iteration = self.curve.dag.iteration
        spread = self.curve.profile.assumed_spread
        rows = exact_draws(self.curve.profile.measurements)
        if self.estimate is not None:
            # Scaled like the expected rows, or draws would have another baseline.
            drawn = self.estimate.draws(_DRAWS)
            longer, dearer = self.scales
            rows = Draws(
                drawn.clocks_mhz,
                {key: longer * table for key, table in drawn.time_s.items()},
                {key: dearer * table for key, table in drawn.energy_j.items()},
            )
        pairs = zip(iteration.keys, iteration.rank_of, strict=False)  # operations come last
        # All stages of a rank run on its GPUs, and share the factor of these.
        gpu_of = {key.stage: rank for key, rank in pairs}
        return on_other_gpus(rows, gpu_of, spread, _DRAWS)

    @cached_property
    def jitter(self) -> Floats | None:
        """How many times as long each computation takes, in each of some iterations."""
        jitter = self.curve.profile.all_jitter
        count = len(self.curve.dag.computations)
        rank_of = self.curve.dag.iteration.rank_of[:count]
        return jitter.draw(rank_of, _ITERATIONS) if jitter else None

    @cached_property
    def replay(self) -> DrawnReplay:
        """The iteration under the draws."""
        return DrawnReplay(self.mean.dag, self.draws, self.jitter)

    @cached_property
    def _baseline_replay(self) -> DrawnReplay:
        """The iteration that savings are compared with, under the draws."""
        dag = self.mean.dag
        if dag.base in (None, dag.iteration):
            return self.replay
        return DrawnReplay(PipelineDag(dag.profile, dag.base, dag.base), self.draws, self.jitter)

    @cached_property
    def jittered_baseline_s(self) -> Floats:
        """Seconds of each iteration with jitter, with all clocks at their maximum."""
        seconds = self._baseline_replay.jittered_s(self.baseline.clocks_mhz)
        return seconds + self.mean.profile.overhead_s

    @cached_property
    def baseline(self) -> Drawn:
        """All clocks at their maximum, in the modes that savings are compared with."""
        replay = self._baseline_replay
        if replay is self.replay:
            return self.at_maximum
        clocks = [row.clock_mhz for row in replay.dag.baseline_measurements()]
        return Drawn(clocks, None, *replay.replay(clocks))

    @cached_property
    def at_maximum(self) -> Drawn:
        """All clocks at their maximum."""
        rows = self.mean.profile.measurements
        clocks = [rows[key][0].clock_mhz for key in self.mean.dag.iteration.keys]
        return self.replayed_with_changes(clocks, None)

    @cached_property
    def mean_planner(self) -> Planner:
        """That of the expected rows."""
        return Planner(self.mean)

    @cached_property
    def mean(self) -> TimeEnergyCurve:
        """The curve of the expected times."""
        if self.estimate is None:
            return self.curve
        profile = _scaled(self.estimate.mean, *self.scales)
        return TimeEnergyCurve.of(self.curve.dag.with_profile(profile))

    @cached_property
    def scales(self) -> tuple[float, float]:
        """What expected times and energies are multiplied by for the baseline of measured rows."""
        if self.estimate is None:
            return 1.0, 1.0
        # A hair earlier: a search that adds up in another order must not find all clocks at maximum
        # late for the baseline's own deadline.
        wanted_s = self.curve.baseline_time_s * (1 - _HAIR)
        wanted_j = self.curve.baseline_energy_j
        overhead_s = self.curve.profile.overhead_s
        base = baseline(self.curve.dag.with_profile(self.estimate.mean))
        rows = base.baseline_measurements()
        longer = 1.0
        # Newton's method: transfers and other fixed times do not scale, so once is not enough.
        for _ in range(_SCALINGS):
            scaled = [replace(row, time_s=longer * row.time_s) for row in rows]
            time_s, energy_j = time_and_energy(base, scaled)
            if abs(time_s - wanted_s) <= SAME * wanted_s:
                break
            # At most halved in a step, where fixed times leave little to scale.
            longer *= max(0.5, 1 + (wanted_s - time_s) / (time_s - overhead_s))
        # Only rows scale: what is drawn while waiting follows from the times.
        dearer = 1 + (wanted_j - energy_j) / sum(row.energy_j for row in rows)
        return longer, dearer if dearer > 0.0 else 1.0

    @cached_property
    def costs_j(self) -> dict[Key, dict[int, float]]:
        """(stage, kind) -> clock -> effective joules of the expected rows."""
        profile = self.mean.profile
        return {
            key: {
                row.clock_mhz: row.energy_j - profile.blocking_w(key.stage) * row.time_s
                for row in profile.measurements[key]
            }
            for key in set(self.mean.dag.iteration.keys)
        }

    @cached_property
    def draw_row(self) -> dict[int, int]:
        """Clock -> its row in the draws."""
        return {clock: row for row, clock in enumerate(self.draws.clocks_mhz)}

    def replayed(self, clocks_mhz: list[int], margin: float | None) -> Drawn:
        """Return the replays of these clocks, as if clock changes cost nothing."""
        return Drawn(clocks_mhz, margin, *self.replay.replay(clocks_mhz))

    def replayed_with_changes(self, clocks_mhz: list[int], margin: float | None) -> Drawn:
        """Return the replays of these clocks, with what clock changes cost."""
        if self.curve.profile.clock_change is None:
            return self.replayed(clocks_mhz, margin)
        return self.replayed_plan(self.mean_planner.plan_of(clocks_mhz, None), margin)

    def replayed_plan(self, plan: Plan, margin: float | None) -> Drawn:
        """Return the replays of a plan's clocks.

        What clock changes cost with the expected times is taken to be the same in all of them.
        """
        drawn = self.replayed([*plan.clocks.values()], margin)
        if plan.clock_change is None:
            return drawn
        expected = self.plan_of(drawn)
        # The same clocks with free changes: the difference is what changes cost.
        points = [expected.measurement(computation) for computation in self.mean.dag.computations]
        free_s, free_j = time_and_energy(self.mean.dag, points)
        return drawn._replace(
            time_s=drawn.time_s + (expected.time_s - free_s),
            energy_j=drawn.energy_j + (expected.energy_j - free_j),
        )

    def plan_of(self, drawn: Drawn) -> Plan:
        """Return the plan of these clocks with their expected times."""
        plan = self.mean_planner.plan_of(drawn.clocks_mhz, None)
        profile = self.curve.profile
        return replace(
            plan,
            profile_digest=profile.digest,
            remarks=profile.remarks,
            baseline_time_s=self.curve.baseline_time_s,
            baseline_energy_j=self.curve.baseline_energy_j,
        )

    def expected_ratio(self, time_s: Floats) -> Floats:
        """Return the mean of (..., draws) seconds over those with all clocks at their maximum."""
        mean: Floats = np.mean(time_s / self.baseline.time_s, axis=-1)
        return mean

    def likely_ratio(self, time_s: Floats, probability: float) -> Floats:
        """Return what (..., draws) seconds keep with this probability, over those with all clocks
        at their maximum.
        """
        likely: Floats = np.quantile(time_s / self.baseline.time_s, probability, axis=-1)
        return likely

    def lateness(
        self, time_s: Floats, *, ratio: float, probability: float, tolerance: float
    ) -> Floats:
        """Return how late plans of (..., draws) seconds are, (...,), at most 0 for one that is on
        time: the worse of its likely time against the limit and its mean against the deadline
        itself, of which what is expected takes no tolerance.
        """
        limit = limit_of(ratio, tolerance)
        likely = self.likely_ratio(time_s, probability) / limit - ROUNDING
        expected = self.expected_ratio(time_s) / ratio - EXPECTED
        late: Floats = np.maximum(likely, expected) - 1
        return late

    def effective_j(self, drawn: Drawn) -> float:
        """Return the mean effective energy: without what GPUs draw waiting in that time."""
        return float(np.mean(drawn.energy_j - self.curve.dag.waiting_w * drawn.time_s))

    def changes(self, clocks: Sequence[int]) -> int:
        """Return the most clock changes of a rank in an iteration."""
        iteration = self.mean.dag.iteration
        counts = [
            len(clock_segments([place for place in program if place < len(clocks)], clocks))
            for program in iteration.programs
        ]
        return max((count for count in counts if count > 1), default=0)

    def case_s(self, key: Key, cases: Integers) -> Floats:
        """Return the (clocks, cases) seconds that a computation takes in some draws; `draw_row`
        tells the row of a clock.
        """
        rows = self.draws.time_s[key]
        # Exact rows have one draw that holds for all cases.
        return rows[:, cases] if rows.shape[1] > 1 else np.repeat(rows, len(cases), axis=1)


def _scaled(profile: Profile, longer: float, dearer: float) -> Profile:
    """Return the profile with times and energies that are multiplied."""
    measurements = {
        key: tuple(
            replace(row, time_s=longer * row.time_s, energy_j=dearer * row.energy_j) for row in rows
        )
        for key, rows in profile.measurements.items()
    }
    return replace(profile, measurements=measurements)


def limit_of(ratio: float, tolerance: float) -> float:
    """Return what a likely time may be, over the baseline: the tolerance is for deadlines no
    earlier than that alone.
    """
    return ratio if ratio < 1 - ROUNDING else max(ratio, 1 + tolerance)


def clock_segments(places: Sequence[int], clocks: Sequence[int]) -> list[list[int]]:
    """Return the runs of equal clocks of a rank, in order; iterations follow each other, so the
    last run goes on in the first one if their clocks are equal.
    """
    segments: list[list[int]] = []
    for place in places:
        if segments and clocks[segments[-1][-1]] == clocks[place]:
            segments[-1].append(place)
        else:
            segments.append([place])
    if len(segments) > 1 and clocks[segments[-1][-1]] == clocks[segments[0][0]]:
        segments[0] = segments.pop() + segments[0]
    return segments
