"""The one seam to NVIDIA's management library (NVML): the binding is loaded here, and its errors become the planner's.

The binding is nvidia-ml-py, which loads `libnvidia-ml.so.1`. Any library may stand behind it: an old one without the
newer functions, one for a vGPU, one that a container brought along. Whatever it answers, what leaves this file is a
value or a `GpuError`.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import Any

from perseus_planner.errors import GpuError, GpuLost, GpuNotPermitted, GpuNotSupported

FUNCTION_NOT_FOUND = 13
"""NVML's code for a function that the library does not have."""

UNSUPPORTED = frozenset({2, 3, 6, 13, 25, 26})
"""Codes by which NVML says of one field value that there is none; libraries differ in what they call an unknown one."""

_INSTALL = "run `pip install 'perseus-planner[nvml]'`"

_CONTAINER = "in a container, start it with the NVIDIA runtime (`docker run --gpus all`)"

_SEE_LOG = "see the kernel log for what the driver says (`dmesg | grep -i -e nvrm -e xid`)"

_UPDATE = "update the NVIDIA driver, or do without: `planner doctor` lists what this GPU has"

_LOST = (
    f"it has fallen off the bus or hangs: {_SEE_LOG}, then reset it (`nvidia-smi --gpu-reset`) or reboot the node, "
    "and run `planner reset`"
)

_MAY_NOT_READ = (
    "ask who runs this node for access to this GPU's device file, or have the job system assign this GPU to the job"
)

_MAY_NOT_SET = (
    "setting needs root (in Docker also `--cap-add SYS_ADMIN`): run as root, or choose a back-end that sets for you "
    "(zeusd: or command:), or set nothing (dry-run:, or observe mode)"
)

_ANSWERS: dict[int, tuple[type[GpuError], str]] = {
    1: (GpuError, "other code in this process has shut NVML down: let it balance nvmlInit and nvmlShutdown"),
    2: (GpuError, f"the value does not suit this GPU, or MIG or a vGPU forbids it: {_UPDATE}"),
    3: (GpuNotSupported, _UPDATE),
    4: (GpuNotPermitted, _MAY_NOT_READ),
    6: (GpuError, "run `planner doctor` to see which GPUs there are"),
    8: (GpuError, "plug in its external power cables"),
    9: (GpuError, f"load the NVIDIA driver (`modprobe nvidia`; `nvidia-smi` must work); {_CONTAINER}"),
    10: (GpuError, f"the driver did not answer in time: try again; {_SEE_LOG}"),
    12: (
        GpuError,
        "libnvidia-ml.so.1 comes with the NVIDIA driver: install that, or name the library's folder in "
        f"LD_LIBRARY_PATH; {_CONTAINER}; without an NVIDIA GPU, use simulated:",
    ),
    FUNCTION_NOT_FOUND: (GpuNotSupported, f"this libnvidia-ml.so.1 is too old to have it: {_UPDATE}"),
    15: (GpuLost, _LOST),
    16: (GpuLost, _LOST),
    17: (GpuError, "the operating system or a container's rules block the driver's device files: allow /dev/nvidia*"),
    18: (
        GpuError,
        "the driver that is loaded and libnvidia-ml.so.1 are of different versions: reboot the node, or reload the "
        "driver's modules, or start the container anew",
    ),
    19: (GpuError, "something else uses it: stop that (DCGM, nvidia-smi, another profiler) and try again"),
    21: (GpuNotSupported, f"the driver keeps no such data for it: {_UPDATE}"),
    24: (GpuError, "choose one of the supported clocks: `planner doctor` lists them"),
    25: (GpuNotSupported, f"this libnvidia-ml.so.1 knows another version of that function: {_UPDATE}"),
    26: (GpuNotSupported, f"this libnvidia-ml.so.1 has given that function up: {_UPDATE}"),
    28: (GpuLost, _LOST),
}


