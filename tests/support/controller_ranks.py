"""Ranks that attach to a clock controller: in this process, or in another one for tests that
kill them.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar
from weakref import WeakKeyDictionary

import psutil
from fake_nvml import StandIn
from waiting import LONG_S, eventually

from perseus_planner.runtime.controller.client import Connection, start_controller
from perseus_planner.runtime.controller.protocol import (
    AttachRequest,
    Control,
    ControlChange,
    Handshakes,
    ToRank,
)
from perseus_planner.runtime.controller.server import Controller
from perseus_planner.runtime.marks import clock_request

RANK_OF_ITS_OWN = """
import os, signal, sys
from perseus_planner.runtime.controller.client import Connection
from perseus_planner.runtime.controller.protocol import AttachRequest
from controller_ranks import set_clock

print("here", flush=True)
address, rank, gpu, clock_mhz, children = sys.argv[1:]
connection = Connection(address, AttachRequest(int(rank), gpu, "clock", None))
connection.attach(30.0)
set_clock(connection, int(clock_mhz))
child = os.fork() if int(children) else 1
if child == 0:
    signal.pause()
print("set", child, flush=True)
sys.stdin.read()
"""
"""Says `here`, attaches, has a clock set, says `set` and the child it forked, if it is to, and
waits.
"""

Kind = TypeVar("Kind", bound=ToRank)
_KEPT: WeakKeyDictionary[Connection, deque[ToRank]] = (
    WeakKeyDictionary()
)  #: received, not waited for yet


@contextmanager
def attached(
    gpus: Sequence[str],
    *,
    control: Control = "clock",
    launcher: int | None = None,
    max_changes_per_s: float = 1e4,
    ranks: int | None = None,
) -> Iterator[list[Connection]]:
    """Start a controller, and attach a rank of this process for each of `gpus`."""
    address = start_controller(ranks or len(gpus), max_changes_per_s, LONG_S)
    with ExitStack() as stack:
        requests = [AttachRequest(rank, gpu, control, launcher) for rank, gpu in enumerate(gpus)]
        connections = [
            stack.enter_context(Connection(address, attach_request)) for attach_request in requests
        ]
        if ranks in (None, len(gpus)):
            for connection in connections:
                connection.attach(LONG_S)
        yield connections


@contextmanager
def serving(ranks: int = 1, max_changes_per_s: float = 1e4) -> Iterator[str]:
    """Run a controller on a thread of this process, which ends with its ranks; return its
    address.
    """
    handshakes = Handshakes()
    thread = threading.Thread(target=Controller(handshakes, ranks, max_changes_per_s).run)
    thread.start()
    yield handshakes.address
    thread.join(LONG_S)
    assert not thread.is_alive()


@contextmanager
def served(gpu: str, max_changes_per_s: float = 1e4) -> Iterator[Connection]:
    """Attach a rank to such a controller."""
    with serving(max_changes_per_s=max_changes_per_s) as address, joined(address, 0, gpu) as rank:
        yield rank


@contextmanager
def joined(address: str, rank: int, gpu: str) -> Iterator[Connection]:
    """Attach a rank of this process."""
    with Connection(address, AttachRequest(rank, gpu, "clock", None)) as connection:
        connection.attach(LONG_S)
        yield connection


def awaited(
    connection: Connection, kind: type[Kind], other: Callable[[Kind], bool] = lambda _: True
) -> Kind:
    """Wait for the next message of a kind for which `other` is true, and drop those before it."""
    kept = _KEPT.setdefault(connection, deque())
    deadline_s = time.monotonic() + LONG_S
    while time.monotonic() < deadline_s:
        while kept:
            message = kept.popleft()
            if isinstance(message, kind) and other(message):
                return message
        select.select([connection], [], [], deadline_s - time.monotonic())
        kept += connection.messages()
    raise AssertionError(f"no {kind.__name__} came")


def let_look(connection: Connection) -> None:
    """Wait until the controller has seen the last request."""
    for _ in range(2):  # it looks at requests between two signs of life
        written_ns = time.monotonic_ns()
        eventually(lambda: connection._alive_ns[0] > written_ns)  # noqa: B023 - called before the next


def set_clock(connection: Connection, value: int, place: int = 0) -> ControlChange:
    """Request a value, wait until it is set, and return the message."""
    connection.request[0] = clock_request(place, value)
    return awaited(connection, ControlChange, lambda changed: changed.value == value)


def process_of(connection: Connection) -> psutil.Process:
    """Return the controller's process."""
    return psutil.Process(connection._controller.pid)


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def locked(nvml: StandIn) -> list[int | None]:
    found = [nvml.locked_mhz(index) for index in range(2)]
    return [each[1] if each else None for each in found]
