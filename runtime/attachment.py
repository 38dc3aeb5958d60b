"""How a rank attaches to the clock controller of its node, and attaches again after that
controller has ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, takewhile
from typing import TYPE_CHECKING

from perseus_planner.base.errors import ControllerLost, GpuError, GpuInUse, GpuNotSupported
from perseus_planner.base.loops import Backoff, in_background
from perseus_planner.gpu import DRY_RUN, open_gpu
from perseus_planner.runtime.controller.client import Connection, attach_reply, start_controller
from perseus_planner.runtime.controller.protocol import AttachRequest
from perseus_planner.runtime.job import launcher
from perseus_planner.runtime.marks import NO_REQUEST

if TYPE_CHECKING:
    from concurrent.futures import Future
    from contextlib import ExitStack

    from perseus_planner.gpu.protocol import Gpu
    from perseus_planner.runtime.controller.protocol import AttachReply, Control, ToRank
    from perseus_planner.runtime.job import Node

ATTACH_S = 60.0
"""How long a controller may take to start, lease its GPUs and answer."""

_POLL_S = 0.01
_LIMIT_STEP = 0.95  #: between two power limits
_LOOK_S = 1.0  #: between two looks for a new controller, which another rank starts


class NodeController:
    """The clock controller of this node, which the rank that leads the node starts.

    Attributes:
        rank: This rank.

    Args:
        rank: This rank.
        node: Its node.
        ranks: Number of ranks of the node.
        max_changes_per_s: Rate of the clock changes of all their GPUs together.
    """

    def __init__(self, rank: int, node: Node, ranks: int, max_changes_per_s: float) -> None:
        self.rank = rank
        self._node = node
        self._ranks = ranks
        self._max_changes_per_s = max_changes_per_s

    @property
    def is_started_here(self) -> bool:
        """Whether this rank starts the controller."""
        return self._node.leads

    def start(self) -> str:
        """Start the controller, and return its address.

        Raises:
            GpuError: If it does not start.
        """
        try:
            address = start_controller(self._ranks, self._max_changes_per_s, ATTACH_S)
        except GpuError as error:
            self._node.pass_on(problem=str(error))
            raise
        self._node.pass_on(controller=address, problem=None)
        return address

    def address(self) -> str | None:
        """Return the address of the controller that was started last; None if none was. Never
        waits.

        Raises:
            GpuError: If it did not start.
        """
        state = self._node.look()
        if state.problem is not None:
            raise GpuError(state.problem)
        return state.controller

    def first_address(self) -> str:
        """Start the controller or wait until it is started, and return its address.

        Raises:
            GpuError: If it does not start.
        """
        if self.is_started_here:
            return self.start()
        deadline_s = time.monotonic() + ATTACH_S
        address = self.address()
        while address is None:
            who = "the clock controller of this node was not started"
            refusal = self._node.state.refusal
            if refusal is not None:
                raise GpuError(f"{who}: rank {refusal.rank} does not begin: {refusal.text}")
            if time.monotonic() > deadline_s:
                raise GpuError(f"{who} within {ATTACH_S:g} s")
            time.sleep(_POLL_S)
            address = self.address()
        return address


def control_of(gpu: str) -> Control:
    """Return what is to be set on a GPU: its power limit if it says that it has no clocks to
    choose from, and its clock otherwise, also if it cannot be asked, as attaching it tells why.
    """
    with suppress(GpuError), open_gpu(gpu) as opened:
        try:
            _ = opened.supported_clocks_mhz
        except GpuNotSupported:
            return "power-limit"
    return "clock"


def power_limits(gpu: Gpu) -> tuple[int, ...]:
    """Return power limits to choose from, watts, highest first.

    Raises:
        GpuError: If the GPU has none.
    """
    smallest_w, largest_w = gpu.power_limits_w
    steps = (int(largest_w * _LIMIT_STEP**number) for number in count())
    return tuple(takewhile(lambda limit_w: limit_w >= smallest_w, steps))


@dataclass(frozen=True)
class Attachment:
    """A rank's part in the clock controller of its node."""

    controller: NodeController  #: The controller
    connection: Connection | None  #: Connection to it; None if there is none
    gpu: AttachReply | None  #: The controller's description of the rank's GPU
    problem: str | None  #: Why no clock can be set; None if clocks can be set


