"""After a failure a GPU is reset, and set again after a pause that grows with every failure."""

from __future__ import annotations

from pathlib import Path

import pytest
from controller_ranks import awaited, locked, served, set_clock
from fake_nvml import StandIn

from perseus_planner.base.loops import LONGEST_PAUSE_S, Backoff
from perseus_planner.runtime.controller.protocol import (
    ControlFailure,
    ControlResumed,
)
from perseus_planner.runtime.marks import NO_REQUEST, clock_request


@pytest.fixture
def short_pauses(nvml: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state folder of its own, the NVML stand-in, and short pauses."""
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(Backoff.__init__, "__defaults__", (0.05, LONGEST_PAUSE_S, None))


def test_after_an_error_of_the_driver_clocks_are_set_again(nvml: StandIn, short_pauses: None):
    with served("nvml:0") as connection:
        set_clock(connection, 1200)
        nvml.fail("nvmlDeviceSetGpuLockedClocks", 999, gpu=0)
        connection.request[0] = clock_request(1, 900)
        awaited(connection, ControlFailure)
        assert locked(nvml)[0] is None
        nvml.heal()
        awaited(connection, ControlResumed)
        set_clock(connection, 1005)
        assert locked(nvml)[0] == 1005


def test_after_a_reload_of_the_driver_nvml_is_initialised_anew(nvml: StandIn, short_pauses: None):
    with served("nvml:0") as connection:
        set_clock(connection, 1200)
        nvml.set("reloads", 1)
        set_clock(connection, 900, 1)
        assert locked(nvml)[0] == 900


def test_a_gpu_that_cannot_be_reset_is_not_set_until_it_can(nvml: StandIn, short_pauses: None):
    with served("nvml:0") as connection:
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
    with served("nvml:0", max_changes_per_s=50.0) as connection:
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
