"""The two ends of the socket between a rank and the controller.

The socket keeps messages apart, so a line arrives whole or not at all, and has no place in a file system. Who is at the
other end is asked of the kernel: only the same user may take part.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import time
from contextlib import suppress
from typing import NamedTuple

from perseus_planner.runtime.controller.protocol import LONGEST, Message, decoded, encoded

KIND = socket.SOCK_SEQPACKET

_CREDENTIALS = struct.Struct("3i")


class Credentials(NamedTuple):
    """Who is at the other end of a socket: the process that connected, or that listened."""

    pid: int
    uid: int

    def are_trusted(self) -> bool:
        """Whether it is of the user that this process runs as."""
        return self.uid == os.geteuid()


def credentials(connection: socket.socket) -> Credentials:
    """As the kernel has them."""
    content = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(content)
    return Credentials(pid, uid)


def bound_address(address: str) -> str:
    """What a socket is bound to that is known by `address`: a name in the kernel's own list."""
    return f"\0{address}"


def new_address() -> str:
    """One that nobody has."""
    return f"perseus-planner-{secrets.token_hex(16)}"


def is_readable(descriptor: int, deadline_s: float) -> bool:
    """Wait until there is something to read, or an end; False: there was not in time."""
    poller = select.poll()  # unlike select, for descriptors of any number
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(max(0.0, 1e3 * (deadline_s - time.monotonic()))))


def _message(line: bytes, flags: int) -> Message:
    if not line:
        raise EOFError
    if flags & socket.MSG_TRUNC:
        raise ValueError(f"it has more than {LONGEST} bytes")
    return decoded(line)


class Peer:
    """One end of a connection; it never waits for the other."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection

    def fileno(self) -> int:
        """For `select`."""
        return self._connection.fileno()

    def tell(self, message: Message, descriptor: int | None = None) -> bool:
        """Send it, with a descriptor if there is one; False where the other end must read what was sent before first.

        Raises:
            EOFError: the other end is closed.
        """
        try:
            socket.send_fds(self._connection, [encoded(message)], [] if descriptor is None else [descriptor])
        except BlockingIOError:
            return False
        except OSError:
            raise EOFError from None
        return True

    def heard(self) -> tuple[Message, int | None] | None:
        """The next message, and the descriptor that came with it, which the caller must close; None: there is none.

        Raises:
            ValueError: what came is no message; says why.
            EOFError: the other end is closed, and all that it said was given.
        """
        try:
            line, descriptors, flags, _ = socket.recv_fds(self._connection, LONGEST, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except OSError:
            raise EOFError from None
        try:
            return _message(line, flags), descriptors[0] if descriptors else None
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def close(self) -> None:
        """Say and hear no more."""
        with suppress(OSError):
            self._connection.close()
