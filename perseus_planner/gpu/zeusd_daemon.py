"""The GPUs of a zeusd daemon, which sets and reads them for processes that may not.

Source of paths, parameters and answers: zeusd 0.5.0, docs/zeusd/api.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perseus_planner.errors import GpuError
from perseus_planner.gpu.foreign_text import one_line

if TYPE_CHECKING:
    from perseus_planner.gpu.zeusd_http import Daemon


@dataclass(frozen=True)
class DaemonGpu:
    """One GPU of a daemon, and all that zeusd can do with it.

    Its methods raise as `Daemon.ask` and `Daemon.tell`.

    Attributes:
        daemon: whose it is.
        index: NVML's index of it where the daemon runs, which may be another one here.
        name: of the product.
        pci_address: as `pci_address` writes it.
    """

    daemon: Daemon
    index: int
    name: str
    pci_address: str

    def lock_clock(self, clock_mhz: int) -> None:
        """Lock the SM clock."""
        self._tell("set_gpu_locked_clocks", min_clock_mhz=clock_mhz, max_clock_mhz=clock_mhz)

    def reset_clocks(self) -> None:
        """Undo `lock_clock`."""
        self._tell("reset_gpu_locked_clocks")

    def set_power_limit_w(self, limit_w: float) -> None:
        """Set the power limit, to the milliwatt."""
        self._tell("set_power_limit", power_limit_mw=round(1000 * limit_w))

    def energy_j(self) -> float:
        """Cumulative energy, joules."""
        (energy_mj,) = self._read("get_cumulative_energy", (str(self.index), "energy_mj"))
        return energy_mj / 1000

    def power_w(self) -> float:
        """Instant power, watts."""
        (power_mw,) = self._read("get_power", ("power_mw", str(self.index)))
        return power_mw / 1000

    def power_limit_w(self) -> float:
        """The power limit, watts."""
        (limit_mw,) = self._read("get_power_limit", (str(self.index), "power_limit_mw"))
        return limit_mw / 1000

    def power_limits_w(self) -> tuple[float, float]:
        """The least and the greatest power limit, watts."""
        ends = ((str(self.index), "min_power_limit_mw"), (str(self.index), "max_power_limit_mw"))
        least_mw, greatest_mw = self._read("get_power_limit_constraints", *ends)
        return least_mw / 1000, greatest_mw / 1000

    def _tell(self, command: str, **values: int) -> None:
        parameters = {name: str(value) for name, value in values.items()}
        self.daemon.tell(f"/gpu/{command}", gpu_ids=str(self.index), **parameters)

    def _read(self, command: str, *places: tuple[str, str]) -> list[float]:
        """The numbers that stand at these places, each a key and a key below it, of one answer."""
        answer = self.daemon.ask(f"/gpu/{command}", gpu_ids=str(self.index))
        try:
            numbers = [answer[outer][inner] for outer, inner in places]
        except (KeyError, TypeError):
            numbers = [None]
        if not all(type(number) in (int, float) and 0 <= number < 2**64 for number in numbers):
            self.daemon.refuse_answer(f"/gpu/{command}", answer)
        return numbers


def found(daemon: Daemon, which: str) -> DaemonGpu:
    """The GPU of `daemon` that `which` names: a PCI address, or the daemon's index as text.

    Raises:
        GpuError: as `Daemon.ask`; the answer is not zeusd's; or it has no such GPU.
    """
    answer = daemon.ask("/discover")
    try:
        gpus = [_daemon_gpu(daemon, gpu) for gpu in answer["gpus"]]
    except (KeyError, TypeError, ValueError):
        daemon.refuse_answer("/discover", answer)
    wanted = pci_address(which) or which
    for gpu in gpus:
        if wanted in (gpu.pci_address, str(gpu.index)):
            return gpu
    listed = ", ".join(f"{gpu.index} at {gpu.pci_address}" for gpu in gpus) or "none"
    raise GpuError(
        f"zeusd at {daemon.where} has no GPU {wanted!r}; it has {listed}: see whether it is the zeusd of this node, "
        "started with --enable gpu-control,gpu-read"
    )


def pci_address(text: str) -> str | None:
    """`text`, a PCI address of NVML or zeusd, written as `lspci -D` does, e.g. "0000:07:00.0"; None if it is none.

    NVML writes the domain with eight digits, and capitals.
    """
    match = re.fullmatch(r"([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", text.lower())
    return f"{int(match[1], 16):04x}:{match[2]}" if match else None


def _daemon_gpu(daemon: Daemon, discovered: Any) -> DaemonGpu:
    index, name, address = discovered["id"], discovered["name"], pci_address(str(discovered["pci_address"]))
    if type(index) is not int or not isinstance(name, str) or address is None:
        raise ValueError
    return DaemonGpu(daemon, index, one_line(name), address)
