"""How rank 0 and the autopilot's process talk: frames of a kind, a length and so many bytes, on a pair of sockets.

Neither end waits for the other: rank 0 keeps what the process has not read yet, and the process reads on a thread of
its own while it plans.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

_HEAD = struct.Struct("<cI")
LONGEST_BYTES = 64 << 20
"""Longest message, and most that is kept for a process that does not read."""

JOB, OBSERVED, END = b"J", b"O", b"E"
"""To the process: the job as JSON; what ranks observed of one iteration; write the state and end."""
PROGRAMS, LOG, WARNING, STATUS = b"P", b"L", b"W", b"S"
"""From the process: programs to propose; a line to log, or to warn with; the status as JSON."""

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
