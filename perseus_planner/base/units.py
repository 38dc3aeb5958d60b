"""The numbers that the planner takes, each with its unit: one rule and one error text wherever a
number comes from.

Python calls, YAML and CSV files and the command line all check a number by its `Rule`, so a wrong
one is refused in the same words everywhere.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from perseus_planner.base.errors import PlannerError, UsageError, shown

_WHOLE = re.compile(r"(?<=\d)\.0+\s*$")


class Rule(NamedTuple):
    """What a number must be.

    Attributes:
        least, most: the smallest and the largest number that are allowed.
    """

    number_type: Callable[[Any], float]  #: int or float
    zero: bool  #: whether 0 is allowed
    wanted: str  #: what the number must be, in words; completes the sentence "5 is not ..."
    negative: bool = False  #: whether numbers below 0 are allowed
    most: float = math.inf
    least: float = -math.inf

    def accept(self, value: object) -> Any:
        """Return `value` as a plain int or float, or None if it breaks the rule."""
        allowed = numbers.Integral if self.number_type is int else numbers.Real
        # True is an int in Python, and no number in a file.
        if isinstance(value, bool) or not isinstance(value, allowed):
            return None
        try:
            # -0.0 becomes 0.0, so that equal profiles have equal files.
            number = self.number_type(value) + 0
            good = math.isfinite(number) and (
                number > 0 or (self.zero and number == 0) or (self.negative and number)
            )
        # Of a whole number that no float reaches.
        except OverflowError:
            return None
        return number if good and self.least <= number <= self.most else None

    def parse(self, text: str) -> Any:
        """Return the number that `text` writes, or None if it is not a number or breaks the
        rule. A whole number may have a point and zeros: pandas writes 1410.0 where a column has a
        gap.
        """
        written = _WHOLE.sub("", text) if self.number_type is int else text
        try:
            # Python reads 1_000 as a number; other programs do not.
            return None if "_" in text else self.accept(self.number_type(written))
        except ValueError:
            return None

    def check(self, value: object, where: str, error: type[PlannerError] = UsageError) -> Any:
        """Return `value` as a plain int or float.

        Args:
            value: the number.
            where: the name of the field or its place in a file; the error text begins with it.
            error: the type of error to raise.

        Raises:
            PlannerError: If `value` breaks the rule; of the type `error`.
        """
        number = self.accept(value)
        if number is None:
            raise error(f"{where}: {shown(value)} is not {self.wanted}")
        return number

    def read(self, text: str, where: str, error: type[PlannerError] = UsageError) -> Any:
        """Return the number that `text` writes; arguments and errors are those of `check`."""
        number = self.parse(text)
        if number is None:
            raise error(f"{where}: {shown(text)} is not {self.wanted}")
        return number


INDEX = Rule(int, True, "a whole number of 0 or more")
STAGE = Rule(int, True, "a stage number: write 0 for the first stage, 1 for the next, and so on")
RATE = Rule(float, False, "a rate: write requests per second above 0, such as 2.5")
COUNT = Rule(int, False, "a whole number of at least 1")
CHANGES = Rule(int, True, "a number of clock changes: give a whole number of 0 or more")
CLOCK = Rule(int, False, "a clock: write whole MHz above 0, such as 1410")
LIMIT = Rule(int, False, "a power limit: write whole watts above 0, such as 250")
TEMPERATURE = Rule(float, True, "a temperature: write degrees Celsius of 0 or more, such as 61")
TIME = Rule(float, False, "a time: write finite seconds above 0, such as 0.0512")
COMPUTED = Rule(float, True, TIME.wanted)
"""The time of a computation, which is 0 where it has no work."""
ENERGY = Rule(float, True, "an energy: write finite joules of 0 or more, such as 23.8")
FINITE = Rule(float, True, "a finite number", negative=True)
POWER = Rule(float, True, "a power: give finite watts of 0 or more, such as 83.64")
POWER_BOUND = Rule(float, False, "a power: give finite watts above 0, such as 400")
BANDWIDTH = Rule(float, False, "a bandwidth: give GB/s above 0, such as 50")
WAIT = Rule(float, True, "a wait: give finite seconds of 0 or more, such as 0.002")
MINUTES = Rule(float, False, "a number of minutes above 0, such as 30")
OFFSET = Rule(float, True, "an overhead: write finite seconds, such as 0.12", negative=True)
PROBABILITY = Rule(
    float, False, "a probability: give a number above 0 and up to 0.99, such as 0.95", most=0.99
)
ON_TIME = 0.95
"""The probability of being on time that plans are made for unless another one is given."""
BYTES = Rule(float, True, "a number of bytes: give one of 0 or more, such as 40e9")
SHARE = Rule(float, True, "a share: give a number of 0 or more, such as 0.001")
FACTOR = Rule(
    float, False, "a slowdown: give how many times as long it takes, above 0, such as 1.15"
)


class Quantity(NamedTuple):
    """A number with a unit: the rule for its value in SI units, and its units as multiples of
    those.
    """

    rule: Rule
    units: Mapping[str, Fraction | int]
    #: a number of seconds without a unit that is at least this is asked about: is it of ms?
    bare_below: float = math.inf

    def read(self, text: str, name: str) -> float:
        """Return the value that `text` writes, in SI units.

        Args:
            text: a number and a unit with or without a space between, such as "2.95s".
            name: the name of the value in error messages, such as "--deadline".

        Raises:
            UsageError: If the text is not such a quantity.
        """
        # Any text before the last letters, so that a wrong number is told as such.
        number, unit = re.fullmatch(r"(.*?)\s*([A-Za-z%]*)", text.strip(), re.DOTALL).groups()  # type: ignore[union-attr]
        value = self.rule.parse(number)
        factor = self.units.get(unit)
        if value is not None and factor is not None:
            # A number that is likely of another unit is asked about, not guessed.
            if not unit and value >= self.bare_below:
                raise UsageError(
                    f"{name}: {shown(text)} has no unit; is it {number}ms or {number}s?"
                )
            # By a ratio of whole numbers: times 0.001 would not give the float of 1.5 ms. Checked
            # again, as what is above 0 may be none in SI units.
            value = self.rule.accept(value * factor.numerator / factor.denominator)
            if value is not None:
                return float(value)
        raise UsageError(f"{name}: {shown(text)} is not {self.rule.wanted}")


_WATTS = MappingProxyType(
    {"": 1, "W": 1, "w": 1, "kW": 10**3, "kw": 10**3, "KW": 10**3, "MW": 10**6}
)
_PARTS = {"us": Fraction(1, 10**6), "ms": Fraction(1, 10**3)}
_SECONDS: Mapping[str, Fraction | int] = MappingProxyType(
    {"": 1, **_PARTS, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
)

DURATION = Quantity(
    Rule(
        float,
        False,
        "a duration: write seconds above 0, or a number with us, ms, s, m, h or d, such as 2.95s",
    ),
    _SECONDS,
)
LAG = Quantity(
    Rule(
        float,
        True,
        "a duration: write seconds of 0 or more, or a number with us, ms, s, m, h or d, such as "
        "1.5ms or 30m",
    ),
    _SECONDS,
)
#: a bare number from a tenth of a second on would be longer than most computations
TRANSFER = LAG._replace(bare_below=0.1)
OVERHEAD = Quantity(
    Rule(
        float,
        True,
        "a duration: write seconds, or a number with us, ms, s, m, h or d, such as 120ms",
        negative=True,
    ),
    _SECONDS,
)
MINUTES_LIMIT = Quantity(
    Rule(
        float,
        False,
        "a time limit: write minutes above 0, or a number with s, m, h or d, such as 30m",
    ),
    MappingProxyType({"": 1, "s": Fraction(1, 60), "m": 1, "min": 1, "h": 60, "d": 1440}),
)
SLOWDOWN = Quantity(
    Rule(
        float,
        False,
        "a slowdown: write a number above 0, where 1 is as fast as all clocks at maximum, such as "
        "1.05",
    ),
    MappingProxyType({"": 1, "x": 1}),
)
POWER_BUDGET = Quantity(
    Rule(float, False, "a power: write watts above 0, or a number with W, kW or MW, such as 5kW"),
    _WATTS,
)
TOKENS = Quantity(
    Rule(float, False, "a number of tokens: write one above 0, such as 26e9, 26B or 1.4T"),
    MappingProxyType({"": 1, "M": 10**6, "B": 10**9, "T": 10**12}),
)
BLOCKING_POWER = Quantity(
    Rule(
        float,
        True,
        "the power of one GPU that waits: write watts of 0 to 5000, such as 83.64",
        most=5000.0,
    ),
    _WATTS,
)
CARBON = Quantity(
    Rule(float, True, "what a kWh emits: give g or kg of CO2e with the unit, such as 400g"),
    MappingProxyType({"g": 1, "kg": 1000}),
)
CERTAINTY = Quantity(
    Rule(
        float,
        False,
        "a certainty: write a percentage above 0% and up to 99%, such as 95%",
        most=99.0,
    ),
    MappingProxyType({"%": Fraction(1, 100)}),
)
TOLERANCE = Quantity(
    Rule(float, True, "a tolerance: write a percentage of 0% or more, such as 0.1%"),
    CERTAINTY.units,
)
SHARE_WITHIN = Quantity(
    Rule(
        float,
        False,
        "a share: write a percentage above 0% and up to 100%, such as 0.3%",
        most=100.0,
    ),
    CERTAINTY.units,
)
SPREAD = Quantity(
    Rule(float, True, "a spread: write a percentage from 0% to 100%, such as 2%", most=100.0),
    CERTAINTY.units,
)

# The types of fields with these rules; see `base.fields`.
Index = Annotated[int, INDEX]
Count = Annotated[int, COUNT]
Changes = Annotated[int, CHANGES]
ClockMhz = Annotated[int, CLOCK]
Seconds = Annotated[float, TIME]  #: above 0
ComputedSeconds = Annotated[float, COMPUTED]  #: above 0, or 0 of a computation without work
Finite = Annotated[float, FINITE]
Wait = Annotated[float, WAIT]  #: seconds, 0 or more
Offset = Annotated[float, OFFSET]  #: seconds, also below 0
Joules = Annotated[float, ENERGY]
Watts = Annotated[float, POWER]  #: 0 or more
PowerBound = Annotated[float, POWER_BOUND]  #: watts, above 0
Celsius = Annotated[float, TEMPERATURE]
Minutes = Annotated[float, MINUTES]
Probability = Annotated[float, PROBABILITY]
Share = Annotated[float, SHARE]
Factor = Annotated[float, FACTOR]
