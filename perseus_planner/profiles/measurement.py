"""Measurements of one computation at one clock, and the evidence behind them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated

from perseus_planner.base.errors import ProfileError
from perseus_planner.base.fields import Checked
from perseus_planner.base.units import Celsius, ClockMhz, Count, Joules, Rule, Seconds, Wait

_ACHIEVED = Rule(float, False, "a clock: write MHz above 0, such as 1395")


@dataclass(frozen=True)
class Evidence(Checked, error=ProfileError):
    """How a measurement was made; plans do not depend on it.

    Raises:
        ProfileError: If a value is out of range.
    """

    #: the SM clock at which the GPU ran, MHz, mean over the windows.
    achieved_mhz: Annotated[float, _ACHIEVED]
    time_stderr_s: Wait  #: standard error of the time, seconds
    energy_stderr_j: Joules  #: standard error of the energy, joules
    windows: Count  #: number of measuring windows
    temperature_c: Celsius  #: core temperature, degrees Celsius, mean over the windows
    #: the reasons of `gpu.THROTTLE_REASONS` that were seen, in their order.
    throttle: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measurement(Checked, error=ProfileError):
    """One computation at one clock.

    Raises:
        ProfileError: If a value is out of range.
    """

    #: the SM clock that was set, MHz, above 0; in a profile of power limits the limit, watts.
    clock_mhz: ClockMhz
    time_s: Seconds  #: its duration, seconds, above 0
    energy_j: Joules  #: the energy that the GPU used for it, joules, 0 or more
    #: how it was measured, if that is known; measurements that differ only in it are equal.
    evidence: Evidence | None = field(default=None, compare=False, repr=False)


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
