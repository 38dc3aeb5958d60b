"""No clock stays locked, whichever process is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from fake_nvml import UUIDS, StandIn
from gpu_owners import (
    LOCKS_AND_WAITS,
    SETS_FOR_EVER,
    await_end,
    files,
    guardians,
    kill,
    own_guardians,
    owner,
)
from waiting import LONG_S

from perseus_planner.base.errors import GpuError
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.lease.lease import lease_gpus, recover, stale_records


@pytest.fixture
def state(nvml: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def is_reset(nvml: StandIn) -> bool:
    limits_w = {nvml.limit_w(index) for index in range(2)}
    return [nvml.locked_mhz(index) for index in range(2)] == [None, None] and limits_w <= {
        None,
        700.0,
    }


def kill_at_random_moments(nvml: StandIn, state: Path, victims: str, times: int, seed: int) -> None:
    moments = random.Random(seed)
    for _ in range(times):
        with owner(SETS_FOR_EVER) as process:
            time.sleep(moments.uniform(0.0, 0.4))  # any moment will do: nothing is waited for
            its_guardians = guardians(process)
            numbers = [guardian.pid for guardian in its_guardians]
            if victims == "owner":
                kill(process.pid)
            elif victims == "both":
                kill(process.pid, *numbers)
            else:
                kill(*numbers, process.pid)
            process.wait()
            await_end(its_guardians)
            if victims != "owner":
                recover()
            assert is_reset(nvml)
            recover()  # a record may be left where nothing was set yet
            assert (stale_records(), files(state)) == ((), [])
            assert is_reset(nvml)


VICTIMS = ("owner", "both", "guardian first")


@pytest.mark.parametrize("victims", VICTIMS)
def test_sigkill_at_random_moments_leaves_no_clock_locked(nvml: StandIn, state: Path, victims: str):
    kill_at_random_moments(nvml, state, victims, times=7, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victims", VICTIMS)
def test_200_sigkills_at_random_moments_leave_no_clock_locked(
    nvml: StandIn, state: Path, victims: str
):
    kill_at_random_moments(nvml, state, victims, times=200, seed=2)


def test_the_guardian_resets_and_removes_the_records_in_time(nvml: StandIn, state: Path):
    nvml.set("latency_us_nvmlDeviceResetGpuLockedClocks", 6000)
    with owner(LOCKS_AND_WAITS) as process:
        (guardian,) = guardians(process)
        assert nvml.locked_mhz(0) == (1500, 1500)
        kill(process.pid)
        await_end([guardian])
        assert is_reset(nvml)
        assert files(state) == []


def test_a_forked_child_that_lives_on_does_not_hide_the_owners_death(nvml: StandIn, state: Path):
    code = LOCKS_AND_WAITS.replace(
        'print("set"',
        """
        if os.fork() == 0:
            signal.pause()
        print("set" """.strip(),
    )
    with owner(code) as process:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        children = psutil.Process(process.pid).children()
        (guardian,) = [
            child for child in children if "perseus_planner.gpu.lease.guardian" in child.cmdline()
        ]
        (child,) = [child for child in children if child != guardian]
        kill(process.pid)
        await_end([guardian])
        assert child.is_running()
        assert is_reset(nvml)
        assert files(state) == []
        kill(child.pid)


def test_ctrl_c_reaches_the_owner_and_not_the_guardian(nvml: StandIn, state: Path):
    with owner(LOCKS_AND_WAITS, own_session=True) as process:
        guardian = psutil.Process(process.pid).children()[0]
        assert os.getsid(guardian.pid) == guardian.pid
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(LONG_S) == -signal.SIGINT
        assert process.stderr.read().splitlines()[-1] == "KeyboardInterrupt"
        await_end([guardian])
        assert is_reset(nvml)
        assert files(state) == []


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_guardian_outlasts_signals_while_its_owner_lives(nvml: StandIn, state: Path, name: str):
    with owner(LOCKS_AND_WAITS) as process:
        guardian = psutil.Process(process.pid).children()[0]
        guardian.send_signal(signal.Signals[name])
        kill(process.pid)
        await_end([guardian])
        assert is_reset(nvml)
        assert files(state) == []


def test_an_owner_whose_guardian_was_killed_resets_all_itself(nvml: StandIn, state: Path):
    with owner(LOCKS_AND_WAITS) as process:
        psutil.Process(process.pid).children()[0].kill()
        process.stdin.close()
        assert (process.wait(LONG_S), process.stderr.read()) == (0, "")
        assert is_reset(nvml)
        assert files(state) == []


def test_an_owner_that_ends_by_sigterm_leaves_nothing(nvml: StandIn, state: Path):
    with owner(LOCKS_AND_WAITS) as process:
        guardian = psutil.Process(process.pid).children()[0]
        process.terminate()
        await_end([guardian])
        assert is_reset(nvml)
        assert files(state) == []


def test_the_guardian_of_a_dead_owner_does_not_reset_what_a_new_one_sets(
    nvml: StandIn, state: Path
):
    with owner(LOCKS_AND_WAITS) as process, ExitStack() as stack:
        (guardian,) = guardians(process)
        guardian.suspend()
        kill(process.pid)
        process.wait()
        gpus = [stack.enter_context(open_gpu(f"nvml:{index}")) for index in range(2)]
        with lease_gpus(gpus):
            gpus[0].set_clock_mhz(1005)
            guardian.resume()
            await_end([guardian])
            assert nvml.locked_mhz(0) == (1005, 1005)
            assert len(files(state)) == 2
    assert is_reset(nvml)
    assert files(state) == []


def test_a_guardian_needs_no_record_on_disk_to_reset(nvml: StandIn, state: Path):
    with owner(LOCKS_AND_WAITS) as process:
        (guardian,) = guardians(process)
        for path in state.glob("*.json"):
            path.unlink()
        kill(process.pid)
        await_end([guardian])
        assert is_reset(nvml)


def test_a_gpu_that_cannot_be_reset_stops_no_other_and_keeps_its_record(nvml: StandIn, state: Path):
    with owner(LOCKS_AND_WAITS) as process:
        (guardian,) = guardians(process)
        nvml.fail("nvmlDeviceResetGpuLockedClocks", 999, gpu=0)
        kill(process.pid)
        await_end([guardian])
        assert [nvml.locked_mhz(index) for index in range(2)] == [(1500, 1500), None]
        assert [record.uuid for record in stale_records()] == [UUIDS[0]]


def test_a_guardian_that_cannot_start_prevents_the_lease(nvml: StandIn, state: Path, monkeypatch):
    with open_gpu("nvml:0") as gpu:
        # This process has its library already; the guardian looks for it anew.
        monkeypatch.setenv("LD_LIBRARY_PATH", "")
        with pytest.raises(GpuError) as caught, lease_gpus([gpu]):
            pytest.fail("must not be reached")
    message = str(caught.value)
    assert message.startswith(
        "the guardian that resets GPUs if this process dies could not be started: "
    )
    assert "libnvidia-ml.so.1" in message
    assert files(state) == []
    assert is_reset(nvml)
    assert own_guardians() == []


def test_a_guardian_is_light_and_holds_nothing_of_its_owner(nvml: StandIn, state: Path):
    with owner(LOCKS_AND_WAITS, folder=state.parent) as process:
        guardian = psutil.Process(process.pid).children()[0]
        assert guardian.cwd() == "/"
        assert guardian.cmdline()[1:3] == ["-m", "perseus_planner.gpu.lease.guardian"]
        links = {os.readlink(f"/proc/{guardian.pid}/fd/{name}") for name in ("1", "2")}
        assert links == {os.devnull}
        assert process.stderr is not None
        assert str(process.stderr.fileno()) not in os.listdir(f"/proc/{guardian.pid}/fd")
        mapped = Path(f"/proc/{guardian.pid}/maps").read_text()
        assert not any(heavy in mapped for heavy in ("numpy", "torch"))
        process.stdin.close()
        assert process.wait(LONG_S) == 0


def test_a_guardian_finds_what_its_owner_finds_in_whatever_folder_that_runs(
    nvml: StandIn, state: Path
):
    """The owner may import the package from a relative path."""
    package = Path(sys.modules["perseus_planner"].__file__).parents[1]
    code = f"import sys; sys.path.append({os.path.relpath(package, state.parent)!r})\n{LOCKS_AND_WAITS}"  # noqa: E501
    with owner(code, folder=state.parent) as process:
        process.stdin.close()
        assert process.wait(LONG_S) == 0


def test_without_a_record_a_guardian_has_nothing_to_do(nvml: StandIn, state: Path):
    command = [sys.executable, "-m", "perseus_planner.gpu.lease.guardian", "none"]
    result = subprocess.run(
        command, cwd="/", capture_output=True, text=True, timeout=300, check=True
    )
    assert (result.stdout, result.stderr) == ("", "")


def test_a_closed_pipe_is_not_taken_for_the_owners_death(nvml: StandIn, state: Path):
    code = LOCKS_AND_WAITS.replace(
        'print("set"',
        """
        from contextlib import suppress
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # of the listing itself
                if int(name) > 2 and os.readlink(f"/proc/self/fd/{name}").startswith("pipe:"):
                    os.close(int(name))
        print("set" """.strip(),
    )
    with owner(code) as process:
        (guardian,) = psutil.Process(process.pid).children()
        with pytest.raises(psutil.TimeoutExpired):
            guardian.wait(0.5)
        assert [nvml.locked_mhz(index) for index in range(2)] == [(1500, 1500)] * 2
        kill(process.pid)
        await_end([guardian])
        assert is_reset(nvml)
        assert files(state) == []


SLOW_COMMAND = """
import os, signal, sys, time
from pathlib import Path
import pynvml

pynvml.nvmlInit()
device, is_reset = pynvml.nvmlDeviceGetHandleByUUID(sys.argv[2]), Path(sys.argv[3])
if sys.argv[1] == "reset":
    pynvml.nvmlDeviceResetGpuLockedClocks(device)
    is_reset.touch()
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sudo's child does not end with who asked for it
    is_reset.unlink()
    print("begun", file=open(sys.argv[5], "w"), flush=True)
    while not is_reset.exists():
        time.sleep(0.01)
    pynvml.nvmlDeviceSetGpuLockedClocks(device, int(sys.argv[4]), int(sys.argv[4]))
"""
"""Sets a clock late: once a reset that came after it began is over."""


def test_a_command_that_sets_a_clock_after_its_owner_was_killed_is_undone(
    nvml: StandIn, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "slow.py").write_text(SLOW_COMMAND)
    os.mkfifo(tmp_path / "begun")
    slow, begun, is_reset_file = (tmp_path / name for name in ("slow.py", "begun", "reset"))
    command = f"{sys.executable} {slow}"
    setting = f"{command} set {{uuid}} {is_reset_file} {{min}} {begun} {{max}}"
    monkeypatch.setenv("PLANNER_SET_CLOCK", setting)
    monkeypatch.setenv("PLANNER_RESET_CLOCK", f"{command} reset {{uuid}} {is_reset_file}")
    code = LOCKS_AND_WAITS.replace(
        "        for gpu in gpus:", '        print("held", flush=True)\n        for gpu in gpus:'
    )
    with owner(code, ["command:0"]) as process:
        assert (tmp_path / "begun").read_text() == "begun\n"
        (guardian,) = [
            child
            for child in guardians(process)
            if "perseus_planner.gpu.lease.guardian" in child.cmdline()
        ]
        kill(process.pid)
        await_end([guardian])
        assert [(each.function[10:], each.high) for each in nvml.settings()][-3:] == [
            ("ResetGpuLockedClocks", 0),
            ("SetGpuLockedClocks", 1500),
            ("ResetGpuLockedClocks", 0),
        ]
        assert is_reset(nvml)
        assert files(state) == []
