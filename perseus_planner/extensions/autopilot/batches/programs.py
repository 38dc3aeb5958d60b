"""What a rank runs an iteration by, made of what the leader of its pipeline told it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

from perseus_planner.extensions.autopilot.batches.learning import LOWERED, Known
from perseus_planner.profiles.keys import Key
from perseus_planner.profiles.measurement import nearest_clock
from perseus_planner.runs.savings import Cost, RankCosts, profile_costs
from perseus_planner.runtime.program import Program, Table
from perseus_planner.runtime.sending import values_of

if TYPE_CHECKING:
    from perseus_planner.extensions.autopilot.batches.exchange import Batch
    from perseus_planner.extensions.autopilot.batches.learning import BatchLearner
    from perseus_planner.profiles.profiles import Profile
    from perseus_planner.runtime.controller.protocol import LatestStarts


class Programs:
    """Makes the programs of a rank.

    Args:
        profile: The cost of clocks.
        rank: Its number in the pipeline.
        learner: What it has learnt.
        is_whole: Whether an iteration is one computation.
    """

    def __init__(
        self, profile: Profile, rank: int, learner: BatchLearner, *, is_whole: bool
    ) -> None:
        self._profile = profile
        self._rank = rank
        self._learner = learner
        self._is_whole = is_whole
        self.latest: LatestStarts | None = None  #: where latest starts go; None without controller

    def made(
        self,
        iteration: int,
        full: Program,
        batch: Batch,
        known: Known,
        *,
        has_begun: Callable[[], bool],
    ) -> tuple[Program, Known]:
        """Return the program of an iteration, and with it what is known of it.

        Args:
            iteration: Its number.
            full: Its program at full clocks.
            batch: What the leader told.
            known: What is known of it without that.
            has_begun: Returns whether it has begun, at full clocks.
        """
        expected = replace(full.expected, time_s=batch.time_s)
        program = replace(full, awaits=False, expected=expected)
        if not batch.ranks or known.work is None:
            return program, known
        full_s = self._learner.full_s(program, known.work)
        known = replace(known, plan=batch.ranks[self._rank], full_s=full_s)
        return self._planned(iteration, program, known, has_begun), known

    def _planned(
        self, iteration: int, program: Program, known: Known, has_begun: Callable[[], bool]
    ) -> Program:
        """Return the program at the clocks that this rank was told, and write its latest starts."""
        plan = known.plan
        assert plan is not None
        # Clocks of another number of computations are for another order, and full clocks need no
        # program.
        clocks = values_of(plan.clocks)
        top = program.expected.top
        if len(clocks) != len(program.clocks) or min(clocks) == top:
            return program
        costs = self._costs(program, clocks, known.full_s)
        program = replace(program.at(clocks, costs=costs), then=top, note=LOWERED)
        # Without a controller, laws or a pipeline, nothing can catch up within the iteration.
        if self.latest is None or not known.full_s or self._is_whole:
            return program
        # Begun iterations run at full clocks until now, so their latest starts count from
        # elsewhere.
        rows = self._learner.catching_up.rows(program, known.full_s, plan, has_begun=has_begun())
        if not rows:
            return program
        return replace(program, table=Table(self.latest.write(iteration, rows)))

    def _costs(
        self, program: Program, clocks: tuple[int, ...], full_s: tuple[float, ...]
    ) -> RankCosts | None:
        """Return what the profile says of computations that take `full_s` at full clocks."""
        if not full_s:
            return None
        profile = self._profile
        each = []
        # Rows are of a stage, and an account is of one GPU.
        gpus = profile.gpus_per_stage
        for c, clock, seconds in zip(program.computations, clocks, full_s, strict=True):
            # A planned clock that was not measured takes the nearest measured one, as the planner
            # did.
            rows = {row.clock_mhz: row for row in profile.measurements[Key(c.stage, c.kind)]}
            top = rows[max(rows)]
            row = rows[nearest_clock(rows, clock)]
            # Time and energy of a row scale alike with work, as the plan assumes.
            work = seconds / top.time_s
            row_j = work * row.energy_j / gpus
            top_j = work * top.energy_j / gpus
            each.append(Cost(work * row.time_s, row_j, seconds, top_j))
        waiting_w = fmean(profile.blocking_w(c.stage) for c in program.computations) / gpus
        return profile_costs(tuple(each), waiting_w, program.expected.time_s)
