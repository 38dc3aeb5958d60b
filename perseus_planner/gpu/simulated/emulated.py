"""Emulated GPUs: they compute nothing, but work takes as long in real time as the model says.

    emulated:a100-sxm/0?slower=2000

is GPU 0 of those that this user emulates on this node; other options make a different GPU. It
behaves like `simulated:a100-sxm?slower=2000`, but in real time, and its state is shared: one
process computes on it, others read and set it, and a clock stays locked after the process that
locked it has ended. Emulated GPUs make it possible to run a training job under a plan, with
stragglers and failures, on a machine without GPUs.

The options are those of `options.py`, but without any there are no disturbances: no noise, no
drift, and an exact energy counter. Times of faults count from when a process opens the GPU that no
other has open. The power sensor shows instant power.

While nothing runs, the GPU waits for a message from a neighbour, as in a pipeline.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from perseus_planner.base.errors import GpuError, GpuLost
from perseus_planner.base.processes import boot_id
from perseus_planner.gpu.simulated.chip import SETTLE_S, Chip
from perseus_planner.gpu.simulated.gpu import SimulationBase
from perseus_planner.gpu.simulated.model import GpuModel, Load, OpCost, find_model
from perseus_planner.gpu.simulated.options import SimulationOptions, format_options, parse_options
from perseus_planner.gpu.simulated.state_file import State, StateFile

UNDISTURBED = SimulationOptions(noise=0.0, step_s=0.0, drift=0.0)
"""Default options of an emulated GPU."""

# A clock takes effect SETTLE_S after it is set, so polling more often than that sees it in time.
_SLICE_S = 0.9 * SETTLE_S
# before the end, poll without sleeping: a sleep may take this much longer than asked for
_BUSY_S = 0.2e-3


@dataclass
class _RunningWork:
    """What a GPU computes."""

    load: Load  #: The work
    left: float  #: Share of it that is left
    time: float  #: Factor on its time
    power: float  #: Factor on its power

    def advance(self, chip: Chip, within_s: float = math.inf) -> None:
        """Let `chip` compute for `within_s` seconds, or until the work is done."""
        self.left = chip.execute(self.load, self.left, self.time, self.power, within_s)


class EmulatedGpu(SimulationBase):
    """One emulated GPU, opened by this process.

    Args:
        model: The GPU from the catalog.
        number: Number of the GPU on this node.
        seed: Seed of the noise, if any.
        options: Slowdown, noise, faults; None for `UNDISTURBED`.

    Raises:
        GpuError: If its state cannot be shared.
    """

    keeps_settings = True

    def __init__(
        self, model: GpuModel, number: int, seed: int = 0, options: SimulationOptions | None = None
    ) -> None:
        super().__init__(model, seed, options or UNDISTURBED)
        self.number = number
        self._made_by = f"{self.driver}, boot {boot_id()}"
        self._shared = StateFile(self.uuid, self._first_state)
        self._origin_s = float(self._shared.read()[1]["origin_s"])

    @property
    def text(self) -> str:
        """Text that opens this GPU in any process of this user on this node, e.g.
        "emulated:a100-sxm/0".
        """
        options = self._option_text
        return f"emulated:{self.model.name}/{self.number}{'?' if options else ''}{options}"

    @property
    def simulated_text(self) -> str:
        """Text that opens the same GPU in virtual time; a profile measured there predicts what
        this GPU does.
        """
        options = format_options(self.seed, self.options)
        return f"simulated:{self.model.name}{'?' if options else ''}{options}"

    @property
    def uuid(self) -> str:
        """User, model, number and options, e.g. "emulated-1000-a100-sxm-0"."""
        options = self._option_text and f"-{self._option_text}"
        return f"emulated-{os.geteuid()}-{self.model.name}-{self.number}{options}"

    def now_s(self) -> float:
        """Monotonic clock of this node, seconds."""
        return time.monotonic()

    def wait(self, duration_s: float) -> None:
        """Sleep for `duration_s` seconds."""
        self._count_call()
        time.sleep(max(0.0, duration_s))

    def run(self, work: OpCost | Load) -> float:
        """Run `work`, and return when it is done: `start`, then `finish`. Only one process may
        compute on a GPU.
        """
        self.start(work)
        return self.finish()

    def start(self, work: OpCost | Load) -> None:
        """Launch `work`, and drop what is left of earlier work."""
        now_s = time.monotonic()
        self._count_call()
        load = self.model.load(work) if isinstance(work, OpCost) else work
        if load.memory_s <= 0 and load.megacycles <= 0:
            raise GpuError(f"{self.name} got work without FLOPs or bytes; give it some")

        def begin(snapshot: _Snapshot) -> None:
            snapshot.running = _RunningWork(load, 1.0, *self._noise(snapshot.chip, work, 1))

        self._change(begin, now_s)

    def finish(self) -> float:
        """Wait until the work is done.

        Any process may change the clock meanwhile: each part of the work runs at the clock then in
        force. After the work the GPU waits, however late this method returns.

        Returns:
            How late the method returns, seconds.

        Raises:
            GpuLost: If the GPU falls off the bus meanwhile.
        """
        while True:
            number, state = self._shared.read()
            end_s = self._restored(state).end_s()
            if self._sleep_until(end_s, number):
                self._count_call()
                return time.monotonic() - end_s

    def close(self) -> None:
        """Close the shared file; harmless if repeated."""
        self._shared.close()

    @property
    def _option_text(self) -> str:
        return format_options(self.seed, self.options, UNDISTURBED)

    @property
    def _chip(self) -> Chip:
        snapshot = self._restored(self._shared.read()[1])
        snapshot.advance(time.monotonic())
        return snapshot.chip

    def _set(self, change: Callable[[Chip], None]) -> None:
        self._check_permission()
        # A driver call is not undone once it is made: a process that is stopped meanwhile stops
        # after it.
        time.sleep(max(0.0, self._shared.reserve(self._call_s()) - time.monotonic()))
        self._change(lambda snapshot: change(snapshot.chip), time.monotonic())

    def _change(self, change: Callable[[_Snapshot], None], now_s: float) -> None:
        """Change the GPU at `now_s`, or at the time of the last change if that is later."""

        def changed(state: State) -> State:
            snapshot = self._restored(state)
            snapshot.advance(now_s)
            change(snapshot)
            return snapshot.saved()

        self._shared.change(changed)

    def _first_state(self, state: State | None) -> State:
        """Return the state of a GPU that no process had open; `state` is its last one."""
        if state is None or state.get("made_by") != self._made_by:
            return _Snapshot(self._new_chip(), self._made_by, time.monotonic()).saved()
        snapshot = self._restored(state)
        snapshot.running = None  # the process that launched it has died
        with suppress(GpuLost):  # the GPU is there again
            snapshot.advance(time.monotonic())
        snapshot.chip.restart_time()
        return replace(snapshot, origin_s=time.monotonic(), ended_s=0.0).saved()

    def _restored(self, state: State) -> _Snapshot:
        chip, run = self._new_chip(), state["run"]
        chip.restore(state["chip"])
        running = None if run is None else _RunningWork(Load(*run[0]), *run[1:])
        return _Snapshot(chip, state["made_by"], state["origin_s"], running, state["ended_s"])

    def _new_chip(self) -> Chip:
        return Chip(replace(self.model, sensor_s=0.0), self.options, self._counter_phase_s())

    def _fault_time_s(self) -> float:
        return self.now_s() - self._origin_s

    def _sleep_until(self, end_s: float, number: int) -> bool:
        """Return True at `end_s`, or False soon after the number of the state has changed."""
        while (left_s := end_s - time.monotonic()) > 0:
            if left_s > _BUSY_S:
                time.sleep(min(left_s - _BUSY_S, _SLICE_S))
                if self._shared.number() != number:
                    return False
        return True


@dataclass
class _Snapshot:
    """A chip and what it computes, at one time."""

    chip: Chip  #: The chip
    made_by: str  #: Version of the planner, and boot of the node, which settings do not outlive
    origin_s: float  #: When the chip's time was 0, seconds of the monotonic clock
    running: _RunningWork | None = None  #: What it computes; None if it waits
    ended_s: float = 0.0  #: When it last finished computing, in the chip's time

    def advance(self, now_s: float) -> None:
        """Advance to `now_s` of the monotonic clock.

        Raises:
            GpuLost: If the GPU falls off the bus before.
        """
        meter = self.chip.meter
        if self.running is not None:
            self.running.advance(self.chip, now_s - self.origin_s - meter.now_s)
            if self.running.left <= 0:
                self.running, self.ended_s = None, meter.now_s
        if self.running is None:
            self.chip.execute(self.chip.waiting, now_s - self.origin_s - meter.now_s, 1.0, 1.0)

    def end_s(self) -> float:
        """Return when the work ends or ended, or the GPU falls off the bus, in seconds of the
        monotonic clock.
        """
        if self.running is not None:
            with suppress(GpuLost):
                self.running.advance(self.chip)
            self.ended_s = self.chip.meter.now_s
        return self.origin_s + self.ended_s

    def saved(self) -> State:
        """Return the state to share."""
        run = self.running
        return {
            "made_by": self.made_by,
            "origin_s": self.origin_s,
            "chip": self.chip.saved(),
            "run": None
            if run is None
            else [list(vars(run.load).values()), run.left, run.time, run.power],
            "ended_s": self.ended_s,
        }


def open_emulated(which: str) -> EmulatedGpu:
    """Open an emulated GPU: a name of the catalog, a number and options, e.g.
    "a100-sxm/0?slower=2000".

    Raises:
        GpuError: If there is no such GPU or option, or its state cannot be shared.
    """
    path, _, options = which.partition("?")
    name, _, number = path.partition("/")
    model = find_model(name, f"emulated:{which}", "GPU", "emulated:{}/0")
    if not re.fullmatch("[0-9]{1,4}", number):
        raise GpuError(
            f"GPU 'emulated:{which}': the number is missing; write one, such as emulated:{name}/0"
        )
    try:
        seed, parsed = parse_options(options, UNDISTURBED)
    except GpuError as error:
        raise GpuError(f"GPU 'emulated:{which}': {error}") from None
    return EmulatedGpu(model, int(number), seed, parsed)
