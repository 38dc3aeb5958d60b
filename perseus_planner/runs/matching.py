"""Which clock change was for which computation of an iteration.

A change says for which place of the rank's program it was made, not for which iteration, and none is made for a value
that is in force. Computations one after another at one clock need one change, which may be made while any of them runs.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.runs.records import ComputationRecord

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from perseus_planner.schedules import Computation


class Change(NamedTuple):
    """One call that set a GPU to another value; times as those of the computations."""

    place: int | None  #: of the rank's program, that it was made for; None: of none, as a reset
    value: int  #: what was set: MHz or watts; 0: reset
    seen_s: float  #: when it was seen that this was asked for
    begun_s: float  #: when the call began
    ended_s: float  #: when it returned
    before_mhz: int | None  #: the clock that was achieved right before; None: not known


class Seen(NamedTuple):
    """A clock that was read."""

    time_s: float
    clock_mhz: int | None


def with_changes(
    iteration: int,
    computations: Sequence[Computation],
    clocks: Sequence[int] | None,
    spans_s: Sequence[tuple[float, float]],
    changes: Sequence[Change],
    *,
    asked_s: float,
    in_force: int | None,
    readings: Sequence[Seen] = (),
) -> tuple[ComputationRecord, ...]:
    """One rank's computations of an iteration, with the changes that were made for them; O(n log n).

    Args:
        iteration: its number.
        computations: what ran, first to last.
        clocks: what each was to run at; None: no clock was asked for.
        spans_s: when each began and ended.
        changes: those of the rank's GPUs in the order of their calls, from the middle of the last computation of the
            iteration before on.
        asked_s: when the clock of the first computation was asked for; that of another is when the one before it ends.
        in_force: what was set before the first of `changes`; None: not known.
        readings: clocks that were read beside those of `changes`.
    """
    calls = _Calls(changes, in_force)
    asked = {} if clocks is None else dict(_asked_by_place(clocks, spans_s, calls, asked_s))
    achieved = _achieved_mhz(spans_s, changes, readings)
    ran, nothing = [], _Asked()
    for place, (computation, span, mhz) in enumerate(zip(computations, spans_s, achieved, strict=True)):
        clock = None if clocks is None else clocks[place]
        ran.append(ComputationRecord(iteration, computation, *span, clock, *asked.get(place, nothing), mhz))
    return tuple(ran)


def _asked_by_place(
    clocks: Sequence[int], spans_s: Sequence[tuple[float, float]], calls: _Calls, first_s: float
) -> Iterator[tuple[int, _Asked]]:
    """The places for which a change was asked."""
    for first, last in _stretches(clocks):
        from_s = spans_s[first - 1][1] if first else first_s
        since_s = spans_s[first - 1][0] if first else -math.inf
        made = calls.made(range(first, last + 1), clocks[first], since_s, spans_s[last][1])
        if made is not None:
            # A time of the device, as it is known on its node, may be a little after what followed it was seen.
            yield first, _Asked(min(from_s, made.seen_s), made.begun_s, made.ended_s)
        elif calls.in_force(from_s) != clocks[first]:
            yield first, _Asked(from_s)


class _Asked(NamedTuple):
    """Of one computation: when its clock was asked for, and when the call that set it began and returned."""

    asked_s: float | None = None
    set_begin_s: float | None = None
    set_end_s: float | None = None


class _Calls:
    """The changes, found by place and by time."""

    def __init__(self, changes: Sequence[Change], before: int | None) -> None:
        self._changes, self._before = changes, before
        self._begun_s = [each.begun_s for each in changes]
        self._of_place: dict[int | None, list[Change]] = {}
        for each in changes:
            self._of_place.setdefault(each.place, []).append(each)

    def made(self, places: range, value: int, since_s: float, until_s: float) -> Change | None:
        """The change to `value` that was made for one of `places` in that time."""
        of_places = (each for place in places for each in self._of_place.get(place, ()))
        return next((each for each in of_places if each.value == value and since_s <= each.seen_s <= until_s), None)

    def in_force(self, at_s: float) -> int | None:
        """What was set last before `at_s`."""
        count = bisect_right(self._begun_s, at_s)
        return self._changes[count - 1].value if count else self._before


def _stretches(clocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first and last place of each stretch of equal clocks."""
    first = 0
    for place in range(1, len(clocks) + 1):
        if place == len(clocks) or clocks[place] != clocks[first]:
            yield first, place - 1
            first = place


def _achieved_mhz(
    spans_s: Sequence[tuple[float, float]], changes: Sequence[Change], readings: Sequence[Seen]
) -> Iterator[int | None]:
    """The first clock that was read after the middle of each: no change was made in between."""
    seen = sorted([*readings, *(Seen(each.begun_s, each.before_mhz) for each in changes)], key=_time_s)
    for begin_s, end_s in spans_s:
        place = bisect_left(seen, (begin_s + end_s) / 2, key=_time_s)
        yield seen[place].clock_mhz if place < len(seen) else None


def _time_s(seen: Seen) -> float:
    return seen.time_s
