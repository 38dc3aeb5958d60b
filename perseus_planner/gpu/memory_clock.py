"""The memory clock of a GPU as a GPU of its own: `memory:` before the text of another one.

Its clock is that of the memory. So it is leased, set, reset by the guardian and by `planner reset`,
and timed by `planner doctor --measure-latency` as the SM clock is, beside that one's lease.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from perseus_planner.base.errors import GpuError, GpuNotSupported
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.protocol import ClosedOnExit, check_clock

if TYPE_CHECKING:
    from perseus_planner.gpu.protocol import Gpu


class MemoryClock(ClosedOnExit):
    """Sets the memory clock of `gpu`; all members that are not defined here are the GPU's own."""

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self.text, self.uuid = f"memory:{gpu.text}", f"{gpu.uuid}-memory"
        self.supported_clocks_mhz, self.clock_mhz = gpu.memory_clocks_mhz, gpu.memory_mhz

    def __getattr__(self, name: str) -> Any:
        """Read from the GPU itself."""
        return getattr(self._gpu, name)

    def set_clock_mhz(self, clock_mhz: int) -> None:
        """Lock the memory clock, which the GPU may take long to change."""
        check_clock(cast("Gpu", self), clock_mhz)
        self._gpu.lock_memory(clock_mhz)

    def reset_clocks(self) -> None:
        """Unlock the memory clock."""
        self._gpu.lock_memory(None)

    def close(self) -> None:
        """Close the GPU."""
        self._gpu.close()


def open_memory_clock(which: str) -> Gpu:
    """Open the memory clock of the GPU that `which` names, such as "nvml:0".

    Raises:
        GpuError: If `which` names no GPU that can be opened.
        GpuNotSupported: If its back-end does not set memory clocks.
    """
    gpu = open_gpu(which)
    try:
        if hasattr(gpu, "lock_memory") and not isinstance(gpu, MemoryClock):
            return cast("Gpu", MemoryClock(gpu))
        raise GpuNotSupported(
            f"memory:{which}: this back-end does not set memory clocks; use nvml: or cuda:"
        )
    except GpuError:
        gpu.close()
        raise
