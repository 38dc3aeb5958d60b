"""What a killed container left set is reset from any other container that shares the state folder.

Containers are PID namespaces here, each with its own /proc: killing its first process kills all the
others at once."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from commands import done
from fake_nvml import UUIDS, StandIn
from gpu_owners import LOCKS_AND_WAITS, SETS_FOR_EVER, await_end, files, kill

from perseus_planner.base.errors import GpuInUse
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.lease.lease import lease_gpus, recover, stale_records

CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts"]


def _can_make_containers() -> bool:
    return (
        shutil.which("unshare") is not None
        and subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode == 0
    )


pytestmark = pytest.mark.skipif(
    not _can_make_containers(), reason="this process may not make PID namespaces"
)


@pytest.fixture
def state(nvml: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@contextmanager
def container(code: str, name: str) -> Iterator[subprocess.Popen[str]]:
    """Run `code` on the first GPU in a container of this host name, from its first line of
    output on.
    """
    script = 'hostname "$0"; exec "$@"'
    with subprocess.Popen(
        [*CONTAINER, "sh", "-c", script, name, sys.executable, "-c", code, "nvml:0"],
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            if not process.stdout.readline():
                raise AssertionError(process.stderr.read())
            yield process
        finally:
            process.kill()  # the container's first process is killed with it, and so are all others


def kill_container(process: subprocess.Popen[str]) -> None:
    """Kill a container in which a guardian runs."""
    (first,) = psutil.Process(process.pid).children()
    assert any("perseus_planner.gpu.lease.guardian" in each.cmdline() for each in first.children())
    kill_first(process)


def kill_first(process: subprocess.Popen[str]) -> None:
    """Kill all processes of a container at once, as `docker kill` does."""
    (first,) = psutil.Process(process.pid).children()
    inside = first.children(recursive=True)
    kill(first.pid)
    process.wait()
    await_end([first, *inside])


def test_what_a_killed_container_left_is_reset_from_outside(nvml: StandIn, state: Path):
    with container(LOCKS_AND_WAITS, "pod-a") as process:
        assert nvml.locked_mhz(0) == (1500, 1500)
        assert stale_records() == ()
        with (
            open_gpu("nvml:0") as gpu,
            pytest.raises(GpuInUse, match=r"leased to process 1 on pod-a of ") as caught,
            lease_gpus([gpu]),
        ):
            pytest.fail("must not be reached")
        assert "`" in str(caught.value)
        kill_container(process)
        assert nvml.locked_mhz(0) == (1500, 1500)
        assert done("reset").startswith(
            f"Reset nvml:{UUIDS[0]} (NVIDIA H100 80GB HBM3), left set by process 1 on pod-a"
        )
    assert nvml.locked_mhz(0) is None
    assert nvml.limit_w(0) == 700.0
    assert files(state) == []


def test_the_next_job_takes_what_a_killed_container_left(nvml: StandIn, state: Path):
    with container(LOCKS_AND_WAITS, "pod-a") as process:
        kill_container(process)
        with open_gpu("nvml:0") as gpu, lease_gpus([gpu]):
            assert nvml.locked_mhz(0) is None
    with container(LOCKS_AND_WAITS, "pod-b") as process:
        kill_container(process)
        with container(
            LOCKS_AND_WAITS, "pod-c"
        ):  # where the dead owner's number is that of the new one
            assert nvml.locked_mhz(0) == (1500, 1500)
            assert recover() == ()
            assert files(state) == [f"{UUIDS[0]}.{os.geteuid()}.json"]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_200_containers_killed_at_random_moments_leave_no_clock_locked(nvml: StandIn, state: Path):
    moments = random.Random(3)
    for _ in range(200):
        with container(SETS_FOR_EVER, "pod") as process:
            time.sleep(moments.uniform(0.0, 0.4))  # any moment will do: nothing is waited for
            kill_first(process)
        recover()
        assert (nvml.locked_mhz(0), nvml.limit_w(0) in (None, 700.0)) == (None, True)
        assert (stale_records(), files(state)) == ((), [])


def test_one_container_does_not_reset_what_another_sets(nvml: StandIn, state: Path):
    resets = """
import sys
from perseus_planner.gpu.lease.lease import recover
print(recover(), flush=True)
"""
    with container(LOCKS_AND_WAITS, "pod-a"):
        result = subprocess.run(
            [*CONTAINER, sys.executable, "-c", resets],
            cwd="/",
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        assert result.stdout == "()\n"
        assert nvml.locked_mhz(0) == (1500, 1500)
