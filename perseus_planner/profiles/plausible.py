"""Whether the rows of a profile can be true: one rule, for files, sweeps and what training learnt.

Wrong units, energy counters that stood still or wrapped and digits that got lost all look like
savings. What is checked, on each GPU of a stage:

1. Clocks are clocks: a few hundred to a few thousand MHz, and power limits are watts.
2. A GPU that computes draws more than nothing, less than its limit allows, and not much less than
   one that waits.
3. Neighbouring clocks agree. A lower clock makes a computation no faster, and slower at most as the
   clock falls; power falls with it, at most with its third power (frequency times voltage squared).

A row that breaks them by more than noise does is refused. What is merely unusual is said. A
computation without work, of 0 s and 0 J, is exempt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import yaml

from perseus_planner.base.errors import ProfileError
from perseus_planner.base.prefixes import counted, si
from perseus_planner.profiles.csv_file import CONTROLS, unit_of, word_of
from perseus_planner.profiles.keys import Key
from perseus_planner.profiles.measurement import Measurement

Rows = Mapping[Key, Sequence[Measurement]]
"""Measurements, highest clock first."""

_UNKNOWN_LIMIT_W = 3000.0
"""The most that a GPU may draw that the catalogue does not have, watts. The largest that were
announced draw 2.3 kW."""
_HEADROOM = 1.5
"""A GPU draws at most so many times the limit of the catalogue: boards are sold with higher ones
(500 W of an A100 for 400 W), and counters are off by a few percent."""
_ROUNDED = 1.001  #: estimates may be at the limit, and files round
_LEAST_W = 5.0
"""The least that a GPU draws while it computes, watts: the smallest idle at 8 W."""
_WAITING_AT_ZERO = 0.4
"""The least share of the blocking power that a computation draws as its clock falls to 0, of the
highest one. A waiting GPU polls at the highest clock; about half of what it draws is static."""
_WAITING_AT_TOP = 0.8
"""The same at the highest clock: both run at one clock, so what is left is errors of windows."""
_NEARLY_IDLE = 0.25
"""The same of a computation that takes next to no time, which may leave the GPU idle between
launches: idle GPUs draw a third of waiting ones (35 W and 110 W of an L40S)."""
_NEARLY_NO_TIME = 0.05
"""A computation takes next to no time if it takes less than this share of the median one."""
_LAUNCHES_S = 1e-3
"""Or less than this, seconds: it is mostly launches then, and its energy is mostly noise."""
_TIMES_WAITING = 10.0
"""More than so many times the blocking power is unusual: measured profiles have at most 5.8."""
_JUMP = 1.5
"""Neighbouring clocks may be further apart than physics lets them by this factor: measured ones are
by at most 1.07, and short windows are off by a few percent."""
_ERRORS = 4.0
"""Further apart by so many of the standard errors that rows state: those that training learnt
beside other work are off by several percent."""
_MOST_ERROR = 0.25  #: of which so large a share of a row counts at most
_POWER_EXPONENT = 3  #: of the clock; see above
_LIMIT_EXPONENT = 3
"""Of a power limit, for times: near the static power, a little of it is much of the clock."""
_CLOCKS_MHZ = (50, 4000)
"""Clocks of GPUs, MHz: the lowest that drivers list is 114, the highest 3.2 GHz."""
_LEAST_TOP_MHZ = 400  #: the highest clock of a profile is no lower, MHz: small GPUs reach 800
_LIMITS_W = (10, 3000)  #: power limits of GPUs, watts
_LEAST_TOP_W = 50  #: the highest power limit of a profile is no lower, watts
_OVER_LIMIT = 1.5  #: a GPU draws at most so many times the power limit that is set
_UNDER_LIMIT = 0.2  #: some computation reaches this share of a power limit, or none has an effect
_GAP = 3.0  #: neighbouring clocks that are further apart, as a factor, are unusual
_OTHER_CLOCK = 5.0  #: how far off a clock must be, as a factor, to stand in for another one
_LONGEST_S = 30.0  #: a computation of one microbatch that takes longer is unusual, seconds
_SAME_UNIT = 300.0  #: a factor above it is that of a unit (1000), and not of GPUs or microbatches


class Doubt(NamedTuple):
    """What is wrong with a row, or unusual."""

    key: Key
    clock: int  #: its clock, MHz, or its power limit, watts
    column: str  #: that is likely to be wrong: "time", "energy" or "clock"
    problem: str  #: what is wrong, what may be the cause, and what to do
    is_refused: bool  #: whether it cannot be true


class _Judged(NamedTuple):
    """Rows, and what is known of them."""

    rows: Rows  #: those that have work
    control: str
    gpus: int  #: of a stage
    waiting_w: Callable[[int], float]  #: stage -> power of its GPUs while they wait, watts
    most_w: float  #: that one GPU draws, watts
    is_learnt: bool  #: while training, beside other work

    def short(self) -> set[Key]:
        """Return the computations that take next to no time."""
        if not self.rows:
            return set()
        usual_s = median(rows[0].time_s for rows in self.rows.values())
        least_s = max(_LAUNCHES_S, _NEARLY_NO_TIME * usual_s)
        return {key for key, rows in self.rows.items() if rows[0].time_s < least_s}

    def power_w(self, row: Measurement) -> float:
        """Return the power of one GPU, watts."""
        return row.power_w / self.gpus


def find_doubts(
    rows: Rows,
    control: str,
    gpus: int,
    waiting_w: Callable[[int], float],
    gpu: str | None = None,
    *,
    is_learnt: bool = False,
) -> list[Doubt]:
    """Return what cannot be true of the rows of a profile, and then what is unusual.

    Args:
        rows: measurements, highest clock first; energies of all GPUs of a stage.
        control: what was set for each row, as in `Profile`.
        gpus: the number of GPUs of a stage.
        waiting_w: returns the power of a stage's GPUs while they wait, watts; 0 if it is not known.
        gpu: the name of the GPU.
        is_learnt: whether training learnt them. Rows that only disagree, with each other or with
            what a waiting GPU draws, are said and not refused then: no window was their own.
    """
    # Computations without work have nothing that could be false.
    busy = {key: key_rows for key, key_rows in rows.items() if key_rows[0].has_work}
    judged = _Judged(busy, control, gpus, waiting_w, most_power_w(gpu), is_learnt)
    doubts = [
        *_setting_doubts(judged),
        *_power_doubts(judged),
        *_limit_doubts(judged),
        *_jump_doubts(judged),
        *_unusual(judged),
    ]
    # What cannot be true comes first, as it is refused.
    return sorted(doubts, key=lambda doubt: not doubt.is_refused)


def refuse_doubtful(doubts: Sequence[Doubt], place_of: Callable[[Doubt], str]) -> None:
    """Refuse rows that cannot be true.

    Args:
        doubts: those of `find_doubts`.
        place_of: returns where a row stands, such as a file, a line and a column.

    Raises:
        ProfileError: If there is such a row; names the first.
    """
    for doubt in doubts:
        if doubt.is_refused:
            raise ProfileError(f"{place_of(doubt)}: {doubt.problem}")


def row_name(doubt: Doubt, control: str) -> str:
    """Return the name of the row that is doubted, for people."""
    name = word_of(doubt.key.name)
    return f"stage {doubt.key.stage} {name} at {doubt.clock} {unit_of(control)}"


def column_of(doubt: Doubt, control: str) -> str:
    """Return the column of a CSV that is doubted."""
    return CONTROLS[control] if doubt.column == "clock" else doubt.column


def most_power_w(gpu: str | None) -> float:
    """Return the most that a GPU of this name can draw on average, watts."""
    # Names of drivers and of the catalogue share words, and not their order.
    words = re.split(r"[^a-z0-9]+", (gpu or "").lower())
    limits = _catalogue_limits()
    alike_parts: dict[str, int] = {}
    for name in limits:
        first, *form = name.split("-")
        if first in words:
            # "NVIDIA A100-SXM4-80GB" is an a100-sxm, and "NVIDIA H100 80GB HBM3" may be any H100.
            alike_parts[name] = sum(any(word.startswith(part) for word in words) for part in form)
    if not alike_parts:
        return _UNKNOWN_LIMIT_W
    # The largest limit of the closest names, so that no GPU is refused for another's limit.
    closest = max(alike_parts.values())
    return _HEADROOM * max(limits[name] for name, alike in alike_parts.items() if alike == closest)


@cache
def _catalogue_limits() -> Mapping[str, float]:
    """Return the largest power limit of each GPU of the catalogue of simulated ones, watts."""
    file = Path(__file__).parents[1] / "gpu" / "simulated" / "gpus.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    with file.open(encoding="utf-8") as text:
        _, gpus = yaml.load_all(text, loader)
    return {name: float(gpu["power_limits_w"][1]) for name, gpu in gpus.items()}


def power_problem(power_w: float, gpu: str | None = None) -> str | None:
    """Return why one GPU cannot draw this power on average; None if it can."""
    most_w = most_power_w(gpu)
    if power_w <= most_w:
        return None
    cause = "are these milliwatts?" if power_w > 10 * most_w else "is it that of one GPU?"
    return f"{si(power_w, 'W', 4)} for one GPU, which draws {si(most_w, 'W', 4)} at most; {cause}"


def _setting_doubts(judged: _Judged) -> Iterator[Doubt]:
    """Yield clocks that are none, and power limits that are none."""
    is_limit = judged.control == "power-limit"
    least, most = _LIMITS_W if is_limit else _CLOCKS_MHZ
    unit = unit_of(judged.control)
    # The highest clock of all shows a wrong unit, where a single low one may be right.
    top = max((row.clock_mhz for rows in judged.rows.values() for row in rows), default=most)
    least_top = _LEAST_TOP_W if is_limit else _LEAST_TOP_MHZ
    for key, rows in judged.rows.items():
        for row in rows:
            value = row.clock_mhz
            if value > most:
                # Each wrong unit is off by its own factor, which names the likely cause.
                cause = f"write whole {unit}"
                if is_limit:
                    cause = "are these milliwatts?"
                elif value >= _SAME_UNIT * 1e6:
                    cause = "are these Hz?"
                elif value >= _SAME_UNIT * 1e2:
                    cause = "are these kHz?"
                what = "power limit" if is_limit else "clock"
                problem = f"{value} {unit} is no {what} of a GPU, {most} at most; {cause}"
                yield Doubt(key, value, "clock", problem, True)
            elif value < least or top < least_top:
                cause = "are these GHz?" if value < 10 and not is_limit else f"write whole {unit}"
                what = f"below {least}" if value < least else f"the highest of all is {top}"
                problem = f"{value} {unit} is too low for a GPU: {what}; {cause}"
                yield Doubt(key, value, "clock", problem, True)


def _power_doubts(judged: _Judged) -> Iterator[Doubt]:
    """Yield rows in which a GPU draws more than it can, or less than while it waits."""
    # Power falls with the clock, and so does the least that is believed.
    top = max((row.clock_mhz for rows in judged.rows.values() for row in rows), default=1)
    short = judged.short()
    high: list[tuple[Key, Measurement]] = []
    low: list[tuple[Key, Measurement]] = []
    for key, rows in judged.rows.items():
        waiting_w = judged.waiting_w(key.stage) / judged.gpus
        for row in rows:
            share = _WAITING_AT_ZERO + (_WAITING_AT_TOP - _WAITING_AT_ZERO) * row.clock_mhz / top
            # Launches leave a GPU idle, so brief computations may draw little.
            if key in short:
                share = _NEARLY_IDLE
            if judged.power_w(row) > _ROUNDED * judged.most_w:
                high.append((key, row))
            elif judged.power_w(row) < max(_LEAST_W, share * waiting_w):
                low.append((key, row))
    # All rows are judged first, as units are wrong in nearly all rows and errors in few.
    for key, row in high:
        yield Doubt(key, row.clock_mhz, "energy", _too_high(judged, key, row, high), True)
    for key, row in low:
        column, problem = _too_low(judged, key, row, low)
        # Beside other work power is known less well, but never that badly.
        is_refused = not judged.is_learnt or judged.power_w(row) < _LEAST_W
        yield Doubt(key, row.clock_mhz, column, problem, is_refused)


def _is_single(judged: _Judged, key: Key, wrong: Sequence[tuple[Key, Measurement]]) -> bool:
    """Return whether few rows of a computation are wrong, so that it is not a matter of units."""
    rows = [row for key_of_row, row in wrong if key_of_row == key]
    return len(rows) < len(judged.rows[key]) / 2


def _too_high(
    judged: _Judged, key: Key, row: Measurement, wrong: Sequence[tuple[Key, Measurement]]
) -> str:
    power_w = judged.power_w(row)
    # Three times what a waiting GPU draws, or a fifth of the most, is near the middle of what GPUs
    # draw: close enough to tell units, which differ by 1000.
    usual_w = 3 * judged.waiting_w(key.stage) / judged.gpus or judged.most_w / 5
    cause = (
        "is this the energy of several GPUs (gpus_per_stage of a profile.yaml says how many), or "
        "of several computations?"
    )
    if _is_single(judged, key, wrong):
        cause = "did the counter wrap? Measure the row again, or leave it out"
    elif power_w > _SAME_UNIT * 1e3 * usual_w:
        cause = "are these microjoules?"
    elif power_w > _SAME_UNIT * usual_w or row.energy_j > 1e3 * row.time_s * 10:
        cause = "are these millijoules?"
    return (
        f"{si(row.energy_j, 'J', 4)} in {si(row.time_s, 's', 4)} are {si(power_w, 'W', 4)} for one "
        f"GPU, which draws {si(judged.most_w, 'W', 4)} at most; {cause}"
    )


def _too_low(
    judged: _Judged, key: Key, row: Measurement, wrong: Sequence[tuple[Key, Measurement]]
) -> tuple[str, str]:
    """Return the column that is likely to be wrong, and the problem."""
    power_w = judged.power_w(row)
    waiting_w = judged.waiting_w(key.stage) / judged.gpus
    time = si(row.time_s, "s", 4)
    # A counter that did not move is another fault than a wrong unit.
    if row.energy_j == 0.0:
        return "energy", (
            f"0 J in {time}: the energy counter did not move in that time; measure the row in a "
            "longer window, or leave it out (where no work is done, the time is 0 as well)"
        )
    # The factor of the error tells its unit.
    factor = max(_LEAST_W, waiting_w) / power_w
    column = "energy"
    cause = "did the counter stand still, or wrap? Measure the row again"
    if not _is_single(judged, key, wrong):
        cause = (
            "is the blocking power that of one waiting GPU, and the energy that of all GPUs of "
            "the stage?"
        )
        # Seconds of a thousand times the usual length look like low power.
        if factor > _SAME_UNIT / 10 and row.time_s >= 1.0:
            of_million = row.time_s >= _SAME_UNIT * 1e2
            column = "time"
            cause = f"are these {'micro' if of_million else 'milli'}seconds?"
        elif factor > _SAME_UNIT / 10:
            cause = "are these kilojoules, or watt-hours?"
    return column, (
        f"{si(row.energy_j, 'J', 4)} in {time} are {si(power_w, 'W', 4)} for a GPU that computes, "
        f"and one that waits draws {si(waiting_w, 'W', 4)}; {cause}"
    )


def _limit_doubts(judged: _Judged) -> Iterator[Doubt]:
    """Yield rows that do not fit the power limit that was set."""
    if judged.control != "power-limit":
        return
    # A limit is of one GPU, and what it draws on average lies below it.
    shares = {
        (key, row.clock_mhz): judged.power_w(row) / row.clock_mhz
        for key, rows in judged.rows.items()
        for row in rows
    }
    for (key, limit), share in shares.items():
        if share > _OVER_LIMIT:
            problem = (
                f"a GPU draws {share * limit:.0f} W under a limit of {limit} W; are these the "
                "watts of one GPU?"
            )
            yield Doubt(key, limit, "clock", problem, True)
    # A limit that nothing comes near has no effect, or is of several GPUs.
    if shares and max(shares.values()) < _UNDER_LIMIT:
        (key, limit), share = max(shares.items(), key=lambda item: item[1])
        problem = (
            f"a GPU draws {share * limit:.0f} W under a limit of {limit} W, and never comes near "
            "any limit; are these the watts of one GPU?"
        )
        yield Doubt(key, limit, "clock", problem, True)


def _jump_doubts(judged: _Judged) -> Iterator[Doubt]:
    """Yield rows that are further from neighbouring clocks than physics and noise allow."""
    # Brief computations are mostly launches, whose energy is noise.
    short = judged.short()
    for key, rows in judged.rows.items():
        if key in short or not any(_are_apart(judged, *pair) for pair in pairwise(rows)):
            continue
        place = _most_contradicted(judged, rows)
        # The neighbour shows the jump to people, so it is the nearest one that disagrees.
        near = min(_contradicting(judged, rows, place), key=lambda other: abs(other - place))
        row = rows[place]
        neighbour = rows[near]
        # Rows are ordered by clock, highest first.
        column = _are_apart(judged, rows[min(place, near)], rows[max(place, near)]) or "energy"
        unit = unit_of(judged.control)
        problem = (
            f"{si(row.time_s, 's', 4)} and {si(row.energy_j, 'J', 4)} at {row.clock_mhz} {unit} do "
            f"not go with {si(neighbour.time_s, 's', 4)} and {si(neighbour.energy_j, 'J', 4)} at "
            f"{neighbour.clock_mhz} {unit}; did the counter wrap, or is a digit wrong? Measure the "
            "row again, or leave it out"
        )
        yield Doubt(key, row.clock_mhz, column, problem, not judged.is_learnt)


def _most_contradicted(judged: _Judged, rows: Sequence[Measurement]) -> int:
    """Return the place of the row that disagrees with the most others, the first of several: where
    two rows disagree, it tells which of them is the wrong one.
    """
    return max(range(len(rows)), key=lambda place: len(_contradicting(judged, rows, place)))


def _contradicting(judged: _Judged, rows: Sequence[Measurement], place: int) -> list[int]:
    """Return the places of the rows that do not go together with the row at `place`."""
    return [
        other
        for other in range(len(rows))
        if other != place
        and _are_apart(judged, rows[min(place, other)], rows[max(place, other)]) is not None
    ]


def _are_apart(judged: _Judged, high: Measurement, low: Measurement) -> str | None:
    """Return the column in which two rows do not go together, the one of the higher clock first;
    None if they do.
    """
    # A lower clock is no faster, and slower at most in proportion.
    slower = low.time_s / high.time_s
    ratio = high.clock_mhz / low.clock_mhz
    is_limit = judged.control == "power-limit"
    # Under a power limit the clock is not known, so time may grow faster than the limit falls.
    most_slower = ratio**_LIMIT_EXPONENT if is_limit else ratio
    # Noise of both rows widens what is allowed.
    time_jump = _JUMP * (1.0 + _ERRORS * (_time_error(high) + _time_error(low)))
    if not 1 / time_jump <= slower <= most_slower * time_jump:
        return "time"
    # Powers cannot be compared with 0.
    if low.energy_j == 0.0 or high.energy_j == 0.0:
        return "energy"
    # Power falls with the clock, at most with its third power.
    weaker = high.power_w / low.power_w
    most_weaker = ratio if is_limit else ratio**_POWER_EXPONENT
    error = _time_error(high) + _time_error(low) + _energy_error(high) + _energy_error(low)
    jump = _JUMP * (1.0 + _ERRORS * error)
    return None if 1 / jump <= weaker <= most_weaker * jump else "energy"


def _time_error(row: Measurement) -> float:
    """Return the standard error of a row's time, as a share of it."""
    if row.evidence is None:
        return 0.0
    return min(row.evidence.time_stderr_s / row.time_s, _MOST_ERROR)


