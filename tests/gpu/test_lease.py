"""One process at a time leases a GPU; the lease is recorded before anything is set, and ends
with a reset.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from fake_nvml import UUIDS, StandIn
from gpu_owners import LOCKS_AND_WAITS, await_end, files, guardians, kill, own_guardians, owner
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import to_builtins
from msgspec.structs import asdict, replace
from waiting import LONG_S

from perseus_planner.base.errors import GpuError, GpuInUse, GpuNotPermitted, GpuNotSupported
from perseus_planner.base.processes import this_process
from perseus_planner.gpu import Gpu, open_gpu
from perseus_planner.gpu.lease.lease import lease_gpus, recover, stale_records
from perseus_planner.gpu.lease.records import LeaseRecord, LockedRecords, lock_records, read_records

RESET = "nvmlDeviceResetGpuLockedClocks"
NOT_PERMITTED, UNKNOWN_ERROR = 4, 999


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the state folder, which does not exist yet."""
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def gpus(nvml: StandIn, state: Path):
    with ExitStack() as stack:
        yield [stack.enter_context(open_gpu(f"nvml:{index}")) for index in range(2)]


def a_record(**changes: object) -> LeaseRecord:
    record = LeaseRecord(
        f"nvml:{UUIDS[0]}", UUIDS[0], "H100", "abc", "2026", True, True, None, this_process()
    )
    return replace(record, **changes)


def written(record: LeaseRecord) -> None:
    """Write a record, and unlock it as the death of its owner does."""
    descriptors: list[int] = []
    with lock_records(record.uuid) as records:
        records.write(record, descriptors)
    os.close(*descriptors)


def file_of(state: Path, uuid: str = UUIDS[0]) -> Path:
    return state / f"{uuid}.{os.geteuid()}.json"


