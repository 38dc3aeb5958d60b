"""The controls that a sweep can set: the SM clock, or the power limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from perseus_planner.base.errors import GpuError

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
        settings, set_to, reset = gpu.supported_clocks_mhz, gpu.set_clock_mhz, gpu.reset_clocks
    else:
        least_w, top_w = gpu.power_limits_w[0], math.floor(gpu.power_limit_w())
        settings = tuple(range(top_w, math.ceil(least_w) - 1, -_LIMIT_STEP_W))
        set_to, reset = gpu.set_power_limit_w, gpu.reset_power_limit
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
