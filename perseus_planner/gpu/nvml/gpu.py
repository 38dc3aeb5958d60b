"""GPUs read and set through NVML, NVIDIA's management library.

The driver keeps a locked clock or a power limit after the process has ended, until it is reset or
the driver unloaded. This is the only file that converts NVML's milliwatts, millijoules and
nanoseconds to SI units. Names of functions and numbers of fields are those of nvml.h.
"""

from __future__ import annotations

import ctypes
import os
import re
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

from perseus_planner.base.errors import GpuError, GpuNotSupported
from perseus_planner.gpu.cuda_driver import CudaDriver
from perseus_planner.gpu.nvml.device import (
    MAX_MHZ,
    NVML,
    UNKNOWN,
    NvmlDevice,
    NvmlQuantity,
    find_device,
    read_or_none,
    visible_gpus,
)
from perseus_planner.gpu.protocol import RealGpu, check_clock, check_power_limit

_SMOOTHING_ENABLED = 251
_SMOOTHING_FLOOR = 255
_CHARGE_SMOOTHING_ENABLED = 300  #: by the state of charge of an energy store, from driver 615 on

_PROFILE = "NVML_POWER_PROFILE_"
_OPERATION = "OPERATION_"  # constants with this second prefix are operations, not profiles


def is_mig_on(device: NvmlDevice) -> bool:
    """Return whether the GPU is partitioned into MIG instances; False if NVML cannot tell."""
    modes = device.answer("nvmlDeviceGetMigMode", "read its MIG mode")  # now, and after a reset
    return modes is not None and modes[0] == 1


def smoothing_floor_w(device: NvmlDevice) -> int | None:
    """Return the power that power smoothing keeps at least, watts; 0 if NVML cannot tell it, and
    None if it is off.
    """
    if _read_smoothing(device, _SMOOTHING_ENABLED) != 1:
        return None
    return max(_read_smoothing(device, _SMOOTHING_FLOOR), 0)


def is_charge_smoothing_on(device: NvmlDevice) -> bool:
    """Return whether power is smoothed by the state of charge of an energy store; False if NVML
    cannot tell.
    """
    return _read_smoothing(device, _CHARGE_SMOOTHING_ENABLED) == 1


def _read_smoothing(device: NvmlDevice, field: int) -> int:
    """Return a field of power smoothing, or 0 if NVML cannot tell."""
    numbers = read_or_none(lambda: device.fields([field], "read power smoothing"))
    return 0 if numbers is None else numbers[0]


def find_warnings(
    device: NvmlDevice, of_module: tuple[str, ...], limit_and_default_w: tuple[float, float] | None
) -> Iterator[str]:
    """Yield one sentence for each condition, with what to do about it.

    Args:
        device: The GPU.
        of_module: Which of "energy" and "power" are read for the GPU together with its CPU.
        limit_and_default_w: Power limit in force and its default, watts; None if unknown.

    Raises:
        GpuLost: If the GPU has fallen off the bus.
    """
    # Readings of the whole GPU do not tell what one instance of it used.
    if is_mig_on(device):
        yield (
            "MIG is on: clock, power and energy are those of the whole GPU, which all its "
            "instances share; turn it off (`nvidia-smi -mig 0`) before profiling"
        )
    # A profile moves clocks and limits for a kind of work, under the planner's own.
    profiles = read_or_none(lambda: _enforced_profiles(device))
    if profiles:
        yield (
            f"workload power profiles are active ({', '.join(profiles)}), which change clocks and "
            "power; clear them (see `nvidia-smi power-profiles -h`), or always train with the same"
        )
    # Power is filled up to the floor by work without use, so low clocks save less or nothing.
    floor_w = smoothing_floor_w(device)
    if floor_w is not None:
        floor = f"{floor_w} W" if floor_w else "a floor"
        yield (
            f"power smoothing is on, which keeps power above {floor}, so that lower clocks may "
            "save nothing; turn it off (see `nvidia-smi power-smoothing -h`) if you may"
        )
    # Here power does not follow the work, so neither does what a profile would say.
    if is_charge_smoothing_on(device):
        yield (
            "power smoothing by state of charge is on, by which power follows an energy store and "
            "not only the work, so that lower clocks may save nothing; turn it off (see "
            "`nvidia-smi power-smoothing -h`) if you may"
        )
    # Without a process that holds the driver, it unloads, and forgets what was locked.
    if device.answer("nvmlDeviceGetPersistenceMode", "read its persistence mode") == 0:
        yield (
            "persistence mode is off: locked clocks are lost when the driver unloads between "
            "jobs; turn it on (`nvidia-smi -pm 1`, or the daemon nvidia-persistenced)"
        )
    # Under a lower limit the same clock may take longer than it did when it was profiled.
    if limit_and_default_w is not None and limit_and_default_w[0] < limit_and_default_w[1]:
        limit_w, default_w = limit_and_default_w
        yield (
            f"the power limit is {limit_w:g} W, below its default of {default_w:g} W, so that "
            "high clocks may not be reached; train under the same limit, or restore the default "
            f"(`nvidia-smi -pl {default_w:g}`)"
        )
    # Bits without a name slow the GPU down all the same, which a profile must not hide.
    reasons = read_or_none(lambda: device.number(_REASONS)) or 0
    unknown = reasons & ~(_OTHER_BITS | sum(_REASON_BITS))
    if unknown:
        yield (
            f"a reason that the planner does not know limits its clocks now (bits {unknown:#x}), "
            "so that no profile says when it held; `nvidia-smi -q -d PERFORMANCE` may name it; "
            "update the planner"
        )
    # A superchip's module draws the power of its CPU as well.
    if of_module:
        yield (
            f"{' and '.join(of_module)} can only be read for the whole module, including the CPU; "
            "compare only profiles that were measured the same way"
        )


