"""The state of a simulated GPU in virtual time: clock, power, temperature and counters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import GpuLost
from perseus_planner.gpu.simulated.model import REFERENCE_C, GpuModel, Load

if TYPE_CHECKING:
    from perseus_planner.gpu.simulated.options import SimulationOptions

COUNTED = ("sw-power-cap", "sw-thermal", "hw-thermal")
"""The throttle reasons that a simulated GPU has and counts."""

SETTLE_S = 0.9e-3
"""How long the clock lags behind a call that sets it: the mean on an A800, in an unpublished
measurement.
"""

LOST = "it fell off the bus, as its fault says; open it without that fault"
"""Error text of a lost GPU."""

_THROTTLED = 0.7  # share of the clock that the fault leaves
_SETTLED_K = 1e-3  # this close to its end value, the temperature is constant
_PIECE = 0.1  # share of the warming time constant during which the temperature is taken as constant


class Chip:
    """The state of one GPU, and how it changes with time.

    Attributes without an underscore are its state, as `saved` returns it.

    Args:
        model: The GPU.
        options: Air temperature, drift, counter steps and faults.
        phase_s: When the energy counter first moves.
        saved: The state of a chip with the same model and options, to go on from.
    """

    def __init__(
        self,
        model: GpuModel,
        options: SimulationOptions,
        phase_s: float,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        self._model, self._options, self._faults = model, options, options.faults
        self._phase_s = phase_s
        self.now_s = self.energy_j = 0.0  #: since it was made
        self.counter_j = 0.0  #: what the energy counter shows
        self.power_w = model.idle_power_w  #: what is drawn now
        #: Time, and energy until then, from before the span over which the sensor averages.
        self.past = [(-model.sensor_s, -model.sensor_s * self.power_w), (0.0, 0.0)]
        #: Power limit that is set; None for the default, that of each load.
        self.limit_w: float | None = None
        self.locked_mhz: int | None = None  #: clock that is locked
        self.memory_mhz = model.memory_clocks_mhz[0]  #: clock of the memory
        #: Until when the clock lags behind the last setting, and what was locked before.
        self.before: tuple[float, int | None] = (0.0, None)
        self.clock_mhz = float(model.clocks_mhz[-1])  #: clock of what was done last
        self.reasons: tuple[str, ...] = ()  #: throttle reasons of what was done last
        self.throttled_s = dict.fromkeys(COUNTED, 0.0)  #: seconds of throttling by reason
        self.temperature_c = options.air_c + model.warming_k_per_w * model.idle_power_w
        vars(self).update(saved or {})

    def saved(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def sensed_w(self) -> float:
        """Return what the power sensor shows, watts."""
        average_s = self._model.sensor_s
        if not average_s:
            return self.power_w
        (early_s, early_j), (late_s, late_j) = self.past[:2]
        share = (self.now_s - average_s - early_s) / (late_s - early_s)
        return (self.energy_j - (early_j + share * (late_j - early_j))) / average_s

    def lock(self, clock_mhz: int | None) -> None:
        """Lock a clock, or unlock it; the clock follows a little later."""
        self.before = (self.now_s + SETTLE_S, self.locked_mhz)
        self.locked_mhz = clock_mhz

    def limit(self, limit_w: float | None) -> None:
        """Set a power limit, watts, or the default; it is in force at once."""
        self.limit_w = limit_w

    def idle(self, duration_s: float) -> None:
        """Stay idle for `duration_s` seconds.

        Raises:
            GpuLost: If the GPU falls off the bus meanwhile.
        """
        while duration_s > 0:
            piece_s = min(duration_s, self._constant_s(self._model.idle_power_w))
            clock_mhz = self._effective_lock_mhz() or self._model.clocks_mhz[-1]
            self._spend(piece_s, self._model.idle_power_w, clock_mhz, ())
            duration_s -= piece_s

    def execute(
        self, load: Load, repetitions: float, time: float, power: float, within_s: float = math.inf
    ) -> float:
        """Run a load repeatedly, with its time and power multiplied by factors, but for at most
        `within_s` seconds.

        Returns:
            The number of repetitions that are left, with fractions.

        Raises:
            GpuLost: If the GPU falls off the bus meanwhile.
        """
        ends_s = self.now_s + within_s
        while repetitions > 0 and self.now_s < ends_s:
            clock_mhz, power_w, reasons = self._run_at(load, power)
            once_s = load.free_time_s(clock_mhz) * time
            whole_s = once_s * repetitions
            piece_s = min(self._constant_s(power_w), ends_s - self.now_s)
            self._spend(min(whole_s, piece_s), power_w, clock_mhz, reasons)
            repetitions = repetitions - piece_s / once_s if piece_s < whole_s else 0.0
        return repetitions

    def block(self, duration_s: float, power: float = 1.0) -> None:
        """Wait for a neighbour's message for `duration_s` seconds, at its power times a factor."""
        self.execute(self._model.blocking(), duration_s, 1.0, power)

    def _run_at(self, load: Load, power: float) -> tuple[float, float, tuple[str, ...]]:
        """Return the clock and the power at which `load` runs now, and the throttle reasons."""
        wanted_mhz = float(self._effective_lock_mhz() or self._model.clocks_mhz[0])
        reasons = []
        if self._faults.throttled_at(self.now_s):
            wanted_mhz *= _THROTTLED
            reasons.append("hw-thermal")
        set_w = math.inf if self.limit_w is None else self._model.held_share * self.limit_w
        limit_w, reason = min(
            (min(load.power_limit_w, set_w), "sw-power-cap"),
            (self._thermal_limit_w(), "sw-thermal"),
        )
        warmth = 1 + self._options.drift * self._model.leakage_per_k * (
            self.temperature_c - REFERENCE_C
        )
        limited = replace(load, static_w=load.static_w * warmth, power_limit_w=limit_w)
        clock_mhz = limited.achieved_mhz(wanted_mhz)
        if clock_mhz < wanted_mhz:
            reasons.append(reason)
        power_w = max(limited.static_w, min(limited.free_power_w(clock_mhz) * power, limit_w))
        return clock_mhz, power_w, tuple(reasons)

    def _thermal_limit_w(self) -> float:
        """Return the power at which the GPU gets no hotter; infinite while it is cool enough."""
        model = self._model
        if self.temperature_c < model.slowdown_c:
            return math.inf
        return (model.slowdown_c - self._options.air_c) / model.warming_k_per_w

    def _effective_lock_mhz(self) -> int | None:
        until_s, before_mhz = self.before
        return before_mhz if self.now_s < until_s else self.locked_mhz

    def _constant_s(self, power_w: float) -> float:
        """Return how long everything that clock and power depend on stays constant at this
        power, seconds.
        """
        now_s, settled_s = self.now_s, self.before[0]
        ends_s = min(self._faults.next_s(now_s), settled_s if settled_s > now_s else math.inf)
        is_settled = abs(self._end_c(power_w) - self.temperature_c) < _SETTLED_K
        return min(ends_s - now_s, math.inf if is_settled else _PIECE * self._model.warming_s)

    def _end_c(self, power_w: float) -> float:
        """Return the temperature that this power leads to in the end, degrees Celsius."""
        return self._options.air_c + self._model.warming_k_per_w * power_w

    def _spend(
        self, duration_s: float, power_w: float, clock_mhz: float, reasons: tuple[str, ...]
    ) -> None:
        options, average_s = self._options, self._model.sensor_s
        start_s, start_j = self.now_s, self.energy_j
        self.now_s, self.energy_j = start_s + duration_s, start_j + power_w * duration_s
        moved_s = self.now_s
        if options.step_s:
            moved_s -= (self.now_s - self._phase_s) % options.step_s
        shown_s = min(moved_s, self._faults.counter_stuck_at_s)
        if shown_s > start_s:
            self.counter_j = start_j + power_w * (shown_s - start_s)
        if average_s:
            self.past.append((self.now_s, self.energy_j))
            while len(self.past) > 2 and self.past[1][0] <= self.now_s - average_s:
                del self.past[0]
        self.power_w, self.clock_mhz, self.reasons = power_w, clock_mhz, reasons
        for reason in reasons:
            self.throttled_s[reason] += duration_s
        end_c = self._end_c(power_w)
        self.temperature_c = end_c + (self.temperature_c - end_c) * math.exp(
            -duration_s / self._model.warming_s
        )
        if self.now_s >= self._faults.lost_at_s:
            raise GpuLost(f"simulated {self._model.name} is lost: {LOST}")