class Nvml:
    """NVML in this process: initialised while it is in use, and again in a forked child.

    Attributes:
        generation: changes whenever NVML is initialised; a device handle is good for one generation.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._users = 0
        self._initialised = False
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._after_fork)

    def acquire(self) -> None:
        """Initialise NVML unless it is; give it back with `release`.

        Raises:
            GpuError: no binding, no library, no driver, or versions that do not fit.
        """
        with self._lock:
            if not self._initialised:
                self._initialise()
            self._users += 1

    def release(self) -> None:
        """Undo one `acquire`; the last one shuts NVML down."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._initialised:
                self._initialised = False
                with suppress(GpuError):  # what was taken goes with the process, and nothing hangs on it
                    _called("nvmlShutdown", (), "NVML", "shut down")

    def call(self, function: str, *arguments: Any, who: str, what: str, instead: str = "") -> Any:
        """What the binding's `function` returns, in NVML's units.

        Args:
            function: its name in nvidia-ml-py.
            arguments: passed on.
            who: which GPU is asked, for the error.
            what: what was to be done, for the error: "cannot" stands before it.
            instead: what to do where it is not supported; empty: what suits every function.

        Raises:
            GpuError: NVML answered an error; the text says which, and what to do.
        """
        self.ready()
        return _called(function, arguments, who, what, instead)

    def ready(self) -> None:
        """Initialise NVML anew where this is a child that was forked while it was in use.

        Raises:
            GpuError: nobody uses NVML in this process, or it cannot be initialised.
        """
        if self._initialised:
            return
        with self._lock:
            if self._users == 0:
                raise GpuError("NVML: this GPU was closed; open it again with open_gpu")
            if not self._initialised:
                self._initialise()

    def structure(self, name: str) -> Any:
        """An empty structure of the binding, its version filled in.

        Raises:
            GpuNotSupported: the installed binding does not know it.
        """
        try:
            return getattr(_binding(), name)()
        except AttributeError as error:
            raise GpuNotSupported(f"nvidia-ml-py: too old to have {name}; {_INSTALL}") from error

    def constants(self, prefix: str) -> dict[str, int]:
        """The binding's numbers whose names begin so, by the rest of their names."""
        members = vars(_binding()).items()
        return {name.removeprefix(prefix): value for name, value in members if name.startswith(prefix)}

    def _initialise(self) -> None:
        _called("nvmlInit", (), "NVML", "start")
        self._initialised = True
        self.generation += 1

    def _after_fork(self) -> None:
        # Its parent's NVML is not the child's; and another thread may have held the lock.
        self._initialised = False
        self._lock = threading.Lock()


NVML = Nvml()
"""The NVML of this process."""


def refusal(code: int, said: str, function: str, who: str, what: str, instead: str = "") -> GpuError:
    """The error for a code that NVML answered, with what to do about it."""
    kind, advice = _ANSWERS.get(code, (GpuError, f"{_SEE_LOG} and try again"))
    if kind is GpuNotSupported and instead:
        advice = instead
    if kind is GpuNotPermitted and function.startswith(("nvmlDeviceSet", "nvmlDeviceReset")):
        advice = _MAY_NOT_SET
    return kind(f"{who}: cannot {what}: NVML answers '{said}' (error {code}) to {function}; {advice}")


def _called(function: str, arguments: tuple[Any, ...], who: str, what: str, instead: str = "") -> Any:
    binding = _binding()
    call = getattr(binding, function, None)
    if call is None:
        raise refusal(FUNCTION_NOT_FOUND, "nvidia-ml-py is too old", function, who, what, instead or _INSTALL)
    try:
        return call(*arguments)
    except binding.NVMLError as error:
        raise refusal(error.value, _said(error), function, who, what, instead) from error
    except Exception as error:
        # Not an answer of NVML's: the binding has met bytes that are no text, a size that fills no memory, and so on.
        raise GpuError(
            f"{who}: cannot {what}: nvidia-ml-py makes no sense of what NVML answers to {function} "
            f"({type(error).__name__}: {error}); see which libnvidia-ml.so.1 is loaded, and {_UPDATE}"
        ) from error


def _said(error: Exception) -> str:
    """NVML's own words for an error, which come from the library and may be anything."""
    try:
        return str(error)
    except Exception:
        return "unknown error"


def _binding() -> Any:
    """The module of nvidia-ml-py, which is called pynvml."""
    try:
        import pynvml
    except ImportError as error:
        raise GpuError(f"NVML needs nvidia-ml-py, which cannot be imported ({error}); {_INSTALL}") from error
    if not hasattr(pynvml, "_nvmlGetFunctionPointer"):
        # Packages called pynvml before version 12 bring a module of the same name that lacks much of NVML.
        found = getattr(pynvml, "__file__", None)
        raise GpuError(
            f"NVML needs nvidia-ml-py, but `import pynvml` finds another package ({found}); "
            f"run `pip uninstall pynvml`, then {_INSTALL}"
        )
    return pynvml