def _enforced_profiles(device: NvmlDevice) -> list[str]:
    """Return NVML's names of the workload power profiles in force.

    Raises:
        GpuError: If NVML cannot tell.
    """
    profiles = NVML.structure("c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t")
    function = "nvmlDeviceWorkloadPowerProfileGetCurrentProfiles"
    device.call(function, ctypes.byref(profiles), what="read its workload power profiles")
    # The mask has several words of 32 bits; the library writes all ones where it knows none.
    words = list(profiles.enforcedProfilesMask.mask)
    if all(word in UNKNOWN for word in words):
        return []
    # The binding's names for the numbers; a newer driver has numbers without one.
    names = {
        number: name
        for name, number in NVML.constants(_PROFILE).items()
        if not name.startswith(_OPERATION)
    }
    numbers = [
        32 * number + bit
        for number, word in enumerate(words)
        for bit in range(32)
        if word >> bit & 1
    ]
    return [names.get(number, f"number {number}") for number in numbers]


_CLOCK_SM = 1
_CLOCK_MEMORY = 2
_CLOCK_ID_CURRENT = 0
_TEMPERATURE_GPU = 0
_SCOPE_MODULE = 1
_TOTAL_ENERGY = 83
_ENERGY = 191
_POWER_INSTANT = 186

_REASON_BITS = {
    0x04: "sw-power-cap",
    0x08: "hw-slowdown",
    0x10: "sync-boost",
    0x20: "sw-thermal",
    0x40: "hw-thermal",
    0x80: "hw-power-brake",
    0x200: "board-limit",
    0x400: "reliability",
}
"""NVML's clocks event reasons that slow down a busy GPU."""
_CLOCKS_WERE_SET_BIT = 0x02  #: a program has chosen the clock
_OTHER_BITS = 0x01 | _CLOCKS_WERE_SET_BIT | 0x100  #: and reasons of idle GPUs and of displays

_REASON_FIELDS = {
    74: "sw-power-cap",
    76: "sync-boost",
    77: "board-limit",
    79: "reliability",
    269: "sw-thermal",
    270: "hw-thermal",
    271: "hw-power-brake",
}
"""Fields that count the nanoseconds of each reason."""

_WITHOUT_ENERGY = (
    "without an energy counter there is nothing to plan with: use another GPU, or simulated:"
)
_WITHOUT_CLOCKS = (
    "if clocks cannot be locked, use the power limit as the control, or set nothing (observe mode)"
)
_LIST_CLOCKS = "list its supported clocks"
_WITHOUT_LIMIT = (
    "if the power limit cannot be set, use the SM clock as the control, or set "
    "nothing (observe mode)"
)

_MAX_MW = 100_000_000
"""Larger numbers cannot be a power: no board draws 100 kW."""
_SAME_LIMIT_W = 0.5  #: drivers round

