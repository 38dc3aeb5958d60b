"""Measurements of one computation at one clock, and the evidence behind them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from perseus_planner.base.errors import ProfileError
from perseus_planner.base.units import (
    CLOCK,
    COUNT,
    ENERGY,
    TEMPERATURE,
    TIME,
    WAIT,
    Rule,
    check_fields,
)


@dataclass(frozen=True)
class Evidence:
    """How a measurement was made; plans do not depend on it.

    Raises:
        ProfileError: If a value is out of range.
    """

    achieved_mhz: float  #: the SM clock at which the GPU ran, MHz, mean over the windows
    time_stderr_s: float  #: standard error of the time, seconds
    energy_stderr_j: float  #: standard error of the energy, joules
    windows: int  #: number of measuring windows
    temperature_c: float  #: core temperature, degrees Celsius, mean over the windows
    #: the reasons of `gpu.THROTTLE_REASONS` that were seen, in their order.
    throttle: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, EVIDENCE, ProfileError)


EVIDENCE: Mapping[str, Rule] = MappingProxyType(
    {
        "achieved_mhz": Rule(float, False, "a clock: write MHz above 0, such as 1395"),
        "time_stderr_s": WAIT,
        "energy_stderr_j": ENERGY,
        "windows": COUNT,
        "temperature_c": TEMPERATURE,
    }
)
"""The rule of each number of an `Evidence`."""


@dataclass(frozen=True)
class Measurement:
    """One computation at one clock.

    Raises:
        ProfileError: If a value is out of range.
    """

    #: the SM clock that was set, MHz, above 0; in a profile of power limits the limit, watts.
    clock_mhz: int
    time_s: float  #: its duration, seconds, above 0
    energy_j: float  #: the energy that the GPU used for it, joules, 0 or more
    #: how it was measured, if that is known; measurements that differ only in it are equal.
    evidence: Evidence | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(self, {"clock_mhz": CLOCK, "time_s": TIME, "energy_j": ENERGY}, ProfileError)


def nearest_clock(measured: Collection[int], clock_mhz: int) -> int:
    """Return `clock_mhz` if it was measured, else the next lower clock that was, else the lowest
    one.
    """
    if clock_mhz in measured:
        return clock_mhz
    return max(
        (measured_mhz for measured_mhz in measured if measured_mhz < clock_mhz),
        default=min(measured),
    )
