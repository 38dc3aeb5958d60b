"""`python -m perseus_planner.extensions.autopilot.ranks`: the autopilot of a job; rank 0 starts it
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
from perseus_planner.base.wires import StreamChannel
from perseus_planner.extensions.autopilot.ranks.coordinator import DESCRIPTOR
from perseus_planner.extensions.autopilot.ranks.messages import (
    End,
    LogLine,
    Observations,
    ToProcess,
)
from perseus_planner.extensions.autopilot.ranks.planner import Planner

_SAVE_S = 60.0
_CORE_SHARE = 0.25  #: CPU time that the process takes at most, as a share of that of one core
_FIRST_S = 20.0  #: and so much more, at first: CPU seconds
_OWNER_S = 0.5  #: between two looks at the process of rank 0
_END_S = 5.0  #: for the end of a plan that is being made


def main() -> int:
    """Plan until rank 0 says that it is over, or has ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            number, signal.SIG_IGN
        )  # launchers send them to all processes while ranks still run
    parser = argparse.ArgumentParser(
        prog="python -m perseus_planner.extensions.autopilot.ranks", description=__doc__
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
    channel = StreamChannel(socket.socket(fileno=DESCRIPTOR), ToProcess)
    received: queue.SimpleQueue[ToProcess] = queue.SimpleQueue()
    # A thread reads, as the end of rank 0 must be seen while a plan is being made.
    threading.Thread(target=_receive, args=(channel, owner, received), daemon=True).start()
    planner = Planner()
    begun_s = time.monotonic()
    saved_s = begun_s
    while True:
        # The process rests until its CPU time is within its share of the time since it began.
        rests_until_s = begun_s + (time.process_time() - _FIRST_S) / _CORE_SHARE
        messages = _taken(received, rests_until_s)
        try:
            replies = planner.take(messages)
        except Exception as error:  # a fault of the planner: training goes on with its last program
            text = f"a fault of the autopilot, please report it: {error!r}"
            replies = [LogLine(text, is_warning=True)]
        is_over = any(isinstance(message, End) for message in messages)
        # Saved at times and at the end, so that a killed job loses a minute at most.
        if is_over or time.monotonic() - saved_s > _SAVE_S:
            replies += planner.save()
            saved_s = time.monotonic()
        try:
            for reply in replies:
                channel.send(reply, waits=True)
        # Rank 0 is gone, so what was learnt is kept and nobody is left to answer.
        except EOFError:
            planner.save()
            return 0
        if is_over:
            return 0


def _receive(
    channel: StreamChannel, owner: WatchedProcess, received: queue.SimpleQueue[ToProcess]
) -> None:
    """Pass messages on until rank 0 has ended: a child that it has forked may keep the socket open.

    Then this process ends too, soon even if it plans.
    """
    try:
        while not owner.has_ended():
            if is_readable(channel.fileno(), _OWNER_S):
                for message in channel.receive():
                    received.put(message)
    except EOFError:
        pass
    received.put(End())
    time.sleep(_END_S)
    os._exit(1)


def _taken(received: queue.SimpleQueue[ToProcess], rests_until_s: float) -> list[ToProcess]:
    """Wait for a message, and return all that are there; observations wait until then."""
    messages: list[ToProcess] = []
    try:
        messages.append(received.get(timeout=_SAVE_S))
        while True:
            rest_s = 0.0
            if all(isinstance(message, Observations) for message in messages):
                rest_s = max(0.0, rests_until_s - time.monotonic())
            messages.append(received.get(timeout=rest_s))
    except queue.Empty:
        return messages


if __name__ == "__main__":
    sys.exit(main())
