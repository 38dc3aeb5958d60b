"""A plan is followed at marks that are captured in the CUDA graph of a whole iteration.

Captured, a mark writes the *position* of the next computation again in each replay; the controller
looks the clock up in the table that was named last, by the request that is written before the
replay. So positions are frozen and plans are not: another plan is another table, and counts from
the begin of an iteration on, in the order of the device.

Whether a driver captures such a write is told by `benchmarks/gpu_graph_marks.py`, on any GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from perseus_planner.base.errors import PlanError
from perseus_planner.runtime.controller.protocol import LatestStarts
from perseus_planner.runtime.fixed_plan import FixedPlan
from perseus_planner.runtime.program import Inside, Table
from perseus_planner.runtime.timed_plan import top_clock, whole_costs
from perseus_planner.schedules import WHOLE

if TYPE_CHECKING:
    from perseus_planner.runtime.decider import Context
    from perseus_planner.runtime.program import Program
    from perseus_planner.runtime.sending import Plans

_ALWAYS_NS = 1 << 62  #: until when a computation may begin at its planned clock


class CapturedPlan(FixedPlan):
    """Follows the plan that all ranks agree on, at captured marks."""

    def __init__(self) -> None:
        super().__init__()
        self._latest: LatestStarts | None = None
        self._first: Program | None = None  #: written once the controller can read it

    def begin(self, context: Context) -> None:
        """See `Decider.begin`."""
        self._latest = context.latest
        if self._first is not None:
            self._write(self._first)

    def program_of_plans(self, version: int, plans: Plans) -> Program:
        """See `Decider.program_of_plans`."""
        program = super().program_of_plans(version, plans)
        followed = self.followed(program)
        if version:  # 0 is asked for, not followed
            self._write(program)
        return followed

    def followed(self, program: Program) -> Program:
        """Return a program of a plan as it is followed: an iteration is shown as one computation.

        Raises:
            PlanError: If it has modes, or too many computations for a table.
        """
        plan = program.expected.plan
        assert plan is not None
        if any(program.modes):
            raise PlanError(
                "the plan has modes, which cannot be entered in a captured graph; plan without "
                "modes"
            )
        if len(program.clocks) > LatestStarts.MOST_ROWS:
            raise PlanError(
                f"the plan has {len(program.clocks)} computations on this rank, and captured marks "
                f"have {LatestStarts.MOST_ROWS} at most; follow it by time (follow='time')"
            )
        # The controller needs a table before the first iteration; later ones come through
        # `program_of_plans`.
        self._first = self._first or program
        # Marks of a captured graph say positions alone, so the clocks are in a table that the
        # controller reads.
        rank = plan.schedule.ranks.index(program.computations)
        costs = whole_costs(program, rank, program.clocks)
        return replace(
            program,
            computations=WHOLE.ranks[0],
            clocks=program.clocks[:1],
            table=Table(LatestStarts.number_of(program.version)),
            inside=Inside(program.microbatches, program.shown, is_captured=True),
            expected=replace(program.expected, top=top_clock(plan, program), costs=costs),
        )

    def busy_s(self, iteration: int, program: Program) -> float | None:
        """See `Decider.busy_s`; a replay does not show when its rank computes."""
        return None

    def _write(self, program: Program) -> None:
        """Write the clocks of a program for the controller."""
        if self._latest is not None:
            rows = [[(clock, _ALWAYS_NS)] for clock in program.clocks]
            self._latest.write(program.version, rows)
