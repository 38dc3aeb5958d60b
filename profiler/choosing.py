"""Which setting to measure next, so that few of them tell all that a plan needs.

A plan uses the lower convex hull of (time, effective energy) of each kind (see `curve.py`). First a coarse descent from
the top, in steps that widen, until every kind costs more energy than its least, twice in a row. Settings above the
clock that a power cap leaves to every kind are passed over: they are all alike.

Then the hull is refined where it is least certain. Were the true hull convex, it could pass below a segment no deeper
than where the segments to both sides, made longer, meet: the bounding triangle of sandwich algorithms (Rote, "The
convergence rate of the sandwich algorithm for approximating convex functions", Computing 48, 1992). Where it is deepest,
the gap in clock beside an end of the segment is halved; again and again, until noise is deeper or enough was measured.
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
_LEAST_REFINED = 3
_STEP = 0.06  # of the top setting: the first step down
_WIDENING = 1.12  # of each step over the one before: low clocks change less
_RISES = 2
_NOISE = 2.0  # standard errors
_RISEN = 0.01  # relative: less than this, or than the noise, is no rise
_ALIKE = 0.005  # relative: rows that differ by less, or by less than the noise, are alike
_TOLERANCE = 0.004  # relative to the energy: a depth that does not matter


class _Point(NamedTuple):
    """A row as the hull sees it; the setting is what it was measured at."""

    setting: int
    time_s: float
    effective_j: float
    energy_j: float


def descent(settings: Sequence[int], rows: Table) -> list[int]:
    """The settings of the coarse descent, highest first.

    Args:
        settings: what can be set, highest first.
        rows: what was measured so far; of these, only those at the top tell where the steps begin.
    """
    wanted, step = float(_capped(settings, rows)), _STEP * settings[0]
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


def next_setting(settings: Sequence[int], rows: Table, blocking_w: float) -> int | None:
    """The setting to measure next; None when what was measured is enough.

    Follows from the arguments alone, so that a sweep that goes on chooses as one that was not interrupted.

    Args:
        settings: what can be set, highest first.
        rows: what was measured so far.
        blocking_w: what the GPUs draw while they wait, watts.
    """
    measured = sorted({setting for table in rows.values() for setting in table}, reverse=True)
    wanted = descent(settings, rows)
    done = [setting for setting in wanted if setting in measured]
    if len(done) < len(wanted) and not _risen(done, rows):
        return next(setting for setting in wanted if setting not in measured)
    if len(measured) >= max(MOST_SETTINGS, len(done) + _LEAST_REFINED):
        return None
    depths: dict[int, float] = {}
    for table in rows.values():
        for setting, depth in _uncertain(settings, measured, table, blocking_w):
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
    """Settings that may lower the hull of one kind, and by how much, relative to the energy there."""
    hull = _hull(table, blocking_w)
    for place, (fast, slow) in enumerate(pairwise(hull)):
        before = hull[place - 1] if place else None
        after = hull[place + 2] if place + 2 < len(hull) else None
        depth_j = _depth_j(before, fast, slow, after)
        errors_j = (_error_j(table[end.setting], blocking_w) for end in (fast, slow))
        if depth_j <= max(_TOLERANCE * slow.energy_j, *errors_j):
            continue
        between = _halved(settings, measured, table, fast.setting, slow.setting)
        if between is not None:
            yield between, depth_j / slow.energy_j


def _depth_j(before: _Point | None, fast: _Point, slow: _Point, after: _Point | None) -> float:
    """How far below the segment from `fast` to `slow` a convex curve through all four can pass, joules."""
    slope = _slope(fast, slow)
    flatter = (_slope(slow, after) if after else 0.0) - slope
    duration_s = slow.time_s - fast.time_s
    if before is None:
        return duration_s * flatter / 2  # no steeper segment bounds it; half of what the flatter one leaves
    steeper = slope - _slope(before, fast)
    return duration_s * steeper * flatter / (steeper + flatter)


def _halved(
    settings: Sequence[int], measured: Sequence[int], table: Mapping[int, Measurement], fast: int, slow: int
) -> int | None:
    """The setting in the middle of the wider of the gaps beside `fast` and `slow`, on the side of the other."""
    widest: list[int] = []
    for end, other in ((fast, slow), (slow, fast)):
        place = measured.index(end)
        neighbour = measured[place + 1 if other < end else place - 1]
        low, high = sorted((end, neighbour))
        gap = [setting for setting in settings if low < setting < high]
        if len(gap) > len(widest) and not _alike(table[end], table[neighbour]):
            widest = gap
    return widest[len(widest) // 2] if widest else None


def _alike(one: Measurement, other: Measurement) -> bool:
    """Whether both are the same but for noise, as under a power cap; then so is what lies between."""
    for first, second, error in (
        (one.time_s, other.time_s, max(_error_s(one), _error_s(other))),
        (one.energy_j, other.energy_j, max(_error_j(one, 0.0), _error_j(other, 0.0))),
    ):
        if abs(first - second) > max(_ALIKE * first, _NOISE * error):
            return False
    return True


def _hull(table: Mapping[int, Measurement], blocking_w: float) -> list[_Point]:
    hull: list[_Point] = []
    for option in worthwhile(table.values(), blocking_w):
        point = _Point(option.clock_mhz, option.time_s, option.effective_j, option.energy_j)
        while len(hull) >= 2 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _slope(left: _Point, right: _Point) -> float:
    return (right.effective_j - left.effective_j) / (right.time_s - left.time_s)


def _error_s(row: Measurement) -> float:
    return row.evidence.time_stderr_s if row.evidence else 0.0


def _error_j(row: Measurement, blocking_w: float) -> float:
    evidence = row.evidence
    return evidence.energy_stderr_j + blocking_w * evidence.time_stderr_s if evidence else 0.0
