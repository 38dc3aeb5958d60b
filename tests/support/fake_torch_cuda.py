"""A stand-in for torch.cuda and the CUDA driver: it keeps stream order, and runs when the test says
so.

Time is the test's: `now_ns` is the host's clock; the device's drifts from it. What a real device
would punish is punished: reading an event that is not done, a negative time, anything forbidden
while a graph is captured, memory that is not registered. Every wait for the device is counted.
"""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_APART = 1 << 40  #: a device pointer is no host pointer


class Stream:
    def __init__(self, device: FakeCuda, handle: int) -> None:
        self.device, self.cuda_stream = device, handle
        self.queue: deque[Callable[[], None]] = deque()

    def run_next(self) -> None:
        self.queue.popleft()()


class Event:
    def __init__(self, device: FakeCuda) -> None:
        self._device = device
        self.at_device_ns: float | None = None
        self._records = 0

    def record(self, stream: Stream) -> None:
        self._device.enqueues(stream)
        self._records += 1
        self.at_device_ns, turn = None, self._records
        stream.queue.append(lambda: self._done(turn, stream))

    def _done(self, turn: int, stream: Stream) -> None:
        if turn == self._records:
            self.at_device_ns = self._device.device_ns()
        if stream.cuda_stream == 0:
            self._device.events_ns.append(self._device.now_ns)

    def query(self) -> bool:
        self._device.asks()
        self._device.passes(self._device.query_ns)
        if self._device.is_idle_stream_prompt:
            self._device.run_if_idle()
        return self.at_device_ns is not None

    def synchronize(self) -> None:
        self._device.waits += 1
        while self.at_device_ns is None:
            self._device.run()

    def elapsed_time(self, later: Event) -> float:
        self._device.asks()
        if self.at_device_ns is None or later.at_device_ns is None:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return ctypes.c_float((later.at_device_ns - self.at_device_ns) / 1e6).value


class FakeCuda:
    """Both `torch.cuda` and, by its `cu...` functions, libcuda.

    Args:
        drift_ppm: by how much the device's clock is faster than the host's.
        is_idle_stream_prompt: work in a stream beside that of training is done at once, as it is on
            a real device.
        refuses: function of the driver -> the error that it answers.
    """

    def __init__(
        self,
        drift_ppm: float = 0.0,
        is_idle_stream_prompt: bool = True,
        refuses: dict[str, int] | None = None,
    ) -> None:
        self.drift_ppm, self.is_idle_stream_prompt = drift_ppm, is_idle_stream_prompt
        self.refuses = refuses or {}
        self.now_ns, self.query_ns = 1_000_000_000, 1_000
        self.events_ns: list[
            int
        ] = []  #: when each event of training's stream was, truly, on the host's clock
        self.waits = 0
        self.is_capturing = (
            False  #: by the training thread, in the default mode: the whole process is watched
        )
        self.graph: list[Callable[[], None]] | None = None  #: what is captured now on purpose
        self.broken_by: list[str] = []
        self.registered: set[int] = set()
        self.capture_mode = 0
        self._streams = [Stream(self, 0)]
        self.current = self._streams[0]

    # torch.cuda
    def Event(self, enable_timing: bool) -> Event:  # noqa: N802
        assert enable_timing
        return Event(self)

    def Stream(self, device: object) -> Stream:  # noqa: N802
        self._streams.append(Stream(self, len(self._streams)))
        return self._streams[-1]

    def current_stream(self, device: object) -> Stream:
        return self.current

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing

    def synchronize(self, device: object) -> None:
        self.waits += 1
        while any(stream.queue for stream in self._streams):
            self.run()

    @contextmanager
    def device(self, device: object) -> Iterator[None]:
        yield

    # libcuda
    def cuMemHostRegister_v2(self, address: Any, size: Any, flags: int) -> int:  # noqa: N802
        assert size.value >= 8
        assert flags == 3
        return self._answer("cuMemHostRegister_v2", lambda: self.registered.add(address.value))

    def cuMemHostUnregister(self, address: Any) -> int:  # noqa: N802
        assert not any(stream.queue for stream in self._streams), "something may yet be written"
        return self._answer("cuMemHostUnregister", lambda: self.registered.remove(address.value))

    def cuMemHostGetDevicePointer_v2(self, pointer: Any, address: Any, flags: int) -> int:  # noqa: N802
        def tell() -> None:
            pointer._obj.value = address.value + _APART

        assert address.value in self.registered
        return self._answer("cuMemHostGetDevicePointer_v2", tell)

    def cuStreamWriteValue64_v2(self, stream: Any, pointer: Any, value: Any, flags: int) -> int:  # noqa: N802
        written, address = struct.pack("=Q", value.value), pointer.value - _APART

        def enqueue() -> None:
            into = self._streams[stream.value or 0]
            if self.graph is not None and into is self.current:
                self.graph.append(write)
                return
            self.enqueues(into)
            into.queue.append(write)

        def write() -> None:
            assert address in self.registered
            ctypes.memmove(address, written, 8)

        return self._answer("cuStreamWriteValue64_v2", enqueue)

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
        mode._obj.value, self.capture_mode = self.capture_mode, mode._obj.value
        return 0

    def cuGetErrorString(self, code: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"operation not permitted"
        return 0

    def _answer(self, function: str, work: Callable[[], None]) -> int:
        if function not in self.refuses:
            work()
        return self.refuses.get(function, 0)

    @contextmanager
    def captures(self) -> Iterator[list[Callable[[], None]]]:
        """Capture what is enqueued in the block; yield the graph, which is what `replay` takes."""
        self.is_capturing = True
        self.graph = graph = []
        try:
            yield graph
        finally:
            self.is_capturing = False
            self.graph = None

    def replay(self, graph: list[Callable[[], None]]) -> None:
        """Enqueue a graph."""
        self._streams[0].queue.extend(graph)

    # the device and its time
    def work(self, duration_ns: int) -> None:
        """Enqueue work of this duration, as training does."""
        into = self._streams[0].queue if self.graph is None else self.graph
        into.append(lambda: self.passes(duration_ns))

    def run(self, count: int | None = None) -> None:
        """Run some of the enqueued work; None for all."""
        done = 0
        while done != count and any(stream.queue for stream in self._streams):
            next(stream for stream in self._streams if stream.queue).run_next()
            done += 1

    def run_if_idle(self) -> None:
        """Enqueue work in a separate stream, which does not wait for that of training."""
        for stream in self._streams[1:]:
            while stream.queue:
                stream.run_next()

    @property
    def queued(self) -> int:
        return len(self._streams[0].queue)

    def passes(self, duration_ns: int) -> None:
        self.now_ns += duration_ns

    def device_ns(self) -> float:
        return self.now_ns * (1 + self.drift_ppm * 1e-6)

    def enqueues(self, stream: Stream) -> None:
        if self.is_capturing and stream.cuda_stream == 0:
            self.broken_by.append("something enqueued")

    def asks(self) -> None:
        if self.is_capturing and self.capture_mode == 0:
            self.broken_by.append("an event asked")
