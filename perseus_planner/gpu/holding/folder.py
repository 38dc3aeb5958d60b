"""Where the records of set GPUs are; a look at whether there are any costs next to nothing."""

from __future__ import annotations

import os

DEFAULT_FOLDER = "/dev/shm/perseus-planner"
"""Where records are unless $PLANNER_STATE_DIR names another folder: in memory, gone after a boot as the settings."""


def state_folder() -> str:
    """The folder of this node's records, which need not be there."""
    return os.environ.get("PLANNER_STATE_DIR") or DEFAULT_FOLDER


def has_records() -> bool:
    """Whether there are any, of processes that live or are dead; False where the folder cannot be read."""
    try:
        return any(name.endswith(".json") for name in os.listdir(state_folder()))
    except OSError:
        return False
