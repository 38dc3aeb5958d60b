"""One GPU of NVML, whose numbers are whole and in NVML's units, and how it is found on this node.

A library may report success and write nothing, or write a number that means "unknown". Both become
`GpuNotSupported`, so that the next way to read the same quantity is tried.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from perseus_planner.base.errors import GpuError, GpuLost, GpuNotSupported
from perseus_planner.gpu.nvml.library import NVML, nvml_error

Result = TypeVar("Result")

MAX_MHZ = 100_000
"""Larger numbers cannot be a clock."""

UNKNOWN = (0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)
"""What NVML writes for an unknown number of 32 or 64 bits."""

_UNKNOWN_FIELD = (2, 3, 6, 13, 25, 26)
"""Return codes of libraries that do not know a field; they differ in which one they use."""

_INTEGERS = {1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
"""Member that holds a field's number, by type. Type 0, a real number, is also the type of an
entry never written.
"""


Way = str | int | tuple[Any, ...]
"""A function that returns a number, with its arguments; or a field, with its scope:
0 is the GPU, 1 the module of a GPU and its CPU.
"""


@dataclass(frozen=True)
class NvmlQuantity:
    """A quantity that NVML returns as a whole number."""

    what: str  #: What reading it does, for error messages that begin with "cannot"
    largest: int  #: Largest plausible number
    ways: tuple[Way, ...]  #: How it is read, best first
    smallest: int = 1  #: Smallest plausible number
    advice: str = ""  #: What to do if it is not supported; empty for general advice


class NvmlDevice:
    """One GPU of NVML, usable from any thread and in forked children.

    Every method raises a `GpuError` that says what was asked, what NVML returned and what to do.

    Attributes:
        uuid: The GPU's UUID.
        who: Text that opens the GPU, which begins each error message.
    """

    def __init__(self, uuid: str, handle: Any) -> None:
        self.uuid = uuid
        self.who = f"nvml:{uuid}"
        self._handle, self._generation = handle, NVML.generation
        self._lock = threading.Lock()
        self._supported: dict[NvmlQuantity, Way] = {}

    def call(self, function: str, *arguments: Any, what: str, advice: str = "") -> Any:
        """Call a function of the binding on this GPU; see `Nvml.call`."""
        return NVML.call(
            function, self._current_handle(), *arguments, who=self.who, what=what, advice=advice
        )

    def answer(self, function: str, what: str) -> Any:
        """Return what a function returns, or None if NVML cannot tell.

        Raises:
            GpuLost: If the GPU has fallen off the bus.
        """
        return read_or_none(lambda: self.call(function, what=what))

    def text(self, function: str, what: str) -> str:
        """Return a text, which is not empty."""
        value = self.call(function, what=what)
        text = (value.decode(errors="replace") if isinstance(value, bytes) else str(value)).strip()
        if not text:
            raise self.implausible(what, "an empty text", function)
        return text

    def number(self, quantity: NvmlQuantity) -> int:
        """Return a plausible number of a quantity, by the first way that the GPU supports, and by
        no other from then on.

        Different ways may count differently, so that differences between their results would be
        meaningless.

        Raises:
            GpuNotSupported: If no way is supported; the text is that of the first.
            GpuError: As a way raises it.
        """
        supported = self._supported.get(quantity)
        if supported is not None:
            return self._number(quantity, supported)
        errors = []
        for way in quantity.ways:
            try:
                value = self._number(quantity, way)
            except GpuNotSupported as error:
                errors.append(error)
            else:
                self._supported[quantity] = way
                return value
        raise errors[0]

    def uses_last_way(self, quantity: NvmlQuantity) -> bool:
        """Whether a quantity that can be read is only read by the last of its ways."""
        can_read = read_or_none(lambda: self.number(quantity))
        return bool(can_read) and self._supported[quantity] == quantity.ways[-1]

    def clocks(self, function: str, *arguments: int, what: str, advice: str) -> tuple[int, ...]:
        """Return a list of clocks without duplicates, highest first, MHz: NVML specifies no
        order.
        """
        listed = self.call(function, *arguments, what=what, advice=advice)
        clocks = tuple(
            sorted({int(clock) for clock in listed if 0 < clock <= MAX_MHZ}, reverse=True)
        )
        if not clocks:
            raise GpuNotSupported(
                f"{self.who}: cannot {what}: {function} returns an empty list; {advice}"
            )
        return clocks

    def fields(self, fields: Sequence[int | tuple[int, ...]], what: str) -> list[int]:
        """Return the numbers of several fields, each a field or (field, scope), from one call."""
        entries = self.call("nvmlDeviceGetFieldValues", list(fields), what=what)
        return [self._field_number(entry, what) for entry in entries]

    def implausible(self, what: str, value: str, function: str) -> GpuNotSupported:
        """Return the error for an implausible value."""
        return GpuNotSupported(
            f"{self.who}: cannot {what}: NVML returns {value} from {function}, which is not "
            "plausible; update the NVIDIA driver, and check which libnvidia-ml.so.1 is loaded"
        )

    def _number(self, quantity: NvmlQuantity, way: Way) -> int:
        name, *arguments = way if isinstance(way, tuple) else (way,)
        if isinstance(name, str):
            function = name
            value = int(self.call(function, *arguments, what=quantity.what, advice=quantity.advice))
        else:
            # Older versions of the binding know no scopes.
            function = f"field {name} of nvmlDeviceGetFieldValues"
            (value,) = self.fields([(name, *arguments) if arguments else name], quantity.what)
        if not quantity.smallest <= value <= quantity.largest or value in UNKNOWN:
            raise self.implausible(quantity.what, str(value), function)
        return value

    def _field_number(self, entry: Any, what: str) -> int:
        """Return the number in one entry of field values, which has a return code of its own."""
        function = f"field {entry.fieldId} of nvmlDeviceGetFieldValues"
        if entry.nvmlReturn != 0:
            error = nvml_error(entry.nvmlReturn, "no value", function, self.who, what)
            raise GpuNotSupported(str(error)) if entry.nvmlReturn in _UNKNOWN_FIELD else error
        member = _INTEGERS.get(entry.valueType)
        number = int(getattr(entry.value, member)) if member else None
        if number is None or number in UNKNOWN:
            raise self.implausible(what, "nothing" if number is None else hex(number), function)
        return number

    def _current_handle(self) -> Any:
        NVML.ensure_initialised()
        if (
            self._generation != NVML.generation
        ):  # in a forked child: handles belong to the process that got them
            with self._lock:
                self._handle = NVML.call(
                    "nvmlDeviceGetHandleByUUID", self.uuid, who=self.who, what="find it again"
                )
                self._generation = NVML.generation
        return self._handle


def read_or_none(read: Callable[[], Result]) -> Result | None:
    """Return what `read` returns, or None if NVML cannot tell.

    Raises:
        GpuLost: If the GPU has fallen off the bus.
    """
    try:
        return read()
    except GpuLost:
        raise
    except GpuError:
        return None


_PCI = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2})(?:\.[0-7])?", re.IGNORECASE)

_VGPU = 2

_MIG = (
    "a MIG instance has no clock or power of its own; turn MIG off (`nvidia-smi -mig 0`) and name "
    "the whole GPU, nvml:GPU-… or nvml:0"
)


@dataclass(frozen=True)
class VisibleGpu:
    """A GPU that NVML shows."""

    index: int  #: NVML index
    text: str  #: Text that opens the GPU, with its index if the UUID cannot be read
    name: str  #: Product name; empty if it cannot be read
    problem: str  #: Why the GPU cannot be opened; empty if it can


def visible_gpus() -> tuple[VisibleGpu, ...]:
    """Return all GPUs that NVML shows on this node, by index, including those that cannot be
    opened.

    Raises:
        GpuError: If NVML cannot be used here; the text says what to do.
    """
    NVML.acquire()
    try:
        return tuple(_visible_gpu(index) for index in range(_count()))
    finally:
        NVML.release()


def find_device(which: str) -> NvmlDevice:
    """Return the GPU with an index, a UUID, the unique beginning of one, or a PCI bus id; NVML must
    be in use.

    Raises:
        GpuError: If there is no such GPU, or it cannot be opened.
        GpuNotSupported: If it is a MIG instance or a vGPU.
    """
    if which.upper().startswith("MIG-"):
        raise GpuNotSupported(f"nvml:{which}: {_MIG}")
    pci = _PCI.fullmatch(which)
    if pci:
        who, bus_id = f"nvml:{which}", f"{pci[1] or '0000'}:{pci[2]}.0"
        handle = NVML.call("nvmlDeviceGetHandleByPciBusId", bus_id, who=who, what="find it")
        device = _device(which, handle)
    elif re.fullmatch("[0-9]{1,4}", which):
        if int(which) >= _count():
            raise _not_found(which)
        device = _at(int(which))
    else:
        device = _with_uuid(which)
    _reject_vgpu(device)
    return device


def _visible_gpu(index: int) -> VisibleGpu:
    text, name, problem = f"nvml:{index}", "", ""
    try:
        device = _at(index)
        text = device.who
        name = device.text("nvmlDeviceGetName", "read its name")
        _reject_vgpu(device)
    except GpuError as error:
        problem = str(error)
    return VisibleGpu(index, text, name, problem)


def _with_uuid(which: str) -> NvmlDevice:
    """Find a GPU by the beginning of its UUID, even if other GPUs cannot be read."""
    devices, lost = [], None
    for index in range(_count()):
        try:
            device = _at(index)
            if which and device.uuid.lower().startswith(which.lower()):
                devices.append(device)
        except GpuError as error:
            lost = error if isinstance(error, GpuLost) else lost
    if not devices and lost:
        raise GpuLost(
            f"nvml:{which}: no GPU that responds has this UUID; it may be the one that is lost: "
            f"{lost}"
        )
    if not devices:
        raise _not_found(which)
    if len(devices) > 1:
        matches = ", ".join(device.who for device in devices)
        raise GpuError(f"nvml:{which}: several GPUs match: {matches}; write more of the UUID")
    return devices[0]


def _at(index: int) -> NvmlDevice:
    who = f"nvml:{index}"
    handle = NVML.call("nvmlDeviceGetHandleByIndex", index, who=who, what="open it")
    return _device(str(index), handle)


def _device(which: str, handle: Any) -> NvmlDevice:
    """Return the device of a handle, which must have a UUID: nothing else identifies it."""
    uuid = NvmlDevice(which, handle).text("nvmlDeviceGetUUID", "read its UUID")
    if uuid.startswith("MIG-"):
        raise GpuNotSupported(f"nvml:{which}: {_MIG}")
    return NvmlDevice(uuid, handle)


def _reject_vgpu(device: NvmlDevice) -> None:
    mode = "nvmlDeviceGetVirtualizationMode", "read its virtualization mode"
    if device.answer(*mode) == _VGPU:
        raise GpuNotSupported(
            f"{device.who}: this is a vGPU, whose clock and power belong to the host; run on the "
            "host, or have a whole GPU passed through to this machine"
        )


def _count() -> int:
    count = NVML.call("nvmlDeviceGetCount", who="NVML", what="count the GPUs")
    if not 0 <= count <= 1024:  # no node has more
        raise GpuError(
            f"NVML: cannot count the GPUs: it returns {count}; check which libnvidia-ml.so.1 is "
            "loaded"
        )
    return int(count)


def _not_found(which: str) -> GpuError:
    """Return the error for a missing GPU, with a list of the GPUs that NVML shows."""
    shown = [
        f"{gpu.index} {gpu.text.removeprefix('nvml:')} {gpu.name or gpu.problem}"
        for gpu in visible_gpus()
    ]
    choose = f"choose one of: {'; '.join(shown)}" if shown else "NVML shows none on this node"
    return GpuError(f"nvml:{which}: NVML shows no such GPU; {choose}")
