"""How ranks come to the controller: who connects, and what they say first."""

from __future__ import annotations

import os
import socket

from perseus_planner.errors import GpuError
from perseus_planner.runtime.controller import page
from perseus_planner.runtime.controller.peer import KIND, Peer, bound_address, credentials, new_address
from perseus_planner.runtime.controller.protocol import Hello, Message, Refused
from perseus_planner.runtime.controller.rank import Rank

_HELLO_NS = 10_000_000_000  #: from a connection to its hello
_MOST = 64  #: connections without a hello


class Arrivals:
    """Where ranks connect.

    Attributes:
        address: what they connect to.
    """

    def __init__(self) -> None:
        self.address = new_address()
        self._listener = socket.socket(socket.AF_UNIX, KIND)
        self._listener.bind(bound_address(self.address))
        self._listener.listen(_MOST)
        self._listener.setblocking(False)
        self._strangers: dict[Peer, tuple[int, int]] = {}  #: that have said nothing yet: pid, and since when

    def descriptors(self) -> list[int]:
        """What becomes readable when `serve` has something to do."""
        return [self._listener.fileno(), *(stranger.fileno() for stranger in self._strangers)]

    def serve(self, ready: set[int], now_ns: int) -> list[Rank]:
        """Those that have said hello; `ready` are the descriptors that are readable."""
        ranks = [rank for peer in list(self._strangers) if peer.fileno() in ready and (rank := self._heard(peer))]
        for peer, (_, since_ns) in list(self._strangers.items()):
            if now_ns - since_ns > _HELLO_NS:
                self._send_away(peer, "it has not said hello")
        if self._listener.fileno() in ready:
            for _ in range(_MOST):
                if not self._accepts(now_ns):
                    break
        return ranks

    def close(self) -> None:
        """Nobody can come any more."""
        self._listener.close()
        for peer in self._strangers:
            peer.close()

    def _accepts(self, now_ns: int) -> bool:
        """Take in who waits; False: nobody does."""
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return False
        who = credentials(connection)
        if who.are_trusted() and len(self._strangers) < _MOST:
            self._strangers[Peer(connection)] = (who.pid, now_ns)
        else:
            connection.close()
        return True

    def _heard(self, peer: Peer) -> Rank | None:
        pid, _ = self._strangers[peer]
        try:
            heard = peer.heard()
            if heard is None:
                return None
            rank = _rank(peer, pid, *heard)
        except EOFError:
            del self._strangers[peer]
            peer.close()
            return None
        except ValueError as error:
            self._send_away(peer, str(error))
            return None
        del self._strangers[peer]
        return rank

    def _send_away(self, peer: Peer, why: str) -> None:
        del self._strangers[peer]
        try:
            peer.tell(Refused(GpuError.__name__, f"the clock controller does not understand this process: {why}"))
        except EOFError:
            pass
        finally:
            peer.close()


def _rank(peer: Peer, pid: int, hello: Message, descriptor: int | None) -> Rank:
    """The rank that has said this first.

    Raises:
        ValueError: it is no hello.
    """
    if isinstance(hello, Hello) and descriptor is not None and pid > 0:
        return Rank(peer, hello, page.received(descriptor), pid)
    if descriptor is not None:
        os.close(descriptor)
    raise ValueError("a rank says hello first, with its page, from where this process can see it")
