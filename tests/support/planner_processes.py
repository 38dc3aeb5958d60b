"""The processes that the planner itself starts for a job: its clock controller and the guardian of that."""

from __future__ import annotations

from contextlib import suppress

import psutil

CONTROLLER, GUARDIAN = "perseus_planner.runtime.controller", "perseus_planner.gpu.lease.guardian"


def planner_processes(state: str, *modules: str) -> list[psutil.Process]:
    """Those of jobs whose records are in the folder `state`, oldest first; of all kinds unless `modules` are given."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            line = process.cmdline()
            is_one = line[1:2] == ["-m"] and line[2] in (modules or (CONTROLLER, GUARDIAN))
            if is_one and process.environ().get("PLANNER_STATE_DIR") == state and has_not_ended(process):
                found.append(process)
    return sorted(found, key=lambda process: process.create_time())


def has_not_ended(process: psutil.Process) -> bool:
    """A zombie has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
