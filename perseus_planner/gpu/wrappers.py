"""Other faces of a GPU, written before its text: `dry-run:` reads it and never sets it; `memory:`
is its memory clock as a GPU of its own.

The clock of the latter is that of the memory. So it is leased, set, reset by the guardian and by
`planner reset`, and timed by `planner doctor --measure-latency` as the SM clock is, beside that
one's lease.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from perseus_planner.base.errors import GpuError, GpuNotSupported
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.protocol import ClosedOnExit, check_clock, check_power_limit

if TYPE_CHECKING:
    from perseus_planner.gpu.protocol import Gpu


class DryRunGpu(ClosedOnExit):
    """Reads `gpu`; does not set it, and rejects the values that `gpu` would reject.

    Args:
        gpu: The GPU to read; all members that are not defined here are its own.
    """

    keeps_settings = False

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.text = f"dry-run:{gpu.text}"

    def __getattr__(self, name: str) -> Any:
        """Read from the GPU itself."""
        return getattr(self._gpu, name)

    def warnings(self) -> tuple[str, ...]:
        """The warnings of the GPU, and that nothing is set."""
        text = (
            "nothing is set in a dry run: the GPU keeps the clock it has; do not plan with this "
            "profile"
        )
        return (*self._gpu.warnings(), text)

    def set_clock_mhz(self, clock_mhz: int) -> None:
        """Check a clock."""
        check_clock(self._gpu, clock_mhz)

    def reset_clocks(self) -> None:
        """Do nothing."""

    def lock_memory(self, clock_mhz: int | None) -> None:
        """Do nothing."""

    def set_power_limit_w(self, limit_w: float) -> None:
        """Check a power limit."""
        check_power_limit(self._gpu, limit_w)

    def reset_power_limit(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Close the GPU that is read."""
        self._gpu.close()


def open_dry_run(which: str) -> Gpu:
    """Open the GPU that `which` names, such as "nvml:0", to be read but not set.

    Raises:
        GpuError: If `which` names no GPU that can be opened.
    """
    # It reads through __getattr__, which type checkers do not see.
    return cast("Gpu", DryRunGpu(open_gpu(which)))


class MemoryClock(ClosedOnExit):
    """Sets the memory clock of `gpu`; all members that are not defined here are the GPU's own."""

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self.text = f"memory:{gpu.text}"
        self.uuid = f"{gpu.uuid}-memory"
        self.supported_clocks_mhz = gpu.memory_clocks_mhz
        self.clock_mhz = gpu.memory_mhz

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
    # A memory clock hands the method through, and has no memory clock of its own.
    try:
        if hasattr(gpu, "lock_memory") and not isinstance(gpu, MemoryClock):
            return cast("Gpu", MemoryClock(gpu))
        raise GpuNotSupported(
            f"memory:{which}: this back-end does not set memory clocks; use nvml: or cuda:"
        )
    except GpuError:
        gpu.close()
        raise
