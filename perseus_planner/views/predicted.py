"""The records that a plan predicts: what its ranks would record of one iteration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from perseus_planner.plans.replay import clock_calls
from perseus_planner.runs.records import SetCall, match_changes

if TYPE_CHECKING:
    from perseus_planner.plans.clock_replay import Call
    from perseus_planner.plans.plan import Plan
    from perseus_planner.runs.records import ComputationRecord


def predict_records(plan: Plan) -> tuple[tuple[ComputationRecord, ...], ...]:
    """Predict the computations of each rank; times are seconds after the start of the iteration,
    number 0.
    """
    spans = plan.timeline.spans
    # Calls are those that a rank would make, with what each takes.
    calls = clock_calls(plan)
    ranks = []
    for number, program in enumerate(plan.schedule.ranks):
        spans_s = [
            (spans[str(computation)].start_s, spans[str(computation)].end_s)
            for computation in program
        ]
        clocks = [plan.clocks[str(computation)] for computation in program]
        of_rank = [call for call in calls if call.rank == number]
        # The clock of the iteration before is that of its last computation, as iterations repeat.
        previous = [clocks[-1], *(call.clock_mhz for call in of_rank)]
        changes = [
            _change(call, spans_s, before) for call, before in zip(of_rank, previous, strict=False)
        ]
        # The first request may come before the iteration begins.
        asked_s = min([0.0, *(call.requested_s for call in of_rank)])
        ranks.append(
            match_changes(
                0, program, clocks, spans_s, changes, first_asked_s=asked_s, in_force=clocks[-1]
            )
        )
    return tuple(ranks)


def _change(call: Call, spans_s: Sequence[tuple[float, float]], before: int) -> SetCall:
    # A rank asks for the clock of its next computation.
    position = next(
        position for position, (start_s, _) in enumerate(spans_s) if start_s >= call.requested_s
    )
    return SetCall(position, call.clock_mhz, call.requested_s, call.start_s, call.end_s, before)
