"""Processes that lease GPUs of the stand-in NVML library, for tests that kill them, and those that
the planner starts for a job: clock controllers, guardians and the autopilot.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from waiting import soon

_BEGIN = """
import os, signal, sys
from contextlib import ExitStack
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.lease.lease import lease_gpus

with ExitStack() as stack:
    gpus = [stack.enter_context(open_gpu(text)) for text in sys.argv[1:]]
"""

LOCKS_AND_WAITS = f"""{_BEGIN}
    with lease_gpus(gpus):
        for gpu in gpus:
            gpu.set_clock_mhz(1500)
            gpu.set_power_limit_w(300.0)
        print("set", flush=True)
        sys.stdin.read()
"""
"""Leases and sets its GPUs, prints `set`, and ends when its standard input is closed."""

SETS_FOR_EVER = f"""{_BEGIN}
    print("begun", flush=True)
    while True:
        with lease_gpus(gpus):
            for clock_mhz in (1500, 1005, 1980, 300):
                for gpu in gpus:
                    gpu.set_clock_mhz(clock_mhz)
                    gpu.set_power_limit_w(float(clock_mhz // 10 + 100))
                    gpu.reset_clocks()
                    gpu.set_clock_mhz(clock_mhz)
"""
"""Prints `begun`, then leases, sets and releases its GPUs repeatedly."""

TEXTS = ("nvml:0", "nvml:1")

CONTROLLER, GUARDIAN = "perseus_planner.runtime.controller", "perseus_planner.gpu.lease.guardian"
AUTOPILOT = "perseus_planner.extensions.autopilot.ranks"


@contextmanager
def owner(
    code: str, texts: Sequence[str] = TEXTS, folder: Path = Path("/"), *, own_session: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """Run `code` on these GPUs in a process, from its first line of output on; kill it at the end
    of the block.

    It runs in a folder without the package, so that it imports the installed one.
    """
    with subprocess.Popen(
        [sys.executable, "-c", code, *texts],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=own_session,
    ) as process:
        try:
            if not process.stdout.readline():
                raise AssertionError(process.stderr.read())
            yield process
        finally:
            process.kill()


def guardians(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Stop `process`, so that it starts no more children, and return its children, which are
    guardians.
    """
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    return psutil.Process(process.pid).children()


def own_guardians() -> list[psutil.Process]:
    """Return the guardians that this process has started; it may have other children."""
    found = list[psutil.Process]()
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has just ended
            if GUARDIAN in child.cmdline():
                found.append(child)
    return found


def kill(*pids: int) -> None:
    """Kill processes in this order, one right after the other."""
    for pid in pids:
        with suppress(ProcessLookupError):  # a guardian that was about to end, and has
            os.kill(pid, signal.SIGKILL)


def await_end(processes: Sequence[psutil.Process]) -> None:
    """Wait for processes to end, reaped or not, and fail if that takes too long."""
    soon(lambda: not any(map(has_not_ended, processes)))


def files(folder: Path) -> list[str]:
    """Return the files in the state folder, except locks and emulated GPUs, which stay."""
    return (
        sorted(path.name for path in folder.iterdir() if path.suffix != ".lock" and path.is_file())
        if folder.exists()
        else []
    )


def planner_processes(state: str, *modules: str) -> list[psutil.Process]:
    """Return the processes of jobs with this state folder, oldest first; of both kinds unless
    `modules` are given.
    """
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            line = process.cmdline()
            is_one = line[1:2] == ["-m"] and line[2] in (modules or (CONTROLLER, GUARDIAN))
            if (
                is_one
                and process.environ().get("PLANNER_STATE_DIR") == state
                and has_not_ended(process)
            ):
                found.append(process)
    return sorted(found, key=lambda process: process.create_time())


def has_not_ended(process: psutil.Process) -> bool:
    """Whether the process runs; a zombie has ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
