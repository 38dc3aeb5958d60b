"""A GPU that the zeusd daemon sets, for jobs without privilege, and NVML reads.

`which` is what `nvml.opened` takes. The daemon may see more GPUs than this container does, so its GPU is found by PCI
address, never by index. Only where the NVML library is not here, `which` is an index of the daemon's or a PCI address,
and zeusd alone reads.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from perseus_planner.errors import GpuError, GpuNotPermitted, GpuNotSupported
from perseus_planner.gpu.nvml import gpu as nvml
from perseus_planner.gpu.nvml_read import NvmlRead
from perseus_planner.gpu.zeusd_daemon import found, pci_address
from perseus_planner.gpu.zeusd_http import Daemon, connected

if TYPE_CHECKING:
    from collections.abc import Mapping

_LIBRARY_NOT_FOUND = 12  # of nvmlReturn_t

_KEPT = "zeusd keeps what it has set when the process that asked for it has ended; `planner reset` undoes that"


class ZeusdGpu(NvmlRead):
    """Reads `gpu`, and what that cannot read through zeusd; sets it through zeusd.

    Args:
        gpu: what is read.
        daemon: has the same GPU.

    Raises:
        GpuError: the daemon does not have it.
    """

    def __init__(self, gpu: nvml.NvmlGpu, daemon: Daemon) -> None:
        super().__init__(gpu)
        bus_id = self._device.call("nvmlDeviceGetPciInfo", what="read its PCI address").busId
        address = bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id)
        self._daemon, self._daemon_gpu = daemon, found(daemon, address)

    @property
    def text(self) -> str:
        """See `Gpu.text`."""
        return f"zeusd:{self.uuid}"

    def notices(self) -> tuple[str, ...]:
        """See `Gpu.notices`."""
        return (*self._gpu.notices(), *_notices(self._daemon))

    def reset_clocks(self) -> None:
        """Undo `set_clock_mhz`; raises `GpuError` where zeusd cannot be reached or refuses."""
        self._daemon_gpu.reset_clocks()

    def energy_j(self) -> float:
        """See `Gpu.energy_j`."""
        try:
            return self._gpu.energy_j()
        except (GpuNotPermitted, GpuNotSupported):
            return self._daemon_gpu.energy_j()

    def power_w(self) -> float:
        """See `Gpu.power_w`."""
        try:
            return self._gpu.power_w()
        except (GpuNotPermitted, GpuNotSupported):
            return self._daemon_gpu.power_w()

    def close(self) -> None:
        """See `Gpu.close`."""
        super().close()
        self._daemon.close()

    def _lock_clock(self, clock_mhz: int) -> None:
        self._daemon_gpu.lock_clock(clock_mhz)

    def _limit_power(self, limit_w: float) -> None:
        self._daemon_gpu.set_power_limit_w(limit_w)


class ZeusdAloneGpu:
    """A GPU that zeusd both sets and reads: energy, power and power limits, no more.

    Args:
        daemon: has it.
        which: the daemon's index of it, or its PCI address.

    Raises:
        GpuError: the daemon does not have it.
    """

    origin = "measured"
    driver = "unknown to zeusd"
    keeps_settings = True

    def __init__(self, daemon: Daemon, which: str) -> None:
        self._daemon, self._daemon_gpu = daemon, found(daemon, which)

    @property
    def text(self) -> str:
        """See `Gpu.text`."""
        return f"zeusd:{self._daemon_gpu.pci_address}"

    @property
    def uuid(self) -> str:
        """The PCI address, as zeusd does not tell UUIDs: another than NVML's of the same GPU."""
        return f"PCI-{self._daemon_gpu.pci_address}"

    @property
    def name(self) -> str:
        """See `Gpu.name`."""
        return self._daemon_gpu.name

    def notices(self) -> tuple[str, ...]:
        """See `Gpu.notices`."""
        alone = (
            "zeusd alone reads this GPU: no list of clocks, achieved clock, temperature or throttle reasons; for "
            "those, make libnvidia-ml.so.1 visible here (in a container, NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
        )
        return (alone, *_notices(self._daemon))

    @property
    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """Not supported."""
        raise self._unread("which clocks a GPU supports")

    def set_clock_mhz(self, clock_mhz: int) -> None:
        """Lock the SM clock; raises `GpuError` where zeusd cannot be reached or refuses."""
        self._daemon_gpu.lock_clock(clock_mhz)

    def reset_clocks(self) -> None:
        """Undo `set_clock_mhz`; raises `GpuError` as that does."""
        self._daemon_gpu.reset_clocks()

    @property
    def power_limits_w(self) -> tuple[float, float]:
        """See `Gpu.power_limits_w`."""
        return self._daemon_gpu.power_limits_w()

    def power_limit_w(self) -> float:
        """See `Gpu.power_limit_w`."""
        return self._daemon_gpu.power_limit_w()

    def set_power_limit_w(self, limit_w: float) -> None:
        """Not supported, as it could not be undone."""
        raise self._unread("the default power limit, so that one that is set could not be reset")

    def reset_power_limit(self) -> None:
        """Not supported."""
        raise self._unread("the default power limit")

    def energy_j(self) -> float:
        """See `Gpu.energy_j`."""
        return self._daemon_gpu.energy_j()

    def power_w(self) -> float:
        """See `Gpu.power_w`."""
        return self._daemon_gpu.power_w()

    def clock_mhz(self) -> int:
        """Not supported."""
        raise self._unread("the achieved clock")

    def temperature_c(self) -> float:
        """Not supported."""
        raise self._unread("the temperature")

    def throttle_reasons(self) -> frozenset[str]:
        """Not supported."""
        raise self._unread("throttle reasons")

    def throttled_s(self) -> Mapping[str, float]:
        """Empty."""
        return {}

    def now_s(self) -> float:
        """See `Gpu.now_s`."""
        return time.monotonic()

    def wait(self, duration_s: float) -> None:
        """See `Gpu.wait`."""
        time.sleep(duration_s)

    def close(self) -> None:
        """See `Gpu.close`."""
        self._daemon.close()

    def _unread(self, what: str) -> GpuNotSupported:
        return GpuNotSupported(
            f"GPU {self.text!r}: zeusd does not tell {what}; make libnvidia-ml.so.1 visible here, "
            "and name the GPU by its index or UUID"
        )


def opened(which: str) -> ZeusdGpu | ZeusdAloneGpu:
    """The GPU that `which` names.

    Raises:
        GpuError: there is no zeusd, or it does not have this GPU; otherwise as `nvml.opened`.
    """
    with ExitStack() as on_error:
        read = _read_by_nvml(which)
        if read:
            on_error.callback(read.close)
        daemon = connected()
        on_error.callback(daemon.close)
        gpu = ZeusdGpu(read, daemon) if read else ZeusdAloneGpu(daemon, which)
        on_error.pop_all()
    return gpu


def _notices(daemon: Daemon) -> tuple[str, ...]:
    if not daemon.elsewhere:
        return (_KEPT,)
    here = (
        f"zeusd is reached over the network, at {daemon.where}: make sure that it runs on this node, as the GPUs of "
        "another one may well have the same PCI addresses"
    )
    return (here, _KEPT)


def _read_by_nvml(which: str) -> nvml.NvmlGpu | None:
    """The GPU through NVML; None where NVML or its binding is not installed here, and zeusd can find it by `which`."""
    try:
        return nvml.opened(which)
    except GpuError as error:
        cause = error.__cause__
        absent = isinstance(cause, ImportError) or getattr(cause, "value", None) == _LIBRARY_NOT_FOUND
        if absent and (which.isdecimal() or pci_address(which)):
            return None
        raise
