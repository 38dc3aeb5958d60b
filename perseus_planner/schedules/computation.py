"""One computation of an iteration, and its text."""

from __future__ import annotations

import re
from typing import NamedTuple

from perseus_planner.errors import ScheduleError, shown

KINDS = ("F", "B", "I", "W")  #: forward, full backward, gradient of the input alone, gradient of the weights alone

# Python itself reads numbers of any length only up to a limit, and not in linear time.
_COMPUTATION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")


class Computation(NamedTuple):
    """One forward or backward of one microbatch on one stage; `str()` of it is its text, e.g. `3F17`.

    A backward is either whole, B, or in two parts: I, which the stage before waits for, and W, which nothing waits for.
    """

    stage: int
    kind: str  #: one of `KINDS`
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Computation:
        """Inverse of `str()`.

        Raises:
            ScheduleError: the text is no computation.
        """
        match = _COMPUTATION.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{shown(text)} is no computation; write stage, kind (F, B, I or W) and microbatch, e.g. 3F17"
            )
        return cls(int(match[1]), match[2], int(match[3]))
