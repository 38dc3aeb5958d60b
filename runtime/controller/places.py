"""From looks at a rank's word to the values that it asked for, those included that it asked for between two looks.

A call of the driver takes some milliseconds, in which nobody looks. So a rank may have passed places unseen. What they
asked for is not known; it is taken to be what they asked for when they were last seen, as an iteration is like the one
before, and nothing new where they never were. Nothing is assumed of the places between the last one that was seen in
an iteration and the end of that iteration, as it is not known how many there are, nor of more than `FARTHEST`, which
no rank passes between two looks: that is another program.
"""

from __future__ import annotations

from dataclasses import dataclass

from perseus_planner.runtime.marks import NOTHING, place_and_value

FARTHEST = 64
"""More places than this are not passed between two looks."""

_REMEMBERED = 65536  #: places of a program whose values are remembered, so that no rank takes any amount of memory


@dataclass(frozen=True)
class Look:
    """What a changed word says.

    Attributes:
        place: where the rank is; None: it wants no value.
        value: what it wants now; 0: that its GPU is reset.
        passed: what the places asked for that were passed unseen, in their order.
        is_new_iteration: whether its place has gone back.
    """

    place: int | None
    value: int
    passed: tuple[int, ...]
    is_new_iteration: bool


class Places:
    """One rank's way through its program, as far as it is seen."""

    def __init__(self) -> None:
        self._word = NOTHING
        self._place: int | None = None  #: of the last word that had one
        self._values: dict[int, int] = {}

    def look(self, word: int) -> Look | None:
        """What the word says; None where it is the same as before."""
        if word == self._word:
            return None
        self._word = word
        place, value = place_and_value(word)
        if place is None:
            return Look(None, 0, (), False)
        before, self._place = self._place, place
        is_new_iteration = before is not None and place < before
        passed = self._passed(0 if before is None or is_new_iteration else before + 1, place)
        if place < _REMEMBERED:
            self._values[place] = value
        return Look(place, value, passed, is_new_iteration)

    def _passed(self, start: int, end: int) -> tuple[int, ...]:
        if end - start > FARTHEST:
            return ()
        return tuple(self._values[place] for place in range(start, end) if place in self._values)
