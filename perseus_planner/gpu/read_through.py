"""What back-ends share that read a GPU through another one and set it in a way of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perseus_planner.errors import GpuError, GpuNotSupported

if TYPE_CHECKING:
    from collections.abc import Mapping

    from perseus_planner.gpu.protocol import Gpu


class ReadThrough:
    """All readings of a `Gpu`, as another one gives them; who derives from this adds its text and how it is set.

    The methods are written out, not forwarded by `__getattr__`, so that a type checker holds them to the protocol.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    @property
    def uuid(self) -> str:
        """See `Gpu.uuid`."""
        return self._gpu.uuid

    @property
    def name(self) -> str:
        """See `Gpu.name`."""
        return self._gpu.name

    @property
    def origin(self) -> str:
        """See `Gpu.origin`."""
        return self._gpu.origin

    @property
    def driver(self) -> str:
        """See `Gpu.driver`."""
        return self._gpu.driver

    def notices(self) -> tuple[str, ...]:
        """See `Gpu.notices`."""
        return self._gpu.notices()

    @property
    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """See `Gpu.supported_clocks_mhz`."""
        return self._gpu.supported_clocks_mhz

    @property
    def power_limits_w(self) -> tuple[float, float]:
        """See `Gpu.power_limits_w`."""
        return self._gpu.power_limits_w

    def power_limit_w(self) -> float:
        """See `Gpu.power_limit_w`."""
        return self._gpu.power_limit_w()

    def energy_j(self) -> float:
        """See `Gpu.energy_j`."""
        return self._gpu.energy_j()

    def power_w(self) -> float:
        """See `Gpu.power_w`."""
        return self._gpu.power_w()

    def clock_mhz(self) -> int:
        """See `Gpu.clock_mhz`."""
        return self._gpu.clock_mhz()

    def temperature_c(self) -> float:
        """See `Gpu.temperature_c`."""
        return self._gpu.temperature_c()

    def throttle_reasons(self) -> frozenset[str]:
        """See `Gpu.throttle_reasons`."""
        return self._gpu.throttle_reasons()

    def throttled_s(self) -> Mapping[str, float]:
        """See `Gpu.throttled_s`."""
        return self._gpu.throttled_s()

    def now_s(self) -> float:
        """See `Gpu.now_s`."""
        return self._gpu.now_s()

    def wait(self, duration_s: float) -> None:
        """See `Gpu.wait`."""
        self._gpu.wait(duration_s)

    def close(self) -> None:
        """See `Gpu.close`."""
        self._gpu.close()

    def _refuse_unsupported_clock(self, clock_mhz: int) -> None:
        try:
            clocks = self.supported_clocks_mhz
        except GpuNotSupported:
            return  # there are GPUs that lock clocks and list none; then what sets them says what it takes
        if clock_mhz not in clocks:
            nearest = min(clocks, key=lambda supported: abs(supported - clock_mhz))
            raise GpuError(f"{self.name} cannot run at {clock_mhz} MHz; the nearest supported clock is {nearest} MHz")

    def _refuse_unsupported_power_limit(self, limit_w: float) -> None:
        least_w, greatest_w = self.power_limits_w
        if not least_w <= limit_w <= greatest_w:  # also refuses NaN
            raise GpuError(
                f"{self.name} cannot be limited to {limit_w:g} W; its power limit can be set from {least_w:g} to "
                f"{greatest_w:g} W"
            )
