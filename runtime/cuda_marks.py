"""Marks on a CUDA device, which takes times and writes clock requests itself, in the order of
its stream.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import GpuError
from perseus_planner.base.loops import in_background
from perseus_planner.runtime.cuda_driver import DeviceWord, Driver
from perseus_planner.runtime.marks import KEPT, NO_REQUEST, IterationTimes

if TYPE_CHECKING:
    from mmap import mmap

    import torch

_MAX_QUERIES = 64  #: of an event in a row, about 100 us


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
        device: The device.
        now_ns: The host's clock.
    """

    def __init__(
        self, cuda: Any, device: Any, now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._now_ns = now_ns
        self.stream = cuda.Stream(device)
        self._base, self._probe = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        self._probed_ns: int | None = (
            None  #: before the probe was recorded; None if none is under way
        )
        self._base_ns = 0
        for event in (
            self._probe,
            self._base,
        ):  # the first one is slow, because recording creates it
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
        self._base, spare = event, self._base
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

    def after_first(self) -> Iterator[Any]:
        for span in self.spans:
            yield from span
        yield self.last


class CudaMarks:
    """Marks for a training thread that runs ahead of the device; they go to the stream that is
    current at each call.

    After the constructor nothing here waits for the device, not even `finished`. The training
    thread only enqueues events and writes of one number (`DeviceWord.write`). While a CUDA graph is
    captured nothing is enqueued, because it would become a part of the graph: the request is
    written after the capture, and the iteration has no times. A replay of a graph is marked like
    any other work. If the device refuses a call, marks end, `finished` raises the reason, and
    training goes on.

    Args:
        memory: Memory shared with the controller; the clock request is its first 64 bits.
        device: The device of this process.
        cuda: torch.cuda, or a stand-in for it.
        driver: The CUDA driver, or a stand-in for it.

    Raises:
        GpuError: If the device cannot write to the memory.
    """

    def __init__(
        self, memory: mmap, device: torch.device, cuda: Any = None, driver: Driver | None = None
    ) -> None:
        if cuda is None:
            import torch

            cuda = torch.cuda
        self._cuda, self._device = cuda, device
        self._requests: Sequence[int] = ()
        self._owed: int | None = None  #: a request that is not enqueued yet
        self._problem: str | None = None
        self._free: deque[Any] = deque()
        self._unread: deque[_IterationEvents] = deque()
        self._current: _IterationEvents | None = None  #: None for an iteration without times
        self._begun: Any = None
        self._driver = Driver() if driver is None else driver
        try:
            with cuda.device(device):
                self._clock = DeviceClock(cuda, device)
                self._word = DeviceWord(memory, self._driver)
                problem = self._word.write(
                    self._clock.stream.cuda_stream, int.from_bytes(memory[:8], sys.byteorder)
                )
        except RuntimeError as error:
            raise GpuError(f"CUDA: {error}") from error
        if problem is not None:
            self.close()
            raise GpuError(problem)

    def __enter__(self) -> CudaMarks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self, timeout_s: float = 2.0) -> bool:
        """Release the memory once the device is done.

        Args:
            timeout_s: How long to wait for a device that hangs, in seconds.

        Returns:
            False if the device is not done in time; the memory stays registered then.
        """
        self._problem = "the marks are closed"
        return bool(wait([in_background(self._release, "planner-unregister")], timeout_s).done)

    def _release(self) -> None:
        try:
            with self._cuda.device(self._device):
                self._cuda.synchronize(self._device)
                self._word.unregister()
        except (GpuError, RuntimeError):
            pass  # the device is lost, and its memory with it

    def ended_s(self) -> None:
        """See `Marks.ended_s`."""
        return

    def load(self, requests: Sequence[int]) -> None:
        """See `Marks.load`; requests that are enqueued already stay as they are."""
        self._requests = (*requests, NO_REQUEST)

    def request(self, index: int) -> None:
        """See `Marks.request`."""
        self._owed = self._requests[index]
        self._enqueue_owed()

    def begin_iteration(self, number: int) -> None:
        """See `Marks.begin_iteration`; takes no times while `KEPT` iterations are unread."""
        first = self._record_event() if len(self._unread) < KEPT else None
        self._current = _IterationEvents(number, first) if first is not None else None

    def begin(self) -> None:
        """See `Marks.begin`."""
        self._begun = self._record_event()

    def end(self) -> None:
        """See `Marks.end`."""
        ended = self._record_event()
        if self._current is None or self._begun is None or ended is None:
            self._current = None
        else:
            self._current.spans.append((self._begun, ended))
        self._begun = None

    def end_iteration(self) -> None:
        """See `Marks.end_iteration`."""
        last = self._record_event()
        if self._current is not None and last is not None:
            self._current.last = last
            self._unread.append(self._current)
        self._current = None

    def finished(self) -> list[IterationTimes]:
        """See `Marks.finished`.

        Raises:
            GpuError: If the device has refused a call; nothing is marked any more.
        """
        if self._problem is not None:
            raise GpuError(self._problem)
        try:
            with self._driver.apart_from_captures():
                return (
                    self._read_times() if self._is_next_done() and self._clock.synchronize() else []
                )
        except RuntimeError as error:
            self._fail(f"CUDA: {error}")
            raise GpuError(f"CUDA: {error}") from error

    def _is_next_done(self) -> bool:
        return bool(self._unread) and self._unread[0].last.query()

    def _read_times(self) -> list[IterationTimes]:
        times = []
        while self._is_next_done():
            iteration = self._unread.popleft()
            at_ns, spare = self._clock.advance(iteration.first)
            self._free.append(spare)
            times_ns, earlier = [at_ns], iteration.first
            for event in iteration.after_first():
                at_ns += _gap_ns(earlier, event)
                times_ns.append(at_ns)
                earlier = event
            self._free.extend(iteration.after_first())
            begin_ns, *between_ns, end_ns = times_ns
            spans_ns = tuple(zip(between_ns[0::2], between_ns[1::2], strict=True))
            times.append(IterationTimes(iteration.number, begin_ns, spans_ns, end_ns))
        return times

    def _enqueue_owed(self) -> Any:
        """Enqueue the owed request, if there is one; return the stream, or None if nothing may
        be enqueued now.
        """
        try:
            if self._problem is not None or self._cuda.is_current_stream_capturing():
                return None
            stream = self._cuda.current_stream(self._device)
            if self._owed is not None:
                with self._cuda.device(
                    self._device
                ):  # the default stream is that of the current device
                    problem = self._word.write(stream.cuda_stream, self._owed)
                self._owed = None
                if problem is not None:
                    self._fail(problem)
                    return None
        except RuntimeError as error:
            self._fail(f"CUDA: {error}")
            return None
        return stream

    def _record_event(self) -> Any:
        """Record an event, and return it; None if nothing may be enqueued now."""
        stream = self._enqueue_owed()
        if stream is None:
            return None
        try:
            event = self._free.popleft() if self._free else self._cuda.Event(enable_timing=True)
            event.record(stream)
        except RuntimeError as error:
            self._fail(f"CUDA: {error}")
            return None
        return event

    def _fail(self, problem: str) -> None:
        """End the marks and have the GPU reset."""
        self._problem = problem
        self._word.reset()
