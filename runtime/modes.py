"""Runs each computation in the mode that the plan has chosen for it, on the training thread."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec

from perseus_planner.base.errors import PlanError, UsageError, how_to_install
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.lease.lease import lease_gpus
from perseus_planner.gpu.protocol import check_clock
from perseus_planner.profiles.modes import (
    OWN,
    SHARED_BY,
    ModeFunction,
    ModeFunctions,
    is_mode_name,
    reordering,
    shared_by,
)
from perseus_planner.schedules import Computation


@contextmanager
def memory_modes(gpu: str, *clocks_mhz: int) -> Iterator[ModeFunctions]:
    """Lease the memory clock of a GPU inside the block, and yield modes that set it: "own", in
    which it is unlocked, and one for each clock, such as "mem-1593".

        with memory_modes("cuda:0", 1593) as modes, planner_runtime(engine, plan, modes=modes):

    A change takes long and is made on the training thread. So all computations of a stage have one
    mode (`shared_by: stage` in the profile); where a rank has several stages, write `pipeline`: it
    is then entered once. The clock is unlocked after the block, and by the guardian if the process
    dies.

    Raises:
        GpuInUse: If another living process has leased the memory clock.
        GpuError: If the GPU cannot lock its memory at these clocks, or this process may not.
    """
    with open_gpu(f"memory:{gpu}") as memory, lease_gpus([memory], power_limit=False):
        for clock_mhz in clocks_mhz:
            check_clock(memory, clock_mhz)
        of_clocks = {f"mem-{clock}": partial(memory.set_clock_mhz, clock) for clock in clocks_mhz}
        functions: ModeFunctions = {OWN: memory.reset_clocks, **of_clocks}
        yield {name: ModeFunction(function, "stage") for name, function in functions.items()}


class ModeSwitch:
    """Enters the mode that the plan has for each computation, in whatever order they run, and also
    while clocks cannot be set: so all ranks of a stage do the same, and backwards fit forwards.

    Args:
        modes: The modes of the training.
        warn: Gives a warning; of the first mode that fails. Then training goes on in its own way.

    Attributes:
        has_failed: Whether a mode has failed.
    """

    def __init__(self, modes: ModeFunctions, warn: Callable[[str], None]) -> None:
        self._modes = modes
        self._warn = warn
        self._now = OWN
        self.has_failed = False
        self._planned: dict[Computation, str] = {}
        self._rest = OWN  #: the mode between iterations

    def load(self, computations: Sequence[Computation], modes: Sequence[str]) -> None:
        """Take the modes of a plan; empty if all computations run in the training's own way."""
        self._planned = _modes_of(computations, modes)
        self._rest = modes[0] if len(set(modes)) == 1 else OWN

    def check(self, computations: Sequence[Computation], modes: Sequence[str]) -> None:
        """Refuse a plan that changes modes, if the ranks of a stage enter some together: plans do
        not reach them at the same moment.

        Raises:
            PlanError: If it does.
        """
        together = [name for name, mode in self._modes.items() if _is_of_group(mode)]
        if together and _modes_of(computations, modes) != self._planned:
            raise PlanError(
                "the plan has other modes than that of the training so far, whose ranks of a stage "
                f"enter {', '.join(together)} together; plan with the same modes, or start again"
            )

    def begin(self, stage: int, kind: str, microbatch: int) -> None:
        """Enter the mode of a computation."""
        self.enter(self._planned.get(Computation(stage, kind, microbatch), OWN))

    def rest(self) -> None:
        """Enter the mode between iterations: that of all computations, or the training's own."""
        self.enter(self._rest)

    def enter(self, mode: str) -> None:
        """Have the next computations run in a mode."""
        if self.has_failed and not _is_of_group(self._modes[mode]):
            mode = OWN
        if mode == self._now:
            return
        self._now = mode
        try:
            self._modes[mode]()
        except Exception as error:  # the user's code may raise anything
            self.has_failed = True
            self._warn(f"the mode {mode} failed ({error!r}); training goes on in its own way")
            if mode != OWN:
                self.enter(OWN)


def _is_of_group(mode: Callable[[], None]) -> bool:
    return isinstance(mode, ModeFunction) and mode.is_of_group


def learnt_modes(functions: ModeFunctions, *, may_reorder: bool) -> ModeFunctions:
    """Return the modes that the autopilot may try.

    Raises:
        UsageError: If there are none, or it cannot learn one of them.
    """
    refused = () if may_reorder else reordering(functions)
    learnt = {name: function for name, function in functions.items() if name not in refused}
    # Two modes, as the autopilot tries one against what training does now.
    if OWN not in learnt or len(learnt) > 2 or not all(map(is_mode_name, learnt)):
        raise UsageError(
            f"modes: {', '.join(map(str, learnt))} cannot be learnt: give {OWN}, for how training "
            "runs now, and one other, of lower-case letters, digits, - and _"
        )
    for name, function in learnt.items():
        if not isinstance(function, ModeFunction):
            continue
        # Each rank learns alone, and only from times and energy.
        why = {
            "all ranks of a stage enter it together": function.is_of_group,
            "it takes memory, which the autopilot does not know": function.takes_memory,
            f"a {function.shared_by} has it as a whole": function.shared_by in SHARED_BY[2:],
        }
        for reason, holds in why.items():
            if holds:
                raise UsageError(
                    f"modes, {name}: {reason}, so it cannot be learnt while training; give a plan "
                    "made from a profile with modes, or leave it out"
                )
    if shared_by(learnt) != SHARED_BY[0] and find_spec("scipy") is None:
        raise UsageError(
            "modes: those of a microbatch need scipy, which is not installed; "
            f"{how_to_install('modes')} on every rank"
        )
    return learnt


def _modes_of(computations: Sequence[Computation], modes: Sequence[str]) -> dict[Computation, str]:
    of_each = zip(computations, modes, strict=False)
    return {computation: mode for computation, mode in of_each if mode != OWN}


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
