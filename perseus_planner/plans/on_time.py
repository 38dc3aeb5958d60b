"""How sure a plan is that was made for a probability, by replays under joint draws of what is
uncertain.
"""

from __future__ import annotations

from dataclasses import dataclass

INTERVAL = 0.9
"""The probability of each `Interval`: the truth is below it in 5 % of cases, and above it in 5
%.
"""

WIDER_SAVING = 1.5
"""The ends of the interval of a saving are so many times as far from the mean as those of the
draws.

No model of a GPU's curves is exact: `python benchmarks/run.py --only 19` counts how often the truth
is in them. """


@dataclass(frozen=True)
class Interval:
    """What an uncertain number is expected to be, and the ends of its 90 % interval."""

    expected: float
    low: float
    high: float


@dataclass(frozen=True)
class OnTime:
    """How sure a plan is of its time and its saving."""

    probability: float  #: the probability, at least, of being within the limit
    #: the longest iteration time that is on time, tolerance included, over the time with all clocks
    #: at their maximum; None if the limit is a power.
    limit_ratio: float | None
    limit_power_w: float | None  #: the limit of the average power, watts; None if it is a time
    #: how many standard errors were added to the times of computations below their maximum clock;
    #: None if all clocks are at their maximum because no other plan was sure enough.
    margin: float | None
    time_ratio: Interval  #: the iteration time, over that with all clocks at their maximum
    saved_share: Interval  #: the energy saved, over that with all clocks at their maximum
    power_w: Interval  #: the average power over all GPUs of the pipeline, watts
    #: how much more the plan without a margin is expected to save, over the same energy; a plan
    #: within a switch budget has that of the plan without one.
    safety_share: float
    points: int  #: number of operating points in use
    interpolated: int  #: how many of them were not measured, but estimated from others
    #: whether the profile has standard errors, or its noise is taken from how its rows scatter.
    has_errors: bool
