"""The controller looks at requests as often as they change, and at descriptors of any number."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator

import pytest
from controller_ranks import LONG_S, attached, process_of, set_clock

from perseus_planner.processes import WatchedProcess
from perseus_planner.runtime.controller.client import Connection
from perseus_planner.runtime.controller.handshake import Handshakes
from perseus_planner.runtime.controller.protocol import AttachRequest
from perseus_planner.runtime.controller.server import Controller
from perseus_planner.runtime.marks import clock_request

SIMULATED = "simulated:a100-sxm"


def test_while_computations_take_20_ms_the_controller_needs_little_of_a_core():
    with attached([SIMULATED]) as (connection,):
        process = process_of(connection)
        set_clock(connection, 1200)
        before, begin_s = process.cpu_times(), time.monotonic()
        for place in range(100):
            connection.request[0] = clock_request(place % 8, 1200)
            time.sleep(0.02)  # the computation
        after, end_s = process.cpu_times(), time.monotonic()
        spent_s = after.user + after.system - before.user - before.system
        assert spent_s < 0.06 * (end_s - begin_s), spent_s


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Open so many files that all that follow have numbers above 1,024."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 2048), before[1]))
    files = [os.dup(2) for _ in range(1100)]
    yield
    for file in files:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_process_is_watched_by_a_descriptor_of_any_number(many_descriptors: None):
    child = os.fork()
    if not child:
        os._exit(0)
    watched = WatchedProcess(child)
    assert watched.descriptor is None or watched.descriptor > 1024
    os.waitpid(child, 0)
    assert watched.has_ended()
    watched.close()


def test_ranks_are_served_over_descriptors_of_any_number(
    many_descriptors: None, monkeypatch: pytest.MonkeyPatch
):
    handshakes = Handshakes()
    thread = threading.Thread(target=Controller(handshakes, 1, 1e4).run)
    thread.start()
    with Connection(handshakes.address, AttachRequest(0, SIMULATED, "clock", None)) as connection:
        connection.attach(LONG_S)
        assert connection.fileno() > 1024
        connection.request[0] = clock_request(0, 1200)
        assert connection.detach(LONG_S) is None
    thread.join(LONG_S)
    assert not thread.is_alive()
