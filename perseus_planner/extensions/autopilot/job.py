"""What an autopilot is told: the job that it plans, what it may do, and what ranks observe of an
iteration; and what it decides, with the ledger by which each rank bounds what learning costs.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeAlias

from perseus_planner.base.errors import UsageError
from perseus_planner.base.fields import Checked
from perseus_planner.base.units import CLOCK, Count, Seconds, Wait
from perseus_planner.profiles.measurement import ClockChange
from perseus_planner.profiles.modes import OWN
from perseus_planner.runtime.options import Slowdown
from perseus_planner.schedules.iteration import Iteration


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
    clock_change: ClockChange = field(default_factory=lambda: ClockChange(0.0045, 0.0009))
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
    end_s: float  #: likewise
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
    duration_s = seen.end_s - seen.begin_s
    if seen.clock_mhz is None or duration_s <= 0.0:
        return None
    if seen.change_s is None or seen.changed_mhz is None or seen.changed_mhz == seen.clock_mhz:
        return seen.clock_mhz, duration_s
    old_s, before_s = times_s.get(seen.clock_mhz), seen.change_s - seen.begin_s
    if before_s <= 0.0:
        return seen.changed_mhz, duration_s
    if before_s >= duration_s:
        return seen.clock_mhz, duration_s
    if old_s is None or before_s > _MOST_BEFORE * old_s:
        return None
    return seen.changed_mhz, (duration_s - before_s) / (1.0 - before_s / old_s)


_MOST_BEFORE = (
    0.5  #: share of a computation at the old clock up to which it tells the time at the new one
)


_CREDIT = 4.0  #: the most that fast iterations earn for later ones, as a multiple of `burst_s`
_RECENT = 16  #: iterations that are added again when the reference changes


@dataclass(frozen=True)
class Ledger(Checked, prefix="ledger, "):
    """What a rank owes for iterations that clocks made longer than agreed.

    While it `is_overdrawn`, the rank runs at full clocks. So, if each iteration is charged with
    what clocks did to it, after any number of iterations

        sum of their times <= (slowdown + max_slowdown) * sum of what they take at full clocks
                              + burst_s + the excess of the one iteration that overdrew it.

    The autopilot charges what it finds, from the computations of each iteration and from iterations
    at full clocks that are drawn at random; until then a rank charges what an iteration took beyond
    the reference, and at most `unjudged` of it. An iteration at full clocks costs nothing, however
    long it takes: it is its own reference. Each rank carries a ledger and adds its own iterations;
    clocks never decide what is computed, so ranks need not agree.

    Raises:
        UsageError: If a number is out of range.
    """

    reference_s: Seconds  #: seconds of an iteration at full clocks
    slowdown: Slowdown = 1.0  #: the agreed iteration time, as a multiple of the reference
    #: how much longer iterations may be on average, as a share of the reference.
    max_slowdown: Wait = 0.005
    burst_s: Wait = 0.0  #: how much may be owed, seconds
    owed_s: float = 0.0  #: what is owed now; negative for credit, of at most four bursts
    last: int = -1  #: the number of the iteration that was added last; -1 for none
    #: the last ones that were added, up to 16: number, seconds, and whether it ran at full clocks.
    recent: tuple[tuple[int, float, bool], ...] = ()
    #: a time of more than so many references counts for nothing, unless the one before it was as
    #: long: it is a pause in an iteration; 0 if there is none.
    pause: Wait = 0.0
    #: what an iteration is charged at most until it is known what clocks did to it, as a share of
    #: the reference; 0 for no limit.
    unjudged: Wait = 0.0

    @property
    def is_overdrawn(self) -> bool:
        """Whether more is owed than the burst, so that the next iteration runs at full clocks."""
        return self.owed_s > self.burst_s

    def add(
        self,
        time_s: float,
        *,
        full_clocks: bool = False,
        iteration: int | None = None,
        longer_s: float | None = None,
    ) -> Ledger:
        """Return the ledger after one more iteration.

        Args:
            time_s: seconds that it took.
            full_clocks: whether all of it ran at full clocks.
            iteration: its number; None for the next one.
            longer_s: by how much clocks made it longer, seconds; None if that is not known.
        """
        number = self.last + 1 if iteration is None else iteration
        return self._added((number, time_s, full_clocks), longer_s=longer_s)

    def _added(self, *iterations: tuple[int, float, bool], longer_s: float | None = None) -> Ledger:
        share, owed_s = self.slowdown + self.max_slowdown, self.owed_s
        before_s = self.recent[-1][1] if self.recent else 0.0
        for _, time_s, full_clocks in iterations:
            is_pause, before_s = self.is_pause(time_s, before_s), time_s
            if is_pause:
                continue
            charged_s = 0.0 if full_clocks else time_s - self.reference_s
            if longer_s is not None:
                charged_s = longer_s
            elif self.unjudged and not full_clocks:
                charged_s = min(max(charged_s, 0.0), self.unjudged * self.reference_s)
            owed_s += charged_s - (share - 1.0) * (time_s - charged_s)
            owed_s = max(owed_s, -_CREDIT * self.burst_s)
        ledger = copy(self)  # on the training thread: what was checked is not checked again
        recent = (*self.recent, *iterations)[-_RECENT:]
        ledger.__dict__.update(owed_s=owed_s, last=iterations[-1][0], recent=recent)
        return ledger

    def is_pause(self, time_s: float, before_s: float) -> bool:
        """Whether an iteration of so many seconds counts for nothing after one of `before_s`."""
        longest_s = self.pause * self.reference_s
        return self.pause > 0.0 and before_s <= longest_s < time_s

    def renewed(self, terms: Ledger) -> Ledger:
        """Return the ledger that comes with a program, with the iterations added that this rank has
        run since.

        A rank takes over the reference of `terms`, which is the better one, and what is owed by it.

        Args:
            terms: a ledger of the first iterations of this one, or all. If it ends before what this
                one remembers, what is owed stays.
        """
        later = [
            recent_iteration for recent_iteration in self.recent if recent_iteration[0] > terms.last
        ]
        if len(later) == _RECENT:
            return replace(
                terms,
                owed_s=max(self.owed_s, -_CREDIT * terms.burst_s),
                last=self.last,
                recent=self.recent,
            )
        return terms._added(*later) if later else terms


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
    #: likewise the mode of each; empty if the job has one.
    modes: tuple[tuple[tuple[str, ...], ...], ...] = field(default=(), repr=False)
