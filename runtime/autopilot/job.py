"""What an autopilot is told before it begins: the job that it plans, and what it may do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from perseus_planner.base.errors import UsageError
from perseus_planner.base.units import CHANGES, CLOCK, COUNT, INDEX, WAIT, Rule, check_fields
from perseus_planner.profiles.measurement import ClockChange

if TYPE_CHECKING:
    from perseus_planner.schedules.iteration import Iteration

_SLOWDOWN = Rule(
    float,
    False,
    "a slowdown: give the longest iteration as a multiple of one at full clocks, such as 1",
)


@dataclass(frozen=True)
class AutopilotJob:
    """The job.

    Raises:
        UsageError: If a value is out of range.
    """

    iteration: Iteration  #: the nodes of one pipeline's iteration, and what they wait for
    #: the clocks that its GPUs support and the autopilot may set, MHz, highest first; at least one.
    clocks_mhz: tuple[int, ...]
    #: number of data-parallel pipelines, which are replicas: they run the same iteration on equal
    #: GPUs, end it together, and share what they learn.
    pipelines: int = 1
    #: what setting a clock costs, and how many GPUs share a driver's lock.
    clock_change: ClockChange = field(default_factory=lambda: ClockChange(0.0045, 0.0009))
    gpus_per_stage: int = 1  #: GPUs of a rank
    gpu: str | None = None  #: the GPU's name

    def __post_init__(self) -> None:
        check_fields(self, {"pipelines": COUNT, "gpus_per_stage": COUNT}, UsageError, "job, ")
        clocks = {CLOCK.check(clock, "job, clocks_mhz", UsageError) for clock in self.clocks_mhz}
        if not clocks:
            raise UsageError(
                "job, clocks_mhz: is empty; give the clocks that the GPUs support, at least the "
                "highest"
            )
        object.__setattr__(self, "clocks_mhz", tuple(sorted(clocks, reverse=True)))

    @property
    def ranks(self) -> int:
        """Number of ranks of a pipeline."""
        return len(self.iteration.schedule.ranks)


@dataclass(frozen=True)
class AutopilotSettings:
    """What an autopilot may do.

    Raises:
        UsageError: If a value is out of range.
    """

    #: the agreed iteration time, as a multiple of one at full clocks; at least 1.
    slowdown: float = 1.0
    #: how much longer iterations may be on average, as a share of one at full clocks: the ledger.
    max_slowdown: float = 0.005
    #: how often a GPU may change its clock in an iteration, trials included; None for any number.
    max_changes: int | None = 8
    #: whether to run trials of clocks that were not measured. Without, it plans on the profile that
    #: it is given and on what it sees by itself.
    learn: bool = True
    seed: int = 0  #: of all random choices: equal observations, equal decisions

    def __post_init__(self) -> None:
        rules = {"slowdown": _SLOWDOWN, "max_slowdown": WAIT, "seed": INDEX}
        check_fields(self, rules, UsageError)
        if self.slowdown < 1.0:
            raise UsageError(f"slowdown: {self.slowdown} is not {_SLOWDOWN.wanted} or more")
        if self.max_changes is not None:
            CHANGES.check(self.max_changes, "max_changes")
