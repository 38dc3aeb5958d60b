"""GPUs through NVML, NVIDIA's management library.

What is locked or limited here stays when the process ends: the driver keeps it until it is reset, or unloaded. NVML's
milliwatts, millijoules and nanoseconds become SI units in this file and nowhere else. Names of calls and numbers of
fields are those of nvml.h.
"""

from __future__ import annotations

import math
import time
from functools import cached_property
from typing import TYPE_CHECKING

from perseus_planner.errors import GpuError, GpuNotSupported
from perseus_planner.gpu.nvml.device import MOST_MHZ, NvmlDevice, Quantity, Reading, answer
from perseus_planner.gpu.nvml.discovery import selected
from perseus_planner.gpu.nvml.library import NVML
from perseus_planner.gpu.nvml.warnings import mig_is_on, notices

if TYPE_CHECKING:
    from collections.abc import Mapping

_CLOCK_SM, _CLOCK_ID_CURRENT, _TEMPERATURE_GPU = 1, 0, 0
_SCOPE_MODULE = 1
_TOTAL_ENERGY, _ENERGY, _POWER_INSTANT = 83, 191, 186

_REASON_BITS = {
    0x04: "sw-power-cap",
    0x08: "hw-slowdown",
    0x10: "sync-boost",
    0x20: "sw-thermal",
    0x40: "hw-thermal",
    0x80: "hw-power-brake",
}
"""NVML's clocks event reasons that hold a busy GPU back; it has others, for idle GPUs and for displays."""

_REASON_FIELDS = {74: "sw-power-cap", 76: "sync-boost", 269: "sw-thermal", 270: "hw-thermal", 271: "hw-power-brake"}
"""Fields that count the nanoseconds for which a reason has held."""

_WITHOUT_ENERGY = "without an energy counter there is nothing to plan on: use another GPU, or simulated:"
_WITHOUT_CLOCKS = (
    "where clocks cannot be locked, use the power limit as the control, or observe mode, which sets nothing"
)
_WITHOUT_LIMIT = (
    "where the power limit cannot be set, use the SM clock as the control, or observe mode, which sets nothing"
)

_MOST_MW = 100_000_000
"""No board draws 100 kW: a greater number is no power."""

_ENERGY_MJ = Quantity("read its energy counter", most=2**63, instead=_WITHOUT_ENERGY)
_POWER_MW = Quantity("read its power", most=_MOST_MW)
_LIMIT_MW = Quantity("read its power limit", most=_MOST_MW)
_DEFAULT_LIMIT_MW = Quantity("read its default power limit", most=_MOST_MW, instead=_WITHOUT_LIMIT)
_CLOCK_MHZ = Quantity("read its SM clock", most=MOST_MHZ)
_TEMPERATURE_C = Quantity("read its temperature", most=200)
_REASONS = Quantity("read why it is throttled", most=2**63, least=0)


