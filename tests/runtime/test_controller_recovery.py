"""After a failure a GPU is reset, and set again after a pause that grows with every failure."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from controller_ranks import LONG_S, awaited, locked, set_clock
from fake_nvml import StandIn

from perseus_planner.runtime.controller import backoff
from perseus_planner.runtime.controller.backoff import FIRST_PAUSE_S, LONGEST_PAUSE_S, Backoff
from perseus_planner.runtime.controller.client import Connection
from perseus_planner.runtime.controller.handshake import Handshakes
from perseus_planner.runtime.controller.protocol import (
    AttachRequest,
    ControlFailure,
    ControlResumed,
)
from perseus_planner.runtime.controller.server import Controller
from perseus_planner.runtime.marks import NO_REQUEST, clock_request


@pytest.fixture
def short_pauses(nvml: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state folder of its own, the NVML stand-in, and short pauses."""
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(backoff, "FIRST_PAUSE_S", 0.05)


@contextmanager
def served(max_changes_per_s: float = 1e4) -> Iterator[Connection]:
    """Attach a rank to a controller on a thread of this process."""
    handshakes = Handshakes()
    thread = threading.Thread(target=Controller(handshakes, 1, max_changes_per_s).run)
    thread.start()
    with Connection(handshakes.address, AttachRequest(0, "nvml:0", "clock", None)) as connection:
        connection.attach(LONG_S)
        yield connection
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_pauses_double_up_to_ten_minutes_and_begin_anew_after_as_long_without_a_failure():
    pauses = Backoff()
    assert pauses.is_due(0.0)
    now_s, expected_s = 100.0, [30.0, 60.0, 120.0, 240.0, 480.0, 600.0, 600.0]
    for pause_s in expected_s:
        pauses.fail(now_s)
        assert not pauses.is_due(now_s + pause_s - 1e-6)
        assert pauses.is_due(now_s + pause_s)
        now_s += pause_s + 1.0
    pauses.fail(now_s + LONGEST_PAUSE_S)
    assert pauses.is_due(now_s + LONGEST_PAUSE_S + FIRST_PAUSE_S)


def test_after_an_error_of_the_driver_clocks_are_set_again(nvml: StandIn, short_pauses: None):
    with served() as connection:
        set_clock(connection, 1200)
        nvml.fail("nvmlDeviceSetGpuLockedClocks", 999, gpu=0)
        connection.request[0] = clock_request(1, 900)
        awaited(connection, ControlFailure)
        assert locked(nvml)[0] is None
        nvml.heal()
        awaited(connection, ControlResumed)
        set_clock(connection, 1005)
        assert locked(nvml)[0] == 1005


def test_a_gpu_that_cannot_be_reset_is_not_set_until_it_can(nvml: StandIn, short_pauses: None):
    with served() as connection:
        set_clock(connection, 1200)
        nvml.fail("nvmlDeviceSetGpuLockedClocks", 999, gpu=0)
        nvml.fail("nvmlDeviceResetGpuLockedClocks", 999, gpu=0)
        connection.request[0] = clock_request(1, 900)
        assert "could not be reset" in awaited(connection, ControlFailure).text
        resets = nvml.calls("nvmlDeviceResetGpuLockedClocks")
        while nvml.calls("nvmlDeviceResetGpuLockedClocks") < resets + 2:
            assert connection.messages() == []
        nvml.heal()
        awaited(connection, ControlResumed)
        set_clock(connection, 1005)


def test_after_a_spell_of_too_many_changes_a_gpu_is_set_again(nvml: StandIn, short_pauses: None):
    with served(max_changes_per_s=50.0) as connection:
        failed: list[ControlFailure] = []
        while not failed:
            for request in (clock_request(0, 900), NO_REQUEST):  # as in iterations that deviate
                connection.request[0] = request
                failed += [
                    message
                    for message in connection.messages()
                    if isinstance(message, ControlFailure)
                ]
        awaited(connection, ControlResumed)
        for each in range(8):
            set_clock(connection, 1200 + 15 * each)
        assert connection.messages() == []
