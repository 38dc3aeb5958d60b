"""`python -m perseus_planner.runtime.autopilot.ranks`: the autopilot of a job; rank 0 starts it
and talks to it.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import socket
import sys
import threading
import time

from perseus_planner.base.processes import WatchedProcess, is_readable
from perseus_planner.runtime.autopilot.ranks.messages import END, WARNING, Message, Stream
from perseus_planner.runtime.autopilot.ranks.planner import Planner
from perseus_planner.runtime.autopilot.ranks.process import DESCRIPTOR

_SAVE_S = 60.0
_OWNER_S = 0.5  #: between two looks at the process of rank 0
_END_S = 5.0  #: for the end of a plan that is being made


def main() -> int:
    """Plan until rank 0 says that it is over, or has ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            number, signal.SIG_IGN
        )  # launchers send them to all processes while ranks still run
    parser = argparse.ArgumentParser(
        prog="python -m perseus_planner.runtime.autopilot.ranks", description=__doc__
    )
    parser.add_argument("--owner", type=int, required=True, help="process of rank 0")
    options = parser.parse_args()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (
        1,
        2,
    ):  # so that whoever reads the output of rank 0 does not wait for this process
        os.dup2(nowhere, descriptor)
    os.chdir("/")  # so that no file system is kept from being unmounted
    owner = WatchedProcess(options.owner)
    stream = Stream(socket.socket(fileno=DESCRIPTOR), is_blocking=True)
    received: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(stream, owner, received), daemon=True).start()
    planner, saved_s = Planner(), time.monotonic()
    while True:
        messages = _taken(received)
        try:
            replies = planner.take(messages)
        except Exception as error:  # a fault of the planner: training goes on with its last program
            replies = [(WARNING, f"a fault of the autopilot, please report it: {error!r}".encode())]
        is_over = any(kind == END for kind, _ in messages)
        if is_over or time.monotonic() - saved_s > _SAVE_S:
            replies += planner.save()
            saved_s = time.monotonic()
        try:
            for reply in replies:
                stream.send(*reply)
        except EOFError:
            planner.save()
            return 0
        if is_over:
            return 0


def _receive(stream: Stream, owner: WatchedProcess, received: queue.SimpleQueue[Message]) -> None:
    """Pass messages on until rank 0 has ended: a child that it has forked may keep the socket open.

    Then this process ends too, soon even if it plans.
    """
    try:
        while not owner.has_ended():
            if is_readable(stream.fileno(), _OWNER_S):
                for message in stream.receive():
                    received.put(message)
    except EOFError:
        pass
    received.put((END, b""))
    time.sleep(_END_S)
    os._exit(1)


def _taken(received: queue.SimpleQueue[Message]) -> list[Message]:
    """Wait for a message, and return all that are there."""
    messages = []
    try:
        messages.append(received.get(timeout=_SAVE_S))
        while True:
            messages.append(received.get_nowait())
    except queue.Empty:
        return messages


if __name__ == "__main__":
    sys.exit(main())
