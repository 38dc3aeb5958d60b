"""What a rank observes of one iteration."""

from __future__ import annotations

from typing import NamedTuple


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
