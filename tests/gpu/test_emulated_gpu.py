"""An emulated GPU is a simulated GPU in real time that all processes of a user share."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from gpu_owners import LOCKS_AND_WAITS, await_end, files, guardians, kill, owner
from virtual_time import VirtualTime
from virtual_time import virtual_time as virtual_time

from perseus_planner.base.errors import GpuError, GpuLost
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.lease.lease import lease_gpus, recover, stale_records
from perseus_planner.gpu.simulated.emulated import EmulatedGpu, StateFile, open_emulated
from perseus_planner.gpu.simulated.gpu import SETTLE_S
from perseus_planner.gpu.simulated.model import CATALOG, Load, OpCost

A100 = CATALOG["a100-sxm"]
WHICH = "a100-sxm/0?slower=2000&call=2ms"
DENSE = OpCost(2e10, 1e6)  # a tenth of a second and more, nearly all of it arithmetic
SHORT = DENSE * 0.1


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def gpu() -> Iterator[EmulatedGpu]:
    with closing(open_emulated(WHICH)) as found:
        yield found


def load(gpu: EmulatedGpu, work: OpCost = DENSE) -> Load:
    return gpu.model.load(work)


def settled(gpu: EmulatedGpu, clock_mhz: int) -> None:
    """Lock the clock, and wait until it takes effect."""
    gpu.set_clock_mhz(clock_mhz)
    gpu.wait(2 * SETTLE_S)


def computed_s(gpu: EmulatedGpu, work: OpCost) -> float:
    """Return the time on the GPU, seconds."""
    start_s = gpu.now_s()
    gpu.run(work)
    return gpu.now_s() - start_s


@contextmanager
def setter(text: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that prints `ready`, locks each clock that it reads, and prints when it
    began to and ended.
    """
    code = """
import sys, time
from perseus_planner.gpu import open_gpu
with open_gpu(sys.argv[1]) as gpu:
    print("ready", flush=True)
    for line in sys.stdin:
        begin_s = time.monotonic()
        gpu.set_clock_mhz(int(line))
        print(begin_s, time.monotonic(), flush=True)
"""
    with owner(code, [text]) as process:
        yield process


# Opening


def test_it_is_the_simulated_gpu_of_the_same_name(gpu: EmulatedGpu):
    assert gpu.text == "emulated:a100-sxm/0?slower=2000&call=0.002"
    assert gpu.simulated_text == "simulated:a100-sxm?slower=2000&call=0.002&noise=0&step=0&drift=0"
    with open_gpu(gpu.simulated_text) as simulated:
        assert (simulated.name, simulated.supported_clocks_mhz) == (
            gpu.name,
            gpu.supported_clocks_mhz,
        )
        assert simulated.name == "simulated a100-sxm slower=2000"
        simulated.run(DENSE)  # type: ignore[attr-defined]
        assert simulated.now_s() == pytest.approx(load(gpu).time_s(1410))


def test_numbers_and_options_tell_gpus_apart():
    with ExitStack() as stack:
        texts = (
            "a100-sxm/0",
            "a100-sxm/1",
            "a100-pcie/0",
            "a100-sxm/0?slower=2",
            "a100-sxm/0?seed=1",
            "a100-sxm/00",
        )
        gpus = [stack.enter_context(closing(open_emulated(text))) for text in texts]
        assert len({gpu.uuid for gpu in gpus}) == 5
        assert gpus[-1].uuid == gpus[0].uuid
        gpus[0].set_clock_mhz(600)
        assert [gpu.locked_mhz for gpu in gpus] == [600, None, None, None, None, 600]


@pytest.mark.parametrize(
    ("which", "wrong"),
    [
        ("a100-sxm", "the number is missing; write one, such as emulated:a100-sxm/0"),
        ("a100-sxm/", "the number is missing; write one, such as emulated:a100-sxm/0"),
        ("a100-sxm/-1", "the number is missing; write one, such as emulated:a100-sxm/0"),
        ("a100-sxm/../../x", "the number is missing; write one, such as emulated:a100-sxm/0"),
        (
            "a100-sxm/0?slower=0",
            "'0' is not a slowdown: write a factor from 0.001 to 1e6, such as 2000",
        ),
        (
            "a100-sxm/0?slower=nan",
            "'nan' is not a slowdown: write a factor from 0.001 to 1e6, such as 2000",
        ),
        (
            "a100-sxm/0?call=-1",
            "'-1' is not a duration of a call: write seconds, or a number with ms or s, such as "
            "5ms",
        ),
    ],
)
def test_what_cannot_be_opened_is_refused(which: str, wrong: str):
    with pytest.raises(GpuError) as refusal:
        open_emulated(which)
    assert str(refusal.value) == f"GPU 'emulated:{which}': {wrong}"


