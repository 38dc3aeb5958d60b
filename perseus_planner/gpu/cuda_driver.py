"""The CUDA driver, called directly for what torch and NVML do not offer."""

from __future__ import annotations

import ctypes
from typing import Any

from perseus_planner.base.errors import GpuError, GpuNotSupported


class CudaDriver:
    """The CUDA driver in this process.

    Args:
        needed: Names of the functions that it must have.
        library: Object with the driver's functions; None for libcuda.so.1.

    Raises:
        GpuError: If it cannot be loaded.
        GpuNotSupported: If it is too old.
    """

    def __init__(self, *needed: str, library: Any = None) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1") if library is None else library
        except OSError as error:
            raise GpuError(
                f"cannot load libcuda.so.1 ({error}); it comes with the NVIDIA driver: install "
                "that, or in a container start it with the NVIDIA runtime (`docker run --gpus all`)"
            ) from error
        # All at once, and now: a driver that is too old is told before anything is begun.
        for name in needed:
            self.first_of(name)

    def first_of(self, *names: str) -> str:
        """Return the first of these functions that the driver has.

        Raises:
            GpuNotSupported: If it has none.
        """
        for name in names:
            if hasattr(self._library, name):
                return name
        raise GpuNotSupported(
            f"the CUDA driver has no {names[-1]}; update the NVIDIA driver, to one with CUDA 11.7 "
            "or newer"
        )

    def call(self, function: str, *arguments: Any, allowed: int = 0) -> int:
        """Call a function; return its code, which is 0 or `allowed`.

        Raises:
            GpuError: If the driver returns another one.
        """
        code: int = getattr(self._library, function)(*arguments)
        if code in (0, allowed):
            return code
        # Old drivers cannot tell the reason of a code.
        text = ctypes.c_char_p()
        if hasattr(self._library, "cuGetErrorString"):
            self._library.cuGetErrorString(code, ctypes.byref(text))
        reason = (text.value or b"no reason given").decode()
        raise GpuError(f"the CUDA driver returns error {code} ({reason}) from {function}")
