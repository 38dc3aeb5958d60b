"""Loads NVIDIA's management library (NVML), calls its functions, and turns its errors into those of
the planner.

The binding is nvidia-ml-py, which loads `libnvidia-ml.so.1`. That library may be old and lack newer
functions, be made for a vGPU, or come with a container. Whatever it returns, callers get a value or
a `GpuError`.
"""

from __future__ import annotations

from typing import Any

from perseus_planner.base.errors import (
    GpuError,
    GpuLost,
    GpuNotPermitted,
    GpuNotSupported,
    how_to_install,
)
from perseus_planner.gpu.library import Library

LIBRARY_NOT_FOUND = 12
"""Return code if libnvidia-ml.so.1 cannot be loaded."""

_UNINITIALIZED, _INVALID_ARGUMENT, _FUNCTION_NOT_FOUND = 1, 2, 13

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
    """NVML in this process."""

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
    kind, general = _KINDS.get(code, GpuError), _ADVICE.get(code, f"{_SEE_LOG} and try again")
    if code == _INVALID_ARGUMENT and "nvmlDeviceGet" in function:
        kind = GpuNotSupported  # as libraries answer that do not know what is asked for
    if kind is GpuNotPermitted and function.startswith(("nvmlDeviceSet", "nvmlDeviceReset")):
        general = _MAY_NOT_SET
    do = advice if advice and kind is GpuNotSupported else general
    return kind(
        f"{who}: cannot {what}: NVML returns '{message}' (error {code}) from {function}; {do}"
    )


def _call(function: str, arguments: tuple[Any, ...], who: str, what: str, advice: str = "") -> Any:
    binding = _binding()
    call = getattr(binding, function, None)
    if call is None:
        raise nvml_error(
            _FUNCTION_NOT_FOUND, "nvidia-ml-py is too old", function, who, what, advice or _INSTALL
        )
    try:
        return call(*arguments)
    except binding.NVMLError as error:
        if error.value == LIBRARY_NOT_FOUND and isinstance(error.__context__, OSError):
            raise _load_error(error.__context__, who, what) from error
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


def _binding() -> Any:
    """Import nvidia-ml-py, whose module is called pynvml."""
    try:
        import pynvml
    except ImportError as error:
        raise GpuError(
            f"NVML needs nvidia-ml-py, which cannot be imported ({error}); {_INSTALL}"
        ) from error
    if not hasattr(pynvml, "_nvmlGetFunctionPointer"):
        # The package pynvml before version 12 has a module of the same name that lacks much of
        # NVML.
        path = getattr(pynvml, "__file__", None)
        raise GpuError(
            f"NVML needs nvidia-ml-py, but `import pynvml` finds another package ({path}); "
            f"run `pip uninstall pynvml`, then {_INSTALL}"
        )
    return pynvml