_attachments: set[tuple[int, int]] = set()  #: process and connection


def is_attached() -> bool:
    """Return whether this process is attached to a controller."""
    return any(process == os.getpid() for process, _ in _attachments)


def attach(controller: NodeController, gpu: str, control: Control, stack: ExitStack) -> Attachment:
    """Attach this rank to the controller, before training.

    Args:
        controller: The controller of this node.
        gpu: GPU of this rank, as for `open_gpu`.
        control: What is set on it.
        stack: Closes the connection.

    Raises:
        GpuInUse: If another job holds the GPU.
    """
    try:
        address = controller.first_address()  # first, because other ranks wait for it
        request = AttachRequest(controller.rank, _portable_text(gpu), control, launcher())
        connection = stack.enter_context(Connection(address, request))
        reply = connection.attach(ATTACH_S)
        # With the process, as one that is forked from this one is not attached.
        attached = os.getpid(), id(connection)
        _attachments.add(attached)
        stack.callback(_attachments.discard, attached)
        return Attachment(controller, connection, reply, None)
    except GpuInUse:
        raise
    except GpuError as error:
        return Attachment(controller, None, None, f"no clock can be set: {error}")


def _portable_text(gpu: str) -> str:
    """Return a text that opens the same GPU in the controller, where CUDA devices may be
    numbered differently.
    """
    if not gpu.removeprefix(DRY_RUN).startswith("cuda:"):
        return gpu
    with open_gpu(gpu) as opened:
        return opened.text


class Reattachment:
    """Attaches a rank to a new controller after its controller was lost, less and less often while
    that fails.

    No method waits: the rank that leads the node starts the controller on a thread of its own, and
    the others look for its address. After the end of the launcher nothing is tried, because the job
    is to end then.

    Args:
        controller: The controller of this node.
        connection: The connection that was lost; its memory stays in use.
        now_s: A clock, in seconds.
    """

    def __init__(
        self,
        controller: NodeController,
        connection: Connection,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._controller = controller
        self._connection = connection
        self._now_s = now_s
        self._launcher = launcher()
        self._backoff = Backoff()
        self._looked_s = self._connected_s = -_LOOK_S
        self._starting: Future[str] | None = None
        self._is_connected = False

    def begin(self) -> None:
        """Disconnect from the controller, which was lost."""
        self._fail()

    def look(self) -> Sequence[ToRank] | None:
        """Go on; return the first messages of the new controller once this rank is attached, and
        None before.
        """
        try:
            if self._is_connected:
                return self._attached()
            if self._backoff.is_due(self._now_s()) and launcher() == self._launcher:
                address = self._address()
                if address is not None:
                    self._connect(address)
        except GpuError:
            self._fail()
        return None

    def _fail(self) -> None:
        self._connection.disconnect()
        self._is_connected = False
        self._starting = None
        self._backoff.fail(self._now_s())

    def _address(self) -> str | None:
        """Return the address to try now; None if there is none yet."""
        if self._controller.is_started_here:
            name = "perseus-planner controller start"
            self._starting = self._starting or in_background(self._controller.start, name)
            if not self._starting.done():
                return None
            error = self._starting.exception()
            if error is not None:
                raise GpuError(str(error))
            return self._starting.result()
        if self._now_s() - self._looked_s < _LOOK_S:
            return None
        self._looked_s = self._now_s()
        with suppress(GpuError):  # the rank that leads will try again
            return self._controller.address()
        return None

    def _connect(self, address: str) -> None:
        # What was requested of the lost controller is not for the new one to set.
        self._connection.request[0] = NO_REQUEST
        try:
            self._connection.connect(address)
        except ControllerLost:
            # This rank has started that one itself, so the address is no old one.
            if self._starting is not None:
                raise
            return  # it is still the address of the one that has ended
        self._is_connected = True
        self._starting = None
        self._connected_s = self._now_s()

    def _attached(self) -> Sequence[ToRank] | None:
        messages = self._connection.messages()
        for message in messages:
            if attach_reply(message) is not None:
                self._is_connected = False
                return messages
        if self._now_s() - self._connected_s > ATTACH_S:
            raise GpuError(
                f"the clock controller of this node did not answer within {ATTACH_S:g} s"
            )
        return None
