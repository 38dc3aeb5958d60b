"""What the numbers of a profile may be, in one place for the files and for values made in Python."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """What a number must be: its type, whether it may be zero, and that in words."""

    type: Callable[[Any], float]
    zero: bool
    wanted: str

    def accept(self, value: object) -> Any:
        """`value` as a plain int or float, or None when it breaks the rule."""
        allowed = numbers.Integral if self.type is int else numbers.Real
        if isinstance(value, bool) or not isinstance(value, allowed):
            return None
        try:
            number = self.type(value) + 0  # -0.0 becomes 0.0, so that equal profiles have equal files
            good = math.isfinite(number) and (number > 0 or (self.zero and number == 0))
        except OverflowError:
            return None
        return number if good else None

    def parse(self, text: str) -> Any:
        """The number that `text` writes, or None when it writes none or one that breaks the rule."""
        try:
            return None if "_" in text else self.accept(self.type(text))
        except ValueError:
            return None


STAGE = Rule(int, True, "a stage number: write 0 for the first stage, 1 for the next, and so on")
CLOCK = Rule(int, False, "a clock: write whole MHz above 0, such as 1410")
TIME = Rule(float, False, "a time: write finite seconds above 0, such as 0.0512")
ENERGY = Rule(float, True, "an energy: write finite joules of 0 or more, such as 23.8")
POWER = Rule(float, True, "a power: give finite watts of 0 or more, such as 83.64")
