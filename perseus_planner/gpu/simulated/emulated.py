"""A GPU that computes nothing, in real time: work takes as long as the model says, and clocks take effect when set.

    emulated:a100-sxm/0?slower=2000

is GPU 0 of those that this user emulates on this node; other options make another GPU. It is the GPU that
`simulated:a100-sxm?slower=2000` is, but its time is that of the clock on the wall, and its state is shared: one process
computes on it, others read and set it, and a clock stays locked after the process that locked it has ended. What it is
for: to run a training job under a plan, with stragglers, failures and all, where there is no GPU.

Options are those of `gpu/simulated/options.py`, but nothing disturbs unless it is asked for: without options there
is no noise, static power does not follow the temperature, and the energy counter is exact. Times of faults count from
when a process opened the GPU that none had open before. Its power sensor tells the power of the moment.

Whenever nothing runs, the GPU waits for a message from a neighbour, as one in a pipeline does.
"""

from __future__ import annotations

import math
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from perseus_planner.errors import GpuError, GpuLost
from perseus_planner.gpu.simulated.catalog import CATALOG
from perseus_planner.gpu.simulated.chip import SETTLE_S, Chip
from perseus_planner.gpu.simulated.gpu import SimulationBase
from perseus_planner.gpu.simulated.model import GpuModel, Load, OpCost
from perseus_planner.gpu.simulated.options import SimulationOptions, format_options, parse_options
from perseus_planner.gpu.simulated.shared_file import SharedState, State
from perseus_planner.processes import boot_id

if TYPE_CHECKING:
    from collections.abc import Callable

UNDISTURBED = SimulationOptions(noise=0.0, step_s=0.0, drift=0.0)
"""What an emulated GPU runs under where its text says nothing else."""

# A clock that is set takes effect SETTLE_S later: who looks more often than that knows of it before.
_SLICE_S = 0.9 * SETTLE_S
_AWAKE_S = 0.2e-3  # before the end it sleeps no more: a sleep may take so much longer than was asked for


@dataclass
class _Run:
    """What a GPU computes.

    Attributes:
        load: what it is.
        left: share of it that is left.
        time: what its time is multiplied by.
        power: what its power is multiplied by.
    """

    load: Load
    left: float
    time: float
    power: float

    def go_on(self, chip: Chip, within_s: float = math.inf) -> None:
        """Let `chip` compute it for so long, or until it is done."""
        self.left = chip.execute(self.load, self.left, self.time, self.power, within_s)


class EmulatedGpu(SimulationBase):
    """One emulated GPU, opened by this process.

    Args:
        model: which GPU.
        number: which of them on this node.
        seed: which of the noises, if any.
        options: slowdown, noise, faults; `UNDISTURBED` where None.

    Raises:
        GpuError: its state cannot be shared.
    """

    keeps_settings = True

    def __init__(self, model: GpuModel, number: int, seed: int = 0, options: SimulationOptions | None = None) -> None:
        super().__init__(model, seed, options or UNDISTURBED)
        self.number = number
        self._made_by = f"{self.driver}, boot {boot_id()}"
        self._shared = SharedState(self.uuid, self._begun)
        self._origin_s = float(self._shared.read()[1]["origin_s"])

    @property
    def text(self) -> str:
        """What opens this very GPU from any process of this user on this node, e.g. "emulated:a100-sxm/0"."""
        options = self._options
        return f"emulated:{self.model.name}/{self.number}{'?' if options else ''}{options}"

    @property
    def simulated_text(self) -> str:
        """What opens the same GPU in virtual time: a profile measured there foretells what this one does."""
        options = format_options(self.seed, self.options)
        return f"simulated:{self.model.name}{'?' if options else ''}{options}"

    @property
    def uuid(self) -> str:
        """User, model, number and options, e.g. "emulated-1000-a100-sxm-0"."""
        options = self._options
        return f"emulated-{os.geteuid()}-{self.model.name}-{self.number}{'-' if options else ''}{options}"

    def now_s(self) -> float:
        """Seconds of this node's monotonic clock."""
        return time.monotonic()

    def wait(self, duration_s: float) -> None:
        """Let so many seconds pass."""
        self._count_call()
        time.sleep(max(0.0, duration_s))

    def run(self, work: OpCost | Load) -> float:
        """Run `work`, and return when it is done: `start`, then `finish`. For the one process that computes on it."""
        self.start(work)
        return self.finish()

    def start(self, work: OpCost | Load) -> None:
        """Begin `work`, as a GPU does when it is launched; what is not done of what was begun before is dropped."""
        now_s = time.monotonic()
        self._count_call()
        load = self.model.load(work) if isinstance(work, OpCost) else work
        if load.memory_s <= 0 and load.megacycles <= 0:
            raise GpuError(f"{self.name} was given work without FLOPs or bytes; give it some")

        def begun(moment: _Moment) -> None:
            moment.run = _Run(load, 1.0, *self._noise(moment.chip, work, 1))

        self._change(begun, now_s)

    def finish(self) -> float:
        """Return when what was begun is done; gives by how many seconds that is too late.

        The clock may be changed by anyone meanwhile: each share of the work takes what it takes at the clock then in
        force. From the end of the work on the GPU waits, however late this returns.

        Raises:
            GpuLost: it falls off meanwhile.
        """
        while True:
            number, state = self._shared.read()
            end_s = self._restored(state).end_s()
            if self._slept_until(end_s, number):
                self._count_call()
                return time.monotonic() - end_s

    def close(self) -> None:
        """Give its file back; harmless when done again."""
        self._shared.close()

    @property
    def _options(self) -> str:
        return format_options(self.seed, self.options, UNDISTURBED)

    @property
    def _chip(self) -> Chip:
        moment = self._restored(self._shared.read()[1])
        moment.advance(time.monotonic())
        return moment.chip

    def _set(self, change: Callable[[Chip], None]) -> None:
        self._check_permission()
        # Once made, a call of the driver is not taken back: who is told to stop meanwhile stops after it.
        time.sleep(max(0.0, self._shared.reserve(self._call_s()) - time.monotonic()))
        self._change(lambda moment: change(moment.chip), time.monotonic())

    def _change(self, change: Callable[[_Moment], None], now_s: float) -> None:
        """Change the GPU at that moment, or when it was changed last if that is later."""

        def changed(state: State) -> State:
            moment = self._restored(state)
            moment.advance(now_s)
            change(moment)
            return moment.saved()

        self._shared.change(changed)

    def _begun(self, state: State | None) -> State:
        """The state of a GPU that no process has had open until now."""
        if state is None or state.get("made_by") != self._made_by:
            return _Moment(self._new_chip(), self._made_by, time.monotonic()).saved()
        moment = self._restored(state)
        moment.run = None  # whoever began it has died
        with suppress(GpuLost):  # it is there again
            moment.advance(time.monotonic())
        moment.chip.begin_anew()
        return replace(moment, origin_s=time.monotonic(), ended_s=0.0).saved()

    def _restored(self, state: State) -> _Moment:
        chip, run = self._new_chip(), state["run"]
        chip.restore(state["chip"])
        if run is not None:
            run = _Run(Load(*run[0]), *run[1:])
        return _Moment(chip, state["made_by"], state["origin_s"], run, state["ended_s"])

    def _new_chip(self) -> Chip:
        return Chip(replace(self.model, sensor_s=0.0), self.options, self._counter_phase_s())

    def _fault_time_s(self) -> float:
        return self.now_s() - self._origin_s

    def _slept_until(self, end_s: float, number: int) -> bool:
        """Return at that moment (True), or soon after the state is not that of this number any more (False)."""
        while (left_s := end_s - time.monotonic()) > 0:
            if left_s > _AWAKE_S:
                time.sleep(min(left_s - _AWAKE_S, _SLICE_S))
                if self._shared.number() != number:
                    return False
        return True


