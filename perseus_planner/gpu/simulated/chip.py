"""What a simulated GPU does in virtual time: its clock, power, temperature and counters from moment to moment."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from perseus_planner.errors import GpuLost
from perseus_planner.gpu.simulated.meter import Meter
from perseus_planner.gpu.simulated.model import REFERENCE_C, GpuModel, Load

if TYPE_CHECKING:
    from perseus_planner.gpu.simulated.options import SimulationOptions

COUNTED = ("sw-power-cap", "sw-thermal", "hw-thermal")
"""The throttle reasons that a simulated GPU has and counts."""

SETTLE_S = 0.9e-3
"""For how long after a call the clock is still what it was: the mean on an A800, in an unpublished measurement."""

_THROTTLED = 0.7  # share of the clock that is left by the fault
_SETTLED_K = 1e-3  # so near to where it ends, the temperature does not change any more
_PIECE = 0.1  # share of the warming time constant in which the temperature is taken not to change


class Chip:
    """The state of one GPU, and how it goes on.

    Args:
        model: which GPU.
        conditions: air, drift, counter steps and faults.
        phase_s: when the energy counter moves first.
    """

    def __init__(self, model: GpuModel, conditions: SimulationOptions, phase_s: float) -> None:
        idle_w = model.idle_power_w
        self.limit_w: float | None = None  #: the power limit that is set; None: the default, that of each load
        self.locked_mhz: int | None = None  #: what is locked
        self.clock_mhz = float(model.clocks_mhz[-1])  #: what was done last ran at this
        self.reasons: frozenset[str] = frozenset()  #: what held that back
        self.throttled_s = dict.fromkeys(COUNTED, 0.0)  #: for how long each reason held
        self.temperature_c = conditions.air_c + model.warming_k_per_w * idle_w
        faults = conditions.faults
        self.meter = Meter(conditions.step_s, phase_s, model.sensor_s, faults.counter_stuck_at_s, idle_w)
        self.waiting = model.blocking()  #: one second of waiting for a message
        self._model, self._conditions, self._faults = model, conditions, faults
        # Until when the clock is still what it was, and what was locked then.
        self._before: tuple[float, int | None] = (0.0, None)

    def lock(self, clock_mhz: int | None) -> None:
        """Lock a clock, or none; it is followed a little later."""
        self._before = (self.meter.now_s + SETTLE_S, self.locked_mhz)
        self.locked_mhz = clock_mhz

    def limit(self, limit_w: float | None) -> None:
        """Set a power limit, watts, or the default one; it is in force at once."""
        self.limit_w = limit_w

    def idle(self, duration_s: float) -> None:
        """Do nothing for so long.

        Raises:
            GpuLost: it falls off meanwhile.
        """
        while duration_s > 0:
            piece_s = min(duration_s, self._unchanged_s(self._model.idle_power_w))
            clock_mhz = self._followed_mhz() or self._model.clocks_mhz[-1]
            self._spend(piece_s, self._model.idle_power_w, clock_mhz, frozenset())
            duration_s -= piece_s

    def execute(self, load: Load, repetitions: float, time: float, power: float, within_s: float = math.inf) -> float:
        """Run `load` so many times, with its time and power multiplied, but for no longer than `within_s`.

        Returns how many repetitions are left then, shares included.

        Raises:
            GpuLost: it falls off meanwhile.
        """
        ends_s = self.meter.now_s + within_s
        while repetitions > 0 and self.meter.now_s < ends_s:
            clock_mhz, power_w, reasons = self._under(load, power)
            once_s = load.free_time_s(clock_mhz) * time
            whole_s, piece_s = once_s * repetitions, min(self._unchanged_s(power_w), ends_s - self.meter.now_s)
            self._spend(min(whole_s, piece_s), power_w, clock_mhz, reasons)
            repetitions = repetitions - piece_s / once_s if piece_s < whole_s else 0.0
        return repetitions

    def _under(self, load: Load, power: float) -> tuple[float, float, frozenset[str]]:
        """Clock and power at which `load` runs now, and what holds the clock back."""
        wanted_mhz = float(self._followed_mhz() or self._model.clocks_mhz[0])
        reasons = set()
        if self._faults.throttled_at(self.meter.now_s):
            wanted_mhz *= _THROTTLED
            reasons.add("hw-thermal")
        set_w = math.inf if self.limit_w is None else self.limit_w
        limit_w, reason = min((min(load.power_limit_w, set_w), "sw-power-cap"), (self._cooled_w(), "sw-thermal"))
        warmth = 1 + self._conditions.drift * self._model.leakage_per_k * (self.temperature_c - REFERENCE_C)
        limited = replace(load, static_w=load.static_w * warmth, power_limit_w=limit_w)
        clock_mhz = limited.achieved_mhz(wanted_mhz)
        if clock_mhz < wanted_mhz:
            reasons.add(reason)
        power_w = max(limited.static_w, min(limited.free_power_w(clock_mhz) * power, limit_w))
        return clock_mhz, power_w, frozenset(reasons)

    def _cooled_w(self) -> float:
        """What may be drawn so that it gets no hotter; infinite below the temperature at which that is asked."""
        model = self._model
        if self.temperature_c < model.slowdown_c:
            return math.inf
        return (model.slowdown_c - self._conditions.air_c) / model.warming_k_per_w

    def _followed_mhz(self) -> int | None:
        until_s, before_mhz = self._before
        return before_mhz if self.meter.now_s < until_s else self.locked_mhz

    def saved(self) -> dict[str, Any]:
        """The state as JSON has it, for `restore`."""
        return {
            "meter": self.meter.saved(),
            "limit_w": self.limit_w,
            "locked_mhz": self.locked_mhz,
            "before": list(self._before),
            "clock_mhz": self.clock_mhz,
            "reasons": sorted(self.reasons),
            "throttled_s": dict(self.throttled_s),
            "temperature_c": self.temperature_c,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on from what another chip of this model and these conditions has saved."""
        self.meter.restore(saved["meter"])
        until_s, before_mhz = saved["before"]
        self._before = (until_s, before_mhz)
        self.limit_w, self.locked_mhz, self.clock_mhz = saved["limit_w"], saved["locked_mhz"], saved["clock_mhz"]
        self.reasons, self.throttled_s = frozenset(saved["reasons"]), dict(saved["throttled_s"])
        self.temperature_c = saved["temperature_c"]

    def begin_anew(self) -> None:
        """Let time begin at 0 again, and with it the faults; all else stays."""
        until_s, before_mhz = self._before
        self._before = (until_s - self.meter.now_s, before_mhz)
        self.meter.restore({**self.meter.saved(), "now_s": 0.0})

    def _unchanged_s(self, power_w: float) -> float:
        """For how long from now on, at this power, all that the clock and the power depend on stays as it is."""
        now_s, settled_s = self.meter.now_s, self._before[0]
        ends_s = min(self._faults.next_s(now_s), settled_s if settled_s > now_s else math.inf)
        is_settled = abs(self._end_c(power_w) - self.temperature_c) < _SETTLED_K
        return min(ends_s - now_s, math.inf if is_settled else _PIECE * self._model.warming_s)

    def _end_c(self, power_w: float) -> float:
        """The temperature that is reached in the end."""
        return self._conditions.air_c + self._model.warming_k_per_w * power_w

    def _spend(self, duration_s: float, power_w: float, clock_mhz: float, reasons: frozenset[str]) -> None:
        self.meter.spend(duration_s, power_w)
        self.clock_mhz, self.reasons = clock_mhz, reasons
        for reason in reasons:
            self.throttled_s[reason] += duration_s
        end_c = self._end_c(power_w)
        self.temperature_c = end_c + (self.temperature_c - end_c) * math.exp(-duration_s / self._model.warming_s)
        if self.meter.now_s >= self._faults.lost_at_s:
            raise GpuLost(f"simulated {self._model.name} is lost: {LOST}")


LOST = "it fell off the bus, as its fault says; open it without that fault"
"""What a lost GPU says."""
