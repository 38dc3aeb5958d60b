"""One GPU of NVML, whose numbers are whole and in NVML's units, and how it is found on this node.

A library may report success and write nothing, or write a number that means "unknown". Both become
`GpuNotSupported`, so that the next way to read the same quantity is tried.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, TypeVar

from perseus_planner.base.errors import (
    REINSTALL_NVML,
    GpuError,
    GpuLost,
    GpuNotPermitted,
    GpuNotSupported,
    how_to_install,
)
from perseus_planner.gpu.protocol import Library

LIBRARY_NOT_FOUND = 12
"""Return code if libnvidia-ml.so.1 cannot be loaded."""

_UNINITIALIZED = 1
_INVALID_ARGUMENT = 2
_FUNCTION_NOT_FOUND = 13

_INSTALL = how_to_install("nvml")

_CONTAINER = "in a container, start it with the NVIDIA runtime (`docker run --gpus all`)"

_SEE_LOG = "see what the driver writes to the kernel log (`dmesg | grep -i -e nvrm -e xid`)"

_UPDATE = "update the NVIDIA driver, or do without: `planner doctor` lists what this GPU supports"

_LOST = (
    f"it has fallen off the bus or hangs: {_SEE_LOG}, then reset it (`nvidia-smi --gpu-reset`) or "
    "reboot the node, and run `planner reset`"
)

_MAY_NOT_READ = (
    "ask the node's administrator for access to this GPU's device file, or have the "
    "job system assign it to the job"
)

_MAY_NOT_SET = (
    "setting needs root (in Docker also `--cap-add SYS_ADMIN`): run as root, or choose a back-end "
    "that sets for you (zeusd: or command:), or set nothing (dry-run:, or observe mode)"
)

_KINDS = {
    **dict.fromkeys((3, _FUNCTION_NOT_FOUND, 21, 25, 26), GpuNotSupported),
    4: GpuNotPermitted,
    **dict.fromkeys((15, 16, 28), GpuLost),
}
"""Return codes that are no `GpuError` alone."""

_ADVICE = {
    _UNINITIALIZED: (
        "the driver was reloaded, or other code in this process has shut NVML down; the next call "
        "starts it again"
    ),
    _INVALID_ARGUMENT: (
        f"this GPU does not accept the value, or MIG or a vGPU forbids it: {_UPDATE}"
    ),
    3: _UPDATE,
    4: _MAY_NOT_READ,
    6: "run `planner doctor` to see which GPUs there are",
    8: "plug in its external power cables",
    9: f"load the NVIDIA driver (`modprobe nvidia`; `nvidia-smi` must work); {_CONTAINER}",
    10: f"the driver did not answer in time: try again; {_SEE_LOG}",
    LIBRARY_NOT_FOUND: (
        "libnvidia-ml.so.1 comes with the NVIDIA driver: install that, or name the library's "
        f"folder in LD_LIBRARY_PATH; {_CONTAINER}; without an NVIDIA GPU, use simulated:"
    ),
    _FUNCTION_NOT_FOUND: f"this libnvidia-ml.so.1 is too old for it: {_UPDATE}",
    15: _LOST,
    16: _LOST,
    17: (
        "the operating system or a container's rules block the driver's device files: allow "
        "/dev/nvidia*"
    ),
    18: (
        "the loaded driver and libnvidia-ml.so.1 have different versions: reboot the node, reload "
        "the driver's modules, or restart the container"
    ),
    19: "another program uses it: stop that (DCGM, nvidia-smi, another profiler) and try again",
    21: f"the driver has no such data for it: {_UPDATE}",
    24: "choose one of the supported clocks: `planner doctor` lists them",
    25: f"this libnvidia-ml.so.1 knows another version of that function: {_UPDATE}",
    26: f"this libnvidia-ml.so.1 has dropped that function: {_UPDATE}",
    28: _LOST,
}


class Nvml(Library):
    """NVML in this process.

    The binding is nvidia-ml-py, which loads `libnvidia-ml.so.1`. That library may be old and lack
    newer functions, be made for a vGPU, or come with a container. Whatever it returns, callers get
    a value or a `GpuError`.
    """

    def call(self, function: str, *arguments: Any, who: str, what: str, advice: str = "") -> Any:
        """Call a function of the binding, and return its result in NVML's units.

        Args:
            function: Name in nvidia-ml-py.
            arguments: Arguments of the function.
            who: Text of the GPU, which begins the error message.
            what: What the call does, for error messages that begin with "cannot".
            advice: What to do if it is not supported; empty for general advice.

        Raises:
            GpuError: If NVML returns an error; the text says which, and what to do.
        """
        self.ensure_initialised()
        return _call(function, arguments, who, what, advice)

    def structure(self, name: str) -> Any:
        """Return an empty structure of the binding, with its version filled in.

        Raises:
            GpuNotSupported: If the installed binding does not know it.
        """
        try:
            return getattr(_binding(), name)()
        except AttributeError as error:
            raise GpuNotSupported(f"nvidia-ml-py: too old for {name}; {_INSTALL}") from error

    def constants(self, prefix: str) -> dict[str, int]:
        """Return the binding's constants with this prefix, by name without the prefix."""
        members = vars(_binding()).items()
        return {
            name.removeprefix(prefix): value for name, value in members if name.startswith(prefix)
        }

    def _start(self) -> None:
        _call("nvmlInit", (), "NVML", "start")

    def _shut_down(self) -> None:
        _call("nvmlShutdown", (), "NVML", "shut down")


