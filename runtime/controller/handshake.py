"""How ranks connect to the controller: who may, and what they must send first."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from perseus_planner.base.errors import GpuError
from perseus_planner.runtime.controller.protocol import (
    SOCKET_KIND,
    AttachRefusal,
    AttachRequest,
    Channel,
    Credentials,
    SharedRequest,
    new_address,
    socket_name,
)
from perseus_planner.runtime.controller.rank import Rank

if TYPE_CHECKING:
    from perseus_planner.runtime.controller.protocol import Message

_TIMEOUT_NS = 10_000_000_000  #: from connecting to the attach request
_MAX_PENDING = 64


class Handshakes:
    """Accepts connections and waits for their attach requests.

    Attributes:
        address: What ranks connect to.
    """

    def __init__(self) -> None:
        self.address = new_address()
        self._listener = socket.socket(socket.AF_UNIX, SOCKET_KIND)
        self._listener.bind(socket_name(self.address))
        self._listener.listen(_MAX_PENDING)
        self._listener.setblocking(False)
        self._pending: dict[Channel, tuple[int, int]] = {}  #: pid, and when it connected

    def descriptors(self) -> list[int]:
        """Return the descriptors that become readable when `serve` has something to do."""
        return [self._listener.fileno(), *(channel.fileno() for channel in self._pending)]

    def serve(self, ready: set[int], now_ns: int) -> list[Rank]:
        """Return the ranks whose attach request has arrived; `ready` are the readable
        descriptors.
        """
        received = [
            self._receive(channel) for channel in list(self._pending) if channel.fileno() in ready
        ]
        for channel, (_, since_ns) in list(self._pending.items()):
            if now_ns - since_ns > _TIMEOUT_NS:
                self._reject(channel, "it has not sent an attach request")
        if self._listener.fileno() in ready:
            for _ in range(_MAX_PENDING):
                if not self._accept(now_ns):
                    break
        return [rank for rank in received if rank is not None]

    def close(self) -> None:
        """Stop listening, and close connections that have not sent their attach request."""
        self._listener.close()
        for channel in self._pending:
            channel.close()

    def _accept(self, now_ns: int) -> bool:
        """Accept one connection; return False if none is waiting."""
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return False
        other = Credentials.of(connection)
        if other.is_same_user() and len(self._pending) < _MAX_PENDING:
            self._pending[Channel(connection)] = (other.pid, now_ns)
        else:
            connection.close()
        return True

    def _receive(self, channel: Channel) -> Rank | None:
        try:
            received = channel.receive()
            if received is None:
                return None
            pid, _ = self._pending[channel]
            rank = _make_rank(channel, pid, *received)
        except EOFError:
            del self._pending[channel]
            channel.close()
            return None
        except ValueError as error:
            self._reject(channel, str(error))
            return None
        del self._pending[channel]
        return rank

    def _reject(self, channel: Channel, reason: str) -> None:
        del self._pending[channel]
        text = f"the clock controller does not understand this process: {reason}"
        with suppress(EOFError):
            channel.send(AttachRefusal(GpuError.__name__, text))
        channel.close()


def _make_rank(channel: Channel, pid: int, message: Message, descriptor: int | None) -> Rank:
    """Return the rank that has sent this message first.

    Raises:
        ValueError: If it is not an attach request, came without memory, or the process is not
            visible here.
    """
    if isinstance(message, AttachRequest) and descriptor is not None and pid > 0:
        return Rank(channel, message, SharedRequest.receive(descriptor), pid)
    if descriptor is not None:
        os.close(descriptor)
    raise ValueError("a rank sends an attach request and its memory first, from a visible process")
