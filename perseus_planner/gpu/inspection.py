"""Inspects what can be read and set on a GPU, and how its energy counter behaves, without
setting anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING

from perseus_planner.base.errors import GpuError, GpuNotPermitted, GpuNotSupported
from perseus_planner.base.prefixes import si
from perseus_planner.gpu.lease.lease import in_use_text
from perseus_planner.gpu.lease.records import LeaseRecord, read_records

if TYPE_CHECKING:
    from perseus_planner.gpu.protocol import Gpu, GpuReader

_WATCH_S = 3.0  #: at most; all known counters move at least once a second
_ENOUGH_S = 1.0  #: after which a power sensor that averages covers the same time as the counter
_ENOUGH_MOVES = 8
_POLL_S = 0.002
CLOCKS = "clocks that can be locked"
"""Name of the reading that lists them."""

_CAP_SYS_ADMIN = 21  #: number of that capability, capabilities(7)

NOT_TRIED = "not tried"
"""Result of a setting that was not made: only making it shows whether it is permitted."""


@dataclass(frozen=True)
class ReadingCheck:
    """Something that can be read on a GPU, or not."""

    name: str  #: What it is
    value: str | None  #: The value with its unit; None if it cannot be read
    problem: str | None  #: Why not, and what to do; None if there is a value


@dataclass(frozen=True)
class SettingCheck:
    """Something that can be set on a GPU, or not."""

    name: str  #: What it is
    result: str  #: "permitted", "not permitted", "not supported", "failed" or `NOT_TRIED`
    remark: str  #: What else is known, or what to do


@dataclass(frozen=True)
class EnergyWatch:
    """The energy counter and the power sensor, watched together."""

    watched_s: float  #: For how long
    #: Median time between two moves of the counter; None if it moved less than twice.
    step_s: float | None = None
    step_j: float | None = None  #: Median size of a move
    counter_w: float | None = None  #: Power by the counter, from its first move to its last
    #: Mean of the sensor over the same time; None if it cannot be read.
    sensor_w: float | None = None
    #: What is wrong with the counter, and what to do; None if nothing is.
    problem: str | None = None


@dataclass(frozen=True)
class Inspection:
    """One GPU, as seen from this process."""

    gpu: str  #: Text that opens the GPU
    #: As in `GpuReader`.
    uuid: str
    name: str
    driver: str
    origin: str
    readings: tuple[ReadingCheck, ...]  #: What can be read
    settings: tuple[SettingCheck, ...]  #: What can be set
    energy: EnergyWatch  #: How its energy counter behaves
    leased_by: str | None  #: The lease of a living process; None if the GPU is free
    stale_leases: tuple[str, ...]  #: Leases of dead processes
    warnings: tuple[str, ...]  #: As in `GpuReader`

    @property
    def can_observe(self) -> bool:
        """Whether its energy can be measured."""
        return self.energy.step_s is not None

    @property
    def can_set_clocks(self) -> bool | None:
        """Whether its clocks can be listed and set; None if that was not tried."""
        lists = any(check.name == CLOCKS and check.value is not None for check in self.readings)
        clock = next(check.result for check in self.settings if check.name == "clock")
        return None if lists and clock == NOT_TRIED else lists and clock == "permitted"


def inspect(gpu: Gpu) -> Inspection:
    """Read everything about a GPU, which takes up to a few seconds, and set nothing.

    Raises:
        GpuError: If the lease records cannot be read.
    """
    records = [record for record in read_records()[0] if record.uuid == gpu.uuid]
    living = [record for record in records if record.is_living]
    return Inspection(
        gpu=gpu.text,
        uuid=gpu.uuid,
        name=gpu.name,
        driver=gpu.driver,
        origin=gpu.origin,
        readings=_check_readings(gpu),
        settings=tuple(
            SettingCheck(name, NOT_TRIED, _hint(gpu.text)) for name in ("clock", "power limit")
        ),
        energy=watch_energy(gpu),
        leased_by=in_use_text(living[0]) if living else None,
        stale_leases=tuple(_stale_text(record) for record in records if record not in living),
        warnings=gpu.warnings(),
    )


def failed_check(name: str, error: GpuError) -> SettingCheck:
    """Return the result of a setting that raised `error`."""
    results = ((GpuNotPermitted, "not permitted"), (GpuNotSupported, "not supported"))
    return SettingCheck(
        name,
        next((text for kind, text in results if isinstance(error, kind)), "failed"),
        str(error),
    )


def watch_energy(gpu: GpuReader) -> EnergyWatch:
    """Watch the energy counter until it has moved often enough, or for a few seconds."""
    start_s = gpu.now_s()
    moves: list[tuple[float, float]] = []
    powers: list[tuple[float, float | None]] = []
    try:
        before_j = gpu.energy_j()
        while not _enough(moves) and gpu.now_s() - start_s < _WATCH_S:
            gpu.wait(_POLL_S)
            energy_j, now_s = gpu.energy_j(), gpu.now_s()
            if energy_j != before_j:
                moves.append((now_s, energy_j))
            before_j = energy_j
            powers.append((now_s, _power_w(gpu)))
    except GpuError as error:
        return EnergyWatch(gpu.now_s() - start_s, problem=str(error))
    watched_s = gpu.now_s() - start_s
    if len(moves) < 2:
        problem = (
            f"it did not move in {watched_s:.1f} s: the counter is stuck; load the driver again "
            "or reboot the node, as nothing can be measured without it"
        )
        return EnergyWatch(watched_s, problem=problem)
    return _evaluate(watched_s, moves, powers)


def _evaluate(
    watched_s: float,
    moves: Sequence[tuple[float, float]],
    powers: Sequence[tuple[float, float | None]],
) -> EnergyWatch:
    (first_s, first_j), (last_s, last_j) = moves[0], moves[-1]
    between_w = [
        power_w for at_s, power_w in powers if first_s <= at_s <= last_s and power_w is not None
    ]
    went_back = any(after_j < before_j for (_, before_j), (_, after_j) in pairwise(moves))
    return EnergyWatch(
        watched_s,
        step_s=median(after_s - before_s for (before_s, _), (after_s, _) in pairwise(moves)),
        step_j=median(after_j - before_j for (_, before_j), (_, after_j) in pairwise(moves)),
        counter_w=(last_j - first_j) / (last_s - first_s),
        sensor_w=fmean(between_w) if between_w else None,
        problem="it went back, as when the driver is loaded again; turn persistence mode on"
        if went_back
        else None,
    )


def _enough(moves: Sequence[tuple[float, float]]) -> bool:
    return len(moves) >= _ENOUGH_MOVES and moves[-1][0] - moves[0][0] >= _ENOUGH_S


def _power_w(gpu: GpuReader) -> float | None:
    try:
        return gpu.power_w()
    except GpuError:
        return None


def _check_readings(gpu: GpuReader) -> tuple[ReadingCheck, ...]:
    readings: tuple[tuple[str, Callable[[], str]], ...] = (
        (CLOCKS, lambda: _clocks(gpu.supported_clocks_mhz)),
        ("clock", lambda: f"{gpu.clock_mhz()} MHz"),
        ("power limits", lambda: "{:g} to {:g} W".format(*gpu.power_limits_w)),
        (
            "power limit",
            lambda: f"{gpu.power_limit_w():g} W, by default {gpu.default_power_limit_w():g} W",
        ),
        ("power", lambda: si(gpu.power_w(), "W")),
        ("energy counter", lambda: si(gpu.energy_j(), "J", 6)),
        ("temperature", lambda: f"{gpu.temperature_c():g} degrees Celsius"),
        ("throttled now by", lambda: ", ".join(sorted(gpu.throttle_reasons())) or "nothing"),
        ("throttled so far", lambda: _throttled(gpu)),
    )
    return tuple(_check_reading(name, read) for name, read in readings)


def _check_reading(name: str, read: Callable[[], str]) -> ReadingCheck:
    try:
        return ReadingCheck(name, read(), None)
    except GpuError as error:
        return ReadingCheck(name, None, str(error))


def _clocks(clocks_mhz: Sequence[int]) -> str:
    return f"{len(clocks_mhz)} from {clocks_mhz[0]} to {clocks_mhz[-1]} MHz"


def _throttled(gpu: GpuReader) -> str:
    counted = gpu.throttled_s()
    return (
        ", ".join(f"{reason} {si(counted[reason], 's')}" for reason in sorted(counted))
        or "not counted"
    )


def _hint(text: str) -> str:
    return f"{_privilege(text)}; `planner doctor --measure-latency` tries it"


def _privilege(text: str) -> str:
    """Return what is known about permission before anything is set."""
    back_end = text.partition(":")[0]
    if back_end in ("zeusd", "command"):
        return f"{back_end} sets it, so this process needs no privilege"
    if back_end not in ("nvml", "amd"):
        return "no privilege is needed"
    if _has_sys_admin():
        return "this process has CAP_SYS_ADMIN, which setting needs"
    if os.geteuid() == 0:
        return (
            "root without CAP_SYS_ADMIN, which setting needs: start the container with "
            "--cap-add SYS_ADMIN"
        )
    other = ", or choose the back-end zeusd: or command:" if back_end == "nvml" else ""
    return f"setting needs root: run as root{other}"


def _has_sys_admin() -> bool:
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        effective = next((line.split()[1] for line in file if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _CAP_SYS_ADMIN & 1)


def _stale_text(record: LeaseRecord) -> str:
    return f"{record.owner} leased it at {record.since} and died; run `planner reset`"
