"""What an autopilot is told: the job that it plans, what it may do, and what ranks observe of an
iteration; and what it decides, with the ledger by which each rank bounds what learning costs
(`runtime.guarantee`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from perseus_planner.base.errors import UsageError
from perseus_planner.base.fields import Checked
from perseus_planner.base.units import CLOCK, Count
from perseus_planner.profiles.measurement import ClockChange
from perseus_planner.profiles.modes import OWN
from perseus_planner.schedules.iteration import Iteration

if TYPE_CHECKING:
    from perseus_planner.runtime.guarantee import Ledger


CHANGE = ClockChange(0.0045, 0.0009)
"""What a clock change costs where that was not measured."""


@dataclass(frozen=True)
class AutopilotJob(Checked, prefix="job, "):
    """The job.

    Raises:
        UsageError: If a value is out of range.
    """

    iteration: Iteration  #: the nodes of one pipeline's iteration, and what they wait for
    #: the clocks that its GPUs support and the autopilot may set, MHz, highest first; at least one.
    clocks_mhz: tuple[int, ...]
    #: number of data-parallel pipelines, which are replicas: they run the same iteration on equal
    #: GPUs, end it together, and share what they learn.
    pipelines: Count = 1
    #: what setting a clock costs, and how many GPUs share a driver's lock.
    clock_change: ClockChange = CHANGE
    gpus_per_stage: Count = 1  #: GPUs of a rank
    gpu: str | None = None  #: the GPU's name
    control: str = "clock"  #: what `clocks_mhz` are, as `Profile.control`: power limits are watts
    #: the modes in which each computation may run, the training's own first; two at most.
    modes: tuple[str, ...] = (OWN,)
    shares_microbatch: bool = False  #: whether a microbatch has one mode in all of a stage

    def __post_init__(self) -> None:
        super().__post_init__()
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


class RankRow(NamedTuple):
    """What a rank takes and uses in an iteration, on one of its GPUs, by what is known."""

    busy_s: float  #: seconds that it computes
    busy_j: float  #: joules while it computes
    full_s: float  #: seconds that it computes at full clocks
    full_j: float  #: joules while it computes at full clocks
    waiting_w: float  #: watts while it waits


class ComputationObservation(NamedTuple):
    """When one computation ran, and at which clock."""

    begin_s: float  #: seconds from the begin of the iteration, by this rank's own clock
    end_s: float  #: when it ended, seconds from there by the same clock
    #: the clock in force at its begin, MHz; None if it is not known, and then it teaches nothing.
    clock_mhz: int | None
    #: when another clock came into force while it ran, seconds from the begin of the iteration;
    #: None if none did.
    change_s: float | None = None
    #: that clock, MHz. With more than one change in it, give `clock_mhz` None.
    changed_mhz: int | None = None
    mode: str = OWN  #: in which it ran


class RankObservation(NamedTuple):
    """One rank's iteration.

    Times count from the begin of the iteration on that rank, so the clocks of nodes need not agree.
    """

    pipeline: int  #: the data-parallel replica, from 0
    rank: int  #: the rank in its pipeline, from 0
    iteration: int  #: the number of the iteration, from 0
    #: the `Decision.version` of the program that it ran; 0 for none, which is the maximum clock. A
    #: rank whose ledger made it run at full clocks reports 0.
    version: int
    time_s: float  #: seconds from the begin of the iteration to the begin of the next one
    #: what it ran, in the order of its program; empty if it was not observed.
    computations: tuple[ComputationObservation, ...]
    #: joules that the rank's GPUs drew in the iteration, from their counters at its begin and end;
    #: None if it is not known.
    energy_j: float | None = None
    #: how old a reading of the counter can be, seconds; NVIDIA's counters step every 0.1 s.
    energy_step_s: float = 0.1
    #: seconds in which a GPU of the rank was slowed down by heat or power; such an iteration
    #: teaches nothing.
    throttled_s: float = 0.0
    #: how many iterations of this rank had a known energy so far, and their joules together.
    metered: tuple[int, float] = (0, 0.0)


def time_at_last_clock(
    seen: ComputationObservation, times_s: dict[int, float]
) -> tuple[int, float] | None:
    """Return a clock and the time that the whole computation takes at it, as one observation tells;
    None if it cannot.

    A computation in which the clock changed ran for a time tau at the old clock, at which it would
    have taken t_old, so the share tau / t_old of it was done then, and the rest of its duration d
    tells the time at the new clock: (d - tau) / (1 - tau / t_old). If most of it ran at the old
    clock, the rest tells too little.

    Args:
        seen: the observation.
        times_s: clock in MHz -> seconds of the computation, as far as they are known.
    """
    # A computation whose clock is unknown, or that took no time, would teach something wrong.
    duration_s = seen.end_s - seen.begin_s
    if seen.clock_mhz is None or duration_s <= 0.0:
        return None
    if seen.change_s is None or seen.changed_mhz is None or seen.changed_mhz == seen.clock_mhz:
        return seen.clock_mhz, duration_s
    # The time at the old clock tells which share of the work was done before the change.
    old_s = times_s.get(seen.clock_mhz)
    before_s = seen.change_s - seen.begin_s
    # A change outside the computation leaves it at one clock.
    if before_s <= 0.0:
        return seen.changed_mhz, duration_s
    if before_s >= duration_s:
        return seen.clock_mhz, duration_s
    # If most of it ran at the old clock, a small error of that would be a large one of the rest.
    if old_s is None or before_s > _MOST_BEFORE * old_s:
        return None
    return seen.changed_mhz, (duration_s - before_s) / (1.0 - before_s / old_s)


#: share of a computation at the old clock up to which it tells the time at the new one
_MOST_BEFORE = 0.5


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
    #: number of operating points that the iteration runs to learn of them: of each too little is
    #: known.
    trials: int = 0
    #: number of operating points that a plan might use and that were not measured yet.
    unknown: int = 0
    #: the expected time of the iteration, seconds; None before the first one was observed.
    time_s: float | None = None
    #: energy that the plan saves, as a share of that of an iteration at full clocks.
    saving: float = 0.0
    saving_stderr: float = 0.0  #: its standard error
    #: the mode of each computation, in the order of `clocks`; empty if the job has one.
    modes: tuple[tuple[tuple[str, ...], ...], ...] = field(default=(), repr=False)
    #: how large an effect on whole iterations has to be to be told from noise by now, and by how
    #: much all iterations by now were longer than at full clocks, at most: shares; None before
    #: that is known.
    untold: float | None = None
    longest: float | None = None
