"""Three ways to set the clocks of training processes, on GPUs whose calls wait for each other.

controller_latency.py runs this as a program: `serve` is the clock controller, the others are one
rank each.

- controller: the rank writes its request to shared memory; one process per node sets the clocks of
  all GPUs.
- thread: the rank puts the clock into a queue.SimpleQueue, and one of its threads sets its GPU.
- queue: the rank puts the clock into a multiprocessing.Queue, and another process sets its GPU.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import os
import queue
import random
import sys
import threading
import time
from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.wrappers import DryRunGpu
from perseus_planner.runtime.controller import rank as controller_rank
from perseus_planner.runtime.controller.client import Connection
from perseus_planner.runtime.controller.protocol import (
    AttachRequest,
    ControlChange,
    ControlFailure,
    Handshakes,
)
from perseus_planner.runtime.controller.server import Controller
from perseus_planner.runtime.marks import clock_request

CLOCKS_MHZ = tuple(range(1200, 1320, 15))
"""Requested in turn."""

# Quantiles of the time of a call on an A800, as in perseus_planner/gpu/simulated/gpu.py.
_SHARES, _CALL_S = (0.0, 0.5, 0.99, 1.0), (1.8e-3, 4.5e-3, 13e-3, 14e-3)

Log = list[tuple[int, int]]
"""(number of the request, when the call that set it returned, in nanoseconds)"""


class LockedGpu(DryRunGpu):
    """A simulated GPU whose call to set a clock takes as long as a real one, and holds a lock of
    the whole node.
    """

    def __init__(self, text: str, lock: str) -> None:
        super().__init__(open_gpu(text))
        self.text = text
        self._lock = os.open(lock, os.O_RDWR)
        self._random = random.Random(text)

    def set_clock_mhz(self, clock_mhz: int) -> None:
        """Take the lock, and so long."""
        share = self._random.random()
        part = bisect(_SHARES, share)
        below, above = _SHARES[part - 1], _SHARES[part]
        call_s = _CALL_S[part - 1] + (_CALL_S[part] - _CALL_S[part - 1]) * (share - below) / (
            above - below
        )
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            time.sleep(call_s)
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def reset_clocks(self) -> None:
        """At the beginning and the end; nothing is measured then."""

    def close(self) -> None:
        """Close the GPU and the lock's file."""
        os.close(self._lock)
        super().close()


def serve(options: argparse.Namespace) -> None:
    """Run the controller of the package on these GPUs."""
    controller_rank.open_gpu = lambda text: LockedGpu(text, options.lock)  # type: ignore[assignment]
    handshakes = Handshakes()
    print(handshakes.address, flush=True)
    Controller(handshakes, options.ranks, float("inf")).run()


@contextmanager
def by_controller(options: argparse.Namespace, log: Log) -> Iterator[Callable[[int], None]]:
    """Request by writing to shared memory."""
    attach_request = AttachRequest(options.rank, options.gpu, "clock", None)
    with Connection(options.address, attach_request) as connection:
        connection.attach(60.0)

        def note() -> None:
            for each in connection.messages():
                if isinstance(each, ControlFailure):
                    options.given_up = True
                elif isinstance(each, ControlChange):
                    log.append((each.position or 0, each.ended_ns))

        def ask(number: int) -> None:
            connection.request[0] = clock_request(number, CLOCKS_MHZ[number % len(CLOCKS_MHZ)])
            note()

        yield ask
        time.sleep(0.1)  # several turns of the controller
        note()
        last = options.count - 1
        # Until the clock is the one requested last.
        while not options.given_up and (not log or (log[-1][0] - last) % len(CLOCKS_MHZ)):
            time.sleep(0.01)
            note()


def _set_all(gpu: LockedGpu, asked: Any, log: Log) -> None:
    while (number := asked.get()) is not None:
        gpu.set_clock_mhz(CLOCKS_MHZ[number % len(CLOCKS_MHZ)])
        log.append((number, time.monotonic_ns()))


@contextmanager
def by_thread(options: argparse.Namespace, log: Log) -> Iterator[Callable[[int], None]]:
    """Request through a queue that a thread of this process reads."""
    asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    thread = threading.Thread(
        target=_set_all, args=(LockedGpu(options.gpu, options.lock), asked, log)
    )
    thread.start()
    yield asked.put
    asked.put(None)
    thread.join()


def _set_all_and_tell(gpu: str, lock: str, asked: Any, told: Any) -> None:
    log: Log = []
    opened_gpu = LockedGpu(gpu, lock)
    told.put(None)
    _set_all(opened_gpu, asked, log)
    told.put(log)


@contextmanager
def by_queue(options: argparse.Namespace, log: Log) -> Iterator[Callable[[int], None]]:
    """Request through a queue that another process reads."""
    context = multiprocessing.get_context("spawn")
    asked, told = context.Queue(), context.Queue()
    process = context.Process(
        target=_set_all_and_tell, args=(options.gpu, options.lock, asked, told)
    )
    process.start()
    told.get()
    yield asked.put
    asked.put(None)
    log.extend(told.get())
    process.join()


WAYS = {"controller": by_controller, "thread": by_thread, "queue": by_queue}


def ask_all(options: argparse.Namespace) -> None:
    """Run one rank: request clocks at a steady rate, be busy in Python after each, and print the
    result.
    """
    log: Log = []
    times_ns = []
    with WAYS[options.way](options, log) as ask:
        print("ready", flush=True)
        start_ns = int(sys.stdin.readline())
        for number in range(options.count):
            due_ns = start_ns + round(
                1e9 * options.period_s * (number + options.rank / options.ranks)
            )
            time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
            times_ns.append(time.monotonic_ns())
            ask(number)
            while time.monotonic_ns() < times_ns[-1] + 1e9 * options.busy_s:
                pass
    print(json.dumps({"asked": times_ns, "set": log, "given_up": options.given_up}))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=["serve", *WAYS])
    parser.add_argument("--lock", required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--gpu")
    parser.add_argument("--address")
    parser.add_argument("--count", type=int)
    parser.add_argument("--period-s", type=float)
    parser.add_argument("--busy-s", type=float)
    options = parser.parse_args()
    options.given_up = False  # by the controller, because most requests are overtaken
    (serve if options.way == "serve" else ask_all)(options)


if __name__ == "__main__":
    main()