@dataclass
class _Moment:
    """A chip and what it computes.

    Attributes:
        chip: at some moment.
        made_by: the planner that keeps it, and the boot of the node, which settings do not outlive.
        origin_s: when its time was 0, seconds of the monotonic clock.
        run: what it computes; None: it waits.
        ended_s: when it has ended what it computed last, in its own time.
    """

    chip: Chip
    made_by: str
    origin_s: float
    run: _Run | None = None
    ended_s: float = 0.0

    def advance(self, now_s: float) -> None:
        """Go on to this second of the monotonic clock.

        Raises:
            GpuLost: it falls off before.
        """
        meter = self.chip.meter
        if self.run is not None:
            self.run.go_on(self.chip, now_s - self.origin_s - meter.now_s)
            if self.run.left <= 0:
                self.run, self.ended_s = None, meter.now_s
        if self.run is None:
            self.chip.execute(self.chip.waiting, now_s - self.origin_s - meter.now_s, 1.0, 1.0)

    def end_s(self) -> float:
        """When it has done what it computes, or falls off, or had done it; seconds of the monotonic clock."""
        if self.run is not None:
            with suppress(GpuLost):
                self.run.go_on(self.chip)
            self.ended_s = self.chip.meter.now_s
        return self.origin_s + self.ended_s

    def saved(self) -> State:
        """What is shared of it."""
        run = self.run
        return {
            "made_by": self.made_by,
            "origin_s": self.origin_s,
            "chip": self.chip.saved(),
            "run": None if run is None else [list(vars(run.load).values()), run.left, run.time, run.power],
            "ended_s": self.ended_s,
        }


def open_emulated(which: str) -> EmulatedGpu:
    """The emulated GPU that `which` names: a name of the catalogue, a number and options, "a100-sxm/0?slower=2000".

    Raises:
        GpuError: no such GPU, no such option, or its state cannot be shared.
    """
    path, _, options = which.partition("?")
    name, _, number = path.partition("/")
    if name not in CATALOG:
        known = ", ".join(f"emulated:{each}/0" for each in CATALOG)
        raise GpuError(f"GPU 'emulated:{which}': there is no such GPU as {name!r}; choose one of: {known}")
    if not re.fullmatch("[0-9]{1,4}", number):
        raise GpuError(f"GPU 'emulated:{which}': which of them is missing; write a number, such as emulated:{name}/0")
    try:
        seed, parsed = parse_options(options, UNDISTURBED)
    except GpuError as error:
        raise GpuError(f"GPU 'emulated:{which}': {error}") from None
    return EmulatedGpu(CATALOG[name], int(number), seed, parsed)
