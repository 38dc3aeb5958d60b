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


@dataclass(frozen=True)
class NvmlQuantity:
    """A quantity that NVML returns as a whole number."""

    what: str  #: What reading it does, for error messages that begin with "cannot"
    largest: int  #: Largest plausible number
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

    def call(self, function: str, *arguments: Any, what: str, advice: str = "") -> Any:
        """Call a function of the binding on this GPU; see `Nvml.call`."""
        return NVML.call(
            function, self._current_handle(), *arguments, who=self.who, what=what, advice=advice
        )

    def text(self, function: str, what: str) -> str:
        """Return a text, which is not empty."""
        value = self.call(function, what=what)
        text = (value.decode(errors="replace") if isinstance(value, bytes) else str(value)).strip()
        if not text:
            raise self.implausible(what, "an empty text", function)
        return text

    def number(self, quantity: NvmlQuantity, function: str, *arguments: int) -> int:
        """Return a plausible number of the quantity."""
        value = int(self.call(function, *arguments, what=quantity.what, advice=quantity.advice))
        return self._plausible(quantity, value, function)

    def field_number(self, quantity: NvmlQuantity, field: int, scope: int = 0) -> int:
        """Return a plausible number from a field; scope 0 is the GPU, 1 the module of a GPU and
        its CPU.
        """
        # Scope 0 is left out: older versions of the binding know no scopes.
        (value,) = self.fields([(field, scope) if scope else field], quantity.what)
        return self._plausible(quantity, value, f"field {field} of nvmlDeviceGetFieldValues")

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

    def fields(self, fields: Sequence[int | tuple[int, int]], what: str) -> list[int]:
        """Return the numbers of several fields, each a field or (field, scope), from one call."""
        entries = self.call("nvmlDeviceGetFieldValues", list(fields), what=what)
        return [self._field_number(entry, what) for entry in entries]

    def implausible(self, what: str, value: str, function: str) -> GpuNotSupported:
        """Return the error for an implausible value."""
        return GpuNotSupported(
            f"{self.who}: cannot {what}: NVML returns {value} from {function}, which is not "
            "plausible; update the NVIDIA driver, and check which libnvidia-ml.so.1 is loaded"
        )

    def _plausible(self, quantity: NvmlQuantity, value: int, function: str) -> int:
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


class FirstSupported:
    """Reads a quantity by the first function that the GPU supports, and by no other from then on.

    Different functions may count differently, so that differences between their results would be
    meaningless.

    Args:
        functions: Read the quantity, best first.
    """

    def __init__(self, *functions: Callable[[], int]) -> None:
        self._functions = functions
        self._supported: Callable[[], int] | None = None

    @property
    def uses_last(self) -> bool:
        """Whether only the last function is supported."""
        return self._supported is self._functions[-1]

    def __call__(self) -> int:
        """Read the quantity.

        Raises:
            GpuNotSupported: If no function is supported; the text is that of the first.
            GpuError: As the function raises it.
        """
        if self._supported is not None:
            return self._supported()
        errors = []
        for function in self._functions:
            try:
                value = function()
            except GpuNotSupported as error:
                errors.append(error)
            else:
                self._supported = function
                return value
        raise errors[0]


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
        device = _with_pci(which, f"{pci[1] or '0000'}:{pci[2]}.0")
    elif re.fullmatch("[0-9]{1,4}", which):
        device = _with_index(which)
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


def _with_index(which: str) -> NvmlDevice:
    if int(which) >= _count():
        raise _not_found(which)
    return _at(int(which))


def _with_pci(which: str, bus_id: str) -> NvmlDevice:
    handle = NVML.call("nvmlDeviceGetHandleByPciBusId", bus_id, who=f"nvml:{which}", what="find it")
    return _device(which, handle)


def _with_uuid(which: str) -> NvmlDevice:
    """Find a GPU by the beginning of its UUID, even if other GPUs cannot be read."""
    devices, lost = [], None
    for index in range(_count()):
        try:
            device = _at(index)
        except GpuLost as error:
            lost = error
        except GpuError:
            continue
        else:
            if which and device.uuid.lower().startswith(which.lower()):
                devices.append(device)
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
    return _device(
        str(index),
        NVML.call("nvmlDeviceGetHandleByIndex", index, who=f"nvml:{index}", what="open it"),
    )


def _device(which: str, handle: Any) -> NvmlDevice:
    """Return the device of a handle, which must have a UUID: nothing else identifies it."""
    uuid = NvmlDevice(which, handle).text("nvmlDeviceGetUUID", "read its UUID")
    if uuid.startswith("MIG-"):
        raise GpuNotSupported(f"nvml:{which}: {_MIG}")
    return NvmlDevice(uuid, handle)


def _reject_vgpu(device: NvmlDevice) -> None:
    mode = read_or_none(
        lambda: device.call("nvmlDeviceGetVirtualizationMode", what="read its virtualization mode")
    )
    if mode == _VGPU:
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
