"""The clock controller, as ranks see it: the real process, on the stand-in NVML library and on simulated GPUs."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from controller_ranks import (
    LONG_S,
    RANK_OF_ITS_OWN,
    attached,
    awaited,
    eventually,
    has_ended,
    let_look,
    process_of,
    set_clock,
)
from fake_nvml import StandIn
from gpu_owners import WITHIN_S, await_end, files, kill, owner

from perseus_planner.errors import ControllerLost, GpuError, GpuHeld, GpuNotPermitted, GpuNotSupported
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.holding.journal import held
from perseus_planner.runtime.controller import process as controller
from perseus_planner.runtime.controller.arrivals import Arrivals
from perseus_planner.runtime.controller.client import Connection, started
from perseus_planner.runtime.controller.messages import Changed, Failed, Hello, Reading
from perseus_planner.runtime.controller.peer import KIND, Credentials, bound_address
from perseus_planner.runtime.marks import NOTHING, word

SIMULATED = "simulated:a100-sxm"
WAITS = "import sys; print('here', flush=True); sys.stdin.read()"


@pytest.fixture
def state(nvml: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # for ranks of their own
    return tmp_path / "state"


def locked(nvml: StandIn) -> list[int | None]:
    found = [nvml.locked_mhz(index) for index in range(2)]
    return [each[1] if each else None for each in found]


def clocks_set(nvml: StandIn, gpu: int) -> list[int]:
    """What each call that set the clock of a GPU set it to; 0 for resets."""
    return [each.high for each in nvml.settings() if each.gpu == gpu and "LockedClocks" in each.function]


def test_every_gpu_is_set_to_what_its_rank_asks_for_and_reset_when_it_leaves(nvml: StandIn, state: Path):
    nvml.set("latency_us_nvmlDeviceSetGpuLockedClocks", 3000)
    with attached(["nvml:0", "nvml:1"]) as (first, second):
        process = process_of(first)
        changed = set_clock(first, 1200)
        assert (changed.place, changed.before_mhz) == (0, 1980)
        assert changed.seen_ns <= changed.begun_ns <= changed.ended_ns - 3_000_000
        assert set_clock(second, 900, place=7).place == 7
        assert set_clock(first, 1005, place=1).before_mhz == 1200
        assert locked(nvml) == [1005, 900]
        assert len(files(state)) == 2
        first.word[0] = NOTHING
        assert awaited(first, Changed).value == 0
        assert locked(nvml) == [None, 900]
        set_clock(first, 1500)
        assert first.leave(LONG_S) is None
        assert locked(nvml) == [None, 900]
        assert second.leave(LONG_S) is None
        assert locked(nvml) == [None, None]
        assert files(state) == []
        eventually(lambda: has_ended(process))


def test_a_value_that_is_set_already_is_not_set_again(nvml: StandIn, state: Path):
    with attached(["nvml:0"]) as (connection,):
        before = len(clocks_set(nvml, 0))
        set_clock(connection, 1200, place=0)
        for place in (1, 2, 3, 0):
            connection.word[0] = word(place, 1200)
            let_look(connection)
        set_clock(connection, 900, place=1)
        assert clocks_set(nvml, 0)[before:] == [1200, 900]


def test_a_change_waits_for_the_dwell_and_the_latest_value_is_set_then(nvml: StandIn, state: Path):
    with attached(["nvml:0"], min_dwell_s=0.3) as (connection,):
        first = set_clock(connection, 1200)
        connection.word[0] = word(1, 1500)
        let_look(connection)
        connection.word[0] = word(2, 900)
        second = awaited(connection, Changed)
        assert second.value == 900
        assert second.begun_ns - first.begun_ns >= 250_000_000
        assert second.seen_ns < first.begun_ns + 250_000_000
        connection.dwell(0.0)
        third = set_clock(connection, 1500)
        assert third.begun_ns - second.begun_ns < 250_000_000
        assert 1500 not in clocks_set(nvml, 0)[:-1]


def test_the_rate_is_of_all_gpus_together(nvml: StandIn, state: Path):
    with attached(["nvml:0", "nvml:1"], max_changes_per_s=10.0) as (first, second):
        clocks = (1200, 900, 1500)
        changes = [set_clock(each, clock) for clock in clocks for each in (first, second)]
        begun_ns = sorted(change.begun_ns for change in changes)
        for i, earlier_ns in enumerate(begun_ns):
            for j, later_ns in enumerate(begun_ns[i:], i):
                assert later_ns - earlier_ns >= 100_000_000 * (j - i - 1) - 20_000_000  # a call begins a little later
        assert begun_ns[-1] - begun_ns[0] >= 380_000_000


def test_a_power_limit_is_set_and_put_back_to_what_it_was(nvml: StandIn, state: Path):
    with open_gpu("nvml:0") as gpu:
        gpu.set_power_limit_w(500.0)
    with attached(["nvml:0"], knob="power-limit") as (connection,):
        set_clock(connection, 300)
        assert nvml.limit_w(0) == 300.0
        connection.word[0] = NOTHING
        awaited(connection, Changed)
        assert nvml.limit_w(0) == 500.0
        set_clock(connection, 250)
        assert connection.leave(LONG_S) is None
        assert nvml.limit_w(0) == 500.0
        assert nvml.locked_mhz(0) is None


def test_readings_come_at_the_start_of_every_iteration_and_at_the_end(nvml: StandIn, state: Path):
    nvml.set("temperature_c", 61)
    nvml.fail("nvmlDeviceGetPowerUsage", 3)
    nvml.set("field_186_0 error", 3)
    with attached(["nvml:0"]) as (connection,):
        first = awaited(connection, Reading)
        set_clock(connection, 1200, place=0)
        set_clock(connection, 900, place=1)
        connection.word[0] = word(0, 1200)
        second = awaited(connection, Reading)
        connection.leave(LONG_S)
        (last,) = [message for message in connection.messages() if isinstance(message, Reading)]
    assert first.now_ns < second.now_ns < last.now_ns
    assert first.energy_j < second.energy_j < last.energy_j
    assert second.seen_ns <= second.now_ns
    assert (last.temperature_c, last.clock_mhz, last.overtaken, last.untold) == (61.0, 1200, 0, 0)


def test_what_a_gpu_does_not_say_is_none():
    faults = "&".join(f"fault=not-supported:{what}" for what in ("energy", "power", "temperature", "throttle"))
    with attached([f"{SIMULATED}?{faults}"]) as (connection,):
        reading = awaited(connection, Reading)
    assert (reading.energy_j, reading.power_w, reading.temperature_c, reading.throttled_s) == (None, None, None, {})
    assert reading.clock_mhz == 210


@pytest.mark.parametrize(("gpu", "knob"), [("dry-run:nvml:0", "clock"), ("nvml:0", "observed")])
def test_without_privilege_a_gpu_can_be_watched_and_nothing_is_set(nvml: StandIn, state: Path, gpu: str, knob):
    for function in ("SetGpuLockedClocks", "ResetGpuLockedClocks", "SetPowerManagementLimit"):
        nvml.fail(f"nvmlDevice{function}", 4)
    with attached([gpu], knob=knob) as (connection,):
        first = awaited(connection, Reading)
        for place in (0, 1, 0):
            connection.word[0] = word(place, 1500)
            let_look(connection)
        second = awaited(connection, Reading)
        assert second.energy_j > first.energy_j
        if knob == "clock":
            assert set_clock(connection, 1200, place=1).before_mhz == 1980
        assert connection.leave(LONG_S) is None
    assert nvml.settings() == []
    assert files(state) == []


def test_a_gpu_of_another_job_is_refused(nvml: StandIn, state: Path):
    with open_gpu("nvml:0") as gpu, held([gpu]):
        gpu.set_clock_mhz(1500)
        with pytest.raises(GpuHeld, match="has set its clocks since"), attached(["nvml:0"]):
            pytest.fail("not to be reached")
        assert nvml.locked_mhz(0) == (1500, 1500)


def test_a_second_controller_is_refused_what_the_first_one_has(nvml: StandIn, state: Path):
    with attached(["nvml:0"]) as (connection,):
        set_clock(connection, 1200)
        with pytest.raises(GpuHeld, match=r"perseus_planner\.runtime\.controller"), attached(["nvml:0"]):
            pytest.fail("not to be reached")
        assert nvml.locked_mhz(0) == (1200, 1200)
        set_clock(connection, 900)


def test_ranks_that_share_a_gpu_are_refused_in_terms_of_ranks(nvml: StandIn, state: Path):
    address = started(3, 100.0, LONG_S)
    with ExitStack() as stack:
        gpus = ("nvml:0", "nvml:1", "nvml:0")
        ranks = [
            stack.enter_context(Connection(address, Hello(rank, gpu, "clock", None, 0.0)))
            for rank, gpu in enumerate(gpus)
        ]
        for rank in (0, 2):
            with pytest.raises(GpuHeld, match=r"^ranks 0, 2 have one GPU, GPU-1.*name one of its own for each rank"):
                ranks[rank].attach(LONG_S)
        ranks[1].attach(LONG_S)
        set_clock(ranks[1], 1200)
        assert locked(nvml) == [None, 1200]


@pytest.mark.parametrize(
    ("gpu", "kind"),
    [
        (f"{SIMULATED}?fault=not-permitted", GpuNotPermitted),
        (f"{SIMULATED}?fault=not-supported:power-limit", GpuNotSupported),
        ("simulated:none", GpuError),
    ],
)
def test_a_gpu_that_cannot_be_had_is_refused_with_its_error(gpu: str, kind: type[GpuError]):
    with pytest.raises(GpuError) as caught, attached([gpu], knob="power-limit"):
        pytest.fail("not to be reached")
    assert type(caught.value) is kind


def test_a_gpu_that_may_not_be_set_is_refused(nvml: StandIn, state: Path):
    nvml.fail("nvmlDeviceResetGpuLockedClocks", 4)
    with pytest.raises(GpuNotPermitted, match="setting needs root"), attached(["nvml:0"]):
        pytest.fail("not to be reached")
    assert files(state) == []


def test_one_rank_whose_gpu_cannot_be_opened_does_not_keep_the_others_from_theirs(nvml: StandIn, state: Path):
    address = started(2, 100.0, LONG_S)
    with (
        Connection(address, Hello(0, "nvml:9", "clock", None, 0.0)) as first,
        Connection(address, Hello(1, "nvml:1", "clock", None, 0.0)) as second,
    ):
        second.attach(LONG_S)
        with pytest.raises(GpuError, match="nvml:9"):
            first.attach(LONG_S)
        set_clock(second, 1200)
        with pytest.raises(ControllerLost):
            first.messages()


def test_a_gpu_that_fails_is_told_once_and_the_others_go_on(nvml: StandIn, state: Path):
    with attached(["nvml:0", "nvml:1"]) as (first, second):
        set_clock(first, 1200)
        nvml.fail("nvmlDeviceSetGpuLockedClocks", 999, gpu=0)
        first.word[0] = word(1, 900)
        failed = awaited(first, Failed)
        assert "lock its SM clock at 900 MHz" in failed.text
        assert locked(nvml) == [None, None]
        nvml.heal()
        first.word[0] = word(2, 1500)
        set_clock(second, 1005)
        set_clock(second, 1200, place=1)
        assert locked(nvml) == [None, 1200]
        assert first.messages() == []
        assert first.leave(LONG_S) is None


def test_a_lost_gpu_says_so_and_that_it_could_not_be_reset():
    with attached([f"{SIMULATED}?fault=lost@40calls", SIMULATED]) as (first, second):
        for place in range(40):
            first.word[0] = word(place, 1200 + 15 * (place % 3))
            set_clock(second, 1200 + 15 * (place % 3), place)
        failed = awaited(first, Failed)
        assert failed.text.count("is lost") == 2
        assert "; and it could not be reset: " in failed.text
        assert "is lost" in first.leave(LONG_S)
        set_clock(second, 900)


def test_a_clock_that_the_gpu_does_not_have_is_a_failure():
    with attached([SIMULATED]) as (connection,):
        connection.word[0] = word(0, 1201)
        assert "the nearest supported clock is 1200 MHz" in awaited(connection, Failed).text


def test_a_plan_that_is_too_fast_for_its_node_is_given_up(nvml: StandIn, state: Path):
    with attached(["nvml:0", "nvml:1"], max_changes_per_s=2.0) as (first, second):
        set_clock(second, 1200)
        failed: list[Failed] = []
        place = 0
        while not failed:
            first.word[0] = word(place % 1000, 900 + 15 * (place % 2))
            place += 1
            failed = [message for message in first.messages() if isinstance(message, Failed)]
        assert failed[0].text == (
            "GPU nvml:0: more than half of the last 64 changes of its clock came when the one before had not been "
            "made yet; make the plan with fewer changes (--max-changes, --min-dwell), or allow more changes per second"
        )
        assert locked(nvml) == [None, 1200]
        assert first.leave(LONG_S) is None
        last = [message for message in first.messages() if isinstance(message, Reading)][-1]
        assert last.overtaken > 32


def test_a_killed_ranks_gpu_is_reset_in_time_and_no_other(nvml: StandIn, state: Path):
    address = started(2, 100.0, LONG_S)
    with (
        owner(RANK_OF_ITS_OWN, [address, "0", "nvml:0", "1200", "0"]) as rank,
        Connection(address, Hello(1, "nvml:1", "clock", None, 0.0)) as second,
    ):
        second.attach(LONG_S)
        rank.stdout.readline()
        set_clock(second, 900)
        assert locked(nvml) == [1200, 900]
        kill(rank.pid)
        eventually(lambda: nvml.locked_mhz(0) is None, WITHIN_S)
        assert locked(nvml) == [None, 900]
        set_clock(second, 1005)


def test_a_forked_child_that_has_the_socket_does_not_hide_the_ranks_death(nvml: StandIn, state: Path):
    address = started(1, 100.0, LONG_S)
    with owner(RANK_OF_ITS_OWN, [address, "0", "nvml:0", "1200", "1"]) as rank:
        child = int(rank.stdout.readline().split()[1])
        assert locked(nvml) == [1200, None]
        kill(rank.pid)
        eventually(lambda: nvml.locked_mhz(0) is None, WITHIN_S)
        assert psutil.pid_exists(child)
        kill(child)
    eventually(lambda: files(state) == [])


def test_a_killed_controllers_guardian_resets_all_in_time(nvml: StandIn, state: Path):
    with attached(["nvml:0", "nvml:1"]) as (first, second):
        set_clock(first, 1200)
        set_clock(second, 900)
        kill(process_of(first).pid)
        eventually(lambda: locked(nvml) == [None, None], WITHIN_S)
        eventually(lambda: files(state) == [])
        eventually(lambda: _is_lost(first))
        assert (
            first.leave(1.0) == "the clock controller of this node has ended; what it had set is reset by its guardian"
        )
        first.word[0] = word(0, 900)  # goes on to be memory


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
        assert connection.leave(0.05) is not None  # it does not answer, and this does not wait for it
        assert locked(nvml) == [1200, None]
        process.kill()
        eventually(lambda: locked(nvml) == [None, None], WITHIN_S)


def test_a_rank_kills_a_controller_that_hangs(nvml: StandIn, state: Path):
    with attached(["nvml:0"]) as (connection,):
        set_clock(connection, 1200)
        assert connection.age_s() < 5.0
        process_of(connection).suspend()
        connection.kill()
        eventually(lambda: locked(nvml) == [None, None], WITHIN_S)
        eventually(lambda: _is_lost(connection))
        connection.kill()  # harmless


def test_the_launchers_end_resets_all_tells_all_and_ends_the_controller(nvml: StandIn, state: Path):
    with owner(WAITS, []) as launcher, attached(["nvml:0", "nvml:1"], launcher=launcher.pid) as (first, second):
        process = process_of(first)
        set_clock(first, 1200)
        set_clock(second, 900)
        kill(launcher.pid)
        for connection in (first, second):
            text = f"process {launcher.pid}, which launched this job, has ended: all GPUs are reset"
            assert awaited(connection, Failed).text == text
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


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_polite_signal_does_not_end_it_while_ranks_live(name: str):
    with attached([SIMULATED]) as (connection,):
        process = process_of(connection)
        process.send_signal(signal.Signals[name])
        set_clock(connection, 1200)
        assert os.getsid(process.pid) != os.getsid(0)
        connection.leave(LONG_S)
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
        assert not any(heavy in mapped for heavy in ("numpy", "torch", "numba"))


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


GARBAGE = (
    b"\n",
    b"not json\n",
    b"[" * 60000,
    b'{"message":"Leave"}\n',
    b'{"message":"Hello","rank":0}\n',
    b'{"message":"Hello","rank":true,"gpu":"nvml:1","knob":"clock","launcher":null,"min_dwell_s":0}\n',
    b'{"message":"Hello","rank":5,"gpu":"nvml:1","knob":"clock","launcher":null,"min_dwell_s":0}\n',  # without its page
    b"\xff\xfe\n",
    b'{"message":"Left","problem":null}\n',
)


@pytest.fixture(scope="module")
def simulated_rank() -> Iterator[Connection]:
    with attached([SIMULATED], ranks=1) as (connection,):
        yield connection


def check_served(connection: Connection) -> None:
    set_clock(connection, 900)
    set_clock(connection, 1200)


@pytest.mark.parametrize("line", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_from_a_stranger_changes_nothing_for_others(simulated_rank: Connection, line: bytes):
    with _stranger(simulated_rank) as stranger:
        stranger.send(line)
        answer = stranger.recv(65536)
        assert answer.startswith(
            b'{"message":"Refused","error":"GpuError","text":"the clock controller does not understand'
        )
        assert stranger.recv(65536) == b""
    check_served(simulated_rank)


@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_page_that_could_vanish_under_the_controller_is_refused(simulated_rank: Connection, is_sealed: bool):
    hello = b'{"message":"Hello","rank":5,"gpu":"nvml:1","knob":"clock","launcher":null,"min_dwell_s":0}\n'
    descriptor = os.memfd_create("small", os.MFD_ALLOW_SEALING) if is_sealed else os.open("/dev/zero", os.O_RDWR)
    try:
        with _stranger(simulated_rank) as stranger:
            socket.send_fds(stranger, [hello], [descriptor])
            assert b"its page can" in stranger.recv(65536)
    finally:
        os.close(descriptor)
    check_served(simulated_rank)


def test_strangers_that_say_nothing_and_go_are_forgotten(simulated_rank: Connection):
    process = process_of(simulated_rank)
    before = process.num_fds()
    for _ in range(3):
        strangers = [_stranger(simulated_rank) for _ in range(40)]
        for stranger in strangers:
            stranger.close()
    eventually(lambda: process.num_fds() == before)
    check_served(simulated_rank)


def test_a_rank_too_many_is_refused(simulated_rank: Connection):
    connection = Connection(_address(simulated_rank), Hello(9, SIMULATED, "clock", None, 0.0))
    with connection, pytest.raises(GpuError, match="the 1 ranks of this node are here; rank 9 is one more"):
        connection.attach(LONG_S)
    check_served(simulated_rank)


def test_messages_that_a_rank_does_not_read_are_dropped_and_counted_and_its_failure_is_told_in_the_end():
    with attached([SIMULATED, SIMULATED], max_changes_per_s=1e6) as (idle, other):
        for place in range(600):
            idle.word[0] = word(place, 900 + 15 * (place % 2))
            set_clock(other, 900 + 15 * (place % 2), place)
        idle.word[0] = word(600, 1)
        set_clock(other, 1200)
        set_clock(other, 900)
        heard = idle.messages()
        while Failed not in (kinds := [type(message) for message in heard]):
            heard += idle.messages()
        assert 100 < kinds.count(Changed) < 600
        assert kinds.count(Failed) == 1
        assert idle.leave(LONG_S) is None
        last = [message for message in idle.messages() if isinstance(message, Reading)][-1]
        assert last.untold > 100


def _address(connection: Connection) -> str:
    return connection._peer._connection.getpeername()[1:].decode()


def _stranger(connection: Connection) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX, KIND)
    stranger.connect(bound_address(_address(connection)))
    return stranger


def test_only_the_same_user_is_trusted():
    assert Credentials(1, os.geteuid()).are_trusted()
    assert not Credentials(1, os.geteuid() + 1).are_trusted()


def test_a_stranger_of_another_user_is_sent_away_unheard(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Credentials, "are_trusted", lambda _: False)
    arrivals = Arrivals()
    with socket.socket(socket.AF_UNIX, KIND) as stranger:
        stranger.connect(bound_address(arrivals.address))
        assert arrivals.serve(set(arrivals.descriptors()), 0) == []
        assert stranger.recv(100) == b""
        with pytest.raises(ControllerLost, match="not of this one"):
            Connection(arrivals.address, Hello(0, SIMULATED, "clock", None, 0.0))
    arrivals.close()


def test_where_no_controller_is_a_rank_is_told():
    with pytest.raises(ControllerLost, match="cannot be reached at perseus-planner-none"):
        Connection("perseus-planner-none", Hello(0, SIMULATED, "clock", None, 0.0))


def test_an_answer_that_does_not_come_is_not_waited_for():
    address = started(2, 100.0, LONG_S)
    connection = Connection(address, Hello(0, SIMULATED, "clock", None, 0.0))
    with connection, pytest.raises(GpuError, match=r"did not answer within 0\.1 s"):
        connection.attach(0.1)


def test_a_controller_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(GpuError, match=r"could not be started: 0.0 changes per second: give 0\.001 or more"):
        started(1, 0.0, LONG_S)
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(GpuError, match="could not be started: it ended without a word"):
        started(1, 1.0, LONG_S)
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(GpuError, match=r"sys\.executable does not name the Python"):
        started(1, 1.0, LONG_S)


def test_a_controller_that_is_not_ready_in_time_is_given_up():
    with pytest.raises(GpuError, match=r"was not ready within 0 s"):
        started(1, 1.0, 0.0)


def test_nobody_comes_and_it_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(controller, "ALONE_NS", 0)
    controller.Controller(Arrivals(), 1, 1.0).run()


def test_who_comes_late_is_attached_apart_and_who_is_missing_is_not_waited_for(
    nvml: StandIn, state: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(controller, "TOGETHER_NS", 0)
    arrivals = Arrivals()
    thread = threading.Thread(target=controller.Controller(arrivals, 3, 100.0).run)
    thread.start()
    with Connection(arrivals.address, Hello(0, "nvml:0", "clock", None, 0.0)) as first:
        first.attach(LONG_S)
        set_clock(first, 1200)
        with Connection(arrivals.address, Hello(1, "nvml:1", "clock", None, 0.0)) as late:
            late.attach(LONG_S)
            set_clock(late, 900)
            assert locked(nvml) == [1200, 900]
        assert locked(nvml) == [1200, None]
        assert len(files(state)) == 1
    thread.join(LONG_S)
    assert not thread.is_alive()
    assert files(state) == []


def test_where_the_kernel_tells_of_no_end_processes_are_looked_at(
    nvml: StandIn, state: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(pid: int) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "pidfd_open", refuse)
    arrivals = Arrivals()
    thread = threading.Thread(target=controller.Controller(arrivals, 1, 100.0).run)
    thread.start()
    with owner(RANK_OF_ITS_OWN, [arrivals.address, "0", "nvml:0", "1200", "1"]) as rank:
        child = int(rank.stdout.readline().split()[1])
        kill(rank.pid)
        eventually(lambda: nvml.locked_mhz(0) is None, WITHIN_S)
        kill(child)
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_a_controller_that_breaks_resets_all_and_tells_all(monkeypatch: pytest.MonkeyPatch, nvml: StandIn, state: Path):
    arrivals = Arrivals()
    serving = controller.Controller(arrivals, 1, 100.0)
    raised: list[BaseException] = []

    def run() -> None:
        try:
            serving.run()
        except ZeroDivisionError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    with Connection(arrivals.address, Hello(0, "nvml:0", "clock", None, 0.0)) as connection:
        connection.attach(LONG_S)
        set_clock(connection, 1200)
        monkeypatch.setattr(serving, "_beat", lambda: 1 / 0)
        text = "the clock controller of this node has failed: ZeroDivisionError('division by zero')"
        assert awaited(connection, Failed).text == text
        thread.join(LONG_S)
        assert len(raised) == 1
        assert locked(nvml) == [None, None]
        assert files(state) == []
