"""Which setting to measure next, so that few of them tell all that a plan needs.

A plan uses the lower convex hull of (time, effective energy) of each kind (see `curve.py`). First a coarse descent from
the top, in steps that widen, until every kind costs more energy than its least, twice in a row. Settings above the
clock that a power cap leaves to every kind are passed over: they are all alike.

Then the hull is refined where it is least certain: a gap between settings that were measured is halved, the one that
may hide the most, again and again, until noise hides more or enough was measured. What a gap may hide:

- Were the true hull convex, it could pass below a segment no deeper than where the segments to both sides, made longer,
  meet: the bounding triangle of sandwich algorithms (Rote, "The convergence rate of the sandwich algorithm for
  approximating convex functions", Computing 48, 1992).
- Were time and effective energy monotone in the clock, no setting of the gap would be faster than the faster end of it,
  or take less than the cheaper end.
- Where the lower clock of a gap is the faster one, they are not monotone there; then a setting of the gap may be as
  much faster again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from perseus_planner.curve import worthwhile
from perseus_planner.measurement import Measurement

Table = Mapping[str, Mapping[int, Measurement]]
"""Kind -> setting -> its row. All kinds have the same settings."""

MOST_SETTINGS = 12  #: an adaptive sweep measures no more, unless the descent alone needs them
_LEAST_REFINED = 1
_STEP = 0.05  # of the top setting: the first step down
_WIDENING = 1.12  # of each step over the one before: low clocks change less
_RISES = 2
_NOISE = 2.0  # standard errors
_RISEN = 0.01  # relative: less than this, or than the noise, is no rise
_STRANGE = 0.005  # relative: a lower clock that gains less time than this, or than the noise, gains none
_TOLERANCE = 0.004  # relative to the energy: a depth that does not matter


class _Point(NamedTuple):
    """A row as the hull sees it."""

    setting: int
    time_s: float
    effective_j: float


class _Segment(NamedTuple):
    """A segment of the hull, and how far below it the true hull may pass, joules."""

    fast: _Point
    slow: _Point
    depth_j: float

    @property
    def slope_w(self) -> float:
        """Below 0."""
        return _slope(self.fast, self.slow)

    def at_j(self, time_s: float) -> float:
        """Effective energy of the segment at a time."""
        return self.fast.effective_j + self.slope_w * (time_s - self.fast.time_s)


def descent(settings: Sequence[int], begin: int) -> list[int]:
    """The settings of the coarse descent, highest first.

    Args:
        settings: what can be set, highest first.
        begin: one of them, below which the steps begin; the highest is there too.
    """
    wanted, step = float(begin), _STEP * settings[0]
    chosen = [settings[0]]
    while wanted > settings[-1]:
        chosen.append(min(settings, key=lambda setting: abs(setting - wanted)))
        wanted -= step
        step *= _WIDENING
    # The lowest one too, unless the last step came close to it.
    if chosen[-1] - settings[-1] > step / 3:
        chosen.append(settings[-1])
    return list(dict.fromkeys(chosen))


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
    measured = sorted({setting for table in rows.values() for setting in table}, reverse=True)
    capped = _capped(settings, rows) if clocks else settings[0]
    wanted = descent(settings, capped)
    done = [setting for setting in wanted if setting in measured]
    if len(done) < len(wanted) and not _risen(done, rows):
        return next(setting for setting in wanted if setting not in measured)
    if len(measured) >= max(MOST_SETTINGS, len(done) + _LEAST_REFINED):
        return None
    depths: dict[int, float] = {}
    below = [setting for setting in settings if setting < capped]
    for table in rows.values():
        for setting, depth in _uncertain(below, measured, table, blocking_w):
            depths[setting] = depths.get(setting, 0.0) + depth
    return max(depths, key=lambda setting: (depths[setting], setting), default=None)


def _risen(done: Sequence[int], rows: Table) -> bool:
    """Whether at the last settings every kind took more energy than at its best by more than noise."""
    for table in rows.values():
        least_j = min((table[setting].energy_j for setting in done), default=0.0)
        for setting in done[-_RISES:]:
            row = table[setting]
            if row.energy_j <= least_j + max(_NOISE * _error_j(row, 0.0), _RISEN * row.energy_j):
                return False
    return len(done) > _RISES


def _uncertain(
    settings: Sequence[int], measured: Sequence[int], table: Mapping[int, Measurement], blocking_w: float
) -> Iterator[tuple[int, float]]:
    """The middles of the gaps that may hide something of one kind, and how much, joules."""
    hull = _hull(table, blocking_w)
    segments = [
        _Segment(fast, slow, _depth_j(hull[max(place - 1, 0)], fast, slow, hull[min(place + 2, len(hull) - 1)]))
        for place, (fast, slow) in enumerate(pairwise(hull))
    ]
    for high, low in pairwise(measured):
        gap = [setting for setting in settings if low < setting < high]
        ends = table[high], table[low]
        noise_j = max(_error_j(end, blocking_w) for end in ends)
        hidden_j = _hidden_j(ends, segments, blocking_w)
        if gap and hidden_j > max(noise_j, _TOLERANCE * min(end.energy_j for end in ends)):
            yield gap[len(gap) // 2], hidden_j


def _hidden_j(ends: tuple[Measurement, Measurement], segments: Sequence[_Segment], blocking_w: float) -> float:
    """How far below the hull a setting between `ends`, the higher first, may be, joules; see the module."""
    high, low = ends
    gained_s = high.time_s - low.time_s
    if gained_s > max(_NOISE * max(_error_s(high), _error_s(low)), _STRANGE * high.time_s):
        touching = (
            each for each in segments if {each.fast.setting, each.slow.setting} & {high.clock_mhz, low.clock_mhz}
        )
        return max((min(each.depth_j, gained_s * -each.slope_w) for each in touching), default=0.0)
    begin_s, end_s = sorted((high.time_s, low.time_s))
    least_j = min(_effective_j(end, blocking_w) for end in ends)
    hidden_j = 0.0
    for each in segments:
        if each.fast.time_s < end_s and begin_s < each.slow.time_s:
            above_j = each.at_j(max(begin_s, each.fast.time_s)) - least_j
            hidden_j = max(hidden_j, min(each.depth_j, above_j))
    return hidden_j


def _depth_j(before: _Point, fast: _Point, slow: _Point, after: _Point) -> float:
    """How far below the segment from `fast` to `slow` a convex curve through all four can pass, joules.

    `before` is `fast`, and `after` is `slow`, where there is none.
    """
    slope_w = _slope(fast, slow)
    flatter_w = (_slope(slow, after) if after is not slow else 0.0) - slope_w
    duration_s = slow.time_s - fast.time_s
    if before is fast:
        return duration_s * flatter_w / 2  # no steeper segment bounds it; half of what the flatter one leaves
    steeper_w = slope_w - _slope(before, fast)
    return duration_s * steeper_w * flatter_w / (steeper_w + flatter_w)


def _hull(table: Mapping[int, Measurement], blocking_w: float) -> list[_Point]:
    hull: list[_Point] = []
    for option in worthwhile(table.values(), blocking_w):
        point = _Point(option.clock_mhz, option.time_s, option.effective_j)
        while len(hull) >= 2 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _slope(left: _Point, right: _Point) -> float:
    return (right.effective_j - left.effective_j) / (right.time_s - left.time_s)


def _effective_j(row: Measurement, blocking_w: float) -> float:
    return row.energy_j - blocking_w * row.time_s


def _error_s(row: Measurement) -> float:
    return row.evidence.time_stderr_s if row.evidence else 0.0


def _error_j(row: Measurement, blocking_w: float) -> float:
    evidence = row.evidence
    return evidence.energy_stderr_j + blocking_w * evidence.time_stderr_s if evidence else 0.0