def _energy_error(row: Measurement) -> float:
    """Return the standard error of a row's energy, as a share of it."""
    if row.evidence is None or not row.energy_j:
        return 0.0
    return min(row.evidence.energy_stderr_j / row.energy_j, _MOST_ERROR)


def _unusual(judged: _Judged) -> Iterator[Doubt]:
    """Yield what may be true, and is not usual."""
    yield from _unusual_powers(judged)
    yield from _unusual_clocks(judged)
    longest = [
        (key, row)
        for key, rows in judged.rows.items()
        for row in rows
        if row.time_s > _LONGEST_S and len(judged.rows) > 1
    ]
    if longest:
        key, row = longest[0]
        problem = f"a computation takes {si(row.time_s, 's', 4)}; are these milliseconds?"
        yield Doubt(key, row.clock_mhz, "time", problem, False)


def _unusual_powers(judged: _Judged) -> Iterator[Doubt]:
    """Yield the row that draws the most, if that is many times what a waiting GPU draws."""
    # Where waiting draws next to nothing, every power is many times that.
    drawn = [
        (row.power_w / judged.waiting_w(key.stage), key, row)
        for key, rows in judged.rows.items()
        for row in rows
        if judged.waiting_w(key.stage) > _LEAST_W * judged.gpus
    ]
    times, key, row = max(drawn, key=lambda entry: entry[0], default=(0.0, Key(0, "F"), None))
    if row is not None and times > _TIMES_WAITING:
        problem = (
            f"a GPU that computes draws {si(judged.power_w(row), 'W', 4)}, {times:.0f} times what "
            "one that waits draws; check the units, and that the blocking power is that of a GPU "
            "that waits for its neighbour"
        )
        yield Doubt(key, row.clock_mhz, "energy", problem, False)


