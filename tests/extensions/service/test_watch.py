"""A thread of the service that has ended or is stuck is what `/readyz` says."""

from __future__ import annotations

import asyncio
import ctypes
import queue
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from service_stand_in import opened
from services import Clock, frontier_file, job, service_at
from waiting import LONG_S

from perseus_planner.extensions.service.access import Access, Limits
from perseus_planner.extensions.service.draft import Draft
from perseus_planner.extensions.service.models import StorageError
from perseus_planner.extensions.service.service import Service
from perseus_planner.extensions.service.store import Storage
from perseus_planner.extensions.service.watch import STUCK_S, Watchdog
from perseus_planner.extensions.service.writer import Writer

pytest.importorskip("httpx")


def test_what_one_thread_does_for_too_long_is_named():
    clock = Clock()
    watchdog = Watchdog(clock)
    watchdog.watch()
    assert watchdog.problem is None
    with watchdog.working():
        clock.now_s += STUCK_S
        assert watchdog.problem is None
        clock.now_s += 1.0
        assert watchdog.problem == "its thread MainThread has been at one thing for 16 s"
    assert watchdog.problem is None


def leave(_: Draft) -> None:
    """End the thread that writes, as a command."""
    raise SystemExit


def end(service: Service, name: str) -> None:
    """End a thread as an error that nothing catches does."""
    if name == "planner-writer":
        service._writer.submit(leave)
        return
    for thread in threading.enumerate():
        if thread.name.startswith(name):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
            )


@pytest.mark.parametrize("name", ["planner-clock", "planner-writer", "planner-replanning"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_service_whose_thread_has_ended_is_not_ready(tmp_path: Path, name: str):
    async def conversation(service: Service) -> None:
        async with opened(service, Access(), Limits()) as client:
            service._replanner.request("gpt")  # so that its thread is there
            assert (await client.get("/readyz")).status_code == 200

            live = client._transport.app.state.service
            until_s = time.monotonic() + LONG_S
            while service.problem is None and live.problem is None:
                assert time.monotonic() < until_s, "no thread has ended"
                # Again, as what a pool runs may take it for an error of its own.
                end(service, name)
                live._clock.wake()
                service._replanner.request("gpt")
                await asyncio.sleep(0.01)
            answer = await client.get("/readyz")
            assert answer.status_code == 503
            assert f"its thread {name}" in answer.json()["detail"]
            assert (await client.get("/livez")).status_code == 200

    service = service_at(tmp_path / "service.sqlite", Clock())
    with service as running:
        running.register(job(), frontier_file())
        asyncio.run(conversation(running))


class SlowWatchdog(Watchdog):
    """It begins to watch a thread that has ended meanwhile."""

    def watch(self, thread: threading.Thread | None = None) -> None:
        assert thread is not None
        thread.join(LONG_S)
        super().watch(thread)


def test_a_writer_whose_thread_ends_as_it_begins_takes_nothing(tmp_path: Path):
    """What it took was never answered."""
    watchdog = SlowWatchdog()
    with Storage(tmp_path / "service.sqlite") as storage:
        writer = Writer(
            storage, storage.load(), lambda state: state, lambda _: None, Clock(), watchdog
        )
        writer._commands.put(None)
        with writer:
            refused = writer.submit(lambda _: None)
            assert refused.done()
            with pytest.raises(StorageError, match="the thread that writes has ended"):
                refused.result()
            assert watchdog.problem is not None


class EndingQueue(queue.SimpleQueue[Any]):
    """A queue whose reader ends in the moment after a command has left the queue."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        super().get(block, timeout)
        raise SystemExit


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_waited_for_a_writer_that_ends_is_refused(tmp_path: Path):
    """Nobody waits for ever for a thread that is gone, which would keep the service from ending."""
    with service_at(tmp_path / "service.sqlite", Clock()) as service:
        writer = service._writer

        def have_it_end(_: Draft) -> None:
            has_begun.set()
            assert others_wait.wait(LONG_S)
            writer._commands = commands

        commands = EndingQueue()
        has_begun = threading.Event()
        others_wait = threading.Event()
        first = writer.submit(have_it_end)
        assert has_begun.wait(LONG_S)
        futures = [writer.submit(lambda _: None) for _ in range(400)]
        for given in [writer._commands.get() for _ in futures]:
            commands.put(given)
        others_wait.set()
        first.result(LONG_S)
        for future in futures:
            with pytest.raises(StorageError, match="the thread that writes has ended"):
                future.result(LONG_S)
        with pytest.raises(StorageError, match="the thread that writes has ended"):
            writer.submit(lambda _: None).result(LONG_S)
