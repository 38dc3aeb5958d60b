"""What ranks and the autopilot's process say to each other, and the connection between rank 0 and
the process.

On a pair of sockets: a kind, a length and so many bytes. Neither end waits for the other: rank 0
keeps what the process has not read yet, and the process reads on a thread of its own while it
plans.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from array import array
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from perseus_planner.runtime.autopilot.observations import ComputationObservation, RankObservation

_HEAD = struct.Struct("<cI")
_FRAME = struct.Struct("<IIqqddddHH")
_CHANGE = struct.Struct("<di")
_OBSERVED = struct.Struct("<qqI")
_SIZE = struct.Struct("<I")
LONGEST_BYTES = 64 << 20
"""Longest message, and most that is kept for a process that does not read."""

JOB, OBSERVED, WAITS, END = b"J", b"O", b"T", b"E"
"""To the process: the job as JSON; what ranks observed of one iteration; how long each pipeline may
take, as JSON; write the state and end."""
PROGRAMS, LOG, WARNING, STATUS, LEARNT = b"P", b"L", b"W", b"S", b"R"
"""From the process: programs to propose; a line to log, or to warn with; as JSON the status, and
what was learnt.
"""

Message = tuple[bytes, bytes]


class Stream:
    """One end of the connection.

    Args:
        connection: The socket.
        is_blocking: Whether `receive` waits, and `send` too.
    """

    def __init__(self, connection: socket.socket, *, is_blocking: bool) -> None:
        connection.setblocking(is_blocking)
        self._socket, self._is_blocking = connection, is_blocking
        self._unread = bytearray()
        self._unsent = bytearray()

    def fileno(self) -> int:
        """Return the descriptor, for `poll`."""
        return self._socket.fileno()

    def send(self, kind: bytes, content: bytes = b"") -> None:
        """Send a message, or keep what the other end has no room for.

        Raises:
            EOFError: If the other end has ended, or has not read for too long.
        """
        message = _HEAD.pack(kind, len(content)) + content
        try:
            if self._is_blocking:
                self._socket.sendall(message)
                return
            self._unsent += message
            self.flush()
        except OSError:
            raise EOFError from None

    def flush(self) -> None:
        """Send what was kept.

        Raises:
            EOFError: As `send`.
        """
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            if len(self._unsent) > LONGEST_BYTES:
                raise EOFError from None
        except OSError:
            raise EOFError from None

    def receive(self) -> list[Message]:
        """Return the messages that have arrived; a blocking stream waits for at least one.

        Raises:
            EOFError: If the other end has ended.
        """
        while True:
            try:
                data = self._socket.recv(1 << 20)
            except BlockingIOError:
                return self._taken()
            except OSError:
                raise EOFError from None
            if not data:
                if messages := self._taken():
                    return messages
                raise EOFError
            self._unread += data
            if self._is_blocking and (messages := self._taken()):
                return messages

    def close(self) -> None:
        """Close this end; may be repeated."""
        with suppress(OSError):
            self._socket.close()

    def _taken(self) -> list[Message]:
        messages = []
        while len(self._unread) >= _HEAD.size:
            kind, size = _HEAD.unpack_from(self._unread)
            if size > LONGEST_BYTES:
                raise EOFError
            if len(self._unread) < _HEAD.size + size:
                break
            messages.append((kind, bytes(self._unread[_HEAD.size : _HEAD.size + size])))
            del self._unread[: _HEAD.size + size]
        return messages


@dataclass(frozen=True)
class Frame:
    """One iteration of one rank. Times are seconds from its begin, by the rank's clock."""

    rank: int  #: Rank in the whole job
    order: int  #: Number of the order of computations that the rank runs; 0 if it is not known yet
    iteration: int  #: Number of the iteration
    decision: int  #: `Decision.version` of its program; 0 if it ran at full clocks
    time_s: float  #: How long it took
    #: Begin and end of each computation, one after the other; empty if nothing can be learnt of
    #: them.
    spans_s: tuple[float, ...] = ()
    #: When clocks came into force, and which (MHz); the first is the one at its begin, with a time
    #: of 0. A clock of 0 is not known.
    changes: tuple[tuple[float, int], ...] = ()
    energy_j: float | None = None  #: Energy of the GPU; None if it is not known
    throttled_s: float = 0.0  #: Seconds in which the GPU was throttled
    #: How long the last calls took that set a clock, seconds, their median; 0 if that is not known.
    call_s: float = 0.0

    def pack(self) -> bytes:
        """Return the frame as bytes."""
        energy_j = math.nan if self.energy_j is None else self.energy_j
        head = (self.rank, self.order, self.iteration, self.decision, self.time_s)
        rest = (energy_j, self.throttled_s, self.call_s, len(self.spans_s), len(self.changes))
        changes = b"".join(_CHANGE.pack(*change) for change in self.changes)
        return _FRAME.pack(*head, *rest) + array("d", self.spans_s).tobytes() + changes

    @classmethod
    def unpack(cls, data: bytes) -> Frame:
        """Return the frame that `pack` wrote.

        Raises:
            ValueError: If it is not exactly that.
        """
        if len(data) < _FRAME.size:
            raise ValueError("it is cut off")
        rank, order, iteration, decision, time_s, energy_j, throttled_s, call_s, spans, changes = (
            _FRAME.unpack_from(data)
        )
        middle = _FRAME.size + 8 * spans
        if len(data) != middle + _CHANGE.size * changes:
            raise ValueError("it is cut off")
        return cls(
            rank,
            order,
            iteration,
            decision,
            time_s,
            tuple(array("d", data[_FRAME.size : middle])),
            tuple((at_s, clock) for at_s, clock in _CHANGE.iter_unpack(data[middle:])),
            None if math.isnan(energy_j) else energy_j,
            throttled_s,
            call_s,
        )

    def observation(
        self, pipeline: int, rank: int, gpus: int, energy_step_s: float
    ) -> RankObservation:
        """Return what the autopilot is told.

        Args:
            pipeline: The rank's pipeline.
            rank: The rank in its pipeline.
            gpus: How many GPUs like this one the rank of the pipeline has.
            energy_step_s: How old a reading of the energy counter can be, in seconds.
        """
        return RankObservation(
            pipeline,
            rank,
            self.iteration,
            self.decision,
            self.time_s,
            tuple(
                self._computation(begin_s, end_s)
                for begin_s, end_s in zip(self.spans_s[0::2], self.spans_s[1::2], strict=True)
            ),
            None if self.energy_j is None else gpus * self.energy_j,
            energy_step_s,
            self.throttled_s,
        )

    def _computation(self, begin_s: float, end_s: float) -> ComputationObservation:
        before = [clock for at_s, clock in self.changes if at_s <= begin_s]
        inside = [change for change in self.changes if begin_s < change[0] < end_s]
        if not before or not before[-1] or len(inside) > 1 or not all(clock for _, clock in inside):
            return ComputationObservation(begin_s, end_s, None)
        return ComputationObservation(
            begin_s, end_s, before[-1], *(inside[0] if inside else (None, None))
        )


