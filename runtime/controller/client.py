"""A rank's side of the clock controller: start it, attach to it, write clock requests, read its
messages.

    with Connection(address, AttachRequest(rank, gpu, "clock", os.getppid())) as connection:
        reply = connection.attach(timeout_s=60.0)
        connection.request[0] = clock_request(position, clock_mhz)
        for message in connection.messages():
            ...

`start_controller` returns the address on the first rank of a node, which passes it on to the node's
other ranks.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import threading
import time
from collections import deque
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial

from perseus_planner.base import errors
from perseus_planner.base.errors import ControllerLost, GpuError
from perseus_planner.base.loops import in_background
from perseus_planner.base.processes import (
    WatchedProcess,
    end_module,
    is_readable,
    start_module,
)
from perseus_planner.base.wires import PacketChannel
from perseus_planner.runtime.controller.protocol import (
    SOCKET_KIND,
    AnyMessage,
    AttachRefusal,
    AttachReply,
    AttachRequest,
    ControlFailure,
    Credentials,
    DetachReply,
    DetachRequest,
    FromRank,
    SharedRequest,
    ToRank,
    create_shared_memory,
    socket_name,
)

HUNG_S = 10.0
"""A controller without a sign of life for this long is taken to hang and is killed.
"""

DETACH_S = 15.0
"""How long the end of a `with` block waits for the GPU to be reset."""

#: seconds and microseconds to wait for the controller to accept
_CONNECT = struct.pack("ll", 10, 0)
_ENDED = "the clock controller of this node has ended"
_RESET = "its GPUs are reset"
_WATCH_S = 1.0  #: between two looks whether this rank has left


def start_controller(ranks: int, max_changes_per_s: float, timeout_s: float) -> str:
    """Start the controller of this node, in the background and not as a child of this process.

    Args:
        ranks: How many ranks will attach to it.
        max_changes_per_s: Rate of the clock changes of all their GPUs together.
        timeout_s: How long to wait until it is ready, in seconds.

    Returns:
        The address that ranks attach to.

    Raises:
        GpuError: If it does not become ready.
    """
    package = "perseus_planner.runtime.controller"
    rate = repr(max_changes_per_s)
    options = ("--ranks", str(ranks), "--max-changes-per-s", rate)
    who = "the clock controller of this node"
    process, address = start_module(package, *options, who=who, timeout_s=timeout_s)
    end_module(process)  # which has left the controller in the background
    return address


class Connection:
    """A rank's connection to the controller; in children that the rank forks it does nothing.

    Attributes:
        memory: Memory shared with the controller. It stays valid while anything refers to it, also
            after `close`.
        recovery: Becomes the result of `recover` when the controller has ended. A thread of its own
            waits for that, which needs neither the training nor the job's store.
        request: The first number in it: what this rank wants now, as `marks.clock_request` packs
            it.
        latest: By what this rank gets faster clocks when it is late.

    Args:
        address: What `start_controller` returned.
        attach_request: Describes this rank.

    Raises:
        ControllerLost: If no controller of this user listens at the address.
    """

    def __init__(self, address: str, attach_request: AttachRequest) -> None:
        # A forked child shares the descriptors, and must not detach its parent.
        self._owner = os.getpid()
        self._attach_request = attach_request
        self._received: deque[ToRank] = deque()
        self._is_open = self._was_lost = False
        self._descriptor: int | None = create_shared_memory()
        shared = SharedRequest(self._descriptor)
        self.memory = shared.memory
        self.request = shared.request
        self._alive_ns = shared.alive_ns
        self.latest = shared.latest
        try:
            self.connect(address)
        except BaseException:
            self.close()
            raise

    def connect(self, address: str) -> None:
        """Connect to a controller, and ask it to attach this rank with the same memory; `attach`
        waits for that.

        May be called again after `disconnect`.

        Raises:
            ControllerLost: If no controller of this user listens at the address.
        """
        self._received.clear()
        self._channel, pid = _connect(address)
        self._controller = WatchedProcess(pid)
        # One of its own for the thread, which closes it; and a mark of its own that this rank has
        # left, as `_is_open` is soon that of another connection.
        watched = WatchedProcess(pid)
        self._has_left = threading.Event()
        self._is_open = True
        # From now on the end of the controller is noticed, whatever the training does.
        self.recovery = in_background(
            partial(self._watch, watched, self._has_left), "planner watch"
        )
        # The wait for a sign of life begins now.
        self._alive_ns[0] = time.monotonic_ns()
        try:
            self._check_alive()  # so the process that is watched now is the controller
            self._send(self._attach_request, self._descriptor)
        except BaseException:
            self.disconnect()
            raise

    def attach(self, timeout_s: float) -> AttachReply:
        """Wait until this rank's GPU is leased, which waits for the node's other ranks.

        Raises:
            GpuError: If the controller refuses, with the class and the text that it gives, or does
                not answer in time.
            ControllerLost: If the controller has ended.
        """
        deadline_s = time.monotonic() + timeout_s
        try:
            # Messages to a rank that is not attached yet say nothing about that.
            while (message := self._wait(deadline_s)) is not None:
                if (reply := attach_reply(message)) is not None:
                    return reply
        except ControllerLost as error:
            # An end of the socket while the controller lives is a fault of it, and needs no
            # recovery.
            if not self._is_cut():
                raise
            # Another rank's GPU may be set already.
            raise ControllerLost(f"{error}, and {self.result_of(self.recovery, HUNG_S)}") from None
        raise GpuError(f"the clock controller of this node did not answer within {timeout_s:g} s")

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when `messages` has something to return or
        to raise.
        """
        return self._channel.fileno()

    def messages(self) -> list[ToRank]:
        """Return all messages received since the last call; never waits.

        Raises:
            ControllerLost: If the controller has ended and all its messages were returned.
        """
        messages = list(self._received)
        self._received.clear()
        try:
            while self._is_open and (message := self._receive()) is not None:
                messages.append(message)
        except ControllerLost:
            # What came before the end is returned first; the next call raises.
            if not messages:
                raise
        return messages

    def age_s(self) -> float:
        """Return the seconds since the controller's last sign of life; while it leases GPUs,
        some seconds may pass.
        """
        return (time.monotonic_ns() - self._alive_ns[0]) / 1e9

    def kill(self) -> None:
        """Kill a controller that hangs, so that the GPUs can be reset; harmless if it has ended.

        Raises:
            GpuError: If this process has no permission to.
        """
        try:
            # By the descriptor, which means this process, whatever has its number later.
            if self._controller.descriptor is not None:
                signal.pidfd_send_signal(self._controller.descriptor, signal.SIGKILL)
            # Its number is not reused while its end of the socket is open.
            elif self._is_open and not self._is_cut():
                os.kill(self._controller.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        except PermissionError:
            raise GpuError(
                f"the clock controller, process {self._controller.pid}, cannot be killed: end it"
            ) from None

    def recover(self) -> str:
        """Reset what a controller that has ended has left set on this node, unless its guardian
        has.

        Returns:
            What was found, to follow "the controller has ended, and".

        Raises:
            GpuError: If a GPU stays locked.
        """
        from perseus_planner.gpu.lease.lease import recover  # seldom needed

        # Tells `detach` to look once more, as a controller may have set a GPU until its end.
        self._was_lost = True
        # It was killed a moment ago, so commands of it may still be under way.
        recoveries = recover(is_fresh=True)
        locked = [f"{left.record.gpu} ({left.problem})" for left in recoveries if left.problem]
        if locked:
            raise GpuError(f"still locked: {'; '.join(locked)}; run `planner reset`")
        by_this = ", ".join(left.record.gpu for left in recoveries)
        return f"rank {self._attach_request.rank} has reset {by_this}" if by_this else _RESET

    def result_of(self, recovery: Future[str], timeout_s: float) -> str:
        """Return what `recover` returns, or raises, for a message; limited in time."""
        if wait([recovery], timeout_s).done:
            return str(recovery.exception() or recovery.result())
        return (
            f"its process, {self._controller.pid}, or the driver does not answer, so that GPUs may "
            "stay locked: kill it, then run `planner reset`"
        )

    def _watch(self, controller: WatchedProcess, has_left: threading.Event) -> str:
        """Wait for the end of a controller, and recover; end without if this rank leaves it."""
        while not controller.has_ended():
            # Looked at often enough that a rank that leaves ends the thread within a second.
            if has_left.is_set():
                break
            if controller.descriptor is None:
                time.sleep(_WATCH_S)
            else:
                is_readable(controller.descriptor, _WATCH_S)
        controller.close()
        return _RESET if has_left.is_set() else self.recover()

    def detach(self, timeout_s: float) -> str | None:
        """Have this rank's GPU reset, and close; return the problem if that fails.

        `messages` still returns what the controller sent before.
        """
        # A child only closes what it has got.
        if os.getpid() != self._owner:
            self.close()
            return None
        problem = None
        try:
            if self._is_open:
                problem = self._detach(timeout_s)
        except GpuError as error:
            # Only one that hangs is killed: it may be resetting GPUs.
            if self.age_s() > HUNG_S:
                with suppress(GpuError):
                    self.kill()
            problem = f"{error}, and {self.result_of(self.recovery, timeout_s)}"
        if self._was_lost:  # what it left may not have been reset then
            self.result_of(in_background(self.recover, "planner recovery"), timeout_s)
        self.close()
        return problem

    def _detach(self, timeout_s: float) -> str | None:
        self._received.extend(self.messages())  # makes room in the socket
        self._send(DetachRequest())
        deadline_s = time.monotonic() + timeout_s
        while (message := self._wait(deadline_s)) is not None:
            if isinstance(message, DetachReply):
                return message.problem
            self._received.append(message)
        raise GpuError(
            f"the clock controller of this node has not reset this GPU within {timeout_s:g} s"
        )

    def disconnect(self) -> None:
        """Close the socket; the controller then resets the GPU, unless a child has the socket too.

        May be called again.
        """
        if self._is_open:
            self._is_open = False
            self._has_left.set()
            self._channel.close()
            self._controller.close()

    def close(self) -> None:
        """Disconnect for good. May be called again."""
        self.disconnect()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        """Detach; call `detach` yourself to learn about problems."""
        self.detach(DETACH_S)

    def _send(self, message: FromRank, descriptor: int | None = None) -> None:
        try:
            is_sent = self._channel.send(message, descriptor)
        except EOFError:
            raise ControllerLost(_ENDED) from None
        if not is_sent:
            raise ControllerLost("the clock controller of this node no longer reads its messages")

    def _receive(self) -> ToRank | None:
        """Return the next message; None if there is none yet."""
        try:
            received = self._channel.receive()
        except EOFError:
            raise ControllerLost(_ENDED) from None
        except ValueError as error:
            raise ControllerLost(
                f"the clock controller of this node has another version: {error}"
            ) from None
        if received is None:
            return None
        message: FromRank | ToRank
        # No message to a rank brings a descriptor.
        message, descriptor = received
        if descriptor is not None:
            os.close(descriptor)
        if isinstance(message, FromRank):
            raise ControllerLost(
                "the process at the address of the clock controller is not a clock controller"
            )
        return message

    def _wait(self, deadline_s: float) -> ToRank | None:
        """Return the next message; None if none arrives in time."""
        # A readable socket may hold no whole message yet.
        while (message := self._receive()) is None:
            if not is_readable(self.fileno(), deadline_s - time.monotonic()):
                return None
        return message

    def _check_alive(self) -> None:
        if self._is_cut():
            raise ControllerLost(_ENDED)

    def _is_cut(self) -> bool:
        """Whether the other end of the socket is closed."""
        # Asked of no events, poll tells hang-ups alone.
        poller = select.poll()
        poller.register(self.fileno(), 0)
        return bool(poller.poll(0))


def _connect(address: str) -> tuple[PacketChannel, int]:
    """Return a connection, and the process that listens at the address.

    Raises:
        ControllerLost: If nothing listens there, or the process belongs to another user.
    """
    connection = socket.socket(socket.AF_UNIX, SOCKET_KIND)
    try:
        # A backlog that is full would let `connect` wait for ever.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _CONNECT)
        connection.connect(socket_name(address))
    except OSError as error:
        connection.close()
        raise ControllerLost(
            f"the clock controller of this node cannot be reached at {address}: {error}"
        ) from None
    # The kernel says who listens, whatever the address promises.
    listener = Credentials.of(connection)
    if not listener.is_same_user():
        connection.close()
        raise ControllerLost(
            f"the process that listens at {address}, {listener.pid}, belongs to user {listener.uid}"
        )
    return PacketChannel(connection, AnyMessage), listener.pid


def attach_reply(message: ToRank) -> AttachReply | None:
    """Return the message if it says that this rank is attached; None if it says nothing about that.

    Raises:
        GpuError: If the controller refuses, with the class and the text that it gives.
    """
    if isinstance(message, AttachRefusal):
        raise _refusal_error(message)
    if isinstance(message, ControlFailure):
        raise GpuError(message.text)
    return message if isinstance(message, AttachReply) else None


def _refusal_error(refusal: AttachRefusal) -> GpuError:
    """Return the error that the controller met."""
    # The class by its name, so that callers handle it as if they had met it themselves.
    kind = getattr(errors, refusal.error, None)
    return (
        kind(refusal.text)
        if isinstance(kind, type) and issubclass(kind, GpuError)
        else GpuError(refusal.text)
    )
