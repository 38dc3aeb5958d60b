"""Messages between processes: how they are written, and what carries them.

A message is a frozen msgspec struct, written as one object of JSON that names its class:

    class DetachReply(Message):
        problem: str | None

    encode(DetachReply(None))  # b'{"message":"DetachReply","problem":null}'

`decode` takes nothing else than the type that it is given: exactly its fields, each of its declared
type, and finite. Where a reader expects one type only, dataclasses travel as well.

A `PacketChannel` or a `StreamChannel` connects two processes of a node; a `Board` is the store of a
training job, in which its ranks write for each other.
"""

from __future__ import annotations

import os
import socket
import struct
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from operator import methodcaller
from typing import TYPE_CHECKING, Any, TypeVar, overload

import msgspec

from perseus_planner.base.errors import PlannerError, RankError

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

STORE_GONE = "the rank or launcher that holds the job's store has ended; see why"
MAX_PACKET_BYTES = 65536
MAX_STREAM_BYTES = 64 << 20
"""Longest message of a stream, and most that is kept for a process that does not read."""

_PLAIN = methodcaller("item")  #: of a number of numpy
_MAX_REASON = 200  #: characters of what msgspec says
_LENGTH = struct.Struct("<I")  #: before each message of a stream
_ABSENT = "?"  #: a value that no key of a store ever has, as it is not JSON
_LONGEST_PAUSE_S = 0.05  #: between two looks at the store, in jobs of up to
_RANKS_LOOKING = 500  #: ranks; longer in larger ones


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fields that are written and read together."""


class Message(Record, frozen=True, tag=True, tag_field="message"):
    """A record that says of which class it is, for channels that carry several."""


def encode(value: Any) -> bytes:
    """Return a message, a dataclass or plain values as JSON, on one line."""
    return msgspec.json.encode(value, enc_hook=_PLAIN)


@overload
def decode(data: bytes, kind: type[T]) -> T: ...
@overload
def decode(data: bytes, kind: Any) -> Any: ...
def decode(data: bytes, kind: Any) -> Any:
    """Return what `encode` wrote.

    Args:
        data: What it wrote.
        kind: Its type, or the union of the types that it may have.

    Raises:
        ValueError: If it is anything else.
    """
    try:
        return _decoder(kind).decode(data)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except msgspec.DecodeError as error:  # may name a field that somebody else has chosen
        reason = "".join(filter(str.isprintable, str(error)))[:_MAX_REASON]
        raise ValueError(f"it is not what this version writes: {reason}") from None
    except PlannerError as error:  # of a value that is out of range
        raise ValueError(str(error)) from None


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


class Channel:
    """One end of a connection between two processes of a node.

    Args:
        connection: The socket.
        kinds: The messages that the other end may send.
    """

    def __init__(self, connection: socket.socket, kinds: Any) -> None:
        self._connection, self._kinds = connection, kinds

    def fileno(self) -> int:
        """Return the descriptor, for `poll`."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close this end; may be repeated."""
        with suppress(OSError):
            self._connection.close()


class PacketChannel(Channel):
    """A SOCK_SEQPACKET socket: a message arrives whole or not at all, and may bring a descriptor.

    No method waits for the other end.
    """

    def __init__(self, connection: socket.socket, kinds: Any) -> None:
        super().__init__(connection, kinds)
        connection.setblocking(False)

    def send(self, message: Message, descriptor: int | None = None) -> bool:
        """Send a message, with a descriptor if one is given.

        Returns:
            False if the other end has to read earlier messages first; the message is not sent then.

        Raises:
            EOFError: If the other end is closed.
        """
        descriptors = [] if descriptor is None else [descriptor]
        try:
            socket.send_fds(self._connection, [encode(message)], descriptors)
        except BlockingIOError:
            return False
        except OSError:
            raise EOFError from None
        return True

    def receive(self) -> tuple[Any, int | None] | None:
        """Return the next message and the descriptor sent with it, which the caller closes; None if
        there is none.

        Raises:
            ValueError: If what arrived is not a message.
            EOFError: If the other end is closed and all its messages were returned.
        """
        try:
            data, descriptors, flags, _ = socket.recv_fds(
                self._connection, MAX_PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except OSError:
            raise EOFError from None
        try:
            return self._decoded(data, flags), descriptors[0] if descriptors else None
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def _decoded(self, data: bytes, flags: int) -> Any:
        if not data:
            raise EOFError
        if flags & socket.MSG_TRUNC:
            raise ValueError(f"it has more than {MAX_PACKET_BYTES} bytes")
        return decode(data, self._kinds)


class StreamChannel(Channel):
    """A SOCK_STREAM socket: each message, of any length, comes after its length.

    One thread may send while another one receives.
    """

    def __init__(self, connection: socket.socket, kinds: Any) -> None:
        super().__init__(connection, kinds)
        connection.setblocking(True)
        self._unread, self._unsent = bytearray(), bytearray()

    def send(self, message: Message, *, waits: bool = False) -> None:
        """Send a message; keep what the other end has no room for, or wait for it.

        Raises:
            EOFError: If the other end has ended, or has not read for too long.
        """
        data = encode(message)
        self._unsent += _LENGTH.pack(len(data)) + data
        self.flush(waits=waits)

    def flush(self, *, waits: bool = False) -> None:
        """Send what was kept; see `send`."""
        flags = 0 if waits else socket.MSG_DONTWAIT
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent, flags)]
        except BlockingIOError:
            if len(self._unsent) > MAX_STREAM_BYTES:
                raise EOFError from None
        except OSError:
            raise EOFError from None

    def receive(self) -> list[Any]:
        """Return the messages that have arrived, without waiting.

        Raises:
            EOFError: If the other end has ended and all its messages were returned, or if it sends
                something else.
        """
        is_open = True
        try:
            while is_open:
                data = self._connection.recv(1 << 20, socket.MSG_DONTWAIT)
                self._unread += data
                is_open = bool(data)
        except BlockingIOError:
            pass
        except OSError:
            raise EOFError from None
        messages = self._whole_messages()
        if not is_open and not messages:
            raise EOFError
        return messages

    def _whole_messages(self) -> list[Any]:
        messages, begin = [], 0
        while len(self._unread) >= begin + _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._unread, begin)
            end = begin + _LENGTH.size + size
            if size > MAX_STREAM_BYTES:
                raise EOFError
            if len(self._unread) < end:
                break
            try:
                messages.append(
                    decode(bytes(self._unread[begin + _LENGTH.size : end]), self._kinds)
                )
            except ValueError:
                raise EOFError from None
            begin = end
        del self._unread[:begin]
        return messages