def iteration_of(data: bytes) -> tuple[int, int]:
    """Return the iteration of a packed frame, and the number of its order; decodes nothing else."""
    _, order, iteration, *_ = _FRAME.unpack_from(data)
    return iteration, order


@dataclass(frozen=True)
class JobDescription:
    """What rank 0 says of the job."""

    settings: Mapping[str, Any]  #: As for `AutopilotSettings`
    #: Rank in the whole job -> its pipeline, and its rank there; of ranks that observe.
    places: Mapping[int, tuple[int, int]]
    pipelines: int  #: Number of pipelines
    gpus_per_stage: int  #: How many ranks have the same place
    #: Rank in the whole job -> what it runs and its GPU, as `Observer` writes it; of the first
    #: pipeline.
    told: Mapping[int, Mapping[str, Any]]
    sets_clocks: bool  #: Whether clocks are set; otherwise only full clocks can be observed
    state: str | None  #: File of what is learnt; None for none
    gpus_per_node: int = 8  #: How many GPUs share the lock of a driver
    is_shared: bool = False  #: Whether a service wants to know what is learnt

    def dumps(self) -> bytes:
        """Return the description as bytes."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def loads(cls, data: bytes) -> JobDescription:
        """Return what `dumps` wrote."""
        values = json.loads(data)
        places = {
            int(rank): (pipeline, place) for rank, (pipeline, place) in values["places"].items()
        }
        told = {int(rank): each for rank, each in values["told"].items()}
        return cls(**{**values, "places": places, "told": told})


def observed_message(iteration: int, since: int, frames: Iterable[bytes]) -> bytes:
    """Return the message with the packed frames of an iteration; a program proposed now begins
    with `since`.
    """
    packed = list(frames)
    return _OBSERVED.pack(iteration, since, len(packed)) + b"".join(
        _SIZE.pack(len(each)) + each for each in packed
    )


def read_observed(data: bytes) -> tuple[int, list[Frame]]:
    """Return what `observed_message` wrote: the iteration that programs begin with, and the frames.

    Raises:
        ValueError: If it is not exactly that.
    """
    _, since, count = _OBSERVED.unpack_from(data)
    at, frames = _OBSERVED.size, []
    for _ in range(count):
        (size,) = _SIZE.unpack_from(data, at)
        at += _SIZE.size
        frames.append(Frame.unpack(data[at : at + size]))
        at += size
    return since, frames