_ENERGY_MJ = NvmlQuantity(
    "read its energy counter",
    2**63,
    ("nvmlDeviceGetTotalEnergyConsumption", _TOTAL_ENERGY, _ENERGY, (_ENERGY, _SCOPE_MODULE)),
    advice=_WITHOUT_ENERGY,
)
_POWER_MW = NvmlQuantity(
    "read its power",
    _MAX_MW,
    # Instant power; since Ampere, nvmlDeviceGetPowerUsage is an average over a second on most GPUs.
    (_POWER_INSTANT, "nvmlDeviceGetPowerUsage", (_POWER_INSTANT, _SCOPE_MODULE)),
)
_LIMIT_MW = NvmlQuantity(
    "read its power limit",
    _MAX_MW,
    # The strictest of all limits; the second function returns the one that was set.
    ("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementLimit"),
)
_SET_LIMIT_MW = replace(_LIMIT_MW, ways=_LIMIT_MW.ways[1:])
_DEFAULT_LIMIT_MW = NvmlQuantity(
    "read its default power limit",
    _MAX_MW,
    ("nvmlDeviceGetPowerManagementDefaultLimit",),
    advice=_WITHOUT_LIMIT,
)
_CLOCK_MHZ = NvmlQuantity(
    "read its SM clock",
    MAX_MHZ,
    # The second one takes two arguments: the clock, and that the current one is meant.
    (("nvmlDeviceGetClockInfo", _CLOCK_SM), ("nvmlDeviceGetClock", _CLOCK_SM, _CLOCK_ID_CURRENT)),
)
_MEMORY_MHZ = NvmlQuantity(
    "read its memory clock", MAX_MHZ, (("nvmlDeviceGetClockInfo", _CLOCK_MEMORY),)
)
_TEMPERATURE_C = NvmlQuantity(
    "read its temperature",
    200,
    (
        ("nvmlDeviceGetTemperatureV", _TEMPERATURE_GPU),
        ("nvmlDeviceGetTemperature", _TEMPERATURE_GPU),
    ),
)
_REASONS = NvmlQuantity(
    "read why it is throttled",
    2**63,
    ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
    smallest=0,
)

OpenedGpu = TypeVar("OpenedGpu", bound="NvmlReader")