# Time and energy


def test_work_takes_what_the_model_says_at_the_clock_in_force(
    virtual_time: VirtualTime, gpu: EmulatedGpu
):
    for clock_mhz in (1410, 705):
        settled(gpu, clock_mhz)
        assert computed_s(gpu, SHORT) == pytest.approx(
            load(gpu, SHORT).time_s(clock_mhz), rel=1e-3, abs=1e-5
        )
        gpu.start(SHORT)
        assert 0 <= gpu.finish() < 1e-5, "it returns soon after the end"


def test_time_is_real(gpu: EmulatedGpu):
    start_s = time.monotonic()
    gpu.start(SHORT)
    late_s = gpu.finish()
    assert time.monotonic() - start_s >= late_s + load(gpu, SHORT).time_s(1410)


@pytest.mark.parametrize(("before_mhz", "after_mhz"), [(1410, 705), (705, 1410)])
def test_a_clock_that_another_process_sets_changes_what_is_left_of_the_work(
    gpu: EmulatedGpu, before_mhz: int, after_mhz: int
):
    early_s = before_s = 0.0
    done_s, work = [0.0, 0.0], DENSE * 2.5
    with setter(gpu.text) as process:
        while (
            done_s[1] - early_s >= before_s
        ):  # until it is so much that the other process comes in time
            work *= 2
            before_s, after_s = (load(gpu, work).time_s(clock) for clock in (before_mhz, after_mhz))
            settled(gpu, before_mhz)
            early_s = time.monotonic()
            gpu.start(work)
            start_s = time.monotonic()
            print(after_mhz, file=process.stdin, flush=True)
            gpu.finish()
            end_s = gpu._restored(gpu._shared.read()).end_s()
            done_s = [float(text) + SETTLE_S for text in process.stdout.readline().split()]
    # It began between two moments, and the clock changed between two.
    expected_s = [done + (1 - (done - start_s) / before_s) * after_s for done in done_s]
    slack_s = (start_s - early_s) * max(1.0, after_s / before_s) + 1e-4
    assert min(expected_s) - slack_s <= end_s <= max(expected_s) + slack_s


def test_energy_is_that_of_work_and_of_waiting_to_the_moment(gpu: EmulatedGpu):
    for clock_mhz in (1410, 900):
        settled(gpu, clock_mhz)
        waiting = gpu.model.blocking()
        waiting_w = waiting.energy_j(clock_mhz) / waiting.time_s(clock_mhz)
        early_s, start_j, start_s = time.monotonic(), gpu.energy_j(), time.monotonic()
        gpu.run(SHORT)
        gpu.wait(0.03)
        gpu.run(DENSE * 0.2)
        end_s, end_j, late_s = time.monotonic(), gpu.energy_j(), time.monotonic()
        busy_s = sum(load(gpu, work).time_s(clock_mhz) for work in (SHORT, DENSE * 0.2))
        busy_j = sum(load(gpu, work).energy_j(clock_mhz) for work in (SHORT, DENSE * 0.2))
        least_j = busy_j + waiting_w * (end_s - start_s - busy_s)
        most_j = busy_j + waiting_w * (late_s - early_s - busy_s)
        assert least_j * (1 - 1e-6) <= end_j - start_j <= most_j * (1 + 1e-6)


def test_what_it_does_is_read_while_it_does_it(virtual_time: VirtualTime, gpu: EmulatedGpu):
    with closing(open_emulated(WHICH)) as other:
        settled(other, 1005)
        assert other.power_w() < 100
        gpu.start(DENSE)
        gpu.wait(0.01)
        assert other.power_w() == pytest.approx(load(gpu).free_power_w(1005))
        assert other.clock_mhz() == 1005
        gpu.finish()
        assert other.power_w() < 100


def test_a_power_limit_holds_the_clock_back_and_is_counted(
    virtual_time: VirtualTime, gpu: EmulatedGpu
):
    gpu.set_power_limit_w(200.0)
    limited = replace(load(gpu, SHORT), power_limit_w=200.0)
    assert computed_s(gpu, SHORT) == pytest.approx(limited.time_s(1410), rel=1e-3, abs=1e-5)
    gpu.start(SHORT)
    gpu.wait(1e-3)
    assert gpu.throttle_reasons() == {"sw-power-cap"}
    assert gpu.clock_mhz() == round(limited.achieved_mhz(1410))
    gpu.finish()
    assert gpu.throttled_s()["sw-power-cap"] == pytest.approx(2 * limited.time_s(1410), rel=1e-3)


