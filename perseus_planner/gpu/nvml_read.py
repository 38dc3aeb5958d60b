"""What the back-ends share that read a GPU by NVML and set it in another way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from perseus_planner.gpu.nvml.discovery import selected
from perseus_planner.gpu.read_through import ReadThrough

if TYPE_CHECKING:
    from perseus_planner.gpu.nvml.gpu import NvmlGpu


class NvmlRead(ReadThrough, ABC):
    """Reads `gpu`; who derives from this sets it, to values that are supported."""

    keeps_settings = True

    def __init__(self, gpu: NvmlGpu) -> None:
        super().__init__(gpu)
        self._device = selected(gpu.uuid)

    def set_clock_mhz(self, clock_mhz: int) -> None:
        """Lock the SM clock.

        Raises:
            GpuError: the clock is not supported, or what sets it cannot be reached or refuses.
        """
        self._refuse_unsupported_clock(clock_mhz)
        self._lock_clock(clock_mhz)

    def set_power_limit_w(self, limit_w: float) -> None:
        """Set the power limit, to the milliwatt.

        Raises:
            GpuError: it is not within `power_limits_w`, or what sets it cannot be reached or refuses.
        """
        self._refuse_unsupported_power_limit(limit_w)
        self._limit_power(limit_w)

    def reset_power_limit(self) -> None:
        """Set the power limit back to the default that NVML says; raises `GpuError` as `set_power_limit_w` does."""
        default_mw = self._device.call("nvmlDeviceGetPowerManagementDefaultLimit", what="read its default power limit")
        set_mw = self._device.call("nvmlDeviceGetPowerManagementLimit", what="read its power limit")
        if set_mw != default_mw:  # where nothing is to be done, no privilege is needed
            self.set_power_limit_w(default_mw / 1000)

    @abstractmethod
    def _lock_clock(self, clock_mhz: int) -> None:
        """Lock the SM clock, which is supported."""

    @abstractmethod
    def _limit_power(self, limit_w: float) -> None:
        """Set the power limit, which is supported."""
