"""The energy of the host's processors and memory, as Linux counts it: RAPL, in
`/sys/class/powercap` (https://docs.kernel.org/power/powercap/powercap.html).
"""

from __future__ import annotations

import os
from pathlib import Path

from perseus_planner.base.errors import GpuNotPermitted, GpuNotSupported
from perseus_planner.gpu.protocol import RealGpu

FOLDER_VARIABLE = "PLANNER_POWERCAP"
"""The environment variable with the folder of the counters, if it is another one."""


class HostCounter(RealGpu):
    """The processors, or the memory, of all sockets.

    Args:
        text: "cpu" or "dram".
        zones: Folders of their counters.

    Attributes:
        interval_s: Seconds between two updates of a counter, at most.
    """

    interval_s = 0.001

    def __init__(self, text: str, zones: list[Path]) -> None:
        self.text = text
        self.name = f"{len(zones)} zones of powercap"
        self._files = [zone / "energy_uj" for zone in zones]
        self._ranges_uj = [int((zone / "max_energy_range_uj").read_text()) for zone in zones]
        self._last_uj = self._read_uj()
        self._wraps = [0] * len(zones)

    def energy_j(self) -> float:
        """Energy since the host was booted, joules; counters that begin again go on."""
        now_uj = self._read_uj()
        for place, (before, now) in enumerate(zip(self._last_uj, now_uj, strict=True)):
            self._wraps[place] += now < before
        self._last_uj = now_uj
        whole = sum(n * most for n, most in zip(self._wraps, self._ranges_uj, strict=True))
        return (sum(now_uj) + whole) / 1e6

    def power_w(self) -> float:
        """Nothing: there is no sensor.

        Raises:
            GpuNotSupported: Always.
        """
        raise GpuNotSupported(f"{self.text}: the host counts energy and has no sensor of power")

    def _read_uj(self) -> list[int]:
        try:
            return [int(file.read_bytes()) for file in self._files]
        except PermissionError as error:
            raise GpuNotPermitted(
                f"{self.text}: {error.filename} may be read by root alone; run "
                "`chmod a+r /sys/class/powercap/*/energy_uj` as root, or leave host=True out"
            ) from error


def host_counters() -> list[HostCounter]:
    """Return the counters of this host: its processors, and its memory if that is counted.

    Raises:
        GpuNotSupported: If it has none.
        GpuNotPermitted: If this process may not read them.
    """
    folder = Path(os.environ.get(FOLDER_VARIABLE, "/sys/class/powercap"))
    zones: dict[str, list[Path]] = {"cpu": [], "dram": []}
    for zone in sorted(folder.glob("*rapl*:*")):
        if (zone / "energy_uj").exists():
            name = (zone / "name").read_text().strip()
            kind = "cpu" if name.startswith("package") else name
            zones.get(kind, []).append(zone)
    if not zones["cpu"]:
        raise GpuNotSupported(
            f"{folder}: has no energy counters of processors; the kernel module intel_rapl_common "
            "and bare metal have them; leave host=True out"
        )
    return [HostCounter(kind, found) for kind, found in zones.items() if found]