def read_key(store: Store, key: str) -> bytes | None:
    """Return the value of a key, or None if it is absent: one operation, which never waits.

    `Store.get` waits for an absent key, even for one that was there when it was checked.
    `compare_set` returns the value of the key or, if it is absent, the value that was expected. So
    "?" must not be a value.
    """
    value: bytes = store.compare_set(key, _ABSENT, _ABSENT)
    return None if value == _ABSENT.encode() else value


class Board:
    """The store of a training job, or a part of it, with a message under each key.

    All methods but `gather` raise the store's RuntimeError when it is gone, and take one operation.

    Attributes:
        store: The store.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def put(self, key: str, message: Any) -> None:
        """Write a message, over an earlier one."""
        self.store.set(key, encode(message))

    def get(self, key: str, kind: type[T]) -> T | None:
        """Return the message under a key, which is of this type; None if there is none."""
        data = read_key(self.store, key)
        return None if data is None else decode(data, kind)

    def remove(self, key: str) -> None:
        """Remove a message."""
        self.store.delete_key(key)

    def gather(
        self, rank: int, ranks: int, message: Any, kinds: Any, timeout_s: float
    ) -> Sequence[Any]:
        """Gather a message from every rank; every rank returns the same, with None for ranks that
        were too late.

        The first rank writes all of them once they are there; any rank writes those that are
        there after waiting for `timeout_s`. What was written first counts, so a rank that comes
        later finds None for itself. This waits in short pauses and can be interrupted. The board
        must be used for nothing else.

        Args:
            rank: This rank, from 0.
            ranks: Number of ranks.
            message: The message of this rank.
            kinds: The type of the messages, or the union of their types.
            timeout_s: How long to wait for the others, in seconds.

        Raises:
            RankError: If the store is gone, or a rank has written something else.
        """
        try:
            packed = self._gathered(rank, ranks, message, time.monotonic() + timeout_s)
            gathered: Sequence[Any] = decode(zlib.decompress(packed), list[kinds | None])
        except RuntimeError as error:
            raise RankError(STORE_GONE) from error
        except ValueError as error:
            raise RankError(
                f"what the ranks tell each other cannot be read: {error}; use the same version of "
                "the planner on all ranks"
            ) from error
        return gathered

    def _gathered(self, rank: int, ranks: int, message: Any, deadline_s: float) -> bytes:
        keys = [f"values/{number}" for number in range(ranks)]
        # A store drops a rank that sends 8 MiB at once, and what ranks send is mostly alike.
        self.store.set(keys[rank], zlib.compress(encode(message)))
        pause_s, longest_s = 1e-3, _LONGEST_PAUSE_S * max(1.0, ranks / _RANKS_LOOKING)
        while (packed := read_key(self.store, "all")) is None:
            if time.monotonic() > deadline_s or (rank == 0 and self.store.check(keys)):
                written = [read_key(self.store, key) for key in keys]
                messages = [data and msgspec.Raw(zlib.decompress(data)) for data in written]
                self.store.compare_set("all", "", zlib.compress(encode(messages)))
            else:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
        self.remove(keys[rank])
        return packed
