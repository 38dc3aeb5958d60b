"""A computation of an iteration, and its text."""

from __future__ import annotations

import re
from typing import NamedTuple

from perseus_planner.base.errors import ScheduleError, shown

KINDS = (
    "F",
    "B",
    "I",
    "W",
)  #: forward, full backward, gradient of the input alone, gradient of the weights alone

# Python limits the length of numbers that it reads, and does not read them in linear time.
_COMPUTATION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")


class Computation(NamedTuple):
    """One forward or backward of one microbatch on one stage; its `str()` is its text, such as
    `3F17`.

    A backward is either whole, B, or in two parts: I, which the previous stage waits for, and W,
    which nothing waits for.
    """

    stage: int
    kind: str  #: one of `KINDS`
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Computation:
        """Return the computation with this text.

        Raises:
            ScheduleError: If the text is not that of a computation.
        """
        match = _COMPUTATION.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{shown(text)} is not a computation; write stage, kind (F, B, I or W) and "
                "microbatch, e.g. 3F17"
            )
        return cls(int(match[1]), match[2], int(match[3]))