def _unusual_clocks(judged: _Judged) -> Iterator[Doubt]:
    """Yield clocks that stand alone."""
    # Observed clocks are one for each computation, so they are compared with each other.
    if judged.control == "observed":
        clocks = {key: rows[0].clock_mhz for key, rows in judged.rows.items()}
        middle = median(clocks.values()) if clocks else 0
        for key, clock in clocks.items():
            if max(clock / middle, middle / clock) > _GAP:
                problem = f"{clock} MHz are far from {middle:g} MHz of other computations"
                yield Doubt(key, clock, "clock", problem, False)
        return
    unit = unit_of(judged.control)
    for key, rows in judged.rows.items():
        # A sweep sets the same clocks for all computations, so one that stands out may be mistyped.
        mine = {row.clock_mhz for row in rows}
        others = [
            {row.clock_mhz for row in other_rows}
            for name, other_rows in judged.rows.items()
            if name != key
        ]
        extra = mine.difference(*others)
        missing = set.intersection(*others) - mine if others else set()
        if len(extra) == len(missing) == 1:
            (clock,) = extra
            (wanted,) = missing
            if max(clock / wanted, wanted / clock) > _OTHER_CLOCK:
                problem = (
                    f"{clock} {unit} stands where all other computations have {wanted} {unit}; is "
                    "a digit wrong?"
                )
                yield Doubt(key, clock, "clock", problem, True)
                continue
        # Two rows may be far apart on purpose.
        for high, low in pairwise(rows):
            if len(rows) > 2 and high.clock_mhz / low.clock_mhz > _GAP:
                problem = (
                    f"there is no row between {low.clock_mhz} and {high.clock_mhz} {unit}; are "
                    f"both right, among {counted(len(rows), 'row')}?"
                )
                yield Doubt(key, low.clock_mhz, "clock", problem, False)
