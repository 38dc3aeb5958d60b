"""GPUs, real or simulated, behind one protocol: lock a clock, read time and energy.

A GPU is chosen by text, `back-end:which`, e.g. `simulated:a100-sxm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from perseus_planner.errors import GpuError
from perseus_planner.gpu.simulated import CATALOGUE, SimulatedGpu

__all__ = ["Gpu", "locked_clock", "open_gpu"]


class Gpu(Protocol):
    """What measuring needs of a GPU."""

    @property
    def name(self) -> str:
        """What a profile is labelled with, e.g. "simulated a100-sxm"."""

    @property
    def origin(self) -> str:
        """How numbers read from this GPU come to be: "measured" or "simulated"."""

    @property
    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """The SM clocks that can be locked, highest first."""

    def set_clock_mhz(self, clock_mhz: int) -> None:
        """Lock the SM clock; a power limit may still hold the achieved clock below it.

        Raises:
            GpuError: the clock is not supported, or may not be set.
        """

    def reset_clocks(self) -> None:
        """Undo `set_clock_mhz`; harmless when nothing is locked.

        Raises:
            GpuError: the clocks may not be reset.
        """

    def energy_j(self) -> float:
        """Cumulative energy counter, joules; only differences mean anything."""

    def now_s(self) -> float:
        """Seconds on the clock by which the energy counter runs; only differences mean anything."""


def open_gpu(text: str, *, seed: int = 0) -> SimulatedGpu:
    """The GPU that `text` names; `seed` chooses the measurement noise of a simulated one.

    Raises:
        GpuError: no such back-end, or no such GPU.
    """
    known = ", ".join(f"simulated:{name}" for name in CATALOGUE)
    back_end, _, which = text.partition(":")
    if back_end != "simulated":
        raise GpuError(f"GPU {text!r}: there is no back-end {back_end!r}; choose one of: {known}")
    if which not in CATALOGUE:
        raise GpuError(f"GPU {text!r}: there is no simulated GPU {which!r}; choose one of: {known}")
    return SimulatedGpu(CATALOGUE[which], seed)


@contextmanager
def locked_clock(gpu: Gpu, clock_mhz: int) -> Iterator[None]:
    """Hold `gpu` at `clock_mhz` inside the block; reset its clocks on leaving, by whatever way.

    Raises:
        GpuError: the clock is not supported, or may not be set or reset.
    """
    try:
        # Inside the try: an interrupt that arrives during the call is raised after it has taken effect.
        gpu.set_clock_mhz(clock_mhz)
        yield
    finally:
        gpu.reset_clocks()
