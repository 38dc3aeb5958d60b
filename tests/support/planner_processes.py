"""Finds the processes that the planner starts for a job: clock controllers and guardians."""

from __future__ import annotations

from contextlib import suppress

import psutil

CONTROLLER, GUARDIAN = "perseus_planner.runtime.controller", "perseus_planner.gpu.lease.guardian"
AUTOPILOT = "perseus_planner.runtime.autopilot.ranks"


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
