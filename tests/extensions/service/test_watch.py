"""A thread of the service that has ended or is stuck is what `/readyz` says."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from pathlib import Path

import pytest
from service_stand_in import opened
from services import Clock, frontier_file, job, service_at

from perseus_planner.extensions.service.access import Access, Limits
from perseus_planner.extensions.service.service import Service
from perseus_planner.extensions.service.watch import STUCK_S, Watchdog

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


def end(name: str) -> None:
    """End a thread as an error that nothing catches does."""
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

            def ended() -> bool:
                if name == "planner-writer":  # it waits for a command, and ends when it gets one
                    service.clear("gpt", "absent")
                return service.problem is not None or live.problem is not None

            live = client._transport.app.state.service
            for _ in range(500):
                if ended():
                    break
                end(name)  # again, as what a pool runs may take it for an error of its own
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
