"""What a stage's GPUs draw while they are really blocked on a neighbour's message."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perseus_planner.profiler.stage import Stage
    from perseus_planner.profiler.windows import Windows


def blocking_power_w(windows: Windows, stage: Stage) -> float | None:
    """Mean watts, at the present setting, over one window; the sum over the GPUs that share the stage.

    Waiting in a receive is not idleness: the kernel that polls for the message keeps the clock up, and so the power
    depends on the clock too.

    Returns:
        None where the stage has no neighbour to wait for.

    Raises:
        GpuError: the energy counter stands still.
    """
    return None if stage.block is None else windows.power_w(partial(stage.block, windows.window_s))
