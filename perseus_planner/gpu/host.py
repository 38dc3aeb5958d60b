"""The energy of a host's processors and their memory, as Linux counts it: RAPL, in
`/sys/class/powercap` (https://docs.kernel.org/power/powercap/powercap.html).

These counters are small: those of common servers begin again after 65 or 262 kJ, which takes a
processor at 250 W about 4 or 17 minutes. A counter is therefore read several times before it can
begin again, by whoever calls `energy_j` at least every `period_s` seconds. Where it was not, as in
a process that was suspended, `unread_until_s` says so.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from perseus_planner.base.errors import GpuError, GpuNotPermitted, GpuNotSupported
from perseus_planner.base.prefixes import si
from perseus_planner.gpu.protocol import RealGpu

FOLDER_VARIABLE = "PLANNER_POWERCAP"
"""The environment variable with the folder of the counters, if it is another one."""

MOST_W = 2000.0
"""No processor with its memory draws more over a whole turn of its counter, watts. The largest
server processors are made for 500 W, and their limit for short times is about twice that.
"""

_READINGS = 4
"""How often a counter is to be read while it could begin again once: a late reading does no harm
yet.
"""


class HostCounter(RealGpu):
    """The processors, or the memory, of all sockets. Any thread may call it.

    Args:
        text: "cpu" or "dram".
        zones: Folders of their counters.

    Attributes:
        interval_s: Seconds between two updates of a counter, at most.
        period_s: Call `energy_j` at least so often, in seconds.
        unread_until_s: When the counters were read after they had not been for so long that they
            may have begun again more than once, by `now_s`; None if that never was. Nobody knows
            the energy of a time that includes this moment.

    Raises:
        GpuNotSupported: If a counter does not say when it begins again.
        GpuNotPermitted: If this process may not read them.
        GpuError: If they cannot be read.
    """

    interval_s = 0.001

    def __init__(self, text: str, zones: list[Path]) -> None:
        self.text = text
        self.name = f"{len(zones)} zones of powercap"
        self.unread_until_s: float | None = None
        self._files = [zone / "energy_uj" for zone in zones]
        self._ranges_uj = [_range_uj(text, zone) for zone in zones]
        # At the largest power, the smallest counter begins again first.
        self._turn_s = min(self._ranges_uj) / 1e6 / MOST_W  #: in which none begins again twice
        self.period_s = self._turn_s / _READINGS
        self._lock = threading.Lock()
        self._read_s = self.now_s()  #: before the last reading
        self._last_uj = self._read_uj()
        self._turns = [0] * len(zones)

    def energy_j(self) -> float:
        """Cumulative energy, joules. Only differences are meaningful: counters that begin again
        go on, and may have begun again before they were first read.
        """
        with self._lock:
            begun_s = self.now_s()
            # A lower number than before: it began again, once, as `_turn_s` sees to.
            now_uj = self._read_uj()
            for number, (before, now) in enumerate(zip(self._last_uj, now_uj, strict=True)):
                self._turns[number] += now < before
            # A turn that began and ended unseen cannot be told from none.
            after_s = self.now_s()
            # Measured from before the last reading to after this one: the longest the counters can
            # have run.
            if after_s - self._read_s >= self._turn_s:
                self.unread_until_s = after_s
            self._last_uj = now_uj
            self._read_s = begun_s
            # A counter has shown all of its range by each turn.
            whole = sum(n * most for n, most in zip(self._turns, self._ranges_uj, strict=True))
            return (sum(now_uj) + whole) / 1e6

    def unread(self) -> GpuError:
        """Return the error of a time in which the counters were not read often enough."""
        least_j = min(self._ranges_uj) / 1e6
        return GpuError(
            f"{self.text}: its energy is unknown: its counter begins again after "
            f"{si(least_j, 'J', 6)}, and was not read for {si(self._turn_s, 's', 3)} or longer, as "
            "when the process is stopped; measure again in a process that runs throughout"
        )

    def power_w(self) -> float:
        """Nothing: there is no sensor.

        Raises:
            GpuNotSupported: Always.
        """
        raise GpuNotSupported(f"{self.text}: the host counts energy and has no sensor of power")

    def _read_uj(self) -> list[int]:
        return [_number(self.text, file) for file in self._files]


def host_counters() -> list[HostCounter]:
    """Return the counters of this host: its processors, and its memory if that is counted.

    Raises:
        GpuNotSupported: If it has none, or one that does not say when it begins again.
        GpuNotPermitted: If this process may not read them.
        GpuError: If they cannot be read.
    """
    folder = Path(os.environ.get(FOLDER_VARIABLE, "/sys/class/powercap"))
    zones: dict[str, list[Path]] = {"cpu": [], "dram": []}
    for zone in _zones(folder):
        name = _text(zone / "name", "host")
        # Processors are "package-0" and so on, memory is "dram". Others are left out.
        kind = "cpu" if name.startswith("package") else name
        zones.get(kind, []).append(zone)
    if not zones["cpu"]:
        raise GpuNotSupported(
            f"{folder}: has no energy counters of processors; the kernel module intel_rapl_common "
            "and bare metal have them; leave host=True out"
        )
    return [HostCounter(kind, folders) for kind, folders in zones.items() if folders]


def _zones(folder: Path) -> list[Path]:
    """Return the zones that count energy, each once: Linux may show the same ones twice, read
    through registers (intel-rapl:0) and through memory (intel-rapl-mmio:0).
    """
    zones = [zone for zone in sorted(folder.glob("*rapl*:*")) if (zone / "energy_uj").exists()]
    # Twice in the list would count its energy twice.
    names = {zone.name for zone in zones}
    return [
        zone
        for zone in zones
        if "-mmio:" not in zone.name or zone.name.replace("-mmio:", ":") not in names
    ]


def _range_uj(text: str, zone: Path) -> int:
    """Return after how many microjoules a counter begins again."""
    file = zone / "max_energy_range_uj"
    range_uj = _number(text, file) if file.exists() else 0
    if range_uj > 0:
        return range_uj
    raise GpuNotSupported(
        f"{text}: {file} does not say after how much energy the counter begins again, so that it "
        "cannot be followed; leave host=True out"
    )


def _number(text: str, file: Path) -> int:
    number = _text(file, text)
    if number.isascii() and number.isdecimal():
        return int(number)
    raise GpuError(f"{text}: {file} has {number[:40]!r}, which is no number; leave host=True out")


def _text(file: Path, text: str) -> str:
    try:
        return file.read_bytes().decode(errors="replace").strip()
    except PermissionError as error:
        raise GpuNotPermitted(
            f"{text}: {error.filename} may be read by root alone; run "
            "`chmod a+r /sys/class/powercap/*/energy_uj` as root, or leave host=True out"
        ) from error
    except OSError as error:
        raise GpuError(
            f"{text}: {file} cannot be read: {error.strerror}; leave host=True out"
        ) from error
