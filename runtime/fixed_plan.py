"""A plan that somebody made is followed as it is: all ranks run their part of it, until another one
is agreed on.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from perseus_planner.base.errors import PlanError
from perseus_planner.runtime.decider import Decider, Seat
from perseus_planner.runtime.modes import ModeSwitch, check_modes
from perseus_planner.runtime.program import Program
from perseus_planner.runtime.sending import Plans

if TYPE_CHECKING:
    from perseus_planner.engines.engine import Engine
    from perseus_planner.plans.plan import Plan
    from perseus_planner.runtime.controller.protocol import AttachReply, Control


class FixedPlan(Decider):
    """Follows the plan that all ranks agree on; without one, nothing."""

    makes_plans = False
    no_switch = ""

    def __init__(self) -> None:
        self._seat: Seat | None = None
        self._switch: ModeSwitch | None = None

    def join(self, seat: Seat) -> None:
        """See `Decider.join`."""
        self._seat = seat

    def take_switch(self, switch: ModeSwitch) -> None:
        """See `Decider.take_switch`."""
        self._switch = switch

    def program_of(self, version: int, data: bytes) -> Program:
        """See `Decider.program_of`."""
        return self.program_of_plans(version, Plans.loads(data))

    def program_of_plans(self, version: int, plans: Plans) -> Program:
        """See `Decider.program_of_plans`."""
        seat = self._seat
        assert seat is not None  # all have met
        program = program_of(seat.engine, plans, version, seat.own.pipeline, seat.options.modes)
        if self._switch is not None:
            self._switch.check(program.shown, program.modes)
        plan = program.expected.plan
        if seat.gpu is not None and plan is not None:
            check_gpu(plan, seat.gpu, seat.control)
        return program

    def check_pipelines(self, plans: Plans) -> None:
        """See `Decider.check_pipelines`."""
        seat = self._seat
        assert seat is not None  # all have met
        for pipeline in range(seat.part.pipelines):
            program_of(seat.engine, plans, 0, pipeline, seat.options.modes)


def program_of(
    engine: Engine, plans: Plans, version: int, pipeline: int, modes: Collection[str]
) -> Program:
    """Return this rank's part of the plans.

    Args:
        engine: Its engine.
        plans: The plans of all pipelines.
        version: Their number.
        pipeline: That of this rank.
        modes: The modes of the training.

    Raises:
        PlanError: If there is no plan for this pipeline, or the plan is not what the engine runs.
    """
    position = engine.pipeline_rank
    plan = plans.of_pipeline(pipeline)
    if len(plan.schedule.ranks) != position.ranks:
        raise PlanError(
            f"the plan is for pipelines of {len(plan.schedule.ranks)} ranks, and {engine.name} "
            f"runs pipelines of {position.ranks}; solve for the schedule that you train with"
        )
    program = Program.of_plan(version, plan, position.rank, plans)
    order = engine.order()
    if order is not None:
        program.check_order(order, engine.name)
    check_modes(program.computations, program.modes, modes)
    return program


def check_gpu(plan: Plan, gpu: AttachReply, control: Control) -> None:
    """Refuse a plan that was made for another kind of GPU or for another control.

    Raises:
        PlanError: If the plan does not fit; names the difference.
    """
    planned = plan.gpu
    if plan.control != control:
        raise PlanError(
            f"the plan's control is {plan.control!r}, and this training began with "
            f"{control!r}; start the training again to change it"
        )
    if planned is not None and gpu.name != planned:
        raise PlanError(
            f"the plan is for the GPU {planned!r}, and this rank has {gpu.name!r} ({gpu.gpu}); "
            "profile that kind of GPU and plan on it"
        )
