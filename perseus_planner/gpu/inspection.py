"""What can be read and set on a GPU here, and how its energy counter behaves; nothing is set."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING

from perseus_planner.errors import GpuError, GpuNotPermitted, GpuNotSupported
from perseus_planner.gpu.lease.lease import in_use_text
from perseus_planner.gpu.lease.records import LeaseRecord, read_records

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from perseus_planner.gpu.protocol import Gpu

_WATCH_S = 3.0  #: at most; no counter that is known steps more rarely than once a second
_ENOUGH_S = 1.0  #: in which a power sensor that averages has seen as much as the counter
_ENOUGH_MOVES = 8
_POLL_S = 0.002
_CAP_SYS_ADMIN = 21  #: bit of that capability, capabilities(7)

NOT_TRIED = "not tried"
"""Of a setting: whether it is permitted shows only when it is made, which nobody asked for."""


@dataclass(frozen=True)
class Reading:
    """One thing that can be read of a GPU, or not.

    Attributes:
        name: what it is.
        value: what was read, with its unit; None: nothing.
        problem: why not, and what to do; None where there is a value.
    """

    name: str
    value: str | None
    problem: str | None


@dataclass(frozen=True)
class Setting:
    """One thing that may be settable on a GPU.

    Attributes:
        name: what it is.
        answer: "permitted", "not permitted", "not supported", "failed" or `NOT_TRIED`.
        remark: what is known besides, or what to do.
    """

    name: str
    answer: str
    remark: str


@dataclass(frozen=True)
class EnergyWatch:
    """The energy counter and the power sensor, watched together while nothing was set.

    Attributes:
        watched_s: for how long.
        step_s: median time between two moves of the counter; None: it moved less than twice.
        step_j: median size of a move.
        counter_w: power by the counter, from its first move to its last.
        sensor_w: mean of the sensor over the same time; None: it cannot be read.
        problem: what is wrong with the counter, and what to do; None: nothing.
    """

    watched_s: float
    step_s: float | None = None
    step_j: float | None = None
    counter_w: float | None = None
    sensor_w: float | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Inspection:
    """One GPU, as seen from this process.

    Attributes:
        gpu, uuid, name, driver, origin: what it is, as `Gpu` has them.
        readings: what can be read.
        settings: what can be set.
        energy: how its energy counter behaves.
        held_by: which process sets it now; None: none.
        left_behind: what dead processes left set.
        warnings: what to know before trusting a profile of it.
    """

    gpu: str
    uuid: str
    name: str
    driver: str
    origin: str
    readings: tuple[Reading, ...]
    settings: tuple[Setting, ...]
    energy: EnergyWatch
    held_by: str | None
    left_behind: tuple[str, ...]
    warnings: tuple[str, ...]


def inspect(gpu: Gpu) -> Inspection:
    """Read all there is to read of `gpu`; takes up to a few seconds of its clock, and sets nothing.

    Raises:
        GpuError: the records of who sets which GPU cannot be read.
    """
    records = [record for record in read_records()[0] if record.uuid == gpu.uuid]
    living = [record for record in records if record.owner.is_alive()]
    return Inspection(
        gpu=gpu.text,
        uuid=gpu.uuid,
        name=gpu.name,
        driver=gpu.driver,
        origin=gpu.origin,
        readings=_readings(gpu),
        settings=tuple(Setting(name, NOT_TRIED, _hint(gpu.text)) for name in ("clock", "power limit")),
        energy=watch_energy(gpu),
        held_by=in_use_text(living[0]) if living else None,
        left_behind=tuple(_left_text(record) for record in records if record not in living),
        warnings=gpu.warnings(),
    )


def refused(name: str, error: GpuError) -> Setting:
    """The setting that `error` says cannot be made."""
    kinds = ((GpuNotPermitted, "not permitted"), (GpuNotSupported, "not supported"))
    return Setting(name, next((answer for kind, answer in kinds if isinstance(error, kind)), "failed"), str(error))


def watch_energy(gpu: Gpu) -> EnergyWatch:
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
        problem = f"no step was seen in {watched_s:.1f} s: the counter is stuck; measure by the power sensor instead"
        return EnergyWatch(watched_s, problem=problem)
    return _watched(watched_s, moves, powers)


def _watched(
    watched_s: float, moves: Sequence[tuple[float, float]], powers: Sequence[tuple[float, float | None]]
) -> EnergyWatch:
    (first_s, first_j), (last_s, last_j) = moves[0], moves[-1]
    between_w = [power_w for at_s, power_w in powers if first_s <= at_s <= last_s and power_w is not None]
    back = any(after_j < before_j for (_, before_j), (_, after_j) in pairwise(moves))
    return EnergyWatch(
        watched_s,
        step_s=median(after_s - before_s for (before_s, _), (after_s, _) in pairwise(moves)),
        step_j=median(after_j - before_j for (_, before_j), (_, after_j) in pairwise(moves)),
        counter_w=(last_j - first_j) / (last_s - first_s),
        sensor_w=fmean(between_w) if between_w else None,
        problem="the counter went back, as when the driver is loaded again: turn persistence mode on" if back else None,
    )


def _enough(moves: Sequence[tuple[float, float]]) -> bool:
    return len(moves) >= _ENOUGH_MOVES and moves[-1][0] - moves[0][0] >= _ENOUGH_S


def _power_w(gpu: Gpu) -> float | None:
    try:
        return gpu.power_w()
    except GpuError:
        return None


def _readings(gpu: Gpu) -> tuple[Reading, ...]:
    ways: tuple[tuple[str, Callable[[], str]], ...] = (
        ("clocks that can be locked", lambda: _clocks(gpu.supported_clocks_mhz)),
        ("clock", lambda: f"{gpu.clock_mhz()} MHz"),
        ("power limits", lambda: "{:g} to {:g} W".format(*gpu.power_limits_w)),
        ("power limit", lambda: f"{gpu.power_limit_w():g} W"),
        ("power", lambda: f"{gpu.power_w():.1f} W"),
        ("energy counter", lambda: f"{gpu.energy_j():.3f} J"),
        ("temperature", lambda: f"{gpu.temperature_c():g} degrees Celsius"),
        ("throttled now by", lambda: ", ".join(sorted(gpu.throttle_reasons())) or "nothing"),
        ("throttled so far", lambda: _throttled(gpu)),
    )
    return tuple(_reading(name, read) for name, read in ways)


def _reading(name: str, read: Callable[[], str]) -> Reading:
    try:
        return Reading(name, read(), None)
    except GpuError as error:
        return Reading(name, None, str(error))


def _clocks(clocks_mhz: Sequence[int]) -> str:
    return f"{len(clocks_mhz)} from {clocks_mhz[0]} to {clocks_mhz[-1]} MHz"


def _throttled(gpu: Gpu) -> str:
    counted = gpu.throttled_s()
    return ", ".join(f"{reason} {counted[reason]:.3f} s" for reason in sorted(counted)) or "not counted"


def _hint(text: str) -> str:
    return f"{_privilege(text)}; `planner doctor --measure-latency` tries it"


def _privilege(text: str) -> str:
    """What is known of permission without setting anything."""
    back_end = text.partition(":")[0]
    if back_end in ("zeusd", "command"):
        return f"{back_end} sets it, whatever this process may do"
    if back_end != "nvml":
        return "no privilege is needed"
    if _has_sys_admin():
        return "this process has CAP_SYS_ADMIN, which setting needs"
    if os.geteuid() == 0:
        return "root without CAP_SYS_ADMIN, which setting needs: start the container with --cap-add SYS_ADMIN"
    return "setting needs root: run as root, or choose the back-end zeusd: or command:"


def _has_sys_admin() -> bool:
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        effective = next((line.split()[1] for line in file if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _CAP_SYS_ADMIN & 1)


def _left_text(record: LeaseRecord) -> str:
    return f"{record.owner} has set it since {record.since} and died; run `planner reset`"
