"""Loads AMD SMI, calls its functions one at a time, and turns its errors into those of the planner.

The binding is amdsmi, which loads `libamd_smi.so` of ROCm.
"""

from __future__ import annotations

import os
from contextlib import redirect_stdout
from typing import Any

from perseus_planner.base.errors import (
    GpuError,
    GpuLost,
    GpuNotPermitted,
    GpuNotSupported,
    how_to_install,
)
from perseus_planner.gpu.library import Library

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
    2: (GpuNotSupported, UPDATE),
    3: (GpuNotSupported, UPDATE),
    10: (GpuNotPermitted, _MAY_NOT),
    31: (GpuLost, _LOST),
    34: (GpuError, "load the driver (`modprobe amdgpu`)"),
    40: (GpuNotSupported, UPDATE),
    54: (GpuLost, _LOST),
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
        call = getattr(binding, function, None)
        if call is None:
            raise GpuNotSupported(
                f"{who}: cannot {what}: amdsmi is too old for {function}; {UPDATE}"
            )
        try:
            return call(*arguments)
        except (
            Exception
        ) as error:  # the binding's own, and what it raises where it cannot decode a result
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