class NvmlReader(RealGpu):
    """Reads one NVIDIA GPU; a back-end adds how to set it. See `GpuReader` for the members and
    their errors.

    Args:
        device: The GPU.
        text: Text that opens it again in any process of the node.
    """

    def __init__(self, device: NvmlDevice, text: str) -> None:
        self.uuid = device.uuid
        self.text = text
        self._device = device
        self._is_open = True
        self._counted: tuple[int, ...] | None = None

    @cached_property
    def name(self) -> str:
        """Product name."""
        return self._device.text("nvmlDeviceGetName", "read its name")

    @cached_property
    def driver(self) -> str:
        """Version of the NVIDIA driver."""
        function = "nvmlSystemGetDriverVersion"
        # Asked of the library, not of a GPU, so it is not a call of the device.
        what = "read the driver's version"
        version = str(NVML.call(function, who=self._device.who, what=what)).strip()
        if not version:
            raise self._device.implausible(what, "an empty text", function)
        return version

    @property
    def is_mig_on(self) -> bool:
        """Whether the GPU is partitioned into MIG instances."""
        return is_mig_on(self._device)

    def warnings(self) -> tuple[str, ...]:
        """Warnings about MIG, power profiles, power smoothing, power limits, persistence,
        unknown throttle reasons and module readings.
        """
        limits_w = read_or_none(lambda: (self.power_limit_w(), self.default_power_limit_w()))
        return tuple(find_warnings(self._device, self._read_of_module(), limits_w))

    def computing_pids(self) -> tuple[int, ...]:
        """Processes that compute on it; in a container, those that NVML shows there."""
        function = "nvmlDeviceGetComputeRunningProcesses"
        running = self._device.answer(function, "list the processes that compute on it")
        return tuple(process.pid for process in running or ())

    def foreign_locks(self, *, is_leased: bool = False) -> tuple[str, ...]:
        """Which clocks are below their highest while the GPU works and nothing throttles it: NVML
        does not tell what is locked.
        """
        return tuple(read_or_none(lambda: list(self._find_locks(is_leased))) or ())

    def _find_locks(self, is_leased: bool) -> Iterator[str]:
        # Any other reason explains a low clock, also one that only a newer driver knows.
        if self._device.number(_REASONS) & ~_CLOCKS_WERE_SET_BIT:
            return
        # Read now: the reasons above hold for this moment.
        clock_mhz = self.clock_mhz()
        highest_mhz = self.supported_clocks_mhz[0]
        at_most = "although it works and nothing throttles it: a program has locked it"
        if clock_mhz < highest_mhz and not is_leased:
            yield (
                f"the SM clock is {clock_mhz} MHz and not {highest_mhz} MHz, {at_most} (a launch "
                "script with `nvidia-smi -lgc`, DCGM, Slurm's --gpu-freq); what the planner sets "
                "replaces this lock, and is replaced if that program sets it again; remove the "
                "lock (`nvidia-smi -rgc`)"
            )
        memory_mhz = read_or_none(self.memory_mhz)
        highest_mhz = self.memory_clocks_mhz[0]
        if memory_mhz is not None and memory_mhz < highest_mhz:
            yield (
                f"the memory clock is {memory_mhz} MHz and not {highest_mhz} MHz, {at_most} "
                "(`nvidia-smi -lmc`, or a mode of a training), which the planner leaves as it is; "
                "train under the same, or remove the lock (`nvidia-smi -rmc`)"
            )

    @cached_property
    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """SM clocks available at the highest memory clock, highest first."""
        function = "nvmlDeviceGetSupportedGraphicsClocks"
        what = _LIST_CLOCKS
        memory_mhz = self.memory_clocks_mhz[0]
        return self._device.clocks(function, memory_mhz, what=what, advice=_WITHOUT_CLOCKS)

    @cached_property
    def memory_clocks_mhz(self) -> tuple[int, ...]:
        """Memory clocks that can be locked, highest first."""
        function = "nvmlDeviceGetSupportedMemoryClocks"
        what = _LIST_CLOCKS
        return self._device.clocks(function, what=what, advice=_WITHOUT_CLOCKS)

    @property
    def power_limits_w(self) -> tuple[float, float]:
        """Smallest and largest power limit that can be set, watts; none is below the floor of
        power smoothing.
        """
        function = "nvmlDeviceGetPowerManagementLimitConstraints"
        what = "read its range of power limits"
        smallest_mw, largest_mw = self._device.call(function, what=what, advice=_WITHOUT_LIMIT)
        # The binding hands through what the library wrote, which may be nothing.
        if not 0 < smallest_mw <= largest_mw <= _MAX_MW:
            raise self._device.implausible(what, f"{smallest_mw} to {largest_mw} mW", function)
        # The driver refuses limits below what smoothing keeps.
        floor_mw = 1000 * (smoothing_floor_w(self._device) or 0)
        return _watts(min(max(smallest_mw, floor_mw), largest_mw)), _watts(largest_mw)

    def power_limit_w(self) -> float:
        """Power limit in force, watts."""
        return _watts(self._device.number(_LIMIT_MW))

    def default_power_limit_w(self) -> float:
        """Power limit when the driver is loaded, watts."""
        return _watts(self._device.number(_DEFAULT_LIMIT_MW))

    def set_power_limit_w(self, limit_w: float) -> None:
        """Set the power limit, to the milliwatt."""
        check_power_limit(self, limit_w)
        self._limit_power(limit_w)
        self._check_limit_was_set(limit_w)

    def reset_power_limit(self) -> None:
        """Set the power limit back to the value it has when the driver is loaded."""
        default_w = self.default_power_limit_w()
        set_mw = self._device.number(_SET_LIMIT_MW)
        if _watts(set_mw) != default_w:  # restoring what is set already needs no privilege
            self._limit_power(default_w)
            self._check_limit_was_set(default_w)

    @abstractmethod
    def _limit_power(self, limit_w: float) -> None:
        """Set the power limit, which the GPU supports."""

    def _check_limit_was_set(self, limit_w: float) -> None:
        """Check that the power limit is the one that was just set, as far as NVML tells."""
        # Slurm, DCGM or another user may set it again at once; NVML then has returned success.
        set_mw = read_or_none(lambda: self._device.number(_SET_LIMIT_MW))
        if set_mw is not None and abs(_watts(set_mw) - limit_w) > _SAME_LIMIT_W:
            raise GpuError(
                f"{self.text}: its power limit was set to {limit_w:g} W, and is {_watts(set_mw):g} "
                "W: stop what else sets it (Slurm, DCGM, another user of nvidia-smi), or use "
                "observe mode"
            )

    def energy_j(self) -> float:
        """Energy since the driver was loaded, joules; data centre GPUs update it about every 100
        ms.
        """
        return self._device.number(_ENERGY_MJ) / 1000

    def power_w(self) -> float:
        """Instant power, watts, or an average over up to a second if the driver has only that."""
        return _watts(self._device.number(_POWER_MW))

    def clock_mhz(self) -> int:
        """Current SM clock, MHz."""
        return self._device.number(_CLOCK_MHZ)

    def memory_mhz(self) -> int:
        """Current memory clock, MHz."""
        return self._device.number(_MEMORY_MHZ)

    def temperature_c(self) -> float:
        """Core temperature, degrees Celsius."""
        return float(self._device.number(_TEMPERATURE_C))

    def throttle_reasons(self) -> frozenset[str]:
        """The members of `THROTTLE_REASONS` that slow the GPU down now."""
        bits = self._device.number(_REASONS)
        return frozenset(reason for bit, reason in _REASON_BITS.items() if bits & bit)

    def throttled_s(self) -> Mapping[str, float]:
        """Seconds of throttling since the driver was loaded, for each reason that this GPU
        counts.
        """
        what = "read for how long it was throttled"
        # Asked one by one: a library may refuse all fields because of an unknown one.
        if self._counted is None:
            self._counted = tuple(field for field in _REASON_FIELDS if self._counts(field, what))
        if not self._counted:
            return {}
        times_ns = self._device.fields(self._counted, what)
        return {
            _REASON_FIELDS[field]: time_ns / 1e9
            for field, time_ns in zip(self._counted, times_ns, strict=True)
        }

    def close(self) -> None:
        """Give NVML back; locked clocks stay locked."""
        if self._is_open:
            self._is_open = False
            NVML.release()

    def _read_of_module(self) -> tuple[str, ...]:
        """Return which of energy and power are those of the GPU and its CPU together."""
        quantities = {"energy": _ENERGY_MJ, "power": _POWER_MW}
        return tuple(name for name, read in quantities.items() if self._device.uses_last_way(read))

    def _counts(self, field: int, what: str) -> bool:
        try:
            self._device.fields([field], what)
        except GpuNotSupported:
            return False
        return True


