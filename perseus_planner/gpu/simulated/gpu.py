"""Simulated GPUs: they compute nothing, and a model says how long work takes and how much power it
draws.

`model.py` contains the physics. On top of that come the effects that make measuring hard: noise,
static power that follows the temperature, an energy counter that moves in steps, settings that take
time and wait for those of the other GPUs of the node, and the faults of `options.py`. Time passes
only while work runs, the GPU waits or a setting is made; readings take no time and refer to what
was done last.

Equal models, seeds, options and calls give equal numbers. The noise of a call of `run` depends on
the seed, the work, the clock and power limit that are set, and how often the same work ran under
the same settings before, and on nothing else. So a sweep that continues after an interruption gets
the noise it would have got, if it begins each measurement again. The temperature and the phase of
the energy counter do depend on everything before; the options `drift=0` and `step=0` remove them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import blake2b
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from perseus_planner.base import __version__
from perseus_planner.base.errors import (
    GpuLost,
    GpuNotPermitted,
    GpuNotSupported,
)
from perseus_planner.gpu.protocol import ClosedOnExit, check_clock, check_power_limit
from perseus_planner.gpu.simulated.model import REFERENCE_C, GpuModel, Load, OpCost, find_model
from perseus_planner.gpu.simulated.options import (
    DEFAULT,
    SimulationOptions,
    format_number,
    format_options,
    parse_options,
)

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
        self._model = model
        self._options = options
        self._faults = options.faults
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
        # State that is gone on from replaces what a new chip begins with.
        vars(self).update(saved or {})

    def saved(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def sensed_w(self) -> float:
        """Return what the power sensor shows, watts."""
        average_s = self._model.sensor_s
        if not average_s:
            return self.power_w
        # The sensor shows the energy of the last `sensor_s`, divided by it; its beginning lies
        # between two moments that are remembered.
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
        # In pieces during which nothing that power depends on changes.
        while duration_s > 0:
            piece_s = min(duration_s, self._constant_s(self._model.idle_power_w))
            # An idle GPU drops to its lowest clock unless one is locked.
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
            # Exactly 0 at the end: a rounding error would leave another, endless piece.
            repetitions = repetitions - piece_s / once_s if piece_s < whole_s else 0.0
        return repetitions

    def block(self, duration_s: float, power: float = 1.0) -> None:
        """Wait for a neighbour's message for `duration_s` seconds, at its power times a factor."""
        self.execute(self._model.blocking(), duration_s, 1.0, power)

    def _run_at(self, load: Load, power: float) -> tuple[float, float, tuple[str, ...]]:
        """Return the clock and the power at which `load` runs now, and the throttle reasons."""
        # Without a lock a busy GPU runs at its highest clock.
        wanted_mhz = float(self._effective_lock_mhz() or self._model.clocks_mhz[0])
        reasons = []
        # Heat from elsewhere, as a fault says, also moves the clock.
        if self._faults.throttled_at(self.now_s):
            wanted_mhz *= _THROTTLED
            reasons.append("hw-thermal")
        # A real GPU holds itself a little below the limit that is set.
        set_w = math.inf if self.limit_w is None else self._model.held_share * self.limit_w
        # The stricter one decides, and is the reason that is told.
        limit_w, reason = min(
            (min(load.power_limit_w, set_w), "sw-power-cap"),
            (self._thermal_limit_w(), "sw-thermal"),
        )
        # Static power rises with the temperature: leakage.
        warmth = 1 + self._options.drift * self._model.leakage_per_k * (
            self.temperature_c - REFERENCE_C
        )
        limited = replace(load, static_w=load.static_w * warmth, power_limit_w=limit_w)
        # A limit lowers the clock until the power fits, and only then is there a reason to tell.
        clock_mhz = limited.achieved_mhz(wanted_mhz)
        if clock_mhz < wanted_mhz:
            reasons.append(reason)
        # Noise multiplies the power, but takes it neither above the limit nor below what leaks
        # anyway.
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
        now_s = self.now_s
        settled_s = self.before[0]
        # Faults and a clock that settles change it at a known time.
        ends_s = min(self._faults.next_s(now_s), settled_s if settled_s > now_s else math.inf)
        is_settled = abs(self._end_c(power_w) - self.temperature_c) < _SETTLED_K
        # Temperature moves all the time: in pieces so short that it is as good as constant.
        return min(ends_s - now_s, math.inf if is_settled else _PIECE * self._model.warming_s)

    def _end_c(self, power_w: float) -> float:
        """Return the temperature that this power leads to in the end, degrees Celsius."""
        return self._options.air_c + self._model.warming_k_per_w * power_w

    def _spend(
        self, duration_s: float, power_w: float, clock_mhz: float, reasons: tuple[str, ...]
    ) -> None:
        # Energy so far, then what the counter shows of it, then what the sensor will look back at.
        options = self._options
        average_s = self._model.sensor_s
        start_s = self.now_s
        start_j = self.energy_j
        self.now_s = start_s + duration_s
        self.energy_j = start_j + power_w * duration_s
        # The counter shows energy up to its last move only, and stands still from a fault on.
        moved_s = self.now_s
        if options.step_s:
            moved_s -= (self.now_s - self._phase_s) % options.step_s
        shown_s = min(moved_s, self._faults.counter_stuck_at_s)
        if shown_s > start_s:
            self.counter_j = start_j + power_w * (shown_s - start_s)
        # As far back as the sensor averages, and one moment before that to interpolate from.
        if average_s:
            self.past.append((self.now_s, self.energy_j))
            while len(self.past) > 2 and self.past[1][0] <= self.now_s - average_s:
                del self.past[0]
        self.power_w = power_w
        self.clock_mhz = clock_mhz
        self.reasons = reasons
        for reason in reasons:
            self.throttled_s[reason] += duration_s
        # Towards its end value, as an exponential with the time constant of the core.
        end_c = self._end_c(power_w)
        self.temperature_c = end_c + (self.temperature_c - end_c) * math.exp(
            -duration_s / self._model.warming_s
        )
        # Last, so that the energy until then is counted.
        if self.now_s >= self._faults.lost_at_s:
            raise GpuLost(f"simulated {self._model.name} is lost: {LOST}")


