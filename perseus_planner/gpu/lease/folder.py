"""Where the records of set GPUs are; a look at whether there are any costs next to nothing."""

from __future__ import annotations

import os
import sys

DEFAULT_FOLDER = "/dev/shm/perseus-planner"
"""Where records are unless $PLANNER_STATE_DIR names another folder: in memory, gone after a boot as the settings."""


def state_folder() -> str:
    """The folder of this node's records, which need not be there."""
    return os.environ.get("PLANNER_STATE_DIR") or DEFAULT_FOLDER


def elsewhere() -> dict[str, str]:
    """The environment in which a Python process in another folder finds the modules and records that this one finds."""
    modules = os.pathsep.join(map(os.path.abspath, sys.path))
    return {**os.environ, "PYTHONPATH": modules, "PLANNER_STATE_DIR": os.path.abspath(state_folder())}


def has_records() -> bool:
    """Whether there are any, of processes that live or are dead; False where the folder cannot be read."""
    try:
        return any(name.endswith(".json") for name in os.listdir(state_folder()))
    except OSError:
        return False