class NvmlGpu:
    """One NVIDIA GPU, read and set through NVML; see `Gpu` for what its methods mean and raise.

    Attributes:
        uuid: NVML's UUID of it.
        text: what opens it again from any process on this node.
    """

    origin = "measured"
    keeps_settings = True

    def __init__(self, device: NvmlDevice) -> None:
        """Take over a device, and one use of NVML, which `close` gives back."""
        self.uuid, self.text = device.uuid, device.who
        self._device = device
        self._open = True
        self._clock_touched = self._limit_touched = False
        self._counted: tuple[int, ...] | None = None
        number, field = device.number, device.number_of_field
        self._energy_mj = Reading(
            lambda: number(_ENERGY_MJ, "nvmlDeviceGetTotalEnergyConsumption"),
            lambda: field(_ENERGY_MJ, _TOTAL_ENERGY),
            lambda: field(_ENERGY_MJ, _ENERGY),
            lambda: field(_ENERGY_MJ, _ENERGY, _SCOPE_MODULE),
        )
        self._power_mw = Reading(
            # Of now; the plain call averages over a second on most GPUs since Ampere.
            lambda: field(_POWER_MW, _POWER_INSTANT),
            lambda: number(_POWER_MW, "nvmlDeviceGetPowerUsage"),
            lambda: field(_POWER_MW, _POWER_INSTANT, _SCOPE_MODULE),
        )
        self._limit_mw = Reading(
            # The strictest of all limits; the other call says what was set.
            lambda: number(_LIMIT_MW, "nvmlDeviceGetEnforcedPowerLimit"),
            lambda: number(_LIMIT_MW, "nvmlDeviceGetPowerManagementLimit"),
        )
        self._clock_mhz = Reading(
            lambda: number(_CLOCK_MHZ, "nvmlDeviceGetClockInfo", _CLOCK_SM),
            lambda: number(_CLOCK_MHZ, "nvmlDeviceGetClock", _CLOCK_SM, _CLOCK_ID_CURRENT),
        )
        self._temperature_c = Reading(
            lambda: number(_TEMPERATURE_C, "nvmlDeviceGetTemperatureV", _TEMPERATURE_GPU),
            lambda: number(_TEMPERATURE_C, "nvmlDeviceGetTemperature", _TEMPERATURE_GPU),
        )
        self._reason_bits = Reading(
            lambda: number(_REASONS, "nvmlDeviceGetCurrentClocksEventReasons"),
            lambda: number(_REASONS, "nvmlDeviceGetCurrentClocksThrottleReasons"),
        )

    @cached_property
    def name(self) -> str:
        """What its maker calls it."""
        return self._device.text("nvmlDeviceGetName", "read its name")

    @cached_property
    def driver(self) -> str:
        """Version of the NVIDIA driver."""
        function, what = "nvmlSystemGetDriverVersion", "read the driver's version"
        version = str(NVML.call(function, who=self.text, what=what)).strip()
        if not version:
            raise self._device.no_reading(what, "an empty text", function)
        return version

    @property
    def mig_on(self) -> bool:
        """Whether the GPU is partitioned into MIG instances."""
        return mig_is_on(self._device)

    def notices(self) -> tuple[str, ...]:
        """What to know before trusting its profile: MIG, power profiles, smoothing, limits, persistence, scope."""
        limits_w = answer(lambda: (self.power_limit_w(), self._default_limit_w()))
        return notices(self._device, self._read_of_module(), limits_w)

    @cached_property
    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """The SM clocks that its highest memory clock goes with, highest first."""
        what = "list its supported clocks"
        memory = self._device.clocks("nvmlDeviceGetSupportedMemoryClocks", what=what, instead=_WITHOUT_CLOCKS)
        function = "nvmlDeviceGetSupportedGraphicsClocks"
        return self._device.clocks(function, memory[0], what=what, instead=_WITHOUT_CLOCKS)

    def set_clock_mhz(self, clock_mhz: int) -> None:
        """Lock the SM clock, which takes milliseconds, in which no other GPU of this node can be set."""
        self._check_clock(clock_mhz)
        self._clock_touched = True  # before the call: an interrupt during it comes after it has taken effect
        what = f"lock its SM clock at {clock_mhz} MHz"
        self._device.call("nvmlDeviceSetGpuLockedClocks", clock_mhz, clock_mhz, what=what, instead=_WITHOUT_CLOCKS)

    def reset_clocks(self) -> None:
        """Unlock the SM clock, whichever process locked it."""
        try:
            self._device.call("nvmlDeviceResetGpuLockedClocks", what="reset its SM clock", instead=_WITHOUT_CLOCKS)
        except GpuNotSupported:
            if self._clock_touched:  # there are libraries that lock and cannot unlock
                raise
        else:
            self._clock_touched = False

    @property
    def power_limits_w(self) -> tuple[float, float]:
        """The least and the greatest power limit that can be set, watts."""
        function, what = "nvmlDeviceGetPowerManagementLimitConstraints", "read its range of power limits"
        least_mw, greatest_mw = self._device.call(function, what=what, instead=_WITHOUT_LIMIT)
        if not 0 < least_mw <= greatest_mw <= _MOST_MW:
            raise self._device.no_reading(what, f"{least_mw} to {greatest_mw} mW", function)
        return _watts(least_mw), _watts(greatest_mw)

    def power_limit_w(self) -> float:
        """The power limit that is in force, watts."""
        return _watts(self._limit_mw())

    def set_power_limit_w(self, limit_w: float) -> None:
        """Set the power limit, watts, to the milliwatt."""
        least_w, greatest_w = self.power_limits_w
        if not (math.isfinite(limit_w) and least_w <= limit_w <= greatest_w):
            raise GpuError(
                f"{self.text}: cannot set its power limit to {limit_w:g} W; choose {least_w:g} to {greatest_w:g} W"
            )
        self._limit_touched = True
        self._limit_power(limit_w)

    def reset_power_limit(self) -> None:
        """Set the power limit back to what it is when the driver is loaded."""
        try:
            default_w = self._default_limit_w()
            set_mw = self._device.number(_LIMIT_MW, "nvmlDeviceGetPowerManagementLimit")
        except GpuNotSupported:
            if self._limit_touched:
                raise
            return
        if _watts(set_mw) != default_w:  # where nothing is to be done, no privilege is needed
            self._limit_power(default_w)
        self._limit_touched = False

    def energy_j(self) -> float:
        """Energy since the driver was loaded, joules; on data centre GPUs it moves about every 100 ms."""
        return self._energy_mj() / 1000

    def power_w(self) -> float:
        """Power now, watts; where the driver cannot say that, its average over up to a second."""
        return _watts(self._power_mw())

    def clock_mhz(self) -> int:
        """The SM clock now, MHz."""
        return self._clock_mhz()

    def temperature_c(self) -> float:
        """Core temperature, degrees Celsius."""
        return float(self._temperature_c())

    def throttle_reasons(self) -> frozenset[str]:
        """Which of `THROTTLE_REASONS` hold now."""
        bits = self._reason_bits()
        return frozenset(reason for bit, reason in _REASON_BITS.items() if bits & bit)

    def throttled_s(self) -> Mapping[str, float]:
        """Reason -> seconds for which it has held since the driver was loaded, for those that are counted."""
        what = "read for how long it was throttled"
        if self._counted is None:  # asked one by one: a library may refuse them all for one that it does not know
            self._counted = tuple(field for field in _REASON_FIELDS if self._counts(field, what))
        if not self._counted:
            return {}
        times_ns = self._device.fields(self._counted, what)
        return {_REASON_FIELDS[field]: time_ns / 1e9 for field, time_ns in zip(self._counted, times_ns, strict=True)}

    def now_s(self) -> float:
        """The system's monotonic clock, seconds."""
        return time.monotonic()

    def wait(self, duration_s: float) -> None:
        """Sleep for so many seconds."""
        time.sleep(duration_s)

    def close(self) -> None:
        """Give NVML back; what is locked stays locked."""
        if self._open:
            self._open = False
            NVML.release()

    def _check_clock(self, clock_mhz: int) -> None:
        """Refuse what NVML would take without a word and round."""
        try:
            clocks = self.supported_clocks_mhz
        except GpuNotSupported:
            return  # there are GPUs that lock clocks and list none; then NVML alone says what it takes
        if clock_mhz not in clocks:
            nearest = min(clocks, key=lambda supported: abs(supported - clock_mhz))
            raise GpuError(
                f"{self.text}: cannot lock its SM clock at {clock_mhz} MHz; the nearest supported clock is "
                f"{nearest} MHz, and all are from {clocks[-1]} to {clocks[0]} MHz"
            )

    def _limit_power(self, limit_w: float) -> None:
        # Not the newer nvmlDeviceSetPowerManagementLimit_v2: the binding drops its return code.
        function, what = "nvmlDeviceSetPowerManagementLimit", f"set its power limit to {limit_w:g} W"
        self._device.call(function, round(limit_w * 1000), what=what, instead=_WITHOUT_LIMIT)

    def _default_limit_w(self) -> float:
        return _watts(self._device.number(_DEFAULT_LIMIT_MW, "nvmlDeviceGetPowerManagementDefaultLimit"))

    def _read_of_module(self) -> tuple[str, ...]:
        """Which of energy and power come for the GPU together with its CPU: their last ways."""
        readings = {"energy": self._energy_mj, "power": self._power_mw}
        return tuple(name for name, reading in readings.items() if answer(reading) and reading.last_way)

    def _counts(self, field: int, what: str) -> bool:
        try:
            self._device.fields([field], what)
        except GpuNotSupported:
            return False
        return True


def opened(which: str) -> NvmlGpu:
    """The GPU that `which` names: NVML's index ("0"), a UUID or a unique beginning of one, or a PCI bus id.

    NVML's indices are of the whole node, in the order of PCI bus ids, and heed no CUDA_VISIBLE_DEVICES.

    Raises:
        GpuError: NVML is not usable here, or shows no such GPU; the text lists those that it shows.
        GpuNotSupported: a MIG instance or a vGPU, whose clocks are not its own.
    """
    NVML.acquire()
    try:
        return NvmlGpu(selected(which))
    except BaseException:
        NVML.release()
        raise


def _watts(milliwatts: int) -> float:
    return milliwatts / 1000