def test_a_throttled_gpu_is_a_straggler(virtual_time: VirtualTime):
    with closing(open_emulated(f"{WHICH}&fault=throttled@0s-1000s")) as gpu:
        gpu.set_clock_mhz(1200)
        gpu.wait(2 * SETTLE_S)
        assert computed_s(gpu, SHORT) == pytest.approx(
            load(gpu, SHORT).time_s(0.7 * 1200), rel=1e-3, abs=1e-5
        )
        assert gpu.throttle_reasons() == {"hw-thermal"}
        assert gpu.throttled_s()["hw-thermal"] > 0.01


def test_noise_is_there_where_it_is_asked_for(virtual_time: VirtualTime):
    with closing(open_emulated(f"{WHICH}&noise=0.1")) as gpu:
        taken_s = [computed_s(gpu, SHORT * 0.3) for _ in range(6)]
        assert max(taken_s) > 1.03 * min(taken_s)


# Setting


def test_a_call_takes_its_time_and_the_clock_follows(virtual_time: VirtualTime, gpu: EmulatedGpu):
    settled(gpu, 1200)
    start_s = gpu.now_s()
    gpu.set_clock_mhz(600)
    assert gpu.now_s() - start_s >= 2e-3
    assert gpu.locked_mhz == 600
    gpu.wait(2 * SETTLE_S)
    assert gpu.clock_mhz() == 600


def test_calls_of_the_gpus_of_a_node_are_made_one_after_another():
    with ExitStack() as stack:
        gpus = [
            stack.enter_context(closing(open_emulated(f"a100-sxm/{number}?call=20ms")))
            for number in range(4)
        ]
        start_s = time.monotonic()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda gpu: gpu.set_clock_mhz(900), gpus))
        assert time.monotonic() - start_s >= 0.08
        assert [gpu.locked_mhz for gpu in gpus] == [900] * 4


def test_a_call_that_is_under_way_holds_up_neither_work_nor_readings(gpu: EmulatedGpu):
    gpu._shared.call_end_s(gpu.now_s(), 1e6)  # seconds
    gpu.run(SHORT)
    assert gpu.energy_j() > 0


# One state


def test_a_lock_outlives_the_process_that_made_it(gpu: EmulatedGpu):
    with setter(gpu.text) as process:
        print(600, file=process.stdin, flush=True)
        process.stdout.readline()
        process.kill()
        process.wait()
    assert gpu.locked_mhz == 600
    gpu.close()
    with closing(open_emulated(WHICH)) as again:
        assert again.locked_mhz == 600
        energy_j = again.energy_j()
        assert energy_j > 0
        again.reset_clocks()
        assert again.locked_mhz is None


def test_the_guardian_resets_it_when_its_holder_is_killed(state: Path):
    text = "emulated:h100-sxm/0"
    with owner(LOCKS_AND_WAITS, [text]) as process, open_gpu(text) as seen:
        assert isinstance(seen, EmulatedGpu)
        assert (seen.locked_mhz, seen.power_limit_w()) == (1500, 300.0)
        with pytest.raises(GpuError, match="leased to process"), lease_gpus([seen]):
            pass
        children = guardians(process)
        kill(process.pid)
        await_end(children)
        assert (seen.locked_mhz, seen.power_limit_w()) == (None, 700.0)
        assert files(state) == []


def test_a_command_resets_it_when_the_guardian_is_killed_too(state: Path):
    text = "emulated:h100-sxm/0"
    with owner(LOCKS_AND_WAITS, [text]) as process, open_gpu(text) as seen:
        assert isinstance(seen, EmulatedGpu)
        kill(process.pid, *(each.pid for each in guardians(process)))
        process.wait()
        assert seen.locked_mhz == 1500
        assert len(stale_records()) == 1
        assert [each.problem for each in recover()] == [None]
        assert (seen.locked_mhz, seen.power_limit_w(), files(state)) == (None, 700.0, [])


def test_what_a_run_leaves_undone_ends_with_its_process():
    with setter("emulated:a100-sxm/0"):
        gpu = open_emulated("a100-sxm/0?slower=2000")
        gpu.start(OpCost(1e15, 1e6))
        gpu.close()
    with closing(open_emulated("a100-sxm/0?slower=2000")) as again:
        assert again.power_w() < 100


