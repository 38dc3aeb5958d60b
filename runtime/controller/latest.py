"""When the computations of an iteration must start at the latest: what a rank writes for its
controller, which then gives a rank that is late faster clocks.

The tables lie in the memory that both share. Each has a number, which comes with the requests of
the iteration that it is for, so that neither needs a message, nor the training thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Row = Sequence[tuple[int, int]]

_TABLES, _WORDS = 4, 4096  #: that are kept, as the device may be iterations behind; of each table
_HEADER = 3  #: words: number of the table, rows, and entries of a row
_NUMBERS = 0xFFFF  #: of tables, as many as a request can name

LATEST_BYTES = 8 * _TABLES * _WORDS
"""Size of the memory for `LatestStarts`."""


class LatestStarts:
    """The tables of one rank.

    A row is that of a computation: the clock that is planned (MHz or watts) and faster ones,
    slowest first, each with its latest start, in nanoseconds after the rank's first computation of
    the iteration has begun.

    Args:
        memory: `LATEST_BYTES` that rank and controller share.
    """

    def __init__(self, memory: memoryview) -> None:
        self._words = memory.cast("q")

    def write(self, iteration: int, rows: Sequence[Row]) -> int:
        """Write the table of an iteration, over an old one.

        Of rows that are too long for the memory, the planned clock and the fastest ones stay.

        Returns:
            Its number, for `marks.clock_request`; 0 if there are so many computations that there is
            no room.
        """
        most = (_WORDS - _HEADER) // (2 * len(rows))
        if most < 1:
            return 0
        table = 1 + iteration % _NUMBERS
        width = min(most, max(map(len, rows)))
        words = array("q", (len(rows), width))
        for row in rows:
            kept = [*row] if len(row) <= width else [row[0], *row[len(row) - width + 1 :]]
            kept += kept[-1:] * (width - len(kept))
            words.extend(number for entry in kept for number in entry)
        start = self._start(table)
        self._words[start] = 0  # so that no half of a table is read
        self._words[start + 1 : start + 1 + len(words)] = memoryview(words)
        self._words[start] = table
        return table

    def clock(self, table: int, position: int, passed_ns: int) -> int | None:
        """Return the slowest clock of a row whose latest start is not over, or its fastest one.

        Args:
            table: Number of the table.
            position: Number of the row.
            passed_ns: Time since the rank's first computation of the iteration has begun.

        Returns:
            None if there is no such table or row.
        """
        words, start = self._words, self._start(table)
        number, rows, width = words[start : start + _HEADER]
        if number != table or position >= rows or _HEADER + 2 * rows * width > _WORDS:
            return None
        first = start + _HEADER + 2 * position * width
        clock = 0
        for entry in range(first, first + 2 * width, 2):
            clock, latest_ns = words[entry : entry + 2]
            if latest_ns >= passed_ns:
                break
        return clock if words[start] == table and clock > 0 else None

    @staticmethod
    def _start(table: int) -> int:
        return table % _TABLES * _WORDS
