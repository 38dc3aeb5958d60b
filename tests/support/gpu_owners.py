"""Processes that hold GPUs of the stand-in NVML library, for tests that kill them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

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
"""Holds its GPUs, sets them, says `set`, and leaves when its standard input is closed."""

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
"""Says `begun`, then takes its GPUs, sets them and leaves, again and again."""

TEXTS = ("nvml:0", "nvml:1")

WITHIN_S = 2.0
"""In which a guardian must have reset all."""


@contextmanager
def owner(
    code: str, texts: Sequence[str] = TEXTS, folder: Path = Path("/"), *, own_session: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `code` on these GPUs, once it has said its first word; killed on leaving.

    It runs in a folder where it finds the package that is installed, not the one that is tested from.
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
    """The children of `process`, which is stopped so that it starts no other; it forks none but guardians."""
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    return psutil.Process(process.pid).children()


def own_guardians() -> list[psutil.Process]:
    """The guardians that this very process has started; tests may have given it other children."""
    return [child for child in psutil.Process().children() if "perseus_planner.gpu.lease.guardian" in child.cmdline()]


def kill(*pids: int) -> None:
    """Kill them in this order, with nothing in between."""
    for pid in pids:
        with suppress(ProcessLookupError):  # a guardian that was about to end, and has
            os.kill(pid, signal.SIGKILL)


def await_end(processes: Sequence[psutil.Process]) -> None:
    """Wait for their end, which must come in time; whether anybody has taken note of it does not matter."""
    deadline_s = time.monotonic() + WITHIN_S
    for process in processes:
        with suppress(ProcessLookupError):
            end = os.pidfd_open(process.pid)
            try:
                ended, _, _ = select.select([end], [], [], max(0.0, deadline_s - time.monotonic()))
            finally:
                os.close(end)
            assert ended


def files(folder: Path) -> list[str]:
    """What lies in the folder of records, but for the locks and the emulated GPUs, which stay."""
    return (
        sorted(path.name for path in folder.iterdir() if path.suffix != ".lock" and path.is_file())
        if folder.exists()
        else []
    )