def test_changes_of_many_processes_are_all_there():
    def begun(_: bytes) -> bytes:
        return b"0"

    def add(_: int) -> None:
        with closing(StateFile("counter", begun)) as shared:
            for _ in range(200):
                shared.change(lambda state: b"%d" % (int(state) + 1))
                assert shared.read().isdigit()

    with closing(StateFile("counter", begun)) as kept, ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(4)))
        assert kept.read() == b"800"


def test_a_writer_that_dies_has_written_nothing(state: Path):
    code = """
import os, signal, sys
from perseus_planner.gpu.simulated.emulated import StateFile
shared = StateFile("torn", bytes)
print("open", flush=True)
os.replace = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
shared.change(lambda state: state + b" and more")
"""
    with closing(StateFile("torn", lambda _: b"whole")) as shared, owner(code, []) as process:
        process.wait()
        assert (state / f"emulated.{os.geteuid()}" / "next").read_bytes() == b"whole and more"
        assert shared.read() == b"whole"
        shared.change(lambda _: b"next")
        assert shared.read() == b"next"


def test_a_state_that_cannot_be_written_is_said(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(GpuError) as error:
        gpu.start(SHORT)
    assert str(error.value) == (
        f"the state of {gpu.uuid} cannot be shared: No space left on device; check "
        "PLANNER_STATE_DIR"
    )


def test_a_file_of_another_boot_or_planner_is_begun_anew(gpu: EmulatedGpu):
    gpu.set_clock_mhz(600)
    gpu._shared.change(lambda state: state.replace(b"boot", b"boot 1"))
    gpu.close()
    with closing(open_emulated(WHICH)) as again:
        assert again.locked_mhz is None


def test_files_of_another_version_are_begun_anew(gpu: EmulatedGpu, state: Path):
    gpu.set_clock_mhz(600)
    gpu.close()
    for file in ("node", gpu.uuid):
        (state / f"emulated.{os.geteuid()}" / file).write_bytes(b"a\x84Q0{\x0f\xd5@")
    with closing(open_emulated(WHICH)) as again:
        again.set_clock_mhz(795)
        assert again.locked_mhz == 795


def spoiled(state: Path, how: str) -> None:
    """Put something else in the place of the files of emulated GPUs."""
    own = state / f"emulated.{os.geteuid()}"
    state.mkdir(exist_ok=True)
    if how == "folder is a link":
        (state / "elsewhere").mkdir()
        own.symlink_to(state / "elsewhere")
        return
    own.mkdir(0o777 if how == "folder is open to others" else 0o700)
    if how == "folder is open to others":
        own.chmod(0o777)
    elif how == "folder of another user":
        os.chown(own, 12345, -1)
    elif how == "link":
        (state / "mine").write_text("precious")
        (own / "node").symlink_to(state / "mine")


@pytest.mark.parametrize(
    "how",
    ["folder is a link", "folder is open to others", "folder of another user", "link"],
)
def test_files_that_are_not_its_users_alone_are_not_opened(state: Path, how: str):
    if how == "folder of another user" and os.geteuid():
        pytest.skip("needs root")
    spoiled(state, how)
    with pytest.raises(GpuError, match=r"cannot be shared|is open to other users"):
        open_emulated(WHICH)
    if how == "link":
        assert (state / "mine").read_text() == "precious"


# Faults


def test_faults_count_from_when_it_was_opened_first(virtual_time: VirtualTime):
    which = "a100-sxm/0?fault=lost@200ms"
    for _ in range(2):
        with closing(open_emulated(which)) as gpu:
            assert gpu.energy_j() >= 0
            gpu.wait(0.1)
            with closing(open_emulated(which)) as later:
                gpu.wait(0.11)
                for each in (gpu, later):
                    with pytest.raises(GpuLost):
                        each.energy_j()


def test_a_gpu_that_is_lost_in_the_middle_of_work_says_so_then(virtual_time: VirtualTime):
    with closing(open_emulated(f"{WHICH}&fault=lost@100ms")) as gpu:
        start_s = virtual_time.now_s
        with pytest.raises(GpuLost, match="fell off the bus"):
            gpu.run(DENSE)
        assert 0.09 < virtual_time.now_s - start_s < load(gpu).time_s(1410)
        with pytest.raises(GpuLost):
            gpu.start(SHORT)


def test_work_of_nothing_is_refused(gpu: EmulatedGpu):
    with pytest.raises(GpuError, match="without FLOPs or bytes"):
        gpu.run(OpCost(0.0, 0.0))
