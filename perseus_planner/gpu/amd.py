"""AMD GPUs, read and set through AMD SMI, whose binding is amdsmi and whose library comes with
ROCm.

It is tested against a stand-in for the library; nothing here was measured on a GPU.
`planner doctor --measure-latency` measures how long changing a clock takes. What differs from NVML:

- A clock is set as a range from the lowest one, as drivers refuse a range whose ends are equal. A
  busy GPU runs at its upper end.
- Only the performance level "auto" unlocks the clock, and it resets all domains: whoever had set
  the memory clock has to set it again.
- Energy is a counter in units that depend on the GPU, and some versions name a wrong one. So it is
  compared with the power sensor for half a second when a GPU is opened.
- Libraries before ROCm 7.2 do not allow calls from several threads, so there is one call at a time.
- Seconds of throttling are not counted: asking for them takes the library 100 ms.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from functools import cached_property
from statistics import fmean
from typing import Any

from perseus_planner.base.errors import (
    GpuError,
    GpuLost,
    GpuNotPermitted,
    GpuNotSupported,
    how_to_install,
)
from perseus_planner.gpu.protocol import Library, RealGpu, check_clock, check_power_limit

_INSTALL = how_to_install("amd")
_LIBRARY = (
    "libamd_smi.so comes with ROCm (package amd-smi-lib): install that, or name ROCm's folder in "
    "ROCM_PATH; in a container, pass /dev/kfd and /dev/dri on; without an AMD GPU, use nvml: or "
    "simulated:"
)
UPDATE = (
    "update ROCm and the amdgpu driver, or do without: `planner doctor amd:0` lists what this "
    "GPU supports"
)
_MAY_NOT = "run as root, which setting needs, or set nothing (dry-run:, or observe mode)"
_LOST = (
    "it hangs or has fallen off the bus: see `dmesg | grep amdgpu`, reboot the node, and run "
    "`planner reset`"
)
_SEE_LOG = "see what the driver writes to the kernel log (`dmesg | grep amdgpu`), and try again"

_ERRORS: dict[int | None, tuple[type[GpuError], str]] = {
    1: (GpuError, "this GPU or driver does not accept the value"),
    **dict.fromkeys((2, 3, 40), (GpuNotSupported, UPDATE)),
    10: (GpuNotPermitted, _MAY_NOT),
    34: (GpuError, "load the driver (`modprobe amdgpu`)"),
    **dict.fromkeys((31, 54), (GpuLost, _LOST)),
}
"""Status codes of amdsmi.h -> what they mean here; others are errors without a name."""


class AmdSmi(Library):
    """AMD SMI in this process."""

    def call(self, function: str, *arguments: Any, who: str, what: str) -> Any:
        """Call a function of the binding, alone, and return its result.

        Args:
            function: Name in amdsmi.
            arguments: Arguments of the function.
            who: Text of the GPU, which begins the error message.
            what: What the call does, for error messages that begin with "cannot".

        Raises:
            GpuError: If the library returns an error; the text says which, and what to do.
        """
        # Alone: libraries before ROCm 7.2 do not allow calls from several threads.
        with self._lock:
            self.ensure_initialised()
            return self._call(function, arguments, who, what)

    def constant(self, group: str, name: str) -> Any:
        """Return a constant of the binding, such as that of the graphics clock."""
        return getattr(getattr(_binding(), group), name)

    def _start(self) -> None:
        self._call("amdsmi_init", (), "AMD SMI", "start")

    def _shut_down(self) -> None:
        self._call("amdsmi_shut_down", (), "AMD SMI", "shut down")

    def _call(self, function: str, arguments: tuple[Any, ...], who: str, what: str) -> Any:
        binding = _binding()
        # Looked up by name: ROCm's versions have different bindings.
        call = getattr(binding, function, None)
        if call is None:
            raise GpuNotSupported(
                f"{who}: cannot {what}: amdsmi is too old for {function}; {UPDATE}"
            )
        try:
            return call(*arguments)
        # The binding's own errors, and what it raises where it cannot decode a result.
        except Exception as error:
            code = getattr(error, "err_code", None)
            kind, advice = _ERRORS.get(code, (GpuError, _SEE_LOG))
            said = f"'{getattr(error, 'err_info', None) or error}' (error {code})"
            raise kind(
                f"{who}: cannot {what}: AMD SMI returns {said} from {function}; {advice}"
            ) from error


AMD_SMI = AmdSmi("AMD SMI")
"""The AMD SMI of this process."""


def _binding() -> Any:
    """Import amdsmi, which prints to standard output and raises a KeyError where the library is
    missing.
    """
    try:
        # What it prints would stand in a command's output.
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
            import amdsmi
    except ModuleNotFoundError as error:
        raise GpuError(
            f"AMD GPUs need amdsmi, which cannot be imported ({error}); {_INSTALL}"
        ) from error
    except Exception as error:
        missing = "libamd_smi.so cannot be loaded" if isinstance(error, KeyError) else str(error)
        raise GpuError(
            f"AMD GPUs need AMD SMI, and amdsmi cannot use it: {missing}; {_LIBRARY}"
        ) from error
    return amdsmi


CHECK_S = 0.5
"""For which the energy counter is compared with the power sensor when a GPU is opened, seconds."""

_STEP_MHZ = 20  #: between two clocks; any whole MHz can be set
#: times; a counter in a wrong unit is off by more, and the sensor's average lags behind by less
_MOST_OFF = 1.5
_COMPARISONS = 3  #: of counter and sensor, at most; by hand
# Larger numbers cannot be a power or a clock
_MAX_W = 100_000
_MAX_MHZ = 100_000
_BDF = re.compile(r"(?:([0-9a-f]{4}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", re.IGNORECASE)

_REASONS = {
    "active_ppt_pwr": "sw-power-cap",
    "active_socket_thrm": "sw-thermal",
    "active_vr_thrm": "hw-thermal",
    "active_hbm_thrm": "hw-thermal",
    "active_prochot_thrm": "hw-slowdown",
}


class AmdGpu(RealGpu):
    """One AMD GPU, read and set through AMD SMI. See `Gpu` for the members and their errors.

    Args:
        index: Number of the GPU among those of the node.
    """

    def __init__(self, index: int) -> None:
        self.text = f"amd:{index}"
        self._index = index
        self._is_open = True
        self._handle: Any = None
        self._generation = -1
        # Its number may change with the next boot, its UUID does not.
        self.uuid = str(self._read("amdsmi_get_gpu_device_uuid", "read its UUID"))
        self.text = f"amd:{self.uuid}"
        self._counter_problem = self._compare_counter()

    @cached_property
    def name(self) -> str:
        """Product name."""
        name = self._read("amdsmi_get_gpu_asic_info", "read its name").get("market_name")
        return str(name) if name and name != "N/A" else "AMD GPU"

    @cached_property
    def driver(self) -> str:
        """Version of the amdgpu driver."""
        function = "amdsmi_get_gpu_driver_info"
        what = "read its driver"
        return f"amdgpu {self._value(function, what, 'driver_version')}"

    def warnings(self) -> tuple[str, ...]:
        """Warnings about partitions, a power limit below the default, and an energy counter that
        is off.
        """
        # A counter that is off makes a GPU unfit for profiles, so that comes first.
        problems = [] if self._counter_problem is None else [self._counter_problem]
        with suppress(GpuNotSupported):
            partition = str(self._read("amdsmi_get_gpu_compute_partition", "read its partitions"))
            if partition not in ("SPX", "", "N/A"):
                problems.append(
                    f"it is partitioned ({partition}): clock, power and energy are those of the "
                    "whole GPU, which all partitions share; make it one (`amd-smi set -C SPX`) "
                    "before profiling"
                )
        with suppress(GpuNotSupported):
            limit_w = self.power_limit_w()
            default_w = self.default_power_limit_w()
            if limit_w < default_w:
                problems.append(
                    f"the power limit is {limit_w:g} W, below its default of {default_w:g} W, so "
                    "that high clocks may not be reached; train under the same limit, or restore "
                    "the default (`amd-smi reset --power-cap`)"
                )
        return tuple(problems)

    @cached_property
    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """Graphics clocks in steps of 20 MHz, highest first; the lowest one alone cannot be set."""
        least_mhz = self._clock("min_clk")
        most_mhz = self._clock("max_clk")
        # Without a range there is nothing to choose from, and a list would be empty.
        if most_mhz <= least_mhz:
            raise GpuNotSupported(
                f"{self.text}: cannot list its supported clocks: AMD SMI returns {least_mhz} to "
                f"{most_mhz} MHz; use the power limit as the control, or set nothing (observe "
                "mode)"
            )
        return tuple(range(most_mhz, least_mhz, -_STEP_MHZ))

    @property
    def power_limits_w(self) -> tuple[float, float]:
        """Smallest and largest power limit that can be set, watts."""
        # Some drivers name no least limit.
        return max(self._cap_w("min_power_cap"), 1.0), self._cap_w("max_power_cap")

    def power_limit_w(self) -> float:
        """Power limit in force, watts."""
        return self._cap_w("power_cap")

    def default_power_limit_w(self) -> float:
        """Power limit unless another is set, watts."""
        return self._cap_w("default_power_cap")

    def energy_j(self) -> float:
        """Energy since the driver was loaded, joules.

        Raises:
            GpuNotSupported: If the counter did not agree with the power sensor when the GPU was
                opened.
        """
        if self._counter_problem is not None:
            raise GpuNotSupported(f"{self.text}: {self._counter_problem}")
        return self._counted_j()

    def power_w(self) -> float:
        """Power of the whole package, watts."""
        powers = self._read("amdsmi_get_power_info", "read its power")
        # Versions name it differently, and some write a text where they have no number.
        for name in ("socket_power", "current_socket_power", "average_socket_power"):
            if isinstance(powers.get(name), int) and 0 < powers[name] < _MAX_W:
                return float(powers[name])
        raise GpuNotSupported(f"{self.text}: cannot read its power: AMD SMI returns none; {UPDATE}")

    def clock_mhz(self) -> int:
        """Current graphics clock, MHz."""
        return self._clock("clk")

    def temperature_c(self) -> float:
        """Temperature of the hottest place, or of the edge, degrees Celsius."""
        metric = AMD_SMI.constant("AmdSmiTemperatureMetric", "CURRENT")

        def read(place: str) -> float:
            kind = AMD_SMI.constant("AmdSmiTemperatureType", place)
            return float(self._read("amdsmi_get_temp_metric", "read its temperature", kind, metric))

        try:
            return read("HOTSPOT")
        except GpuNotSupported:
            return read("EDGE")

    def throttle_reasons(self) -> frozenset[str]:
        """The members of `THROTTLE_REASONS` that slow the GPU down now; takes about 100 ms."""
        status = self._read("amdsmi_get_violation_status", "read why it is throttled")
        return frozenset(reason for name, reason in _REASONS.items() if status.get(name) is True)

    def throttled_s(self) -> Mapping[str, float]:
        """None are counted."""
        return {}

    def set_clock_mhz(self, clock_mhz: int) -> None:
        """Let the graphics clock rise to at most this one, at which a busy GPU runs."""
        check_clock(self, clock_mhz)
        what = f"set its graphics clock to {clock_mhz} MHz"
        # A range whose ends are equal is refused, so it begins at the lowest clock.
        graphics = AMD_SMI.constant("AmdSmiClkType", "GFX")
        self._read("amdsmi_set_gpu_clk_range", what, self._least_mhz, clock_mhz, graphics)

    def reset_clocks(self) -> None:
        """Give all clocks back to the driver, also those that others have set."""
        auto = AMD_SMI.constant("AmdSmiDevPerfLevel", "AUTO")
        self._read("amdsmi_set_gpu_perf_level", "reset its clocks", auto)

    def set_power_limit_w(self, limit_w: float) -> None:
        """Set the power limit, to the microwatt; the driver may round it to whole watts."""
        check_power_limit(self, limit_w)
        what = f"set its power limit to {limit_w:g} W"
        self._read("amdsmi_set_power_cap", what, 0, round(limit_w * 1e6))
        # The driver rounds silently, or another program may have set it again.
        set_w = self.power_limit_w()
        if abs(set_w - limit_w) >= 1.0:
            raise GpuError(
                f"{self.text}: its power limit was set to {limit_w:g} W, and is {set_w:g} W: stop "
                "what else sets it, or use observe mode"
            )

    def reset_power_limit(self) -> None:
        """Set the power limit back to its default."""
        default_w = self.default_power_limit_w()
        # Restoring what is set already needs no privilege.
        if self.power_limit_w() != default_w:
            self.set_power_limit_w(default_w)

    def close(self) -> None:
        """Give AMD SMI back; a clock that is set stays set."""
        if self._is_open:
            self._is_open = False
            AMD_SMI.release()

    @cached_property
    def _least_mhz(self) -> int:
        return self._clock("min_clk")

    def _clock(self, name: str) -> int:
        kind = AMD_SMI.constant("AmdSmiClkType", "GFX")
        value = self._value("amdsmi_get_clock_info", "read its graphics clock", name, kind)
        if not isinstance(value, int) or not 0 < value < _MAX_MHZ:
            raise GpuNotSupported(
                f"{self.text}: cannot read its graphics clock: AMD SMI returns {value}; {UPDATE}"
            )
        return value

    def _cap_w(self, name: str) -> float:
        cap_uw = self._value("amdsmi_get_power_cap_info", "read its power limit", name)
        # Some drivers name no least limit, and write 0 there; of the others, 0 means "unknown".
        least_uw = 0 if name == "min_power_cap" else 1
        if not least_uw <= cap_uw < _MAX_W * 1e6:
            raise GpuNotSupported(
                f"{self.text}: cannot read its power limit: AMD SMI returns {cap_uw} microwatts; "
                f"{UPDATE}"
            )
        return float(cap_uw / 1e6)

    def _counted_j(self) -> float:
        function = "amdsmi_get_energy_count"
        what = "read its energy counter"
        count = self._value(function, what, "energy_accumulator")
        # The library names the unit of its counts, microjoules; some versions name a wrong one.
        return float(count * self._value(function, what, "counter_resolution") / 1e6)

    def _compare_counter(self) -> str | None:
        """Return what is wrong with the energy counter; None if it agrees with the sensor, or
        one cannot be read.
        """
        counted_w = 0.0
        sensed_w = 0.0
        # On a busy host a reading may come late once, which a wrong unit does not explain.
        for _ in range(_COMPARISONS):
            try:
                counted_w, sensed_w = self._compared_w()
            except GpuError:
                return None  # who reads it next is told why it cannot be read
            if sensed_w / _MOST_OFF <= counted_w <= sensed_w * _MOST_OFF:
                return None
        return (
            f"its energy counter rose by {counted_w:.1f} W while its power sensor showed "
            f"{sensed_w:.1f} W, so the counter is not used: its unit is wrong in some versions of "
            "ROCm; update ROCm and the amdgpu driver"
        )

    def _compared_w(self) -> tuple[float, float]:
        """Return the power by the energy counter and by the sensor over `CHECK_S`, watts.

        Raises:
            GpuError: If one cannot be read.
        """
        powers_w: list[float] = []
        begun_j = self._counted_j()
        begun_s = self.now_s()
        # The sensor is averaged over the same time as the counter: load may change within it.
        while self.now_s() - begun_s < CHECK_S:
            powers_w.append(self.power_w())
            self.wait(CHECK_S / 25)
        counted_w = (self._counted_j() - begun_j) / (self.now_s() - begun_s)
        return counted_w, fmean(powers_w)

    def _value(self, function: str, what: str, name: str, *arguments: Any) -> Any:
        """Return one value of an answer, which has other names before ROCm 6.3."""
        answer = self._read(function, what, *arguments)
        if name not in answer:
            raise GpuNotSupported(
                f"{self.text}: cannot {what}: amdsmi names no {name!r}, as before ROCm 6.3; update "
                "ROCm"
            )
        return answer[name]

    def _read(self, function: str, what: str, *arguments: Any) -> Any:
        return AMD_SMI.call(function, self._current_handle(), *arguments, who=self.text, what=what)

    def _current_handle(self) -> Any:
        AMD_SMI.ensure_initialised()
        # In a forked child, or after a restart of the library: handles are valid for one
        # generation.
        if self._handle is None or self._generation != AMD_SMI.generation:
            self._handle = _handles(self.text)[self._index]
            self._generation = AMD_SMI.generation
        return self._handle


def open_amd(which: str) -> AmdGpu:
    """Open the GPU with an index of AMD SMI ("0"), a UUID or the unique beginning of one, or a PCI
    bus id.

    Raises:
        GpuError: If AMD SMI cannot be used, or shows no such GPU; the text then lists those that it
            shows.
    """
    AMD_SMI.acquire()  # the GPU releases it when it is closed
    try:
        return AmdGpu(_index_of(which))
    except BaseException:
        AMD_SMI.release()
        raise


def visible_amd_gpus() -> tuple[str, ...]:
    """Return the texts of all AMD GPUs of this node; none if there is no AMD SMI."""
    try:
        AMD_SMI.acquire()
    except GpuError:
        return ()
    try:
        return tuple(f"amd:{uuid}" for uuid, _ in _identities())
    finally:
        AMD_SMI.release()


def _index_of(which: str) -> int:
    # One question for each form of a name; ambiguous ones are found by the count at the end.
    identities = _identities()
    pci = _BDF.fullmatch(which)
    if pci:
        wanted = f"{pci[1] or '0000'}:{pci[2]}".lower()
        indices = [index for index, (_, bdf) in enumerate(identities) if bdf.lower() == wanted]
    elif re.fullmatch("[0-9]{1,4}", which):
        indices = [int(which)] if int(which) < len(identities) else []
    else:
        indices = [
            index
            for index, (uuid, _) in enumerate(identities)
            if which and uuid.startswith(which.lower())
        ]
    # None, or several: both get the list to choose from.
    if len(indices) != 1:
        shown = "; ".join(f"{index} {uuid}" for index, (uuid, _) in enumerate(identities)) or "none"
        said = "several such GPUs" if indices else "no such GPU"
        raise GpuError(f"amd:{which}: AMD SMI shows {said}; choose one of: {shown}")
    return indices[0]


def _identities() -> list[tuple[str, str]]:
    """Return UUID and PCI bus id of each GPU, in the order of AMD SMI."""

    def read(function: str, index: int, handle: Any) -> str:
        return str(AMD_SMI.call(function, handle, who=f"amd:{index}", what="identify it"))

    return [
        (
            read("amdsmi_get_gpu_device_uuid", index, handle),
            read("amdsmi_get_gpu_device_bdf", index, handle),
        )
        for index, handle in enumerate(_handles("AMD SMI"))
    ]


def _handles(who: str) -> list[Any]:
    handles = AMD_SMI.call("amdsmi_get_processor_handles", who=who, what="find the GPUs")
    return list(handles)