# Quantiles of the duration of a call that sets a clock on an A800 (p50 4.5 ms and p99 13 ms in an
# unpublished measurement). The ends are chosen to give the measured mean of 6 ms.
_QUANTILES = (0.0, 0.5, 0.99, 1.0)
_CALL_S = (1.8e-3, 4.5e-3, 13e-3, 14e-3)
#: Share of the noise of one computation that remains however often a call repeats it.
_LASTING = 0.25
_LARGEST = 3.0  # standard deviations


class SimulatedGpu(ClosedOnExit):
    """One simulated GPU: a `Gpu` whose readings and settings are those of a `Chip`, which runs
    `OpCost` and waits for messages in virtual time.

    Args:
        model: The GPU from the catalog.
        seed: Seed of the noise.
        options: Noise, slowdown, faults and so on.
    """

    origin = "simulated"
    driver = f"perseus-planner {__version__}"
    keeps_settings = False

    def __init__(
        self,
        model: GpuModel,
        seed: int = 0,
        options: SimulationOptions = DEFAULT,
    ) -> None:
        self.model = model.slowed(options.slower)
        self.seed = seed
        self.options = options
        self._faults = options.faults
        self._origin_s = 0.0
        self._calls = 0
        self._repeated: Counter[object] = Counter()
        self._called_s = 0.0  #: when the last call that set something ended
        self._state = Chip(self.model, options, self._counter_phase_s())

    @property
    def _chip(self) -> Chip:
        """The chip as it is now."""
        return self._state

    @property
    def text(self) -> str:
        """Text that opens a GPU equal to this one when it was opened, e.g.
        "simulated:a100-sxm?seed=3".
        """
        return self.simulated_text

    @property
    def simulated_text(self) -> str:
        """Text that opens the same GPU in virtual time; a profile measured there predicts what
        this GPU does.
        """
        return self._with_options(f"simulated:{self.model.name}", "?", DEFAULT)

    @property
    def uuid(self) -> str:
        """Model, seed and slowdown, e.g. "simulated-a100-sxm-seed-3"."""
        slower = self.options.slower
        slowed = f"-slower-{format_number(slower)}" if slower != 1 else ""
        return f"simulated-{self.model.name}-seed-{self.seed}{slowed}"

    def now_s(self) -> float:
        """Time on the GPU's clock, which is virtual, seconds."""
        return self._chip.now_s

    def wait(self, duration_s: float) -> None:
        """Stay idle for `duration_s` seconds of that clock."""
        self._count_call()
        self._pass(duration_s)

    def run(self, work: OpCost | Load, repetitions: int = 1) -> None:
        """Run `work` several times back to back; on return, its time and energy have been spent.

        A `Load`, such as one fitted to measurements, has its own power limit, which applies beside
        the limit that is set on this GPU.
        """
        self._count_call()
        noise = self._noise(self._chip, work, repetitions)
        self._chip.execute(self._load(work, self._chip), repetitions, *noise)

    def block(self, duration_s: float) -> None:
        """Wait for a neighbour's message for `duration_s` seconds of virtual time."""
        self._count_call()
        self._chip.block(duration_s, self._noise(self._chip, "block", 1)[1])

    def close(self) -> None:
        """Do nothing: a simulated GPU holds no resources."""

    @property
    def name(self) -> str:
        """Name for profiles, e.g. "simulated a100-sxm", with the slowdown if there is one."""
        slower = self.options.slower
        return f"simulated {self.model.name}" + (
            f" slower={format_number(slower)}" if slower != 1 else ""
        )

    @property
    def locked_mhz(self) -> int | None:
        """Locked clock, MHz; None if the clocks are reset."""
        return self._chip.locked_mhz

    def warnings(self) -> tuple[str, ...]:
        """No warnings: nothing spoils a simulated profile."""
        return ()

    def foreign_locks(self, *, is_leased: bool = False) -> tuple[str, ...]:
        """None: no other program sets it."""
        return ()

    def computing_pids(self) -> tuple[int, ...]:
        """None: what computes on it is not counted."""
        return ()

    @property
    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """SM clocks that can be locked, highest first."""
        self._count_call("clocks")
        return self.model.clocks_mhz

    def set_clock_mhz(self, clock_mhz: int) -> None:
        """Lock the SM clock. The call takes milliseconds, and the clock follows a little later.

        Raises:
            GpuError: If the clock is not supported.
        """
        # Asking for the list raises GpuNotSupported if a fault says so.
        if clock_mhz not in self.supported_clocks_mhz:
            check_clock(self, clock_mhz)
        self._set(lambda chip: chip.lock(clock_mhz))

    def reset_clocks(self) -> None:
        """Unlock the SM clock, so that the GPU runs at its highest clock again."""
        self._count_call("clocks")
        self._set(lambda chip: chip.lock(None))

    @property
    def memory_clocks_mhz(self) -> tuple[int, ...]:
        """Memory clocks that can be locked, highest first."""
        return self.model.memory_clocks_mhz

    def memory_mhz(self) -> int:
        """Memory clock, MHz."""
        return self._read().memory_mhz

    def lock_memory(self, clock_mhz: int | None) -> None:
        """Lock the memory clock, or unlock it; it is in force for the work that begins then."""

        def lock(chip: Chip) -> None:
            chip.memory_mhz = clock_mhz or self.memory_clocks_mhz[0]

        self._set(lock)

    @property
    def power_limits_w(self) -> tuple[float, float]:
        """Smallest and largest power limit that can be set, watts."""
        self._count_call("power-limit")
        return self.model.power_limits_w

    def power_limit_w(self) -> float:
        """Power limit in force, watts."""
        limit_w = self._read("power-limit").limit_w
        return self.model.power_limit_w if limit_w is None else limit_w

    def default_power_limit_w(self) -> float:
        """Power limit unless another is set, watts."""
        self._count_call("power-limit")
        return self.model.power_limit_w

    def set_power_limit_w(self, limit_w: float) -> None:
        """Set the power limit, watts.

        Raises:
            GpuError: If the limit is out of range.
        """
        check_power_limit(self, limit_w)
        self._set(lambda chip: chip.limit(limit_w))

    def reset_power_limit(self) -> None:
        """Set the power limit back to its default."""
        self._count_call("power-limit")
        self._set(lambda chip: chip.limit(None))

    def energy_j(self) -> float:
        """Energy counter, joules; it moves in steps unless the option `step` is 0."""
        return self._read("energy").counter_j

    def power_w(self) -> float:
        """Power sensor, watts: instant power or an average over the last second, depending on
        the model.
        """
        return self._read("power").sensed_w()

    def clock_mhz(self) -> int:
        """SM clock of what ran last, MHz."""
        return round(self._read().clock_mhz)

    def temperature_c(self) -> float:
        """Core temperature, whole degrees Celsius."""
        return float(round(self._read("temperature").temperature_c))

    def throttle_reasons(self) -> frozenset[str]:
        """Reasons that slowed down what ran last."""
        return frozenset(self._read("throttle").reasons)

    def throttled_s(self) -> Mapping[str, float]:
        """Seconds of throttling, for each reason that a simulated GPU has."""
        return MappingProxyType(dict(self._read("throttle").throttled_s))

    def _read(self, function: str = "") -> Chip:
        """Count a call of `function`, and return the chip as it is now."""
        self._count_call(function)
        return self._chip

    def _count_call(self, function: str = "") -> None:
        """Count a call of `function`, one of `FUNCTIONS` or empty, and raise an error if a fault
        demands it.
        """
        # Counted first, so that a fault after n calls holds for all kinds of calls.
        self._calls += 1
        if (
            self._calls > self._faults.lost_after_calls
            or self.now_s() - self._origin_s >= self._faults.lost_at_s
        ):
            raise GpuLost(f"{self.name} is lost: {LOST}")
        if function in self._faults.not_supported:
            raise GpuNotSupported(
                f"{self.name} does not support {function}, as its fault says; open it without "
                f"not-supported:{function}"
            )

    def _set(self, change: Callable[[Chip], None]) -> None:
        """Wait for earlier calls, let the call's time pass, and change the chip."""
        if not self._faults.is_permitted:
            raise GpuNotPermitted(
                f"{self.name} does not let this process set anything, as its fault says; open it "
                "without not-permitted"
            )
        # As a real driver: the setting holds when the call returns, not when it begins.
        now_s = self.now_s()
        self._pass(self._call_end_s(now_s, self._call_s()) - now_s)
        self._change(change)

    def _call_end_s(self, now_s: float, duration_s: float) -> float:
        self._called_s = max(now_s, self._called_s) + duration_s
        return self._called_s

    def _pass(self, duration_s: float) -> None:
        """Let time pass."""
        self._state.idle(duration_s)

    def _change(self, change: Callable[[Chip], None]) -> None:
        change(self._state)

    def _load(self, work: OpCost | Load, chip: Chip) -> Load:
        return self.model.load(work, chip.memory_mhz) if isinstance(work, OpCost) else work

    def _with_options(self, text: str, mark: str, default: SimulationOptions) -> str:
        options = format_options(self.seed, self.options, default)
        return f"{text}{mark}{options}" if options else text

    def _counter_phase_s(self) -> float:
        """Return when the energy counter first moves, seconds."""
        return self.options.step_s * self._uniform("phase")[0]

    def _call_s(self) -> float:
        """Return how long the next call that sets something takes, without waiting for others,
        seconds.
        """
        # A fixed duration, for tests and for other drivers.
        if self.options.call_s is not None:
            return self.options.call_s
        return float(
            np.interp(self._uniform("call", self._times_before("call"))[0], _QUANTILES, _CALL_S)
        )

    def _noise(self, chip: Chip, work: object, repetitions: int) -> tuple[float, float]:
        """Return the factors by which noise multiplies the time and the power of a call."""
        options = self.options
        setting = (work, chip.locked_mhz, chip.limit_w)
        # Numbers from the seed and the setting, so that equal calls in another order have equal
        # noise.
        first, second, odd, size = self._uniform(*setting, self._times_before(setting))
        # Repetitions average noise out, except what belongs to this setting.
        deviation = options.noise * max(_LASTING, 1 / math.sqrt(max(1, repetitions)))
        # The Box-Muller transform gives two independent normal numbers.
        # Cut off at `_LARGEST` deviations: a share of noise must not make a time negative.
        length = deviation * min(_LARGEST, math.sqrt(-2 * math.log(1 - first)))
        # Now and then something else runs, too.
        slower = 1.05 + 0.25 * size if odd < options.outliers else 1.0
        return slower * (1 + length * math.cos(math.tau * second)), 1 + length * math.sin(
            math.tau * second
        )

    def _times_before(self, key: object) -> int:
        """Return how often this was asked with `key` before."""
        self._repeated[key] += 1
        return self._repeated[key] - 1

    def _uniform(self, *key: object) -> tuple[float, ...]:
        """Return four numbers in [0, 1) that depend only on the seed and `key`, in any process."""
        # By a hash and not by a generator, whose numbers would depend on the order of calls.
        digest = blake2b(repr((self.seed, *key)).encode(), digest_size=32).digest()
        return tuple(int.from_bytes(digest[i : i + 8], "big") / 2**64 for i in range(0, 32, 8))


def open_simulated(which: str) -> SimulatedGpu:
    """Open a simulated GPU: a name of the catalog with the options of `options.py`, e.g.
    "a100-sxm?seed=3&noise=0".

    Raises:
        GpuError: If there is no such GPU or option.
    """
    text = f"simulated:{which}"
    model = find_model(which.partition("?")[0], text, "simulated GPU", "simulated:{}")
    return SimulatedGpu(model, *parse_options(text))
