"""Marks on a CUDA device, which takes times and writes clock requests itself, in the order of
its stream.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import GpuError
from perseus_planner.base.loops import in_background
from perseus_planner.gpu.cuda_driver import CudaDriver
from perseus_planner.runtime.marks import (
    KEPT,
    NO_REQUEST,
    IterationTimes,
    Marks,
    captured_request,
)

if TYPE_CHECKING:
    from mmap import mmap

    import torch

    from perseus_planner.engines.guard import Span

_MAX_QUERIES = 64  #: of an event in a row, about 100 us
_PORTABLE_AND_MAPPED = 3
_THREAD_LOCAL = 1
_NEEDED = (
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemHostGetDevicePointer_v2",
    "cuStreamWriteValue64_v2",
    "cuThreadExchangeStreamCaptureMode",
)


@contextmanager
def _apart_from_captures(driver: CudaDriver) -> Iterator[None]:
    """Let this thread query events inside the block while another thread captures a CUDA graph.

    By default such a query ends the capture: it is forbidden in the whole process. The watchdog of
    torch's collectives does the same.
    """
    mode = ctypes.c_int(_THREAD_LOCAL)
    driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


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

    def __init__(self, page: mmap, driver: CudaDriver) -> None:
        self._driver = driver
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

    @property
    def pointer(self) -> int:
        """Where the device has the word."""
        return int(self._pointer.value)

    def write(self, stream: int, value: int) -> None:
        """Write `value` when `stream` reaches this point.

        This is a stream memory operation, which needs neither a copy engine, where it would wait
        for other copies (for example of a checkpoint), nor room for a kernel; the value is part of
        the command. Like the launch of a kernel, the call only waits for room in the queue of the
        stream.

        Raises:
            GpuError: If the driver returns an error.
        """
        self._driver.call(
            "cuStreamWriteValue64_v2",
            ctypes.c_void_p(stream),
            self._pointer,
            ctypes.c_uint64(value),
            0,
        )

    def unregister(self) -> None:
        """Unregister the page, to which no write may be pending; harmless if repeated.

        Raises:
            GpuError: If the driver returns an error.
        """
        if self._buffer is not None:
            self._driver.call("cuMemHostUnregister", self._address)
            self._buffer = None


class DeviceClock:
    """Converts events of a device to nanoseconds of the host's monotonic clock.

    CUDA only gives the milliseconds between two events, as a 32-bit float with a relative error of
    up to 2^-25, and the device's clock drifts from the host's by about 10 ppm, or a second a day.
    So times are added up from one event to the next in whole nanoseconds (`advance`), and the sum
    is corrected by the host's clock (`synchronize`): an event is recorded in a stream that is
    otherwise empty, the host notes the time before and after, and the sum is moved as little as
    puts it in between. The remaining error is at most the host's uncertainty about that event, tens
    of microseconds, plus the drift since; nothing adds up over days. Where all streams share one
    queue (`CUDA_DEVICE_MAX_CONNECTIONS=1`), the event waits for what is queued, and the uncertainty
    is larger.

    The constructor waits for the device; no method does.

    Args:
        cuda: torch.cuda.
        stream: A stream that is otherwise empty.
        now_ns: The host's clock.
    """

    def __init__(
        self, cuda: Any, stream: Any, now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._now_ns = now_ns
        self.stream = stream
        self._base = cuda.Event(enable_timing=True)
        self._probe = cuda.Event(enable_timing=True)
        #: before the probe was recorded; None if none is under way
        self._probed_ns: int | None = None
        self._base_ns = 0
        for event in (self._probe, self._base):  # the first is slow: recording creates it
            before_ns = now_ns()
            event.record(self.stream)
            event.synchronize()
            self._base_ns = (before_ns + now_ns()) // 2

    def synchronize(self) -> bool:
        """Correct the sum by the host's clock; never waits.

        Returns:
            False if the device has not answered yet: call again later, and do not call `advance` in
            between.
        """
        if self._probed_ns is None:
            self._probed_ns = self._now_ns()
            self._probe.record(self.stream)
        if not any(self._probe.query() for _ in range(_MAX_QUERIES)):
            return False
        after_ns = self._now_ns()
        sum_ns = self._base_ns + _gap_ns(self._base, self._probe)
        self._base_ns += min(max(sum_ns, self._probed_ns), after_ns) - sum_ns
        self._probed_ns = None
        return True

    def advance(self, event: Any) -> tuple[int, Any]:
        """Return the time of an event that is done, and the event that is no longer needed.

        `event` itself is needed until the next call.
        """
        self._base_ns += _gap_ns(self._base, event)
        spare = self._base
        self._base = event
        return self._base_ns, spare


def _gap_ns(earlier: Any, later: Any) -> int:
    """Return the nanoseconds between two events that are done."""
    elapsed_ms: float = earlier.elapsed_time(later)
    return round(elapsed_ms * 1e6)


@dataclass
class _IterationEvents:
    """The events of an iteration that have not been read: its begin, each computation, and its
    end.
    """

    number: int
    first: Any
    spans: list[tuple[Any, Any]] = field(default_factory=list)
    last: Any = None
    follows_evaluation: bool = False

    def all(self) -> list[Any]:
        return [self.first, *(event for span in self.spans for event in span), self.last]


class CudaMarks(Marks):
    """Marks for a training thread that runs ahead of the device; they go to the stream that is
    current at each call.

    But for `renew`, nothing here waits for the device, not even `finished`. The training thread
    only enqueues events and writes of one number (`DeviceWord.write`). While a CUDA graph is
    captured nothing is enqueued but by `capture`, because it would become a part of the graph: the
    request is written after the capture, and the iteration has no times. A replay of a graph is
    marked like any other work. If the device refuses a call, also when the marks are made, nothing
    is marked, `finished` raises the reason, and training goes on.

    Args:
        memory: Memory shared with the controller; the clock request is its first 64 bits.
        device: The device of this process.
        cuda: torch.cuda, or a stand-in for it.
        library: The CUDA driver, or a stand-in for it.
    """

    def __init__(
        self, memory: mmap, device: torch.device, cuda: Any = None, library: Any = None
    ) -> None:
        if cuda is None:
            import torch

            cuda = torch.cuda
        self._memory = memory
        self._device = device
        self._cuda = cuda
        self._library = library
        self._requests: Sequence[int] = (NO_REQUEST,)
        self.now = self._record_event
        self.write = self._write
        self._owed: int | None = None  #: a request that is not enqueued yet
        self._free: deque[Any] = deque()
        self._unread: deque[_IterationEvents] = deque()
        self._current: _IterationEvents | None = None  #: None for an iteration without times
        self._word: DeviceWord | None = None
        self._problem: GpuError | None = None
        with suppress(GpuError):  # `finished` raises it
            self.renew()

    def renew(self) -> None:
        """See `Marks.renew`; waits for the device."""
        try:
            self._driver = CudaDriver(*_NEEDED, library=self._library)
            with _apart_from_captures(self._driver), self._cuda.device(self._device):
                self._word = self._word or DeviceWord(self._memory, self._driver)
                stream = self._cuda.Stream(self._device)
                request = int.from_bytes(self._memory[:8], sys.byteorder)
                self._word.write(stream.cuda_stream, request)
                clock = DeviceClock(self._cuda, stream)  # waits for the write too
        except (GpuError, RuntimeError) as error:
            raise self._fail(error) from None
        self._free.clear()
        self._unread.clear()
        self._clock = clock
        self._problem = None

    def __enter__(self) -> CudaMarks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, timeout_s: float = 2.0) -> bool:
        """Release the memory once the device is done.

        Args:
            timeout_s: How long to wait for a device that hangs, in seconds.

        Returns:
            False if the device is not done in time; the memory stays registered then.
        """
        self._problem = GpuError("the marks are closed")
        return bool(wait([in_background(self._release, "planner-unregister")], timeout_s).done)

    def _release(self) -> None:
        try:
            with self._cuda.device(self._device):
                self._cuda.synchronize(self._device)
                if self._word is not None:
                    self._word.unregister()
        except (GpuError, RuntimeError):
            pass  # the device is lost, and its memory with it

    def ended_s(self) -> None:
        """See `Marks.ended_s`."""
        return

    def _write(self, _: int, request: int) -> None:
        """See `Marks.write`; requests that are enqueued already stay as they are."""
        self._owed = request
        try:
            self._enqueue_owed()
        except (GpuError, RuntimeError) as error:
            self._fail(error)

    def capture(self, position: int) -> None:
        """See `Marks.capture`."""
        if self._problem is not None or self._word is None:
            return
        try:
            stream = self._cuda.current_stream(self._device)
            with self._cuda.device(self._device):
                self._word.write(stream.cuda_stream, captured_request(position))
        except (GpuError, RuntimeError) as error:
            self._fail(error)

    def begin_iteration(self, number: int, *, follows_evaluation: bool = False) -> list[Span]:
        """See `Marks.begin_iteration`; takes no times while `KEPT` iterations are unread."""
        first = self._record_event() if len(self._unread) < KEPT else None
        if first is None:
            self._current = None
            return []
        self._current = _IterationEvents(number, first, follows_evaluation=follows_evaluation)
        return self._current.spans

    def end_iteration(self) -> None:
        """See `Marks.end_iteration`; an iteration of which the device took not all has no times."""
        last = self._record_event()
        current = self._current
        self._current = None
        if current is None or last is None:
            return
        current.last = last
        if all(event is not None for event in current.all()):
            self._unread.append(current)

    def finished(self) -> list[IterationTimes]:
        """See `Marks.finished`."""
        if self._problem is not None:
            raise self._problem.with_traceback(None)
        try:
            with _apart_from_captures(self._driver):
                return (
                    self._read_times() if self._is_next_done() and self._clock.synchronize() else []
                )
        except (GpuError, RuntimeError) as error:
            raise self._fail(error) from None

    def _is_next_done(self) -> bool:
        return bool(self._unread) and self._unread[0].last.query()

    def _read_times(self) -> list[IterationTimes]:
        times = []
        while self._is_next_done():
            first, *later = events = self._unread[0].all()
            try:
                gaps_ns = [_gap_ns(*pair) for pair in pairwise(events)]
            except RuntimeError:
                if all(event.query() for event in events):
                    raise
                break  # a side stream is still busy with a part of the iteration
            # Only now: an iteration that could not be read whole is read again at the next call.
            read = self._unread.popleft()
            # Gaps are added up from the begin, whose time is corrected by the host's clock; so its
            # errors do not add up.
            begin_ns, spare = self._clock.advance(first)
            self._free.extend((spare, *later))
            begin_ns, *between_ns, end_ns = accumulate(gaps_ns, initial=begin_ns)
            # Events come in pairs, the begin and the end of each computation.
            spans_ns = tuple(zip(between_ns[0::2], between_ns[1::2], strict=True))
            times.append(
                IterationTimes(read.number, begin_ns, spans_ns, end_ns, read.follows_evaluation)
            )
        return times

    def _record_event(self) -> Any:
        """Enqueue the owed request, if there is one, and an event; return the event, or None if
        nothing may be enqueued now.
        """
        try:
            stream = self._enqueue_owed()
            if stream is None:
                return None
            event = self._free.popleft() if self._free else self._cuda.Event(enable_timing=True)
            event.record(stream)
        except (GpuError, RuntimeError) as error:
            self._fail(error)
            return None
        return event

    def _enqueue_owed(self) -> Any:
        """Enqueue the owed request, if there is one; return the stream, or None if nothing may
        be enqueued now.
        """
        if self._problem is not None or self._cuda.is_current_stream_capturing():
            return None
        stream = self._cuda.current_stream(self._device)
        if self._owed is not None and self._word is not None:
            with self._cuda.device(self._device):  # whose default stream is meant
                self._word.write(stream.cuda_stream, self._owed)
            self._owed = None
        return stream

    def _fail(self, error: Exception) -> GpuError:
        """End the marks and have the GPU reset; return why."""
        problem = error if isinstance(error, GpuError) else GpuError(f"CUDA: {error}")
        self._problem = problem
        self._memory[:8] = bytes(8)
        return problem