NVML = Nvml("NVML")
"""The NVML of this process."""


def nvml_error(
    code: int, message: str, function: str, who: str, what: str, advice: str = ""
) -> GpuError:
    """Return the error for a return code of NVML, with advice."""
    # The kind tells callers what to do; codes without one stay a plain `GpuError`.
    kind = _KINDS.get(code, GpuError)
    general = _ADVICE.get(code, f"{_SEE_LOG} and try again")
    if code == _INVALID_ARGUMENT and "nvmlDeviceGet" in function:
        kind = GpuNotSupported  # as libraries answer that do not know what is asked for
    # NVML has one code for both, but reading needs access to a file, and setting needs root.
    if kind is GpuNotPermitted and function.startswith(("nvmlDeviceSet", "nvmlDeviceReset")):
        general = _MAY_NOT_SET
    # What the caller advises is for this GPU alone: without the quantity, something else has to do.
    do = advice if advice and kind is GpuNotSupported else general
    return kind(
        f"{who}: cannot {what}: NVML returns '{message}' (error {code}) from {function}; {do}"
    )


def _call(function: str, arguments: tuple[Any, ...], who: str, what: str, advice: str = "") -> Any:
    binding = _binding()
    # Looked up by name: an older binding lacks newer functions.
    call = getattr(binding, function, None)
    if call is None:
        raise nvml_error(
            _FUNCTION_NOT_FOUND, "nvidia-ml-py is too old", function, who, what, advice or _INSTALL
        )
    try:
        return call(*arguments)
    except binding.NVMLError as error:
        # The binding says "not found" for every reason of the loader, which it keeps as the
        # context.
        if error.value == LIBRARY_NOT_FOUND and isinstance(error.__context__, OSError):
            raise _load_error(error.__context__, who, what) from error
        # Other code in the process may have shut NVML down; the next call starts it again.
        if error.value == _UNINITIALIZED:
            NVML.forget()
        raise nvml_error(error.value, _message(error), function, who, what, advice) from error
    except Exception as error:
        # The binding cannot decode the result, for example bytes that are not text or an impossible
        # size.
        raise GpuError(
            f"{who}: cannot {what}: nvidia-ml-py cannot decode what NVML returns from {function} "
            f"({type(error).__name__}: {error}); check which libnvidia-ml.so.1 is loaded, and "
            f"{_UPDATE}"
        ) from error


def _load_error(reason: OSError, who: str, what: str) -> GpuError:
    """Return the error for a library that the system's loader does not load, with its reason."""
    advice = _ADVICE[LIBRARY_NOT_FOUND]
    if "No such file" not in str(reason):
        advice = (
            "the library that was found does not load: install that of this node's driver, for "
            f"this architecture, or name its folder in LD_LIBRARY_PATH; {_CONTAINER}"
        )
    return GpuError(f"{who}: cannot {what}: {reason}; {advice}")


def _message(error: Exception) -> str:
    """Return NVML's text for an error, which comes from the library and may be anything."""
    try:
        return str(error)
    except Exception:
        return "unknown error"


_NEEDED_SINCE_11 = "nvmlDeviceGetMigMode"
"""A function that nvidia-ml-py has from version 11 on. Modules without it cannot lock clocks or
count energy.
"""


