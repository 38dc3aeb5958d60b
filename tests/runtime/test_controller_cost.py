"""The controller looks at requests as often as they change, and at descriptors of any number."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import controller_ranks
import pytest
from controller_ranks import LONG_S
from virtual_time import VirtualTime

from perseus_planner.runtime.controller import rank, server
from perseus_planner.runtime.controller.client import Connection
from perseus_planner.runtime.controller.protocol import AttachRequest, Handshakes
from perseus_planner.runtime.controller.server import Controller
from perseus_planner.runtime.marks import clock_request

SIMULATED = "simulated:a100-sxm"


class Pauses(VirtualTime):
    """Stands for the modules `time` and `select` of a controller: time passes in its pauses
    alone.
    """

    EPOLLIN = select.EPOLLIN

    def __init__(self) -> None:
        super().__init__(look_s=0.0)

    @property
    def now_ns(self) -> int:
        return round(1e9 * self.now_s)

    def monotonic_ns(self) -> int:
        return self.now_ns

    def epoll(self) -> SimpleNamespace:
        poller = select.epoll()

        def poll(timeout_s: float, most: int) -> list[tuple[int, int]]:
            ready = poller.poll(0, most)
            self.sleep(0.0 if ready else timeout_s)
            return ready

        return SimpleNamespace(register=poller.register, poll=poll)


@contextmanager
def attached(
    pauses: Pauses, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Controller, Connection]]:
    """Yield a controller, which the test turns, and the connection of its one rank; then end it."""
    for module in ("time", "select"):
        monkeypatch.setattr(server, module, pauses)
    # A pause of this process in a call to the GPU is none of the controller's.
    monkeypatch.setattr(rank, "time", pauses)
    handshakes = Handshakes()
    controller = Controller(handshakes, 1, 1e4)
    request = AttachRequest(0, SIMULATED, "clock", None)
    with closing(Connection(handshakes.address, request)) as connection:
        while not controller._attached:
            controller._turn()
        connection.attach(0.0)
        yield controller, connection
    controller.run()


@pytest.mark.parametrize(("computation_ms", "turns"), [(2, 10), (20, 10), (200, 100)])
def test_the_controller_takes_at_most_10_turns_in_a_computation_or_one_in_2_ms(
    computation_ms: int, turns: int, monkeypatch: pytest.MonkeyPatch
):
    pauses = Pauses()
    with attached(pauses, monkeypatch) as (controller, connection):
        (rank,) = controller._attached
        taken = []
        for place in range(70):
            asked_ns = pauses.now_ns
            connection.request[0] = clock_request(place % 8, 1200 + 15 * (place % 8))
            taken.append(0)
            while pauses.now_ns < asked_ns + 1_000_000 * computation_ms:
                controller._turn()
                taken[-1] += 1
            assert 0 <= rank.changed_ns - asked_ns <= 2_000_000
    # Once it knows how long they take; a turn that sets or reads a GPU is followed by one at once.
    assert max(taken[-4:]) <= turns + 3


def test_computations_of_one_clock_are_looked_at_every_few_milliseconds(
    monkeypatch: pytest.MonkeyPatch,
):
    """Also if clocks changed before: what a rank no longer wants is forgotten after a second."""
    pauses = Pauses()
    with attached(pauses, monkeypatch) as (controller, connection):
        taken = []
        for place in range(1600):
            asked_ns = pauses.now_ns
            changes_for = 800
            value = 1200 + 15 * (place % 8) if place < changes_for else 1200
            connection.request[0] = clock_request(place % 8, value)
            taken.append(0)
            while pauses.now_ns < asked_ns + 2_000_000:
                controller._turn()
                taken[-1] += 1
        assert min(taken[changes_for - 100 : changes_for]) >= 10
        turns = sum(taken[-100:])
        assert turns <= 125, "one in each, which lasts longer, and another one after each sample"


def test_a_change_that_was_to_come_is_not_made_once_all_gpus_are_reset(
    monkeypatch: pytest.MonkeyPatch,
):
    pauses = Pauses()
    with attached(pauses, monkeypatch) as (controller, connection):
        (rank,) = controller._attached
        connection.request[0] = clock_request(0, 1200)
        controller._look_at_requests(pauses.now_ns)
        made = []
        monkeypatch.setattr(rank, "make", made.append)
        # As where the launcher is found dead while a change is due.
        monkeypatch.setattr(controller, "_serve", lambda *_: controller._end("the launcher ended"))
        pauses.sleep(1.0)
        controller._turn()
        assert controller._is_over
        assert made == []
        assert controller._scheduler.take(pauses.now_ns) is not None, "there was one to make"


def with_many_descriptors(script: str) -> None:
    """Run a script in a process of its own, in which all numbers up to 1,100 are taken.

    In this process, what an earlier test left to other threads may free a lower number meanwhile.
    """
    opened = """
import os, resource
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, most))
files = [os.dup(2) for _ in range(1100)]
"""
    ended = subprocess.run(
        [sys.executable, "-c", opened + textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": str(Path(controller_ranks.__file__).parent)},
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert not ended.returncode, ended.stderr


def test_a_process_is_watched_by_a_descriptor_of_any_number():
    with_many_descriptors(
        """
        from perseus_planner.base.processes import WatchedProcess
        child = os.fork()
        if not child:
            os._exit(0)
        watched = WatchedProcess(child)
        assert watched.descriptor is None or watched.descriptor > 1024, watched.descriptor
        os.waitpid(child, 0)
        assert watched.has_ended()
        watched.close()
        """
    )


def test_ranks_are_served_over_descriptors_of_any_number():
    with_many_descriptors(
        f"""
        from controller_ranks import LONG_S, served
        from perseus_planner.runtime.marks import clock_request
        with served({SIMULATED!r}) as connection:
            assert connection.fileno() > 1024, connection.fileno()
            connection.request[0] = clock_request(0, 1200)
            assert connection.detach(LONG_S) is None
        """
    )
