"""Functions of the CUDA driver that torch does not offer, for memory that the device shares with
another process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import GpuError, GpuNotSupported

if TYPE_CHECKING:
    from mmap import mmap

_PORTABLE_AND_MAPPED = 3
_THREAD_LOCAL = 1
_NEEDED = (
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemHostGetDevicePointer_v2",
    "cuStreamWriteValue64_v2",
    "cuThreadExchangeStreamCaptureMode",
)


class Driver:
    """The CUDA driver in this process.

    Args:
        library: Object with the driver's functions; None for libcuda.so.1.

    Raises:
        GpuError: If it cannot be loaded.
        GpuNotSupported: If it is older than CUDA 11.7.
    """

    def __init__(self, library: Any = None) -> None:
        self.library = _load() if library is None else library
        missing = [name for name in _NEEDED if not hasattr(self.library, name)]
        if missing:
            raise GpuNotSupported(
                f"the CUDA driver has no {missing[0]}; update it to CUDA 11.7 or newer"
            )

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            GpuError: If the driver returns an error.
        """
        code = getattr(self.library, function)(*arguments)
        if code != 0:
            raise GpuError(self.error_text(function, code))

    def error_text(self, function: str, code: int) -> str:
        """Return a description of an error code."""
        text = ctypes.c_char_p()
        if hasattr(self.library, "cuGetErrorString"):
            self.library.cuGetErrorString(code, ctypes.byref(text))
        reason = (text.value or b"no reason given").decode()
        return f"the CUDA driver returns error {code} ({reason}) from {function}"

    @contextmanager
    def apart_from_captures(self) -> Iterator[None]:
        """Let this thread query events inside the block while another thread captures a CUDA graph.

        By default such a query ends the capture: it is forbidden in the whole process. The watchdog
        of torch's collectives does the same.
        """
        mode = ctypes.c_int(_THREAD_LOCAL)
        self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            yield
        finally:
            self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def _load() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise GpuError(
            f"cannot load libcuda.so.1 ({error}); it comes with the NVIDIA driver: install that, "
            "or in a container start it with the NVIDIA runtime (`docker run --gpus all`)"
        ) from error


class DeviceWord:
    """The first 64 bits of a page of shared memory, written by the device in stream order.

    The page is registered in the current CUDA context of the calling thread. It cannot be closed
    before `unregister`, so that nothing else is mapped where the device may still write.

    Args:
        page: The page.
        driver: The driver.

    Raises:
        GpuError: If the driver returns an error.
    """

    def __init__(self, page: mmap, driver: Driver) -> None:
        self._driver, self._page = driver, page
        self._buffer: Any = ctypes.c_char.from_buffer(page)
        self._address = ctypes.c_void_p(ctypes.addressof(self._buffer))
        self._pointer = ctypes.c_uint64()
        try:
            driver.call(
                "cuMemHostRegister_v2",
                self._address,
                ctypes.c_size_t(len(page)),
                _PORTABLE_AND_MAPPED,
            )
        except GpuError:
            self._buffer = None
            raise
        try:
            driver.call(
                "cuMemHostGetDevicePointer_v2", ctypes.byref(self._pointer), self._address, 0
            )
        except GpuError:
            self.unregister()
            raise

    def write(self, stream: int, value: int) -> str | None:
        """Write `value` when `stream` reaches this point; return an error text if the driver
        returns an error.

        This is a stream memory operation, which needs neither a copy engine, where it would wait
        for other copies (for example of a checkpoint), nor room for a kernel; the value is part of
        the command. Like the launch of a kernel, the call only waits for room in the queue of the
        stream.
        """
        code = self._driver.library.cuStreamWriteValue64_v2(
            ctypes.c_void_p(stream), self._pointer, ctypes.c_uint64(value), 0
        )
        return None if code == 0 else self._driver.error_text("cuStreamWriteValue64", code)

    def reset(self) -> None:
        """Clear the word from the host, once the device does not write any more."""
        self._page[:8] = bytes(8)

    def unregister(self) -> None:
        """Unregister the page, to which no write may be pending; harmless if repeated.

        Raises:
            GpuError: If the driver returns an error.
        """
        if self._buffer is not None:
            self._driver.call("cuMemHostUnregister", self._address)
            self._buffer = None
