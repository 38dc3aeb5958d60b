"""How a value becomes a clock or a power limit of a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perseus_planner.errors import GpuError
from perseus_planner.gpu.lease.release import restore_power_limit
from perseus_planner.runtime.controller.scheduler import RESET

if TYPE_CHECKING:
    from perseus_planner.gpu.protocol import Gpu
    from perseus_planner.runtime.controller.protocol import Knob


class Setting:
    """One GPU's control.

    Raises:
        GpuError: the power limit that was in force before, to which a reset goes back, cannot be read.
    """

    def __init__(self, gpu: Gpu, control: Knob) -> None:
        self._gpu, self._control = gpu, control
        self._before_w = gpu.power_limit_w() if control == "power-limit" else None

    def set(self, value: int) -> None:
        """Set the GPU to `value`, MHz or watts, or reset it where that is `RESET`.

        Raises:
            GpuError: it did not do that.
        """
        if self._control == "observed":
            return
        if self._control == "power-limit":
            if value == RESET:
                restore_power_limit(self._gpu, self._before_w)
            else:
                self._gpu.set_power_limit_w(float(value))
        elif value == RESET:
            self._gpu.reset_clocks()
        else:
            self._gpu.set_clock_mhz(value)

    def reset(self) -> str | None:
        """Reset the GPU; what went wrong."""
        try:
            self.set(RESET)
        except GpuError as error:
            return str(error)
        return None
