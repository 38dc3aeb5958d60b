"""What the decider of a run knows, as it hands it over: a text and columns, which everything shows
as they are. A run keeps the last of it in a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from perseus_planner.base.errors import RunError
from perseus_planner.base.files import reading, replacing
from perseus_planner.base.wires import decode

AUTOPILOT = "autopilot"
"""What the decider is called of whom no name was written: until 0.4 there was no other."""

_NAME = "decider.json"
_NAME_OF_0_3 = "autopilot.json"
_OWN_FIELDS = ("phase", "iteration", "reference_s")  #: that 0.3 wrote too


@dataclass(frozen=True)
class DeciderStatus:
    """What a decider knew last."""

    #: As a service takes it
    __pydantic_config__: ClassVar = {"extra": "ignore", "allow_inf_nan": False}

    phase: str  #: What it does, in a word, such as "learning"
    text: str  #: What it knows, in a line
    iteration: int = -1  #: Since which it knows this; -1 before the first
    #: Seconds of an iteration at full clocks; None while that is not known.
    reference_s: float | None = None
    #: Name -> what else it knows; None for what is not known.
    columns: Mapping[str, float | str | None] = field(default_factory=dict)
    name: str = AUTOPILOT  #: What it is called

    def __str__(self) -> str:
        return self.text


def upgraded(value: Any) -> Any:
    """Return a status that is to be read, in today's form if 0.3 wrote it: without a text, and with
    its columns beside the phase.
    """
    if not isinstance(value, dict) or "phase" not in value or "text" in value:
        return value
    own_values = {name: value[name] for name in _OWN_FIELDS if name in value}
    others = {name: entry for name, entry in value.items() if name not in own_values}
    # Batches were nested in 0.3, and columns are flat.
    batches = others.pop("batches", None)
    if isinstance(batches, dict):
        others |= {f"batches.{name}": entry for name, entry in batches.items()}
    return {**own_values, "text": value["phase"], "columns": others}


def save_status(attempt: Path, status: DeciderStatus) -> None:
    """Replace the status in the folder of an attempt.

    Raises:
        OSError: If it cannot be written.
    """
    with replacing(attempt / _NAME) as file:
        file.write(json.dumps(asdict(status), indent=1).encode() + b"\n")


def read_status(attempt: Path) -> DeciderStatus | None:
    """Return the status in the folder of an attempt; None if it was trained by plans.

    Raises:
        RunError: If the file is damaged.
    """
    path = attempt / _NAME
    if not path.exists():
        path = attempt / _NAME_OF_0_3
    if not path.exists():
        return None
    with reading(path, RunError):
        data = path.read_bytes()
    try:
        return decode(json.dumps(upgraded(json.loads(data))).encode(), DeciderStatus)
    except ValueError as error:
        raise RunError(
            f"{path}: is damaged: {error}; remove it to see the rest of the run"
        ) from error
