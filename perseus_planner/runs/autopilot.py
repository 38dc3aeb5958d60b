"""What the autopilot of a training without a plan knows, and the file in which a run keeps the
last of it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from perseus_planner.base.errors import RunError
from perseus_planner.base.files import reading, replacing
from perseus_planner.base.prefixes import si
from perseus_planner.base.wires import decode

_NAME = "autopilot.json"
_STRICT = {"extra": "forbid", "allow_inf_nan": False}  #: as the service takes it


@dataclass(frozen=True)
class AutopilotStatus:
    """What the autopilot knew when it made a program."""

    __pydantic_config__ = _STRICT

    #: "watching" until the first program; then "reference", "learning", "following", "audit" or
    #: "paying"; "stopped" if the autopilot cannot go on.
    phase: str = "watching"
    iteration: int = -1  #: The iteration that the program was made for; -1 before the first
    #: Seconds of an iteration at full clocks; None while that is not known.
    reference_s: float | None = None
    #: Energy that the newest plan is expected to save, as a share of that of an iteration at full
    #: clocks; None before it. What was saved is in the `Account`.
    saving: float | None = None
    saving_stderr: float | None = None  #: Its standard error
    owed_s: float = 0.0  #: Seconds that the ledger owes; negative for credit
    burst_s: float = 0.0  #: Seconds that it may owe
    trials: int = 0  #: Number of operating points that the iteration tries
    #: Number of operating points that a plan might use and that were not measured yet.
    unknown: int = 0
    #: CPU time of its process since it began, as a share of that of one core; None before.
    core_share: float | None = None

    def __str__(self) -> str:
        if self.reference_s is None or self.saving is None:
            return self.phase
        error = "" if self.saving_stderr is None else f" ± {100 * self.saving_stderr:.1f}"
        uses = (
            "" if self.core_share is None else f", it uses {100 * self.core_share:.0f} % of a core"
        )
        return (
            f"{self.phase}, planned to save {100 * self.saving:.1f}{error} % of the energy at full "
            "clocks, "
            f"{self.trials} operating points tried in iteration {self.iteration} and "
            f"{self.unknown} not known yet, the ledger owes {si(self.owed_s, 's', 3)} of at most "
            f"{si(self.burst_s, 's', 3)}{uses}"
        )


def save_status(attempt: Path, status: AutopilotStatus) -> None:
    """Replace the status in the folder of an attempt.

    Raises:
        OSError: If it cannot be written.
    """
    with replacing(attempt / _NAME) as file:
        file.write(json.dumps(asdict(status), indent=1).encode() + b"\n")


def read_status(attempt: Path) -> AutopilotStatus | None:
    """Return the status in the folder of an attempt; None if it was trained by plans.

    Raises:
        RunError: If the file is damaged.
    """
    path = attempt / _NAME
    if not path.exists():
        return None
    with reading(path, RunError):
        data = path.read_bytes()
    try:
        return decode(data, AutopilotStatus)
    except ValueError as error:
        raise RunError(
            f"{path}: is damaged: {error}; remove it to see the rest of the run"
        ) from error
