"""A rank's side of the controller: attach to it, write what is wanted, read what it says.

    with Connection(address, Hello(rank, gpu, "clock", os.getppid(), plan.min_dwell_s)) as connection:
        attached = connection.attach(timeout_s=60.0)
        connection.word[0] = word(place, clock_mhz)
        for message in connection.messages():
            ...

`started` in the first rank of a node gives the address; that rank tells it to the others.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from perseus_planner import errors
from perseus_planner.errors import ControllerLost, GpuError
from perseus_planner.processes import Watched
from perseus_planner.runtime.controller.page import Page, made
from perseus_planner.runtime.controller.peer import KIND, Peer, bound_address, credentials, is_readable
from perseus_planner.runtime.controller.protocol import (
    Attached,
    Dwell,
    Failed,
    Hello,
    Leave,
    Left,
    Message,
    Refused,
    ToRank,
)
from perseus_planner.runtime.controller.starting import started

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["HUNG_S", "LEAVE_S", "Connection", "ControllerLost", "started"]

HUNG_S = 10.0
"""After so long without a sign of life a controller is taken to hang, and is killed, for its guardian to reset."""

LEAVE_S = 15.0
"""For how long the end of a `with` block waits for the GPU to be reset."""

_CONNECT = struct.pack("ll", 10, 0)  #: seconds and microseconds for which to wait in line
_ENDED = "the clock controller of this node has ended; what it had set is reset by its guardian"


class Connection:
    """One rank's way to the controller; in children that are forked from the rank it does nothing.

    Attributes:
        page: the memory that is shared with the controller. It stays valid for as long as anything refers to it, also
            when the connection is closed.
        word: its first number: what this rank wants now, as runtime/marks.py writes it.

    Args:
        address: what `started` returned in the rank that started the controller.
        hello: who this rank is.

    Raises:
        ControllerLost: there is no controller.
    """

    def __init__(self, address: str, hello: Hello) -> None:
        self._owner = os.getpid()
        self._heard: deque[ToRank] = deque()
        self._is_open = True
        descriptor = made()
        try:
            shared = Page(descriptor)
            shared.alive_ns[0] = time.monotonic_ns()
            self.page, self.word, self._alive_ns = shared.memory, shared.word, shared.alive_ns
            self._peer, pid = _connected(address)
            self._controller = Watched(pid)
            try:
                self._check_connected()  # it lives now, so what is watched is it
                self._tell(hello, descriptor)
            except BaseException:
                self.close()
                raise
        finally:
            os.close(descriptor)

    def attach(self, timeout_s: float) -> Attached:
        """Wait until this rank's GPU is taken: for that, for the node's other ranks to come.

        Raises:
            GpuError: the class and the text with which this rank is refused; or the controller does not answer in time.
            ControllerLost: it has ended.
        """
        deadline_s = time.monotonic() + timeout_s
        while (message := self._awaited(deadline_s)) is not None:
            if isinstance(message, Attached):
                return message
            if isinstance(message, Refused):
                raise _error(message)
            if isinstance(message, Failed):
                raise GpuError(message.text)
        raise GpuError(f"the clock controller of this node did not answer within {timeout_s:g} s")

    def fileno(self) -> int:
        """For `select`: becomes readable when `messages` has something to give, or to raise."""
        return self._peer.fileno()

    def messages(self) -> list[ToRank]:
        """All that the controller has said since the last call; never waits.

        Raises:
            ControllerLost: it has ended, and all that it said was given.
        """
        given = list(self._heard)
        self._heard.clear()
        try:
            while self._is_open and (message := self._next()) is not None:
                given.append(message)
        except ControllerLost:
            if not given:
                raise
        return given

    def age_s(self) -> float:
        """Seconds since the controller was last seen alive; while it takes GPUs, some seconds may pass."""
        return (time.monotonic_ns() - self._alive_ns[0]) / 1e9

    def kill(self) -> None:
        """Kill the controller, which hangs: its guardian then resets all that it has set. Harmless when it has ended.

        Raises:
            GpuError: this process may not.
        """
        try:
            if self._controller.descriptor is not None:
                signal.pidfd_send_signal(self._controller.descriptor, signal.SIGKILL)
            elif self._is_open and not self._is_cut():  # nobody else has its number while it has the other end
                os.kill(self._controller.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        except PermissionError:
            raise GpuError(f"the clock controller, process {self._controller.pid}, cannot be killed: end it") from None

    def dwell(self, seconds: float) -> None:
        """From now on keep each value of this rank for so long at least.

        Raises:
            ControllerLost: it has ended, or reads nothing any more.
        """
        self._tell(Dwell(seconds))

    def leave(self, timeout_s: float) -> str | None:
        """Have this rank's GPU reset, and close; what went wrong. What was said until then, `messages` still gives."""
        if not self._is_open:
            return None
        if os.getpid() != self._owner:
            self.close()
            return None
        try:
            self._heard.extend(self.messages())  # so that there is room for what it says now
            self._tell(Leave())
            deadline_s = time.monotonic() + timeout_s
            while (message := self._awaited(deadline_s)) is not None:
                if isinstance(message, Left):
                    return message.problem
                self._heard.append(message)
        except GpuError as error:
            return str(error)
        else:
            return f"the clock controller of this node has not reset this GPU within {timeout_s:g} s"
        finally:
            if self.age_s() > HUNG_S:
                with suppress(GpuError):
                    self.kill()
            self.close()

    def close(self) -> None:
        """Close, which the controller takes for this rank's end, unless a child has the socket too; may be repeated."""
        self._is_open = False
        self._peer.close()
        self._controller.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Leave; call `leave` before to learn what went wrong."""
        self.leave(LEAVE_S)

    def _tell(self, message: Hello | Dwell | Leave, descriptor: int | None = None) -> None:
        try:
            told = self._peer.tell(message, descriptor)
        except EOFError:
            raise ControllerLost(_ENDED) from None
        if not told:
            raise ControllerLost("the clock controller of this node reads nothing any more")

    def _next(self) -> ToRank | None:
        """What came next; None: nothing yet."""
        try:
            heard = self._peer.heard()
        except EOFError:
            raise ControllerLost(_ENDED) from None
        except ValueError as error:
            raise ControllerLost(f"the clock controller of this node is not one of this version: {error}") from None
        return None if heard is None else _for_rank(heard)

    def _awaited(self, deadline_s: float) -> ToRank | None:
        """The next message; None: none came in time."""
        while (message := self._next()) is None:
            if not is_readable(self.fileno(), deadline_s):
                return None
        return message

    def _check_connected(self) -> None:
        if self._is_cut():
            raise ControllerLost(_ENDED)

    def _is_cut(self) -> bool:
        poller = select.poll()
        poller.register(self.fileno(), 0)
        return bool(poller.poll(0))


def _connected(address: str) -> tuple[Peer, int]:
    """A connection, and the process that listens there.

    Raises:
        ControllerLost: there is none, or it is another user's.
    """
    connection = socket.socket(socket.AF_UNIX, KIND)
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _CONNECT)
        connection.connect(bound_address(address))
    except OSError as error:
        connection.close()
        raise ControllerLost(f"the clock controller of this node cannot be reached at {address}: {error}") from None
    who = credentials(connection)
    if not who.are_trusted():
        connection.close()
        raise ControllerLost(f"what listens at {address} is process {who.pid} of user {who.uid}, not of this one")
    return Peer(connection), who.pid


def _for_rank(heard: tuple[Message, int | None]) -> ToRank:
    """What was heard, if it is for a rank.

    Raises:
        ControllerLost: it is not.
    """
    message, descriptor = heard
    if descriptor is not None:
        os.close(descriptor)
    if isinstance(message, (Hello, Dwell, Leave)):
        raise ControllerLost("what listens at the address of the clock controller is none")
    return message


def _error(refused: Refused) -> GpuError:
    """The error that the controller met."""
    kind = getattr(errors, refused.error, None)
    return kind(refused.text) if isinstance(kind, type) and issubclass(kind, GpuError) else GpuError(refused.text)