def _binding() -> Any:
    """Import nvidia-ml-py, whose module is called pynvml as those of other packages are."""
    try:
        import pynvml
    except ImportError as error:
        raise GpuError(
            f"NVML needs nvidia-ml-py, which cannot be imported ({error}); {_how_to_get_it(error)}"
        ) from error
    path = getattr(pynvml, "__file__", None)
    # Told by an internal name, which both modules lack that are mistaken for it.
    if not hasattr(pynvml, "_nvmlGetFunctionPointer"):
        # The package pynvml before version 12 has a folder of that name, which hides the module.
        raise GpuError(
            f"NVML needs nvidia-ml-py, but `import pynvml` finds another package ({path}); "
            f"run `pip uninstall pynvml`, then {_INSTALL}"
        )
    if not hasattr(pynvml, _NEEDED_SINCE_11):
        raise GpuError(
            "NVML needs nvidia-ml-py, but `import pynvml` finds a module from before its version "
            f"11 ({path}), such as that of 2017 with which nvidia-ml-py3 overwrites it; "
            f"{REINSTALL_NVML}"
        )
    return pynvml


def _how_to_get_it(error: ImportError) -> str:
    """Return what installs a binding that cannot be imported."""
    if error.name != "pynvml" or not _is_listed("nvidia-ml-py"):
        return _INSTALL
    # pip takes it for installed, so that only a forced installation brings the module back.
    return (
        "pip lists it as installed, but its file pynvml.py is gone, as after `pip uninstall "
        f"nvidia-ml-py3`, whose file has the same name; {REINSTALL_NVML}"
    )


def _is_listed(package: str) -> bool:
    """Return whether pip takes a package for installed."""
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


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
        self._handle = handle
        self._generation = NVML.generation
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
        # Once a way has worked, no other is tried: differences of two ways mean nothing.
        supported = self._supported.get(quantity)
        if supported is not None:
            return self._number(quantity, supported)
        errors = []
        for way in quantity.ways:
            try:
                value = self._number(quantity, way)
            except GpuNotSupported as error:
                errors.append(error)
            # Only now: a way that has raised may still be tried next time.
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
        # NVML writes what the driver has, in any order, and some write a clock twice.
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
        # A field is asked for by its number, whose entries have types and codes of their own.
        else:
            # Older versions of the binding know no scopes.
            function = f"field {name} of nvmlDeviceGetFieldValues"
            (value,) = self.fields([(name, *arguments) if arguments else name], quantity.what)
        # Success and nothing written looks like a 0, and "unknown" like the largest number.
        if not quantity.smallest <= value <= quantity.largest or value in UNKNOWN:
            raise self.implausible(quantity.what, str(value), function)
        return value

    def _field_number(self, entry: Any, what: str) -> int:
        """Return the number in one entry of field values, which has a return code of its own."""
        function = f"field {entry.fieldId} of nvmlDeviceGetFieldValues"
        # The call succeeds although single fields fail, each with its own code.
        if entry.nvmlReturn != 0:
            error = nvml_error(entry.nvmlReturn, "no value", function, self.who, what)
            # Libraries disagree about the code for a field that they do not know.
            raise GpuNotSupported(str(error)) if entry.nvmlReturn in _UNKNOWN_FIELD else error
        # A type that this table lacks may also be an entry never written.
        member = _INTEGERS.get(entry.valueType)
        number = int(getattr(entry.value, member)) if member else None
        if number is None or number in UNKNOWN:
            raise self.implausible(what, "nothing" if number is None else hex(number), function)
        return number

    def _current_handle(self) -> Any:
        NVML.ensure_initialised()
        # A forked child: handles belong to the process that got them.
        if self._generation != NVML.generation:
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
    # A MIG instance has a UUID of its own, which NVML takes, and no clock.
    if which.upper().startswith("MIG-"):
        raise GpuNotSupported(f"nvml:{which}: {_MIG}")
    pci = _PCI.fullmatch(which)
    if pci:
        who = f"nvml:{which}"
        # The library wants the full form, with a domain of 4 or 8 digits and the function.
        bus_id = f"{pci[1] or '0000'}:{pci[2]}.0"
        handle = NVML.call("nvmlDeviceGetHandleByPciBusId", bus_id, who=who, what="find it")
        device = _device(which, handle)
    elif re.fullmatch("[0-9]{1,4}", which):
        # An index that is out of range gets a list of what there is, instead of NVML's error.
        if int(which) >= _count():
            raise _not_found(which)
        device = _at(int(which))
    else:
        device = _with_uuid(which)
    # Only now: UUID, address and index may all name one.
    _reject_vgpu(device)
    return device


def _visible_gpu(index: int) -> VisibleGpu:
    text = f"nvml:{index}"
    name = ""
    problem = ""
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
    devices = []
    lost = None
    for index in range(_count()):
        try:
            device = _at(index)
            if which and device.uuid.lower().startswith(which.lower()):
                devices.append(device)
        except GpuError as error:
            # Other errors say nothing about the GPU that is looked for; a lost one may be it.
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
    # In a virtual machine a vGPU opens like a GPU, and only this mode tells.
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
