"""A plan that one rank proposes to all, and what becomes of it."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class Decided:
    """All ranks take the plan.

    Attributes:
        version: its number in this job.
        iteration: the first that runs by it.
    """

    version: int
    iteration: int


@dataclass(frozen=True)
class Refused:
    """The plan is not taken, for the reason in `text`; where the store was lost, that may not be known."""

    text: str


class Proposal:
    """What becomes of a plan that this rank has proposed."""

    def __init__(self) -> None:
        self._outcome: Decided | Refused | None = None
        self._settled = threading.Event()

    @property
    def outcome(self) -> Decided | Refused | None:
        """How it ended; None while it is open."""
        return self._outcome

    def settle(self, outcome: Decided | Refused) -> None:
        """End it."""
        self._outcome = outcome
        self._settled.set()

    def wait(self, timeout_s: float) -> Decided | Refused | None:
        """How it ended within `timeout_s` seconds; None if it has not."""
        self._settled.wait(timeout_s)
        return self._outcome
