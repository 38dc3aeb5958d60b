"""A GPU that computes nothing, in virtual time: only how long work takes and what it draws.

The physics are those of `gpu/simulated/model.py`. Beside them stands what makes measuring hard: noise, static power
that follows the temperature, an energy counter that moves in steps, settings that take time and wait for those of the
node's other GPUs, and the faults of `gpu/simulated/options.py`. Time passes only while something runs or waits, or
a setting is made; readings take none, and tell of what was done last.

Equal models, seeds, conditions and calls give equal numbers. The noise of a call of `run` follows from the seed, what
is run, the clock and power limit that are set, and how often the same was run under the same before; not from anything
else that was done. So a sweep that goes on after an interruption meets the noise that it would have met, where it
begins each measurement anew. Temperature and the phase of the energy counter do follow from all that was done before;
the options `drift=0` and `step=0` take them out.
"""

from __future__ import annotations

from bisect import bisect, insort
from typing import TYPE_CHECKING

from perseus_planner.errors import GpuError
from perseus_planner.gpu.simulated.catalog import CATALOGUE
from perseus_planner.gpu.simulated.chip import COUNTED, Chip
from perseus_planner.gpu.simulated.gpu import ModelGpu
from perseus_planner.gpu.simulated.model import GpuModel, Load, OpCost
from perseus_planner.gpu.simulated.options import NOISE, Conditions, number_text, parsed, written

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "CATALOGUE",
    "COUNTED",
    "NOISE",
    "Conditions",
    "GpuModel",
    "Load",
    "Node",
    "OpCost",
    "SimulatedGpu",
    "opened",
]


_REMEMBERED = 4096  #: calls; no GPU of a node is so far behind the others


class Node:
    """What the GPUs of one machine share: the driver's lock, which makes calls that set something wait for each other.

    The GPUs' virtual times begin together. One of them may be ahead of another: a call takes the first gap after its
    own time.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[float, float]] = []  # (start, end) of each, in order

    def call_s(self, now_s: float, duration_s: float) -> float:
        """When a call ends that is made at `now_s` and holds the lock for `duration_s`."""
        start_s = now_s
        for begin_s, end_s in self._calls[max(0, bisect(self._calls, (now_s,)) - 1) :]:
            if start_s + duration_s <= begin_s:
                break
            start_s = max(start_s, end_s)
        insort(self._calls, (start_s, start_s + duration_s))
        del self._calls[:-_REMEMBERED]
        return start_s + duration_s


class SimulatedGpu(ModelGpu):
    """One simulated GPU: a `Gpu` that also runs `OpCost` and waits for messages, both in virtual time.

    Args:
        model: which GPU.
        seed: which of the noises.
        conditions: noise, counter steps, faults.
        node: the machine that it is in; None: one of its own.
    """

    keeps_settings = False

    def __init__(
        self, model: GpuModel, seed: int = 0, conditions: Conditions | None = None, node: Node | None = None
    ) -> None:
        super().__init__(model, seed, conditions or Conditions())
        self._node = node or Node()
        self._only = Chip(self.model, self.conditions, self._counter_phase_s())

    @property
    def _chip(self) -> Chip:
        return self._only

    @property
    def text(self) -> str:
        """What opens one that is equal to this when it was opened, e.g. "simulated:a100-sxm?seed=3"."""
        options = written(self.seed, self.conditions)
        return f"simulated:{self.model.name}{'?' if options else ''}{options}"

    @property
    def uuid(self) -> str:
        """Model, seed and slowdown, e.g. "simulated-a100-sxm-seed-3"."""
        slower = self.conditions.slower
        slowed = f"-slower-{number_text(slower)}" if slower != 1 else ""
        return f"simulated-{self.model.name}-seed-{self.seed}{slowed}"

    def now_s(self) -> float:
        """Virtual time, seconds."""
        return self._chip.meter.now_s

    def wait(self, duration_s: float) -> None:
        """Let so many seconds of virtual time pass with nothing to do."""
        self._called()
        self._chip.idle(duration_s)

    def run(self, work: OpCost | Load, repetitions: int = 1) -> None:
        """Run `work` so many times back to back; virtual time and energy are spent on return.

        A `Load`, such as one fitted to measurements, is run as it is, its own power limit included; a limit that
        is set on this GPU holds beside that.
        """
        self._called()
        load = self.model.load(work) if isinstance(work, OpCost) else work
        self._chip.execute(load, repetitions, *self._noise(self._chip, work, repetitions))

    def block(self, duration_s: float) -> None:
        """Wait for a neighbour's message for so many seconds of virtual time."""
        self._called()
        self._chip.execute(self._chip.waiting, duration_s, 1.0, self._noise(self._chip, "block", 1)[1])

    def close(self) -> None:
        """Nothing is to be given back."""

    def _set(self, change: Callable[[Chip], None]) -> None:
        self._check_permission()
        self._chip.idle(self._node.call_s(self.now_s(), self._call_s()) - self.now_s())
        change(self._chip)


def opened(which: str) -> SimulatedGpu:
    """The simulated GPU that `which` names: a name of `CATALOGUE` and options, such as "a100-sxm?seed=3&noise=0".

    The options are those of `gpu/simulated/options.py`.

    Raises:
        GpuError: no such GPU, or no such option.
    """
    name, _, options = which.partition("?")
    if name not in CATALOGUE:
        known = ", ".join(f"simulated:{each}" for each in CATALOGUE)
        raise GpuError(f"GPU 'simulated:{which}': there is no simulated GPU {name!r}; choose one of: {known}")
    try:
        seed, conditions = parsed(options)
    except GpuError as error:
        raise GpuError(f"GPU 'simulated:{which}': {error}") from None
    return SimulatedGpu(CATALOGUE[name], seed, conditions)
