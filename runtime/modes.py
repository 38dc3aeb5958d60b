"""Runs each computation in the mode that the plan has chosen for it, on the training thread."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from perseus_planner.base.errors import PlanError
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.lease.lease import lease_gpus
from perseus_planner.gpu.protocol import check_clock
from perseus_planner.profiles.modes import OWN

if TYPE_CHECKING:
    from perseus_planner.schedules import Computation

Modes = Mapping[str, Callable[[], None]]
"""Mode -> what has the next computations run in it; "own" is how training runs without a plan."""


@contextmanager
def memory_modes(gpu: str, *clocks_mhz: int) -> Iterator[Modes]:
    """Lease the memory clock of a GPU inside the block, and yield modes that set it: "own", in
    which it is unlocked, and one for each clock, such as "mem-1593".

        with memory_modes("cuda:0", 1593) as modes, planner_runtime(engine, plan, modes=modes):

    A change takes long and is made on the training thread. So give all computations of a rank one
    mode, with `shared_by: stage` or `pipeline` in the profile: it is then entered once. The clock
    is unlocked after the block, and by the guardian if the process dies.

    Raises:
        GpuInUse: If another living process has leased the memory clock.
        GpuError: If the GPU cannot lock its memory at these clocks, or this process may not.
    """
    with open_gpu(f"memory:{gpu}") as memory, lease_gpus([memory], power_limit=False):
        for clock_mhz in clocks_mhz:
            check_clock(memory, clock_mhz)
        of_clocks = {f"mem-{each}": partial(memory.set_clock_mhz, each) for each in clocks_mhz}
        yield {OWN: memory.reset_clocks, **of_clocks}


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