@pytest.mark.parametrize("ending", [None, ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_leaving_sets_all_back_and_removes_the_records(gpus, nvml: StandIn, state: Path, ending):
    def set_both() -> None:
        with lease_gpus(gpus):
            for index, gpu in enumerate(gpus):
                gpu.set_clock_mhz(1500)
                gpu.set_power_limit_w(300.0)
                assert nvml.locked_mhz(index) == (1500, 1500)
            assert len(files(state)) == 2
            if ending is not None:
                raise ending

    if ending is None:
        set_both()
    else:
        with pytest.raises(ending):
            set_both()
    assert [nvml.locked_mhz(index) for index in range(2)] == [None, None]
    assert [nvml.limit_w(index) for index in range(2)] == [700.0, 700.0]
    assert files(state) == []
    assert own_guardians() == []


def test_an_interrupt_inside_the_call_that_locks_a_clock_leaves_none_locked(
    gpus, nvml: StandIn, state: Path, monkeypatch
):
    import pynvml

    lock_clock = pynvml.nvmlDeviceSetGpuLockedClocks

    def locked_and_interrupted(*arguments: object) -> None:
        lock_clock(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(pynvml, "nvmlDeviceSetGpuLockedClocks", locked_and_interrupted)
    with pytest.raises(KeyboardInterrupt), lease_gpus(gpus[:1], power_limit=False):
        gpus[0].set_clock_mhz(1500)
    assert [setting.high for setting in nvml.settings()] == [0, 1500, 0]
    assert nvml.locked_mhz(0) is None
    assert (files(state), own_guardians()) == ([], [])


def test_an_interrupt_right_after_the_record_is_written_leaves_none(
    gpus, state: Path, monkeypatch: pytest.MonkeyPatch
):
    write = LockedRecords.write

    def written_and_interrupted(*arguments: object) -> None:
        write(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LockedRecords, "write", written_and_interrupted)
        with pytest.raises(KeyboardInterrupt), lease_gpus(gpus):
            pytest.fail("must not be reached")
    assert files(state) == []
    with lease_gpus(gpus):
        pass


def test_the_record_is_there_before_anything_is_set(gpus, nvml: StandIn, state: Path):
    with lease_gpus(gpus[:1]):
        assert [setting.high for setting in nvml.settings()] == [
            0
        ]  # the reset that shows permission
        record = json.loads(file_of(state).read_text())
        assert record["gpu"] == gpus[0].text
        assert (record["uuid"], record["name"], record["power_limit_w"]) == (
            UUIDS[0],
            gpus[0].name,
            700.0,
        )
        assert record["owner"] == asdict(this_process())
        assert record["owner"]["pid"] == os.getpid()
        assert stat.S_IMODE(file_of(state).stat().st_mode) == 0o644


def test_the_folder_is_made_for_all_users_whatever_the_umask(gpus, state: Path):
    umask = os.umask(0o077)
    try:
        with lease_gpus(gpus[:1]):
            assert stat.S_IMODE(state.stat().st_mode) == 0o1777
            assert stat.S_IMODE(file_of(state).stat().st_mode) == 0o644
            assert stat.S_IMODE((state / f"{UUIDS[0]}.lock").stat().st_mode) == 0o666
    finally:
        os.umask(umask)


def test_a_power_limit_goes_back_to_what_it_was_and_not_to_the_default(gpus, nvml: StandIn):
    gpus[0].set_power_limit_w(500.0)
    with lease_gpus(gpus[:1]):
        gpus[0].set_power_limit_w(300.0)
    assert nvml.limit_w(0) == 500.0


def test_a_power_limit_that_nobody_may_set_is_left_alone(gpus, nvml: StandIn):
    with lease_gpus(gpus[:1], power_limit=False):
        gpus[0].set_power_limit_w(300.0)  # by the operator of the node, say
    assert nvml.limit_w(0) == 300.0


def test_a_gpu_whose_clocks_cannot_be_locked_can_be_held_for_its_power_limit(
    gpus, nvml: StandIn, state: Path
):
    nvml.fail(RESET, 3)
    with lease_gpus(gpus[:1]):
        gpus[0].set_power_limit_w(300.0)
    assert nvml.limit_w(0) == 700.0
    assert files(state) == []


def test_a_gpu_whose_clocks_cannot_be_unlocked_is_not_leased_for_them(
    gpus, nvml: StandIn, state: Path
):
    nvml.fail(RESET, 3)
    with pytest.raises(GpuNotSupported), lease_gpus(gpus[:1], power_limit=False):
        pytest.fail("must not be reached")
    assert files(state) == []


def test_a_gpu_is_held_once_in_a_process(gpus, nvml: StandIn, state: Path):
    with lease_gpus(gpus[:1]):
        gpus[0].set_clock_mhz(1500)
        for again in (gpus[:1], gpus[::-1]):
            with (
                pytest.raises(
                    GpuInUse, match="this process has leased it already; name each GPU once"
                ),
                lease_gpus(again),
            ):
                pass
        assert nvml.locked_mhz(0) == (1500, 1500)
        assert files(state) == [file_of(state).name]
        with lease_gpus(gpus[1:]):
            gpus[1].set_clock_mhz(1500)
        assert nvml.locked_mhz(0) == (1500, 1500)
    assert files(state) == []


def test_a_gpu_that_is_named_twice_is_refused_and_given_back(gpus, state: Path):
    with pytest.raises(GpuInUse), lease_gpus([gpus[0], gpus[0]]):
        pass
    assert files(state) == []


def test_another_process_that_lives_is_named(gpus, nvml: StandIn, state: Path):
    with owner(LOCKS_AND_WAITS, ["nvml:0"]) as process:
        since = json.loads(file_of(state).read_text())["since"]
        with pytest.raises(GpuInUse) as caught, lease_gpus(gpus):
            pass
        assert str(caught.value).startswith(
            f"GPU nvml:{UUIDS[0]} (NVIDIA H100 80GB HBM3): leased to process {process.pid} of "
            f"{psutil.Process().username()} (`"
        )
        assert sys.executable in str(caught.value)
        assert str(caught.value).endswith(
            f"`) since {since}; wait for that process to end, end it, or choose another GPU"
        )
        assert nvml.locked_mhz(0) == (1500, 1500)
        assert stale_records() == ()
        assert recover() == ()
        process.stdin.close()
        assert process.wait(LONG_S) == 0
    with lease_gpus(gpus):
        pass


def test_what_a_dead_owner_left_is_reset_before_the_gpu_is_taken(gpus, nvml: StandIn, state: Path):
    with owner(LOCKS_AND_WAITS) as process:
        kill(guardians(process)[0].pid, process.pid)
        process.wait()
        assert nvml.locked_mhz(0) == (1500, 1500)
        (left, other) = stale_records()
        assert (left.owner.pid, left.gpu, other.gpu) == (
            process.pid,
            f"nvml:{UUIDS[0]}",
            f"nvml:{UUIDS[1]}",
        )
    with lease_gpus(gpus[:1]):
        assert nvml.locked_mhz(0) is None
        assert nvml.limit_w(0) == 700.0
        assert nvml.locked_mhz(1) == (1500, 1500)
        (recovered,) = recover()
        assert (recovered.record.gpu, recovered.problem) == (f"nvml:{UUIDS[1]}", None)
        assert (nvml.locked_mhz(1), nvml.limit_w(1)) == (None, 700.0)
        assert files(state) == [file_of(state).name]
    assert files(state) == []


def test_a_record_of_this_very_process_number_is_not_taken_for_a_lease_of_this_process(
    gpus, nvml: StandIn, state: Path
):
    gpus[0].set_clock_mhz(1500)
    written(a_record(owner=this_process()))
    assert [each.problem for each in recover()] == [None]
    assert nvml.locked_mhz(0) is None
    assert files(state) == []


def test_a_zombie_is_dead(gpus, nvml: StandIn, state: Path):
    with owner(LOCKS_AND_WAITS, ["nvml:0"]) as process:
        (guardian,) = guardians(process)
        kill(guardian.pid, process.pid)
        os.waitid(
            os.P_PID, process.pid, os.WEXITED | os.WNOWAIT
        )  # it has ended, and stays in the list of processes
        assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
        assert [each.problem for each in recover()] == [None]
    assert files(state) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a file of another user")
def test_a_record_of_a_gpu_that_was_taken_since_is_removed_and_nothing_is_reset(
    gpus, nvml: StandIn, state: Path
):
    with lease_gpus(gpus[:1]):
        gpus[0].set_clock_mhz(1500)
        dead = json.loads(file_of(state).read_text())
        dead["lease"] = "abc"
        (state / f"{UUIDS[0]}.12345.json").write_text(json.dumps(dead))
        os.chown(state / f"{UUIDS[0]}.12345.json", 12345, -1)
        assert recover() == ()
        assert nvml.locked_mhz(0) == (1500, 1500)
        assert files(state) == [file_of(state).name]


def test_a_gpu_that_cannot_be_reset_stops_no_other_and_is_found_later(
    gpus, nvml: StandIn, state: Path
):
    def both() -> None:
        with lease_gpus(gpus):
            for gpu in gpus:
                gpu.set_clock_mhz(1500)
            nvml.fail(RESET, UNKNOWN_ERROR, gpu=0)

    with pytest.raises(GpuError) as caught:
        both()
    assert str(caught.value).startswith(f"not reset: nvml:{UUIDS[0]}: ")
    assert str(caught.value).endswith("; fix this, then run `planner reset`")
    assert [nvml.locked_mhz(index) for index in range(2)] == [(1500, 1500), None]
    assert files(state) == [file_of(state).name]
    (recovery,) = recover()
    assert recovery.problem is not None
    nvml.heal()
    (recovery,) = recover()
    assert recovery.problem is None
    assert nvml.locked_mhz(0) is None
    assert files(state) == []


def test_a_gpu_that_may_not_be_set_is_refused_and_leaves_nothing(gpus, nvml: StandIn, state: Path):
    nvml.fail(RESET, NOT_PERMITTED, gpu=1)
    with pytest.raises(GpuNotPermitted), lease_gpus(gpus):
        pytest.fail("must not be reached")
    assert files(state) == []
    assert own_guardians() == []


def test_a_simulated_gpu_needs_no_record(nvml: StandIn, state: Path):
    with open_gpu("simulated:a100-sxm") as gpu:
        with lease_gpus([gpu]):
            gpu.set_clock_mhz(1410)
            assert own_guardians() == []
        assert not state.exists()


def damaged(text: str) -> dict[str, bytes]:
    """Return invalid contents of a record file; `text` is a valid one."""
    record = text.encode()
    return {
        "empty": b"",
        "not-json": b"\xff\xfe",
        "code": b"__import__('os').system('true')",
        "deep": b"[" * 10000,
        "large": record + b" " * 20000,
        "list": b"[]",
        "lacks": record.replace(b'"since"', b'"until"'),
        "another-gpu": record.replace(UUIDS[0].encode(), UUIDS[1].encode()),
        "no-back-end": record.replace(b"nvml:", b"simulated:"),
        "not-finite": record.replace(b'"power_limit_w": null', b'"power_limit_w": NaN'),
        "negative": record.replace(b'"pid": 1', b'"pid": -1'),
        "huge": record.replace(b'"pid": 1', b'"pid": 1' + b"0" * 5000),
        "bool": record.replace(b'"pid": 1', b'"pid": true'),
        "escape": record.replace(b"H100", b"\\u001b[2J"),
        "escape-in-name": record.replace(b'"since"', b'"\\u001b[2J"'),
    }


def damage(name: str, path: Path) -> None:
    """Put something invalid in the place of a record."""
    text = json.dumps(to_builtins(a_record(owner=replace(this_process(), pid=1))))
    if name == "link":
        (path.parent / "elsewhere").write_text(text)
        path.symlink_to(path.parent / "elsewhere")
    elif name == "pipe":
        os.mkfifo(path)
    elif name == "folder":
        path.mkdir()
    else:
        assert damaged(text)[name] != text.encode()
        path.write_bytes(damaged(text)[name])


@pytest.mark.parametrize("name", ["link", "pipe", "folder", *damaged("")])
def test_what_is_no_record_is_refused_and_not_followed(gpus, nvml: StandIn, state: Path, name: str):
    with lease_gpus(gpus[:1]):
        pass
    damage(name, file_of(state))
    before = nvml.settings()
    with pytest.raises(GpuError) as caught, lease_gpus(gpus[:1]):
        pytest.fail("must not be reached")
    message = str(caught.value)
    assert message.startswith(
        f"GPU nvml:{UUIDS[0]}: cannot tell whether it is free: {file_of(state)}: is not a record "
    )
    assert message.endswith("; remove it")
    assert "\x1b" not in message
    assert recover() == ()
    assert nvml.settings() == before
    assert os.path.lexists(file_of(state))
    with lease_gpus(gpus[1:]):
        pass


@settings(max_examples=100)
@given(
    data=st.binary(max_size=400)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from([*asdict(a_record()), *asdict(this_process())]), inner, max_size=12
            )
        ),
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_bytes_are_read_without_a_traceback(data: bytes, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANNER_STATE_DIR", str(folder))
        file_of(folder).write_bytes(data)
        records, problems = read_records()
        assert (records, len(problems)) == ([], 1)


@pytest.mark.parametrize("kind", ["link", "file", "lost"])
def test_a_folder_that_is_none_is_refused(gpus, nvml: StandIn, state: Path, kind: str, monkeypatch):
    if kind == "link":
        (state.parent / "real").mkdir()
        state.symlink_to(state.parent / "real")
    elif kind == "file":
        state.touch()
    else:
        monkeypatch.setenv("PLANNER_STATE_DIR", str(state / "below"))
    before = nvml.settings()
    with pytest.raises(GpuError, match=r"in PLANNER_STATE_DIR$"), lease_gpus(gpus[:1]):
        pytest.fail("must not be reached")
    assert nvml.settings() == before
    if kind == "link":
        assert list((state.parent / "real").iterdir()) == []


IN_A_FULL_FOLDER = """
from perseus_planner.base.errors import GpuError
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.lease.lease import lease_gpus

for text in ("nvml:0", "emulated:a100-sxm/0"):
    try:
        with open_gpu(text) as gpu, lease_gpus([gpu]):
            print("leased")
    except GpuError as error:
        print(error)
"""


@pytest.mark.parametrize("room", ["size=16k", "nr_inodes=3"])
def test_a_full_state_folder_is_said(nvml: StandIn, state: Path, room: str):
    state.mkdir()
    fill = 'mount -t tmpfs -o "$0" none "$PLANNER_STATE_DIR" || exit 99; '
    fill += 'head -c 64k /dev/zero > "$PLANNER_STATE_DIR/full"; exec "$@"'
    found = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", fill, room, sys.executable, "-c", IN_A_FULL_FOLDER],
        env=nvml.environment() | {"PLANNER_STATE_DIR": str(state)},
        capture_output=True,
        text=True,
    )
    if found.returncode in (1, 99) and not found.stdout:
        pytest.skip("this process may not mount a file system")
    lines = found.stdout.splitlines()
    assert len(lines) == 2, found
    assert "cannot be written: No space left on device; make room there, or name ano" in lines[0]
    assert lines[1].endswith(": No space left on device; check PLANNER_STATE_DIR")


def test_reading_records_makes_no_folder(state: Path):
    assert (stale_records(), recover()) == ((), ())
    assert not state.exists()


def test_half_written_files_are_removed_by_the_next_command(gpus, state: Path):
    with lease_gpus(gpus[:1]):
        pass
    for uuid in UUIDS:
        (state / f".{uuid}.0.json.x1y2z3.part").write_text("{")
    assert recover() == ()
    assert files(state) == []


def test_records_that_somebody_removed_stop_no_reset(gpus, nvml: StandIn, state: Path):
    with lease_gpus(gpus):
        for gpu in gpus:
            gpu.set_clock_mhz(1500)
        for path in state.iterdir():
            path.unlink()
    assert [nvml.locked_mhz(index) for index in range(2)] == [None, None]


def test_a_record_that_names_another_gpu_resets_none(gpus, nvml: StandIn, state: Path):
    gpus[1].set_clock_mhz(1500)
    written(a_record(gpu=f"nvml:{UUIDS[1]}"))
    (recovery,) = recover()
    assert recovery.problem == (
        f"GPU nvml:{UUIDS[1]}: is {UUIDS[1]}, not {UUIDS[0]} as its record says; remove that file"
    )
    assert nvml.locked_mhz(1) == (1500, 1500)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a file of another user")
def test_the_watts_of_another_users_record_do_not_count(gpus, nvml: StandIn, state: Path):
    gpus[0].set_power_limit_w(300.0)
    written(a_record(power_limit_w=650.0))
    os.chown(file_of(state), 12345, -1)
    file_of(state).rename(state / f"{UUIDS[0]}.12345.json")
    assert [each.problem for each in recover()] == [None]
    assert nvml.limit_w(0) == 700.0
    assert files(state) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a file of another user")
def test_a_file_of_another_user_under_ones_own_name_is_no_record(state: Path):
    written(a_record())
    os.chown(file_of(state), 12345, -1)
    assert read_records()[0] == []


def test_a_child_that_leaves_the_block_after_a_fork_changes_nothing(nvml: StandIn, state: Path):
    code = LOCKS_AND_WAITS.replace(
        "sys.stdin.read()",
        """
        child = os.fork()
        if child == 0:
            sys.exit(0)
        os.waitpid(child, 0)
        print("forked", flush=True)
        sys.stdin.read()
    """.strip(),
    )
    with owner(code, ["nvml:0"]) as process:
        assert process.stdout.readline() == "forked\n"
        assert nvml.locked_mhz(0) == (1500, 1500)
        assert files(state) == [file_of(state).name]
        process.stdin.close()
        assert process.wait(LONG_S) == 0
    assert nvml.locked_mhz(0) is None
    assert files(state) == []


def test_an_owner_that_becomes_another_program_has_ended_its_lease(nvml: StandIn, state: Path):
    code = LOCKS_AND_WAITS.replace(
        "sys.stdin.read()", 'sys.stdin.readline(); os.execvp("sleep", ["sleep", "100"])'
    )
    with owner(code, ["nvml:0"]) as process:
        (guardian,) = psutil.Process(process.pid).children()
        process.stdin.write("\n")
        process.stdin.flush()
        await_end([guardian])
        assert process.poll() is None
        assert nvml.locked_mhz(0) is None
        assert files(state) == []


def test_of_several_processes_that_contend_one_has_the_gpu(nvml: StandIn, state: Path):
    """Each process sets a different clock; if two leased the GPU at once, one would read the
    clock of the other.
    """
    nvml.set("latency_us_nvmlDeviceSetGpuLockedClocks", 1000)
    code = """
import sys
from perseus_planner.base.errors import GpuInUse
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.lease.lease import lease_gpus

own_mhz, had = int(sys.argv[1]), 0
with open_gpu("nvml:0") as gpu:
    while had < 3:
        try:
            with lease_gpus([gpu]):
                for _ in range(3):
                    gpu.set_clock_mhz(own_mhz)
                    assert gpu.clock_mhz() == own_mhz
                had += 1
        except GpuInUse:
            pass
"""
    contenders = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(clock_mhz)], cwd="/", stderr=subprocess.PIPE, text=True
        )
        for clock_mhz in (1500, 1005)
    ]
    said = [contender.communicate(timeout=300)[1] for contender in contenders]
    assert ([contender.returncode for contender in contenders], said) == ([0, 0], ["", ""])
    assert nvml.locked_mhz(0) is None
    assert files(state) == []


def test_gpus_are_a_sequence_of_any_back_end(gpus: list[Gpu]):
    with lease_gpus([]):
        pass
    with lease_gpus(tuple(gpus)):
        pass
