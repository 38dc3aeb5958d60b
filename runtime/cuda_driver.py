"""The few functions of the CUDA driver that torch does not offer: memory that the device and another process share."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from perseus_planner.errors import GpuError, GpuNotSupported

if TYPE_CHECKING:
    from collections.abc import Iterator
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
    """The CUDA driver, as this process has it loaded.

    Args:
        library: what has its functions; None: libcuda.so.1.

    Raises:
        GpuError: it is not there.
        GpuNotSupported: it is older than CUDA 11.7.
    """

    def __init__(self, library: Any = None) -> None:
        self.library = _loaded() if library is None else library
        missing = [name for name in _NEEDED if not hasattr(self.library, name)]
        if missing:
            raise GpuNotSupported(f"the CUDA driver has no {missing[0]}; update it to one of CUDA 11.7 or newer")

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            GpuError: the driver's answer is an error.
        """
        code = getattr(self.library, function)(*arguments)
        if code != 0:
            raise GpuError(self.refusal(function, code))

    def refusal(self, function: str, code: int) -> str:
        """What it means that `function` has answered `code`."""
        text = ctypes.c_char_p()
        if hasattr(self.library, "cuGetErrorString"):
            self.library.cuGetErrorString(code, ctypes.byref(text))
        reason = (text.value or b"no reason given").decode()
        return f"the CUDA driver answers error {code} ({reason}) to {function}"

    @contextmanager
    def apart_from_captures(self) -> Iterator[None]:
        """What this thread asks of events meanwhile does not end the capture of a CUDA graph by another thread.

        By default it does: any `query` of an event is forbidden to the whole process while a graph is captured. torch's
        own watchdog of collectives does the same.
        """
        mode = ctypes.c_int(_THREAD_LOCAL)
        self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            yield
        finally:
            self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def _loaded() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise GpuError(
            f"cannot load libcuda.so.1 ({error}); it comes with the NVIDIA driver: install that, or in a container "
            "start it with the NVIDIA runtime (`docker run --gpus all`)"
        ) from error


class DeviceWord:
    """The first 64 bits of a page of shared memory, written by the device in the order of a stream.

    The page is registered in the CUDA context that is current on the calling thread. It cannot be closed until
    `unregister`: then nothing is mapped where the device may yet write.

    Args:
        page: where the word is.
        driver: the driver.

    Raises:
        GpuError: the driver refuses; the text says why.
    """

    def __init__(self, page: mmap, driver: Driver) -> None:
        self._driver, self._page = driver, page
        self._held: Any = ctypes.c_char.from_buffer(page)
        self._address = ctypes.c_void_p(ctypes.addressof(self._held))
        self._pointer = ctypes.c_uint64()
        try:
            driver.call("cuMemHostRegister_v2", self._address, ctypes.c_size_t(len(page)), _PORTABLE_AND_MAPPED)
        except GpuError:
            self._held = None
            raise
        try:
            driver.call("cuMemHostGetDevicePointer_v2", ctypes.byref(self._pointer), self._address, 0)
        except GpuError:
            self.unregister()
            raise

    def write(self, stream: int, value: int) -> str | None:
        """When `stream` comes to this point, write `value`; what is wrong, where the driver refuses.

        A stream memory operation: it takes neither a copy engine, where it would wait for the copies of others (a
        checkpoint's, say) and hold up the stream meanwhile, nor room for a kernel; the value travels with the command.
        The call waits no more than a kernel's launch does, that is, for room in the stream's queue.
        """
        code = self._driver.library.cuStreamWriteValue64_v2(
            ctypes.c_void_p(stream), self._pointer, ctypes.c_uint64(value), 0
        )
        return None if code == 0 else self._driver.refusal("cuStreamWriteValue64", code)

    def reset(self) -> None:
        """Let the host write that nothing is wanted, where the device writes no more."""
        self._page[:8] = bytes(8)

    def unregister(self) -> None:
        """Let go of the page, to which no write may be under way; nothing if that is done.

        Raises:
            GpuError: the driver refuses.
        """
        if self._held is not None:
            self._driver.call("cuMemHostUnregister", self._address)
            self._held = None
