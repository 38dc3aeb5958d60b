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
    """What the ranks of all pipelines run in one iteration."""

    iteration: int  #: its number, from 0
    #: the number of the program: 0 for full clocks, and equal for equal clocks one after the other.
    version: int
    #: "reference" while nothing but full clocks was run, "learning" with trials, "following"
    #: without, "audit" for an iteration at full clocks that checks the reference, "paying" for one
    #: that pays the ledger.
    phase: Phase
    #: for each pipeline and rank, the clock of each computation in the order of its program, MHz.
    clocks: tuple[Clocks, ...] = field(repr=False)
    #: the ledger after the iterations that were observed; None before the first one. A rank takes
    #: it over with `Ledger.renewed`.
    ledger: Ledger | None
    #: number of operating points that the iteration runs though they were not measured.
    trials: int = 0
    #: number of operating points that a plan might use and that were not measured yet.
    unknown: int = 0
    #: the expected time of the iteration, seconds; None before the first one was observed.
    time_s: float | None = None
    #: energy that the plan saves, as a share of that of an iteration at full clocks.
    saving: float = 0.0
    saving_stderr: float = 0.0  #: its standard error