class NvmlGpu(NvmlReader):
    """One NVIDIA GPU, read and set through NVML."""

    def __init__(self, device: NvmlDevice) -> None:
        super().__init__(device, device.who)

    def set_clock_mhz(self, clock_mhz: int) -> None:
        """Lock the SM clock. This takes milliseconds, during which no other GPU of the node can
        be set.
        """
        check_clock(self, clock_mhz)
        what = f"lock its SM clock at {clock_mhz} MHz"
        self._device.call(
            "nvmlDeviceSetGpuLockedClocks", clock_mhz, clock_mhz, what=what, advice=_WITHOUT_CLOCKS
        )

    def reset_clocks(self) -> None:
        """Unlock the SM clock, whichever process locked it; some libraries can lock but not
        unlock.
        """
        self._device.call(
            "nvmlDeviceResetGpuLockedClocks", what="reset its SM clock", advice=_WITHOUT_CLOCKS
        )

    def lock_memory(self, clock_mhz: int | None) -> None:
        """Lock the memory clock, or unlock it, whichever process locked it."""
        if clock_mhz is None:
            self._device.call("nvmlDeviceResetMemoryLockedClocks", what="reset its memory clock")
            return
        function = "nvmlDeviceSetMemoryLockedClocks"
        what = f"lock its memory at {clock_mhz} MHz"
        self._device.call(function, clock_mhz, clock_mhz, what=what)

    def _limit_power(self, limit_w: float) -> None:
        # Not the newer nvmlDeviceSetPowerManagementLimit_v2: the binding ignores its return code.
        function = "nvmlDeviceSetPowerManagementLimit"
        what = f"set its power limit to {limit_w:g} W"
        self._device.call(function, round(limit_w * 1000), what=what, advice=_WITHOUT_LIMIT)


def open_nvml(which: str) -> NvmlGpu:
    """Open the GPU with an NVML index ("0"), a UUID or the unique beginning of one, or a PCI bus
    id.

    NVML indices count all GPUs of the node in the order of PCI bus ids, whatever
    CUDA_VISIBLE_DEVICES is.

    Raises:
        GpuError: If NVML cannot be used, or shows no such GPU; the text then lists the GPUs it
            shows.
        GpuNotSupported: If it is a MIG instance or a vGPU, which have no clock of their own.
    """
    return open_device(which, NvmlGpu)


def open_device(which: str, make: Callable[[NvmlDevice], OpenedGpu]) -> OpenedGpu:
    """Start NVML, and let `make` turn the device that `which` names into the GPU of a back-end.

    Raises:
        GpuError: As `open_nvml`, or if `make` raises it.
    """
    NVML.acquire()  # the GPU releases it when it is closed
    try:
        return make(find_device(which))
    except BaseException:
        NVML.release()
        raise


