"""Stand-ins for torch's CUDA streams and NCCL messages, for ranks that are threads of one process.

Work on a stream begins when the work before it has ended. A message begins when the current stream
of its sender or receiver has come to it, as in ProcessGroupNCCL, and ends when both have begun.
Nothing runs: whether work has ended follows from what it waits for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any


class Op:
    """Something on a stream.

    Args:
        after: What ends before this begins.
        behind: What begins before this begins; None for nothing.
        peers: The ends of the message, of which there will be two; None for other work.
    """

    def __init__(self, after: list[Op], behind: Op | None, peers: list[Op] | None) -> None:
        self.after, self.behind = after, behind
        self.needed, self.peers = (1, []) if peers is None else (2, peers)
        self.has_begun = self.has_ended = False
        self.peers.append(self)


class Stream:
    """A stream of a device."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.last: list[Op] = []


class FakeNccl:
    """The part of torch and torch.distributed that neighbours use.

    Args:
        one_queue: Whether all streams of a device share one queue, as with
            CUDA_DEVICE_MAX_CONNECTIONS=1: what is launched later begins no earlier.
        limit_s: How long the host waits for a device, seconds.
    """

    def __init__(self, *, one_queue: bool, limit_s: float) -> None:
        self._one_queue, self._limit_s, self._lock = one_queue, limit_s, threading.Lock()
        self._thread, self._counts = threading.local(), dict[Any, int]()
        self._messages: dict[Any, list[Op]] = {}
        self._streams: dict[Any, Stream] = {}
        self._launched: dict[Any, list[Op]] = {}
        cuda = SimpleNamespace(
            Stream=Stream,
            stream=self._stream,
            set_device=lambda _: None,
            synchronize=self._synchronize,
        )
        self.distributed = SimpleNamespace(
            irecv=lambda tensor, rank, group: self._message(tensor, group, "received"),
            isend=lambda tensor, rank, group: self._message(tensor, group, "sent"),
            recv=lambda *call: self.distributed.irecv(*call).wait(),
            send=lambda *call: self.distributed.isend(*call).wait(),
        )
        self.torch = SimpleNamespace(
            cuda=cuda, distributed=self.distributed, empty=self._tensor, zeros=self._zeros
        )

    def _has_ended(self, *wanted: Op) -> bool:
        with self._lock:
            changed = True
            while changed:
                changed = False
                for op in (
                    op for each in self._launched.values() for op in each if not op.has_ended
                ):
                    before = (op.has_begun, op.has_ended)
                    op.has_begun = all(each.has_ended for each in op.after) and (
                        not op.behind or op.behind.has_begun
                    )
                    op.has_ended = len(op.peers) == op.needed and all(
                        each.has_begun for each in op.peers
                    )
                    changed |= before != (op.has_begun, op.has_ended)
            return all(each.has_ended for each in wanted)

    def _tensor(self, _: int, device: Any) -> Any:
        return SimpleNamespace(device=device)

    def _zeros(self, size: int, device: Any) -> Any:
        self._launch(self._current(device), [])
        return self._tensor(size, device)

    def _message(self, tensor: Any, group: Any, end: str) -> Any:
        number = self._counts[group, end] = self._counts.get((group, end), 0) + 1
        stream = self._streams.setdefault((tensor.device, group), Stream(tensor.device))
        current = self._current(tensor.device)
        op = self._launch(stream, current.last, self._messages.setdefault((group, number), []))
        return SimpleNamespace(
            is_completed=lambda: self._has_ended(op), wait=lambda: self._launch(current, [op])
        )

    def _launch(self, stream: Stream, after: list[Op], peers: list[Op] | None = None) -> Op:
        with self._lock:
            launched = self._launched.setdefault(stream.device, [])
            op = Op(
                [*stream.last, *after],
                launched[-1] if launched and self._one_queue else None,
                peers,
            )
            stream.last = [op]
            launched.append(op)
            return op

    def _current(self, device: Any) -> Stream:
        stream = getattr(self._thread, "stream", None)
        return stream or self._streams.setdefault((device, None), Stream(device))

    @contextmanager
    def _stream(self, stream: Stream) -> Iterator[None]:
        self._thread.stream = stream
        yield
        self._thread.stream = None

    def _synchronize(self, device: Any) -> None:
        until_s = time.monotonic() + self._limit_s
        while not self._has_ended(*self._launched.get(device, [])):
            if time.monotonic() > until_s:
                raise RuntimeError("the device does not end")
            time.sleep(1e-3)
