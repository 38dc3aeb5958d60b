"""Marks on a CUDA device: the device tells of itself, in the order of its stream."""

from __future__ import annotations

import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from perseus_planner.errors import GpuError
from perseus_planner.runtime.cuda_driver import DeviceWord, Driver
from perseus_planner.runtime.device_clock import DeviceClock, gap_ns
from perseus_planner.runtime.marks import KEPT, NOTHING, Timed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from mmap import mmap
    from types import TracebackType

    import torch


@dataclass
class _Iteration:
    """An iteration whose events wait to be read: those of its begin, of each computation, and of its end."""

    number: int
    first: Any
    spans: list[tuple[Any, Any]] = field(default_factory=list)
    last: Any = None

    def events(self) -> Iterator[Any]:
        """All but the first, in their order."""
        for span in self.spans:
            yield from span
        yield self.last


class CudaMarks:
    """Marks where the training thread runs ahead of the device; for its stream that is current at each call.

    Nothing here waits for the device after it is made, not even `finished`; the training thread does no more than
    enqueue events and writes of one word (`DeviceWord.write`). While a CUDA graph is captured nothing is enqueued, as
    it would become a part of the graph: what is wanted then is written after it, and that iteration has no times. A
    replay of the graph is marked like any other work. Where the device refuses, marks end, `finished` says so, and
    training goes on.

    Args:
        page: shared memory; the word is its first 64 bits.
        device: where this process computes.
        cuda: torch.cuda, or what stands in for it.
        driver: the CUDA driver, or what stands in for it.

    Raises:
        GpuError: the device cannot write to the page; the text says why.
    """

    def __init__(self, page: mmap, device: torch.device, cuda: Any = None, driver: Driver | None = None) -> None:
        if cuda is None:
            import torch

            cuda = torch.cuda
        self._cuda, self._device = cuda, device
        self._words: Sequence[int] = ()
        self._owed: int | None = None  #: wanted, and not enqueued yet
        self._problem: str | None = None
        self._free: deque[Any] = deque()
        self._waiting: deque[_Iteration] = deque()
        self._now: _Iteration | None = None  #: None: without times
        self._begun: Any = None
        self._driver = Driver() if driver is None else driver
        try:
            with cuda.device(device):
                self._clock = DeviceClock(cuda, device)
                self._word = DeviceWord(page, self._driver)
                refused = self._word.write(self._clock.stream.cuda_stream, int.from_bytes(page[:8], sys.byteorder))
        except RuntimeError as error:
            raise GpuError(f"CUDA: {error}") from error
        if refused is not None:
            self.close()
            raise GpuError(refused)

    def __enter__(self) -> CudaMarks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self, timeout_s: float = 2.0) -> bool:
        """Let go of the page when all is done on the device; False: it is not within the time, and the page stays.

        Args:
            timeout_s: a device that hangs is waited for no longer.
        """
        self._problem = "the marks are closed"
        closing = threading.Thread(target=self._let_go, name="planner-unregister", daemon=True)
        closing.start()
        closing.join(timeout_s)
        return not closing.is_alive()

    def _let_go(self) -> None:
        try:
            with self._cuda.device(self._device):
                self._cuda.synchronize(self._device)
                self._word.unregister()
        except (GpuError, RuntimeError):
            pass  # the device is lost, and its memory with it

    def load(self, words: Sequence[int]) -> None:
        """See `Marks.load`; what is enqueued keeps the words that it was enqueued with."""
        self._words = (*words, NOTHING)

    def want(self, index: int) -> None:
        """See `Marks.want`."""
        self._owed = self._words[index]
        self._enqueued()

    def begin_iteration(self, number: int) -> None:
        """See `Marks.begin_iteration`; without times where `KEPT` iterations wait to be read."""
        first = self._event() if len(self._waiting) < KEPT else None
        self._now = _Iteration(number, first) if first is not None else None

    def begin(self) -> None:
        """See `Marks.begin`."""
        self._begun = self._event()

    def end(self) -> None:
        """See `Marks.end`."""
        ended = self._event()
        if self._now is None or self._begun is None or ended is None:
            self._now = None
        else:
            self._now.spans.append((self._begun, ended))
        self._begun = None

    def end_iteration(self) -> None:
        """See `Marks.end_iteration`."""
        last = self._event()
        if self._now is not None and last is not None:
            self._now.last = last
            self._waiting.append(self._now)
        self._now = None

    def finished(self) -> list[Timed]:
        """See `Marks.finished`.

        Raises:
            GpuError: the device has refused; nothing is marked any more.
        """
        if self._problem is not None:
            raise GpuError(self._problem)
        try:
            with self._driver.apart_from_captures():
                return self._timed() if self._is_done() and self._clock.settled() else []
        except RuntimeError as error:
            self._fail(f"CUDA: {error}")
            raise GpuError(f"CUDA: {error}") from error

    def _is_done(self) -> bool:
        return bool(self._waiting) and self._waiting[0].last.query()

    def _timed(self) -> list[Timed]:
        found = []
        while self._is_done():
            iteration = self._waiting.popleft()
            at_ns, earlier = self._clock.advance(iteration.first)
            self._free.append(earlier)
            times_ns, earlier = [at_ns], iteration.first
            for event in iteration.events():
                at_ns += gap_ns(earlier, event)
                times_ns.append(at_ns)
                earlier = event
            self._free.extend(iteration.events())
            begin_ns, *between_ns, end_ns = times_ns
            spans_ns = tuple(zip(between_ns[0::2], between_ns[1::2], strict=True))
            found.append(Timed(iteration.number, begin_ns, spans_ns, end_ns))
        return found

    def _enqueued(self) -> Any:
        """The stream, with the word that is owed to it enqueued; None: nothing may be enqueued now."""
        try:
            if self._problem is not None or self._cuda.is_current_stream_capturing():
                return None
            stream = self._cuda.current_stream(self._device)
            if self._owed is not None:
                with self._cuda.device(self._device):  # the default stream is that of the current device
                    refused = self._word.write(stream.cuda_stream, self._owed)
                self._owed = None
                if refused is not None:
                    self._fail(refused)
                    return None
        except RuntimeError as error:
            self._fail(f"CUDA: {error}")
            return None
        return stream

    def _event(self) -> Any:
        """An event that is enqueued here; None: none may be."""
        stream = self._enqueued()
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
        """Nothing is marked any more; the GPU is reset."""
        self._problem = problem
        self._word.reset()