def _watts(milliwatts: int) -> float:
    return milliwatts / 1000


_NO_DEVICE = 100
_NEEDED = ("cuInit", "cuDeviceGetCount", "cuDeviceGet")


def open_cuda(which: str) -> NvmlGpu:
    """Open the GPU whose CUDA ordinal in this process is `which`.

    CUDA ordinals depend on CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, NVML indices do not, so the
    CUDA driver is asked for the UUID. This initialises the driver in this process, as the first use
    of CUDA does: later changes of those variables have no effect, and forked children cannot use
    CUDA.

    Raises:
        GpuError: If there is no CUDA driver or no such ordinal, or NVML cannot open the GPU.
        GpuNotSupported: If the CUDA device is a MIG instance.
    """
    if not which:
        raise GpuError(
            "cuda: the number of the GPU is missing; write cuda:0, or run `planner doctor cuda` to "
            "see all"
        )
    if not re.fullmatch("[0-9]{1,4}", which):
        raise GpuError(
            f"cuda:{which}: {which!r} is not a CUDA ordinal; write cuda:0, or nvml: and a UUID"
        )
    # Ordinals count what CUDA_VISIBLE_DEVICES leaves, in CUDA's order. Only UUIDs mean the same to
    # NVML.
    device = _uuid(int(which))
    if f"nvml:GPU-{device}" not in {gpu.text for gpu in visible_gpus()}:
        raise GpuNotSupported(
            f"cuda:{which}: NVML shows no GPU with the UUID of this CUDA device, {device}; if it "
            "is a MIG instance, it has no clock of its own: turn MIG off (`nvidia-smi -mig 0`)"
        )
    gpu = open_nvml(f"GPU-{device}")
    if gpu.is_mig_on:  # old CUDA drivers return the UUID of the whole GPU for an instance of it
        gpu.close()
        raise GpuNotSupported(
            f"cuda:{which}: MIG is on, so that CUDA shows an instance of {gpu.text}, which has no "
            "clock of its own; turn MIG off (`nvidia-smi -mig 0`)"
        )
    return gpu


def count_devices() -> int:
    """Return how many CUDA devices this process sees.

    Raises:
        GpuError: If there is no CUDA driver, or no device.
    """
    with _explained("cuda"):
        count = _count(CudaDriver(*_NEEDED))
    if count == 0:
        raise GpuError(f"cuda: CUDA shows no GPU here{_visible_devices()}; see `planner doctor`")
    return count


def _count(driver: CudaDriver) -> int:
    count = ctypes.c_int()
    # Without a device the driver cannot be initialised: that is a count of 0, and no error.
    if driver.call("cuInit", 0, allowed=_NO_DEVICE) == 0:
        driver.call("cuDeviceGetCount", ctypes.byref(count))
    return count.value


def _uuid(ordinal: int) -> uuid.UUID:
    """Return the UUID of a CUDA device."""
    device = ctypes.c_int()
    raw = (ctypes.c_ubyte * 16)()
    with _explained(f"cuda:{ordinal}"):
        driver = CudaDriver(*_NEEDED)
        # The newer function returns a separate UUID for a MIG instance.
        name = driver.first_of("cuDeviceGetUuid_v2", "cuDeviceGetUuid")
        # Beyond the count the driver would answer with a number only.
        count = _count(driver)
        if ordinal < count:
            driver.call("cuDeviceGet", ctypes.byref(device), ordinal)
            driver.call(name, ctypes.byref(raw), device)
            return uuid.UUID(bytes=bytes(raw))
    raise GpuError(
        f"cuda:{ordinal}: CUDA shows {_listed(count)} here{_visible_devices()}; see `planner "
        "doctor`"
    )


@contextmanager
def _explained(who: str) -> Iterator[None]:
    """Say in errors of the driver which GPU is meant, and what else can be done."""
    try:
        yield
    except GpuError as error:
        raise type(error)(
            f"{who}: {error}{_visible_devices()}; check that `nvidia-smi` works and fits the "
            "driver, or name the GPU by its NVML index or UUID (nvml:), or use simulated:"
        ) from error


def _listed(count: int) -> str:
    return {0: "no GPU", 1: "1 GPU, cuda:0"}.get(count, f"{count} GPUs, cuda:0 to cuda:{count - 1}")


def _visible_devices() -> str:
    """Return the variable that hides or reorders devices, for an error message."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
