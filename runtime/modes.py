"""Runs each computation in the mode that the plan has chosen for it, on the training thread."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from perseus_planner.base.errors import PlanError
from perseus_planner.profiles.modes import OWN

if TYPE_CHECKING:
    from perseus_planner.schedules import Computation

Modes = Mapping[str, Callable[[], None]]
"""Mode -> what has the next computations run in it; "own" is how training runs without a plan."""


class ModeSwitch:
    """Enters modes, and the training's own way wherever a plan is not followed.

    What follows the forward of a microbatch runs in the forward's mode, also after a deviation: a
    backward has to fit it.

    Args:
        modes: The modes of the training.
        warn: Gives a warning; of the first mode that fails. Then training goes on in its own way.
    """

    def __init__(self, modes: Modes, warn: Callable[[str], None]) -> None:
        self._modes, self._warn = modes, warn
        self._now, self._has_failed = OWN, False
        self._of_forward: dict[tuple[int, int], str] = {}

    def begin(self, stage: int, kind: str, microbatch: int, planned: str | None) -> None:
        """Enter the mode of a computation; None if it is not in the plan."""
        if kind == "F":
            self._of_forward[stage, microbatch] = planned or OWN
        self.enter(planned or self._of_forward.get((stage, microbatch), OWN))

    def enter(self, mode: str) -> None:
        """Have the next computations run in a mode."""
        if mode == self._now or self._has_failed:
            return
        self._now = mode
        try:
            self._modes[mode]()
        except Exception as error:  # the user's code may raise anything
            self._has_failed = True
            self._warn(f"the mode {mode} failed ({error!r}); training goes on in its own way")
            if mode != OWN:
                self._modes[OWN]()


def check_modes(
    computations: Sequence[Computation], modes: Sequence[str], known: Collection[str]
) -> None:
    """Refuse a mode that the training does not have.

    Args:
        computations: What a rank runs.
        modes: The mode of each; empty if all run in the training's own way.
        known: The modes of the training.

    Raises:
        PlanError: If it has one; names the first computation that runs in it.
    """
    for computation, mode in zip(computations, modes, strict=False):
        missing = [name for name in (mode, OWN) if name not in known and mode != OWN]
        if missing:
            raise PlanError(
                f"{computation} runs in the mode {mode} in the plan, and this training has no mode "
                f"{missing[0]}; give it in modes= of planner_runtime, or plan without that mode"
            )
