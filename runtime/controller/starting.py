"""Starts the controller of a node."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from perseus_planner.errors import GpuError
from perseus_planner.processes import child_environment
from perseus_planner.runtime.controller.peer import is_readable


def started(ranks: int, max_changes_per_s: float, timeout_s: float) -> str:
    """Start the controller of this node; it is no child of this process, and outlives it for as long as others need it.

    Args:
        ranks: how many will attach to it.
        max_changes_per_s: of all their GPUs together.
        timeout_s: how long to wait until it is ready.

    Returns:
        What they attach to.

    Raises:
        GpuError: it does not become ready; says why.
    """
    if not sys.executable:
        raise GpuError("no clock can be set: sys.executable does not name the Python to start the controller with")
    package = "perseus_planner.runtime.controller"
    options = ["--ranks", str(ranks), "--max-changes-per-s", repr(max_changes_per_s)]
    with subprocess.Popen(
        [sys.executable, "-m", package, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",  # it keeps no file system from being unmounted
        env=child_environment(),
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None  # PIPE was asked for
            said = _said(process.stdout.fileno(), time.monotonic() + timeout_s)
        except TimeoutError:
            raise GpuError(f"the clock controller of this node was not ready within {timeout_s:g} s") from None
        finally:
            process.kill()  # where it is not yet in the background; what is ends by itself, as nobody listens
    lines = [line for line in said.splitlines() if line.strip()] or ["it ended without a word"]
    word, _, address = lines[0].partition(" ")
    if word != "ready":
        raise GpuError(f"the clock controller of this node could not be started: {lines[-1].strip()}")
    return address


def _said(descriptor: int, deadline_s: float) -> str:
    """All that is written to a pipe.

    Raises:
        TimeoutError: it is not closed by then.
    """
    said = b""
    while is_readable(descriptor, deadline_s):
        read = os.read(descriptor, 65536)
        if not read:
            return said.decode(errors="replace")
        said += read
    raise TimeoutError
