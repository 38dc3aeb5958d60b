"""Which setting to measure next, so that few of them tell all that a plan needs.

First a coarse descent from the top: settings evenly apart, until every kind's effective energy (see `curve.py`) rises.
Settings above the clock that a power cap leaves to every kind are passed over: they are all alike.

Then one setting after the other is measured where it promises most. What a plan asks of a computation is the least of
energy + price * time over the settings, where the price of a second, watts, is what the deadline makes it (the
Lagrangian of the plan; Perseus, SOSP'24, finds such prices by minimum cuts). A plan from few settings loses, at each
price, what the least over them is above the least over all. So for a range of prices a setting is worth what it is
expected to lower the least: its expected improvement.

Between two neighbours that were measured, time and energy are thought to walk from one to the other at random, as
Brownian motion over the logarithm of the setting: in the mean along a straight line, and least certain in the middle
of a wide gap (Kushner, "A new method of locating the maximum point of an arbitrary multipeak curve in the presence of
noise", 1964; Locatelli, "Bayesian algorithms for one-dimensional global optimization", 1997). This supposes neither
that they are smooth nor that they are monotone: measured ones are not, as other kernels run at other clocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import NamedTuple

from perseus_planner.profiles.measurement import Measurement

Table = Mapping[str, Mapping[int, Measurement]]
"""Kind -> setting -> its row. All kinds have the same settings."""

MOST_SETTINGS = 12  #: an adaptive sweep measures no more
_COARSE = 6  # settings of the descent, beside the top one
_RISES = 2
_RISEN = 0.01  # relative to the energy: less than this, or than the noise, is no rise
_NOISE = 2.0  # standard errors
_ROUGHNESS = 0.3  # relative standard deviation of time and energy over settings that differ by a factor of e
# Of time, relative to the power at the top setting: from where there is time to spare to where a second is worth nearly
# three times what the GPU draws. Evenly apart by their logarithms.
_PRICES = tuple(2 ** (half / 2) for half in range(-8, 4))
_NORMAL = NormalDist()


class _Guess(NamedTuple):
    """What a row that was not measured may say."""

    time_s: float
    energy_j: float
    spread: float  # relative standard deviation of both


def descent(settings: Sequence[int], begin: int) -> list[int]:
    """The settings of the coarse descent, highest first: the top one, and from `begin` to the lowest.

    Args:
        settings: what can be set, highest first.
        begin: one of them.
    """
    step = (begin - settings[-1]) / (_COARSE - 1)
    wanted = (begin - place * step for place in range(_COARSE))
    nearest = (min(settings, key=lambda setting: abs(setting - each)) for each in wanted)
    return list(dict.fromkeys([settings[0], *nearest]))


def _capped(settings: Sequence[int], rows: Table) -> int:
    """The highest setting that is worth a look below the top one."""
    top = [table[settings[0]].evidence for table in rows.values() if settings[0] in table]
    if not top or any(evidence is None or "sw-power-cap" not in evidence.throttle for evidence in top):
        return settings[0]
    reached_mhz = max(evidence.achieved_mhz for evidence in top if evidence is not None)
    return next((setting for setting in settings if setting <= reached_mhz), settings[0])


def next_setting(settings: Sequence[int], rows: Table, blocking_w: float, *, clocks: bool = True) -> int | None:
    """The setting to measure next; None when what was measured is enough.

    Follows from the arguments alone, so that a sweep that goes on chooses as one that was not interrupted.

    Args:
        settings: what can be set, highest first.
        rows: what was measured so far.
        blocking_w: what the GPUs draw while they wait, watts.
        clocks: whether settings are clocks, MHz, and not power limits.
    """
    measured = {setting for table in rows.values() for setting in table}
    capped = _capped(settings, rows) if clocks else settings[0]
    wanted = descent(settings, capped)
    done = [setting for setting in wanted if setting in measured]
    if len(done) < len(wanted) and not _risen(done, rows, blocking_w):
        return next(setting for setting in wanted if setting not in measured)
    if len(measured) >= MOST_SETTINGS:
        return None
    between = [setting for setting in settings if min(measured) < setting <= capped and setting not in measured]
    return max(between, key=lambda setting: _worth_j(setting, rows, blocking_w), default=None)


def _risen(done: Sequence[int], rows: Table, blocking_w: float) -> bool:
    """Whether at the last settings every kind took more effective energy than at its best by more than noise."""
    for table in rows.values():
        least_j = min((_cost_j(table[setting], -blocking_w) for setting in done), default=0.0)
        for setting in done[-_RISES:]:
            row = table[setting]
            risen_j = max(_NOISE * _error_j(row, blocking_w), _RISEN * row.energy_j)
            if _cost_j(row, -blocking_w) <= least_j + risen_j:
                return False
    return len(done) > _RISES


def _worth_j(setting: int, rows: Table, blocking_w: float) -> float:
    """What a row of every kind at `setting` is expected to save, joules, over all prices of time."""
    return math.fsum(_saved_j(setting, table, blocking_w) for table in rows.values())


def _saved_j(setting: int, table: Mapping[int, Measurement], blocking_w: float) -> float:
    """The same of one kind."""
    guess = _guess(setting, table)
    top = table[max(table)]
    saved_j = 0.0
    for price in _PRICES:
        # A GPU that is busy does not wait, so that a second costs the price less what waiting draws.
        second_w = price * top.energy_j / top.time_s - blocking_w
        least_j = min(_cost_j(row, second_w) for row in table.values())
        spread_j = guess.spread * math.hypot(guess.energy_j, second_w * guess.time_s)
        saved_j += _improvement(least_j - _cost_j(guess, second_w), spread_j)
    return saved_j


def _guess(setting: int, table: Mapping[int, Measurement]) -> _Guess:
    """What is to be expected at a setting between two that were measured: the Brownian bridge of the module."""
    high = table[min(each for each in table if each > setting)]
    low = table[max(each for each in table if each < setting)]
    above, below = math.log(high.clock_mhz / setting), math.log(setting / low.clock_mhz)
    share = above / (above + below)
    return _Guess(
        high.time_s + share * (low.time_s - high.time_s),
        high.energy_j + share * (low.energy_j - high.energy_j),
        _ROUGHNESS * math.sqrt(above * below / (above + below)),
    )


def _improvement(mean: float, spread: float) -> float:
    """The mean of what is above 0 of a normal distribution (Jones, Schonlau and Welch, 1998)."""
    if spread <= 0:
        return max(0.0, mean)
    ratio = mean / spread
    return mean * _NORMAL.cdf(ratio) + spread * _NORMAL.pdf(ratio)


def _cost_j(row: Measurement | _Guess, second_w: float) -> float:
    """Energy, and time at what a second costs."""
    return row.energy_j + second_w * row.time_s


def _error_j(row: Measurement, blocking_w: float) -> float:
    evidence = row.evidence
    return evidence.energy_stderr_j + blocking_w * evidence.time_stderr_s if evidence else 0.0
