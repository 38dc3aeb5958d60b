"""What an autopilot decides for one iteration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from perseus_planner.runtime.autopilot.ledger import Ledger

Phase: TypeAlias = Literal["reference", "learning", "following", "audit", "paying"]
Clocks: TypeAlias = "tuple[tuple[int, ...], ...]"


@dataclass(frozen=True)
class Decision:
    """What the ranks of all pipelines run in one iteration.

    Attributes:
        iteration: its number, from 0.
        version: the number of the program: 0 for full clocks, and equal for equal clocks one after
            the other.
        phase: "reference" while nothing but full clocks was run, "learning" with trials,
            "following" without, "audit" for an iteration at full clocks that checks the reference,
            "paying" for one that pays the ledger.
        clocks: for each pipeline and rank, the clock of each computation in the order of its
            program, MHz.
        ledger: the ledger after the iterations that were observed; None before the first one. A
            rank takes it over with `Ledger.renewed`.
        trials: number of operating points that the iteration runs though they were not measured.
        unknown: number of operating points that a plan might use and that were not measured yet.
        time_s: the expected time of the iteration, seconds; None before the first one was observed.
        saving: energy that the plan saves, as a share of that of an iteration at full clocks.
        saving_stderr: its standard error.
    """

    iteration: int
    version: int
    phase: Phase
    clocks: tuple[Clocks, ...] = field(repr=False)
    ledger: Ledger | None
    trials: int = 0
    unknown: int = 0
    time_s: float | None = None
    saving: float = 0.0
    saving_stderr: float = 0.0
