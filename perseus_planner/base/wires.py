"""Messages between processes: how they are written, and what carries them.

A message is a frozen msgspec struct, written as one object of JSON that names its class:

    class DetachReply(Message):
        problem: str | None

    encode(DetachReply(None))  # b'{"message":"DetachReply","problem":null}'

`decode` takes nothing else than the type that it is given: exactly its fields, each of its declared
type, and finite. Where a reader expects one type only, dataclasses travel as well.

A `PacketChannel` or a `StreamChannel` connects two processes of a node; `NodeMemory` is what one of
them writes for all others; a `Board` is the store of a training job, in which its ranks write for
each other.
"""

from __future__ import annotations

import os
import socket
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from operator import methodcaller
from typing import TYPE_CHECKING, Any, TypeVar, overload

import msgspec

from perseus_planner.base.errors import PlannerError

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

STORE_GONE = "the rank or launcher that holds the job's store has ended; see why"
ABSENT = "?"
"""A value that no key of a store ever has, as it is not JSON."""
MAX_PACKET_BYTES = 65536
MAX_STREAM_BYTES = 64 << 20
"""Longest message of a stream, and most that is kept for a process that does not read."""

_PLAIN = methodcaller("item")  #: of a number of numpy
_MAX_REASON = 200  #: characters of what msgspec says
_LENGTH = struct.Struct("<I")  #: before each message of a stream
_KEYS = 1000  #: that are read in one operation
_VERSION = struct.Struct("<qQ")  #: of the content of memory, and how many bytes it has
_CHECKSUM = struct.Struct("<I")  #: of both, so that half a content is not taken for one


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
        # Somebody else's text must neither end a line nor fill a log.
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
        self._connection = connection
        self._kinds = kinds

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
        # A descriptor belongs to its message: the kernel hands over both or none.
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
            # Room for one descriptor, which is not to live on in programs that are started.
            data, descriptors, flags, _ = socket.recv_fds(
                self._connection, MAX_PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except OSError:
            raise EOFError from None
        try:
            return self._decoded(data, flags), descriptors[0] if descriptors else None
        # Nobody else knows them yet, so they would stay open for ever.
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def _decoded(self, data: bytes, flags: int) -> Any:
        # An empty packet is the end of the connection.
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
        self._unread = bytearray()
        self._unsent = bytearray()

    def send(self, message: Message, *, waits: bool = False) -> None:
        """Send a message; keep what the other end has no room for, or wait for it.

        Raises:
            EOFError: If the other end has ended, or has not read for too long.
        """
        data = encode(message)
        # Behind what was kept, so that messages stay in order.
        self._unsent += _LENGTH.pack(len(data)) + data
        self.flush(waits=waits)

    def flush(self, *, waits: bool = False) -> None:
        """Send what was kept; see `send`."""
        flags = 0 if waits else socket.MSG_DONTWAIT
        try:
            # The kernel may take a part of it.
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent, flags)]
        # The other end may have hung, and keeping more for it would fill the memory.
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
        # Everything that is there, as other messages may be waiting behind the first.
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
        # Messages that came before the end are returned first; the end is told by the next call.
        messages = self._whole_messages()
        if not is_open and not messages:
            raise EOFError
        return messages

    def _whole_messages(self) -> list[Any]:
        messages = []
        begin = 0
        # As many as are whole; what is left is the beginning of the next one.
        while len(self._unread) >= begin + _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._unread, begin)
            end = begin + _LENGTH.size + size
            # Checked before its bytes are waited for: a wrong length would be waited for as well.
            if size > MAX_STREAM_BYTES:
                raise EOFError
            if len(self._unread) < end:
                break
            try:
                messages.append(
                    decode(bytes(self._unread[begin + _LENGTH.size : end]), self._kinds)
                )
            # Once one message is wrong, nothing behind it can be trusted: lengths may be, too.
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
    value: bytes = store.compare_set(key, ABSENT, ABSENT)
    return None if value == ABSENT.encode() else value


class Board:
    """The store of a training job, or a part of it, with a message under each key.

    All methods raise the store's RuntimeError when it is gone, and take one operation unless they
    say otherwise.

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

    def get_all(self, keys: Sequence[str], kind: type[T]) -> list[T | None]:
        """Return the messages under keys, with None where there is none: an operation for each
        1,000 of them or, among 1,000 of which one is missing, for each.
        """
        # In parts: the store answers one operation at a time, and all ranks wait for it.
        values: list[bytes | None] = []
        for begin in range(0, len(keys), _KEYS):
            part = list(keys[begin : begin + _KEYS])
            is_whole = self.store.check(part)  # `multi_get` would wait for the others
            values += (
                self.store.multi_get(part)
                if is_whole
                else [read_key(self.store, key) for key in part]
            )
        return [None if value is None else decode(value, kind) for value in values]


class NodeMemory:
    """Memory in which one process of a node writes for others: a version and its content, over an
    earlier one. It has no name in a file system, so that no death leaves it behind.

    Args:
        descriptor: Descriptor of the memory, which belongs to this object from now on.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def create(cls) -> NodeMemory:
        """Return new memory, without content."""
        return cls(os.memfd_create("perseus-planner", os.MFD_CLOEXEC))

    @classmethod
    def open(cls, address: str) -> NodeMemory:
        """Return the memory at the address that its creator gave.

        Raises:
            OSError: If it cannot be opened, for example because its creator has ended.
        """
        return cls(os.open(f"/proc/{address}", os.O_RDONLY | os.O_CLOEXEC))

    @property
    def address(self) -> str:
        """Where other processes of this user on this node find the memory while this process
        lives.
        """
        return f"{os.getpid()}/fd/{self._descriptor}"

    def write(self, version: int, content: bytes) -> None:
        """Replace the content."""
        # The checksum stands first, over version and content, as a reader may look in the middle of
        # a write.
        data = _VERSION.pack(version, len(content)) + content
        os.pwrite(self._descriptor, _CHECKSUM.pack(zlib.crc32(data)) + data, 0)

    def read(self, after: int) -> tuple[int, bytes] | None:
        """Return a version newer than `after`, and its content; None if there is none, or it is
        being written.
        """
        start = _CHECKSUM.size + _VERSION.size
        head = os.pread(self._descriptor, start, 0)
        if len(head) < start:
            return None
        version, size = _VERSION.unpack_from(head, _CHECKSUM.size)
        # Usual: nothing new. So the content is read only when it is needed.
        if version <= after:
            return None
        content = os.pread(self._descriptor, size, start)
        # Written over in between, both do not match, and the next look gets the new one.
        is_whole = _CHECKSUM.unpack_from(head) == (zlib.crc32(head[_CHECKSUM.size :] + content),)
        return (version, content) if is_whole else None

    def close(self) -> None:
        """Close the memory; other processes may still read it."""
        os.close(self._descriptor)
