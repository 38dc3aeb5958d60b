"""The controls that a sweep can set, the SM clock or the power limit; and whether locked clocks
have an effect, by the clocks at which the GPU ran under load.

A lock that does nothing leaves the GPU at one clock, whatever is set: the highest one, or one that
Slurm, DCGM or a host sets. A power cap or heat only takes the clock below the lock, and the GPU
says so in its throttle reasons. A dry run locks nothing, as its warnings say, so it is not checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from perseus_planner.base.errors import GpuError
from perseus_planner.gpu.protocol import LOCK_WITHOUT_EFFECT

if TYPE_CHECKING:
    from perseus_planner.gpu import Gpu

_LIMIT_STEP_W = 5


@contextmanager
def opened_control(
    gpu: Gpu, control: str
) -> Iterator[tuple[tuple[int, ...], Callable[[int], None]]]:
    """Yield the settings of `control`, highest first, and the function that sets one; reset the
    GPU on leaving. There is one setting if the GPU is only observed, 0, which sets nothing.
    """
    if control == "observed":
        yield (0,), lambda _: None
        return
    set_to: Callable[[int], None]
    if control == "clock":
        settings = gpu.supported_clocks_mhz
        set_to = gpu.set_clock_mhz
        reset = gpu.reset_clocks
    else:
        least_w = gpu.power_limits_w[0]
        top_w = math.floor(gpu.power_limit_w())
        # From the limit that is in force, under which training runs now, down in steps.
        settings = tuple(range(top_w, math.ceil(least_w) - 1, -_LIMIT_STEP_W))
        set_to = gpu.set_power_limit_w
        reset = gpu.reset_power_limit
    try:
        yield settings, set_to
    finally:
        reset()


def common_settings(settings: Sequence[Sequence[int]]) -> list[int]:
    """Return the settings that all GPUs of a group have, highest first."""
    common = sorted(set.intersection(*map(set, settings)), reverse=True)
    if not common:
        raise GpuError(
            "the GPUs of a stage have no setting in common; give a stage GPUs of one kind"
        )
    return common


TOLERANCE = 0.05
"""Clocks that differ by no more than this share count as equal."""


class LockCheck:
    """The clocks that one computation achieved at those that were set; the highest one is set
    first.

    Args:
        gpu: Text that names the GPU in errors.
    """

    def __init__(self, gpu: str) -> None:
        self._gpu = gpu
        self._achieved_mhz: dict[int, float] = {}
        self._is_throttled = False

    def add(self, clock_mhz: int, achieved_mhz: float, throttle: Collection[str]) -> None:
        """Note that the GPU ran at `achieved_mhz` on average, and what throttled it, while
        `clock_mhz` was set.

        Raises:
            GpuError: If it ran above the clock that was set, and as fast as at the highest one.
        """
        if self._gpu.startswith("dry-run:"):
            return
        self._achieved_mhz[clock_mhz] = achieved_mhz
        self._is_throttled = self._is_throttled or bool(throttle)
        if achieved_mhz > (1 + TOLERANCE) * clock_mhz and self._is_as_at_the_top(achieved_mhz):
            raise self._error(clock_mhz)

    def finish(self) -> None:
        """Check all clocks together.

        Raises:
            GpuError: If the GPU ran at one clock whatever was set, and nothing throttled it.
        """
        if not self._achieved_mhz:
            return
        lowest_mhz = min(self._achieved_mhz)
        # Where only one clock was set, that the GPU ran at one says nothing.
        differ = max(self._achieved_mhz) > (1 + TOLERANCE) * lowest_mhz
        if (
            differ
            and not self._is_throttled
            and self._is_as_at_the_top(self._achieved_mhz[lowest_mhz])
        ):
            raise self._error(lowest_mhz)

    def _is_as_at_the_top(self, achieved_mhz: float) -> bool:
        top_mhz = self._achieved_mhz[max(self._achieved_mhz)]
        return abs(achieved_mhz - top_mhz) <= TOLERANCE * top_mhz

    def _error(self, clock_mhz: int) -> GpuError:
        top_mhz = max(self._achieved_mhz)
        return GpuError(
            f"{self._gpu}: its SM clock was locked at {clock_mhz} MHz, and under load ran at "
            f"{self._achieved_mhz[clock_mhz]:.0f} MHz, as when it was locked at {top_mhz} MHz "
            f"({self._achieved_mhz[top_mhz]:.0f} MHz), {LOCK_WITHOUT_EFFECT}"
        )
