"""When ranks, launcher or controller end for any reason, the controller and its guardian leave
no clock set.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest
from controller_ranks import (
    RANK_OF_ITS_OWN,
    attached,
    awaited,
    joined,
    locked,
    process_of,
    serving,
    set_clock,
)
from fake_nvml import StandIn
from gpu_owners import GUARDIAN, await_end, files, kill, owner, planner_processes
from waiting import LONG_S, eventually, soon

from perseus_planner.base.errors import ControllerLost, GpuError
from perseus_planner.runtime.controller import server as controller
from perseus_planner.runtime.controller.client import Connection, start_controller
from perseus_planner.runtime.controller.protocol import AttachRequest, ControlFailure, Handshakes
from perseus_planner.runtime.marks import clock_request

SIMULATED = "simulated:a100-sxm"
WAITS = "import sys; print('here', flush=True); sys.stdin.read()"


@pytest.fixture
def state(nvml: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv(
        "PYTHONPATH", str(Path(__file__).parents[1] / "support")
    )  # for ranks in other processes
    return tmp_path / "state"


def test_a_killed_ranks_gpu_is_reset_in_time_and_no_other(nvml: StandIn, state: Path):
    address = start_controller(2, 100.0, LONG_S)
    with (
        owner(RANK_OF_ITS_OWN, [address, "0", "nvml:0", "1200", "0"]) as rank,
        Connection(address, AttachRequest(1, "nvml:1", "clock", None)) as second,
    ):
        second.attach(LONG_S)
        rank.stdout.readline()
        set_clock(second, 900)
        assert locked(nvml) == [1200, 900]
        kill(rank.pid)
        soon(lambda: nvml.locked_mhz(0) is None)
        assert locked(nvml) == [None, 900]
        set_clock(second, 1005)


def test_a_forked_child_that_has_the_socket_does_not_hide_the_ranks_death(
    nvml: StandIn, state: Path
):
    address = start_controller(1, 100.0, LONG_S)
    with owner(RANK_OF_ITS_OWN, [address, "0", "nvml:0", "1200", "1"]) as rank:
        child = int(rank.stdout.readline().split()[1])
        assert locked(nvml) == [1200, None]
        kill(rank.pid)
        soon(lambda: nvml.locked_mhz(0) is None)
        assert psutil.pid_exists(child)
        kill(child)
    eventually(lambda: files(state) == [])


def test_a_stopped_controller_whose_ranks_have_all_ended_is_ended_and_all_is_reset(
    nvml: StandIn, state: Path
):
    address = start_controller(2, 100.0, LONG_S)
    with (
        owner(RANK_OF_ITS_OWN, [address, "0", "nvml:0", "1200", "0"]) as first,
        owner(RANK_OF_ITS_OWN, [address, "1", "nvml:1", "900", "0"]) as second,
    ):
        for rank in (first, second):
            rank.stdout.readline()
        (controller,) = planner_processes(str(state), "perseus_planner.runtime.controller")
        controller.suspend()
        kill(first.pid)
        assert locked(nvml) == [1200, 900]  # one is left, which may wait for the controller
        kill(second.pid)
        eventually(lambda: locked(nvml) == [None, None])
        await_end([controller])
    eventually(lambda: files(state) == [])


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_killed_controllers_guardian_resets_all_in_time_or_else_a_rank(
    nvml: StandIn, state: Path, is_guarded: bool
):
    with attached(["nvml:0", "nvml:1"]) as (first, second):
        set_clock(first, 1200)
        set_clock(second, 900)
        guardians = [] if is_guarded else planner_processes(str(state), GUARDIAN)
        kill(*(guardian.pid for guardian in guardians), process_of(first).pid)
        soon(lambda: locked(nvml) == [None, None])
        eventually(lambda: files(state) == [])
        eventually(lambda: _is_lost(first))
        who = "its GPUs are reset|rank 0 has reset nvml:.*"  # it may be the guardian or rank 1
        said = first.detach(LONG_S)
        assert re.fullmatch(f"the clock controller of this node has ended, and ({who})", said)
        first.request[0] = clock_request(0, 900)  # goes on to be memory


def _is_lost(connection: Connection) -> bool:
    try:
        connection.messages()
    except ControllerLost:
        return True
    return False


def test_a_controller_that_hangs_grows_old_and_can_be_killed(nvml: StandIn, state: Path):
    with attached(["nvml:0"]) as (connection,):
        set_clock(connection, 1200)
        process = process_of(connection)
        process.suspend()
        eventually(lambda: connection.age_s() > 0.3)
        assert (
            connection.detach(0.05) is not None
        )  # it does not answer, and this does not wait for it
        assert locked(nvml) == [1200, None]
        process.kill()
        soon(lambda: locked(nvml) == [None, None])


def test_a_rank_kills_a_controller_that_hangs(nvml: StandIn, state: Path):
    with attached(["nvml:0"]) as (connection,):
        set_clock(connection, 1200)
        eventually(lambda: connection.age_s() < 5.0)
        process_of(connection).suspend()
        connection.kill()
        soon(lambda: locked(nvml) == [None, None])
        eventually(lambda: _is_lost(connection))
        connection.kill()  # harmless


def test_the_end_of_the_launcher_resets_and_informs_all_and_ends_the_controller(
    nvml: StandIn, state: Path
):
    with (
        owner(WAITS, []) as launcher,
        attached(["nvml:0", "nvml:1"], launcher=launcher.pid) as (first, second),
    ):
        process = process_of(first)
        set_clock(first, 1200)
        set_clock(second, 900)
        kill(launcher.pid)
        for connection in (first, second):
            text = f"process {launcher.pid}, which launched this job, has ended: all GPUs are reset"
            assert awaited(connection, ControlFailure).text == text
        assert locked(nvml) == [None, None]
        assert files(state) == []
        await_end([process])


def test_a_launcher_that_has_ended_already_is_seen():
    with owner(WAITS, []) as launcher:
        kill(launcher.pid)
        launcher.wait()
        with (
            pytest.raises(GpuError, match="which launched this job, has ended"),
            attached([SIMULATED], launcher=launcher.pid),
        ):
            pytest.fail("not to be reached")


def test_ranks_that_come_together_are_all_told_that_a_launcher_has_ended():
    """Those behind the one whose launcher had ended were taken in and never told."""
    handshakes = Handshakes()
    with ExitStack() as stack:
        launcher = stack.enter_context(owner(WAITS, []))
        kill(launcher.pid)
        launcher.wait()
        requests = [
            AttachRequest(rank, SIMULATED, "clock", launcher.pid if rank == 0 else None)
            for rank in range(2)
        ]
        ranks = [
            stack.enter_context(closing(Connection(handshakes.address, request)))
            for request in requests
        ]
        controller.Controller(handshakes, 2, 100.0).run()
        text = f"process {launcher.pid}, which launched this job, has ended: all GPUs are reset"
        assert [[message.text for message in rank.messages()] for rank in ranks] == [[text], [text]]


def test_a_controller_that_a_rank_has_left_is_watched_no_more_once_it_has_another():
    first = Handshakes()
    second = Handshakes()
    with closing(first), closing(second):
        request = AttachRequest(0, SIMULATED, "clock", None)
        with closing(Connection(first.address, request)) as connection:
            left = connection.recovery
            connection.disconnect()
            connection.connect(second.address)
            assert left.result(LONG_S) == "its GPUs are reset"
            assert not connection.recovery.done()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_polite_signal_does_not_end_it_while_ranks_live(name: str):
    with attached([SIMULATED]) as (connection,):
        process = process_of(connection)
        process.send_signal(signal.Signals[name])
        set_clock(connection, 1200)
        assert os.getsid(process.pid) != os.getsid(0)
        connection.detach(LONG_S)
        await_end([process])


def test_starting_it_leaves_no_child_behind():
    before = {child.pid for child in psutil.Process().children()}
    with attached([SIMULATED]) as (connection,):
        assert {child.pid for child in psutil.Process().children()} <= before
        process = process_of(connection)
        assert os.readlink(f"/proc/{process.pid}/fd/0") == os.devnull
        assert process.cwd() == "/"


def test_it_is_light(nvml: StandIn, state: Path):
    with attached(["nvml:0"]) as (connection,):
        mapped = Path(f"/proc/{process_of(connection).pid}/maps").read_text()
        assert not any(heavy in mapped for heavy in ("numpy", "torch"))


def test_a_child_that_is_forked_inside_the_block_leaves_nothing():
    with attached([SIMULATED]) as (connection,):
        set_clock(connection, 1200)
        child = os.fork()
        if child == 0:
            connection.__exit__(None, None, None)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        set_clock(connection, 900, place=1)


def test_an_error_inside_the_block_resets_the_gpu_before_it_goes_on(nvml: StandIn, state: Path):
    def train(connection: Connection) -> None:
        set_clock(connection, 1200)
        raise ZeroDivisionError

    with attached(["nvml:0", "nvml:1"]) as (connection, _):
        with pytest.raises(ZeroDivisionError), connection:
            train(connection)
        assert locked(nvml) == [None, None]
    assert locked(nvml) == [None, None]


def test_a_controller_without_ranks_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(controller, "ALONE_NS", 0)
    controller.Controller(Handshakes(), 1, 1.0).run()


def test_a_late_rank_is_attached_separately_and_missing_ranks_are_not_waited_for(
    nvml: StandIn, state: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(controller, "LEASE_WAIT_NS", 0)
    with serving(3) as address, joined(address, 0, "nvml:0") as first:
        set_clock(first, 1200)
        with joined(address, 1, "nvml:1") as late:
            set_clock(late, 900)
            assert locked(nvml) == [1200, 900]
        assert locked(nvml) == [1200, None]
        assert len(files(state)) == 1
    assert files(state) == []


def test_without_pidfd_processes_are_polled(
    nvml: StandIn, state: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(pid: int) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with (
        serving() as address,
        owner(RANK_OF_ITS_OWN, [address, "0", "nvml:0", "1200", "1"]) as rank,
    ):
        child = int(rank.stdout.readline().split()[1])
        kill(rank.pid)
        soon(lambda: nvml.locked_mhz(0) is None)
        kill(child)


def test_a_controller_that_fails_resets_and_informs_all(
    monkeypatch: pytest.MonkeyPatch, nvml: StandIn, state: Path
):
    handshakes = Handshakes()
    running = controller.Controller(handshakes, 1, 100.0)
    raised: list[BaseException] = []

    def run() -> None:
        try:
            running.run()
        except ZeroDivisionError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    with joined(handshakes.address, 0, "nvml:0") as connection:
        set_clock(connection, 1200)
        monkeypatch.setattr(running, "_write_sign_of_life", lambda: 1 / 0)
        text = "the clock controller of this node has failed: ZeroDivisionError('division by zero')"
        assert awaited(connection, ControlFailure).text == text
        thread.join(LONG_S)
        assert len(raised) == 1
        assert locked(nvml) == [None, None]
        assert files(state) == []
