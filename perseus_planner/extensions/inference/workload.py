"""What requests cost, and what is asked of a cluster: inference profiles, traces of requests, rates
by class, their CSV files, and the demand of a period.

A profile has joules of a request by its class, tensor degree, clock (or power limit) and load. The
columns are `input`, `output`, `tensor_degree`, `clock_mhz` or `power_limit_w`, and `energy_j` or
`energy_wh`: of one request, all GPUs of the instance. Leave the energy empty where the latency
objective is violated. Optional columns: `tokens_per_s`, the load of the instance, input and output
tokens; `ttft_s` and `tbt_s`, time to the first token and between tokens; `idle_w`, the power of the
instance without requests; `concurrency`, the requests in flight of a closed loop; `input_token_j`,
`output_token_j`, `input_token_s` and `output_token_s`, what a token costs.

`input` and `output` name the class of a request: short, medium and long, or the most tokens of the
class, such as 256.

A trace has a row for each request, in the order of time: its time, in seconds or as a date, its
input tokens and its output tokens. The columns are `time`, `input_tokens` and `output_tokens`, or
those of the Azure LLM inference traces, `TIMESTAMP`, `ContextTokens` and `GeneratedTokens`. Numbers
in `time` must be plausible as seconds; `time_s`, `time_ms`, `time_us` and `time_ns` say their unit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np

from perseus_planner.base.errors import ProfileError, UsageError, shown
from perseus_planner.base.fields import rules
from perseus_planner.base.files import sha256
from perseus_planner.base.prefixes import si
from perseus_planner.base.tables import CsvFile, CsvRow, Text
from perseus_planner.base.units import (
    CLOCK,
    COUNT,
    ENERGY,
    INDEX,
    LIMIT,
    WAIT,
    Count,
    Rule,
    Seconds,
    Watts,
)

if TYPE_CHECKING:
    import numpy.typing as npt

INPUT_BOUNDS = (256, 1024)
OUTPUT_BOUNDS = (100, 350)
"""Most tokens of the classes short and medium, those of DynamoLLM."""
LOAD_TOKENS_PER_S = 2000.0
"""The load of a row without `tokens_per_s`: that of table I of DynamoLLM."""
_WORDS = ("short", "medium", "long")
_CLASS = (
    "a class of requests; write short, medium or long, or the most tokens of the class, such as 256"
)
_HEADER = "input,output,tensor_degree,clock_mhz,energy_j"
_SETTINGS = {"clock_mhz": ("clock", CLOCK), "power_limit_w": ("power-limit", LIMIT)}
_ENERGIES = {"energy_j": 1.0, "energy_wh": 3600.0}
_ENERGY = ENERGY._replace(
    zero=False, wanted="an energy: write a number above 0, or nothing where it is too slow"
)


@dataclass(frozen=True, order=True)
class RequestClass:
    """Requests of similar length."""

    input_tokens: float  #: most input tokens; infinite if there is no most
    output_tokens: float  #: most output tokens; infinite if there is no most
    name: str = field(compare=False)  #: how the profile names it, such as "short/medium"

    def covers(self, other: RequestClass) -> bool:
        """Return whether no request of `other` is longer, in input or output, than those of this
        class may be.
        """
        return other.input_tokens <= self.input_tokens and other.output_tokens <= self.output_tokens


class Configuration(NamedTuple):
    """How an instance runs: on how many GPUs, and at which clock in MHz (or power limit in
    watts).
    """

    tensor_degree: int
    setting: int


class Point(NamedTuple):
    """An instance under load."""

    tokens_per_s: float  #: input and output tokens of all its requests in a second
    power_w: float  #: power of all its GPUs, watts


_Load = Annotated[
    float, Rule(float, False, "a load: write tokens per second above 0, such as 2000")
]
_Cost = Annotated[
    float, Rule(float, True, "a cost of a token: write a number of 0 or more, or nothing")
]


@dataclass(frozen=True)
class Cell:
    """An instance under load, as measured; its fields have the names of the columns."""

    tokens_per_s: _Load  #: input and output tokens of all requests of the instance in a second
    #: joules of one request, all GPUs of the instance; None where the objective is violated.
    energy_j: float | None
    ttft_s: Seconds | None = None  #: time to the first token, seconds; None if unknown
    tbt_s: Seconds | None = None  #: time between tokens, seconds; None if unknown
    idle_w: Watts = 0.0  #: watts of the instance without requests; 0 if unknown
    #: joules and seconds of the instance for an input token, and for an output token after the
    #: first; None if unknown.
    input_token_j: _Cost | None = None
    output_token_j: _Cost | None = None
    input_token_s: _Cost | None = None
    output_token_s: _Cost | None = None
    concurrency: Count | None = None  #: requests in flight of a closed loop; None for other traffic

    def meets(self, ttft_s: float, tbt_s: float) -> bool:
        """Return whether it meets objectives; what is unknown does."""
        is_fast = (self.ttft_s or 0.0) <= ttft_s and (self.tbt_s or 0.0) <= tbt_s
        return is_fast and self.energy_j is not None

    def carried(self, input_tokens: float, output_tokens: float) -> Point:
        """Return what it carries of requests of so many tokens each, on average: like those that
        were measured, unless the costs of tokens are known.
        """
        tokens = input_tokens + output_tokens
        after = max(0.0, output_tokens - 1.0)
        energy_j = self.energy_j or 0.0
        tokens_per_s = self.tokens_per_s
        if self.input_token_j is not None and self.output_token_j is not None:
            energy_j = input_tokens * self.input_token_j + after * self.output_token_j
        if self.input_token_s is not None and self.output_token_s is not None:
            seconds = input_tokens * self.input_token_s + after * self.output_token_s
            tokens_per_s = tokens / seconds
        return Point(tokens_per_s, energy_j * tokens_per_s / tokens)


@dataclass(frozen=True)
class Objectives:
    """The latency that requests must meet."""

    #: time to the first token, seconds, for each input class, shortest first; or one number for
    #: all. Empty: 0.25 s for inputs of up to 256 tokens, 0.4 s up to 1,024, 2 s beyond, as later
    #: papers quote DynamoLLM.
    ttft_s: tuple[float, ...] = ()
    tbt_s: float = 0.1  #: time between tokens, seconds


@dataclass(frozen=True)
class InferenceProfile:
    """What requests cost, and which configurations meet the objectives."""

    #: class and configuration -> its measurements, by load.
    cells: Mapping[tuple[RequestClass, Configuration], tuple[Cell, ...]]
    control: str  #: "clock" or "power-limit": what is set
    objectives: Objectives  #: the latency objectives
    digest: str  #: of what was read
    assumed_load: bool = False  #: whether the file has no loads, so that one was assumed

    def __post_init__(self) -> None:
        given = len(self.objectives.ttft_s)
        classes = len(self._inputs)
        if given not in (0, 1, classes):
            raise UsageError(
                f"--ttft: has {given} times for {classes} input classes; give one each, or one"
            )

    @cached_property
    def classes(self) -> list[RequestClass]:
        """All classes, shortest first."""
        return sorted({request_class for request_class, _ in self.cells})

    @cached_property
    def configurations(self) -> list[Configuration]:
        """All configurations."""
        return sorted({configuration for _, configuration in self.cells})

    def ttft_s(self, of: RequestClass) -> float:
        """Return the objective of the time to the first token, seconds."""
        given = self.objectives.ttft_s
        if not given:
            # The objectives of DynamoLLM, by the length of the prompt.
            if of.input_tokens <= 256:
                return 0.25
            return 0.4 if of.input_tokens <= 1024 else 2.0
        return given[self._inputs.index(of.input_tokens) if len(given) > 1 else 0]

    def feasible(self, of: RequestClass, at: Configuration) -> tuple[Cell, ...]:
        """Return the measurements that meet the objectives, by load; none if the configuration
        never does. Closed loops have no bursts, so they count only where there are no others.
        """
        return self._feasible.get((of, at), ())

    def idle_w(self, at: Configuration) -> float:
        """Return the power of an instance without requests, watts; 0 if unknown."""
        return max(
            cell.idle_w
            for (_, configuration), cells in self.cells.items()
            if configuration == at
            for cell in cells
        )

    def only(self, allows: Callable[[RequestClass, Configuration], bool]) -> InferenceProfile:
        """Return the profile in which no other classes and configurations meet their objectives."""
        cells = {
            key: cells if allows(*key) else tuple(replace(cell, energy_j=None) for cell in cells)
            for key, cells in self.cells.items()
        }
        return replace(self, cells=cells)

    @cached_property
    def _inputs(self) -> list[float]:
        return sorted({request_class.input_tokens for request_class in self.classes})

    @cached_property
    def _feasible(self) -> dict[tuple[RequestClass, Configuration], tuple[Cell, ...]]:
        feasible = {}
        for (request_class, at), cells in self.cells.items():
            most_s = self.ttft_s(request_class), self.objectives.tbt_s
            # Rows of open loops are like traffic; those of closed loops stand in where there are
            # none.
            others = [cell for cell in cells if cell.concurrency is None] or cells
            good = (cell for cell in others if cell.meets(*most_s))
            feasible[request_class, at] = tuple(sorted(good, key=lambda cell: cell.tokens_per_s))
        return feasible


def read_inference_profile(
    path: Path,
    objectives: Objectives = Objectives(),
    *,
    input_bounds: Sequence[int] = INPUT_BOUNDS,
    output_bounds: Sequence[int] = OUTPUT_BOUNDS,
    load_tokens_per_s: float = LOAD_TOKENS_PER_S,
) -> InferenceProfile:
    """Read the CSV of an inference profile.

    Args:
        path: the file.
        objectives: what rows with latencies must meet.
        input_bounds: most input tokens of the classes short and medium.
        output_bounds: most output tokens of the classes short and medium.
        load_tokens_per_s: load of the rows if the file has no column `tokens_per_s`.

    Raises:
        ProfileError: If the file cannot be read, or a row is wrong.
    """
    table = CsvFile(path, ProfileError, f"the header {_HEADER} and a row for each measurement")
    table.refuse_twice(table.header)
    table.need(("input", "output", "tensor_degree"), _HEADER)
    setting, energy = (table.one_of(names, _HEADER) for names in (_SETTINGS, _ENERGIES))
    cells: dict[tuple[RequestClass, Configuration], dict[float, Cell]] = {}
    names: dict[RequestClass, str] = {}
    for row in table:
        longest = _bound(row, "input", input_bounds), _bound(row, "output", output_bounds)
        # A class is its bounds, so two names with the same bounds are one class.
        request_class = RequestClass(*longest, f"{row['input']}/{row['output']}")
        other_name = names.setdefault(request_class, request_class.name)
        if other_name != request_class.name:
            raise ProfileError(
                f"{path}: {other_name} and {request_class.name} are one class; write it in one way"
            )
        degree = row.read("tensor_degree", COUNT)
        configuration = Configuration(degree, row.read(setting, _SETTINGS[setting][1]))
        # Empty cells are unknown and not 0.
        extra = {
            name: row.read(name, field.rule)
            for name, field in rules(Cell).items()
            if row.cells.get(name)
        }
        load = extra.pop("tokens_per_s", load_tokens_per_s)
        joules = row.read(energy, _ENERGY) * _ENERGIES[energy] if row[energy] else None
        measured = cells.setdefault((request_class, configuration), {})
        # Two rows of one load would make the curve of power ambiguous.
        if load in measured:
            unit = "MHz" if setting == "clock_mhz" else "W"
            raise ProfileError(
                f"{row.where}: {request_class.name} at tensor degree {degree}, "
                f"{configuration.setting} {unit} and "
                f"{load:g} tokens/s is there twice; keep one of them"
            )
        measured[load] = Cell(load, joules, **extra)
    if not cells:
        raise ProfileError(
            f"{path}: has no rows; write one for each class, tensor degree and {setting}"
        )
    frozen = {key: tuple(by_load.values()) for key, by_load in cells.items()}
    return InferenceProfile(
        frozen,
        _SETTINGS[setting][0],
        objectives,
        sha256(path.read_bytes()),
        "tokens_per_s" not in table.header,
    )


def _bound(row: CsvRow, column: str, bounds: Sequence[int]) -> float:
    """Return the most tokens of the class that the row names."""
    words = dict(zip(_WORDS, (*bounds, math.inf), strict=True))
    return float(row.read(column, Text(lambda text: words.get(text, COUNT.parse(text)), _CLASS)))


_TIME_UNITS = {"time_s": 1, "time_ms": 10**3, "time_us": 10**6, "time_ns": 10**9}
"""Columns that say the unit of their times -> how many of it are a second."""
_COLUMNS = (
    ("time", "TIMESTAMP", *_TIME_UNITS),
    ("input_tokens", "ContextTokens"),
    ("output_tokens", "GeneratedTokens"),
)
_DATE = re.compile(r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(\.\d+)?(?:Z|([+-]\d\d):?(\d\d))?")
_TOKENS = INDEX._replace(wanted="a number of tokens: write a whole number of 0 or more")
_RATE = Rule(float, True, "a rate: write a number of 0 or more in a second, such as 12.5")
_SPARSE_S = 10.0
"""Mean time between requests from which on it is asked whether times are seconds: a service that
has fewer than six requests a minute needs no pools, and milliseconds make one of any load up to 100
a second.
"""
_DENSE_S = 1e-3
"""Mean time between requests that is plausible, when a unit is guessed."""
_FEW = 10  # requests that tell nothing about a unit
_BUSIEST_S = 60.0
"""The period whose load instances must carry: the busiest minute."""


class Load(NamedTuple):
    """The requests of one class."""

    requests_per_s: float  #: how many arrive in a second
    tokens_per_s: float  #: their input and output tokens in a second
    peak: float = 1.0  #: load of the busiest minute over the mean, 1 or more
    #: how many of these tokens are input; None: as in the longest requests of the class.
    input_tokens_per_s: float | None = None

    def lengths(self, of: RequestClass) -> tuple[float, float]:
        """Return the mean input and output tokens of a request of this class."""
        tokens = self.tokens_per_s / self.requests_per_s
        if self.input_tokens_per_s is not None:
            inputs = self.input_tokens_per_s / self.requests_per_s
        elif math.isinf(of.input_tokens) or math.isinf(of.output_tokens):
            inputs = tokens / 2  # only profiles without the costs of tokens have such classes
        else:
            inputs = tokens * of.input_tokens / (of.input_tokens + of.output_tokens)
        return inputs, tokens - inputs

    def scaled(self, share: float) -> Load:
        """Return `share` of all rates."""
        inputs = self.input_tokens_per_s
        return Load(
            self.requests_per_s * share,
            self.tokens_per_s * share,
            self.peak,
            inputs and inputs * share,
        )


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order of time."""

    times_s: npt.NDArray[np.float64]  #: when each arrives, seconds after the first one
    input_tokens: npt.NDArray[np.int64]  #: of each request
    output_tokens: npt.NDArray[np.int64]  #: of each request

    @property
    def end_s(self) -> float:
        """When the last request arrives, seconds after the first."""
        return float(self.times_s[-1])

    def classes(self, profile: InferenceProfile) -> npt.NDArray[np.int64]:
        """Return the class of each request, as its place in `profile.classes`.

        A request that is longer than any class counts as one of the longest.

        Raises:
            UsageError: If the profile lacks a class.
        """
        # Classes form a grid of input and output bounds, which may have gaps.
        bounds = [
            (request_class.input_tokens, request_class.output_tokens)
            for request_class in profile.classes
        ]
        numbers = {longest: number for number, longest in enumerate(bounds)}
        steps = [sorted(set(bounds_of_axis)) for bounds_of_axis in zip(*bounds, strict=True)]
        places = [
            # What is longer than any class counts as one of the longest.
            np.minimum(np.searchsorted(most, tokens), len(most) - 1)
            for most, tokens in zip(steps, (self.input_tokens, self.output_tokens), strict=True)
        ]
        table = np.array([[numbers.get((a, b), -1) for b in steps[1]] for a in steps[0]])
        places_of_requests: npt.NDArray[np.int64] = table[tuple(places)]
        if places_of_requests.min() < 0:
            request = int(np.argmin(places_of_requests))
            names = ", ".join(request_class.name for request_class in profile.classes)
            raise UsageError(
                f"request {request + 1} of the trace has {self.input_tokens[request]} input and "
                f"{self.output_tokens[request]} output tokens, but the profile has no such class, "
                f"only {names}; measure it"
            )
        return places_of_requests

    def demand(
        self,
        profile: InferenceProfile,
        classes: npt.NDArray[np.int64],
        begin_s: float,
        end_s: float,
    ) -> dict[RequestClass, Load]:
        """Return the load of each class that has requests from `begin_s` to before `end_s`.

        Args:
            profile: the profile that has the classes.
            classes: of each request, as `classes` returned them.
            begin_s: seconds after the first request.
            end_s: seconds after the first request.
        """
        first, last = np.searchsorted(self.times_s, (begin_s, end_s))
        length_s = end_s - begin_s
        # Slots of about a minute, as instances must carry the busiest one.
        slots = max(1, round(length_s / _BUSIEST_S))
        slot = np.minimum(
            ((self.times_s[first:last] - begin_s) * slots / length_s).astype(int), slots - 1
        )
        loads = {}
        for number in np.unique(classes[first:last]):
            chosen = classes[first:last] == number
            inputs = self.input_tokens[first:last][chosen]
            tokens = inputs + self.output_tokens[first:last][chosen]
            busiest = np.bincount(slot[chosen], weights=tokens).max() * slots
            # Requests without any token still need a pool.
            total = max(float(tokens.sum()), 1.0)
            load = Load(
                len(tokens) / length_s,
                total / length_s,
                max(float(busiest) / total, 1.0),
                float(inputs.sum()) / length_s,
            )
            loads[profile.classes[number]] = load
        return loads


def periods_of(
    trace: Trace, profile: InferenceProfile, epoch_s: float
) -> list[tuple[float, float, dict[RequestClass, Load]]]:
    """Return start and length of each period with requests, seconds, and its demand.

    Periods are `epoch_s` long, but the last one goes on to the end of the trace: up to half an
    epoch more or less.
    """
    count = max(1, round(trace.end_s / epoch_s))
    starts = [number * epoch_s for number in range(count)]
    # The last request arrives at the end itself, so the last period ends a little later.
    ends = [*starts[1:], max(trace.end_s, starts[-1] + 1.0) * (1 + 1e-9)]
    classes = trace.classes(profile)
    periods = (
        (a, b - a, trace.demand(profile, classes, a, b)) for a, b in zip(starts, ends, strict=True)
    )
    return [period for period in periods if period[2]]


def read_trace(path: Path) -> Trace:
    """Read the CSV of a trace.

    Raises:
        UsageError: If the file cannot be read, a row is wrong, or rows are out of order.
    """
    table = CsvFile(path, UsageError)
    header = ",".join(names[0] for names in _COLUMNS)
    time, first, last = (table.one_of(names, header) for names in _COLUMNS)
    times = list[float]()
    inputs = list[int]()
    outputs = list[int]()
    kinds = set[bool]()
    for row in table:
        time_s, is_date = row.read(time, _TIME)
        kinds.add(is_date)
        # Seconds and dates cannot be put on one scale.
        if len(kinds) > 1:
            raise UsageError(
                f"{row.place(time)}: {shown(row[time])} is another kind of time than before; write "
                "one"
            )
        if times and time_s < times[-1]:
            back = si(times[-1] - time_s, "s", 6)
            raise UsageError(f"{row.where}: is {back} before the row above; sort the rows by time")
        times.append(time_s)
        inputs.append(row.read(first, _TOKENS))
        outputs.append(row.read(last, _TOKENS))
    if not times:
        raise UsageError(f"{path}: has no requests; write a row for each")
    # Only differences count, as a trace begins anywhere in time.
    times_s = np.array(times) - times[0]
    # The column's name says its unit; without it, plain numbers must be plausible as seconds.
    if time in _TIME_UNITS:
        times_s /= _TIME_UNITS[time]
    elif not any(kinds):
        _check_unit(path, time, times_s)
    # A wrong date shows as the longest gap.
    if times_s[-1] > _MOST_S:
        number = int(np.argmax(np.diff(times_s)))
        gap_s = float(times_s[number + 1] - times_s[number])
        raise UsageError(
            f"{path}: its requests span {si(float(times_s[-1]), 's', 4)}, more than a year; the "
            f"longest gap, {si(gap_s, 's', 4)}, is before request {number + 2:,}: correct its time"
        )
    return Trace(times_s, np.array(inputs), np.array(outputs))


_MOST_S = 366 * 86400.0
"""How long a trace may be: it is replayed tick by tick, also where nothing arrives."""


def _check_unit(path: Path, column: str, times_s: npt.NDArray[np.float64]) -> None:
    """Refuse times that are no seconds, as far as the time between requests tells."""
    gaps = len(times_s) - 1
    between_s = float(times_s[-1]) / max(1, gaps)
    if gaps < _FEW or between_s < _SPARSE_S:
        return
    plausible = [
        name for name, count in _TIME_UNITS.items() if _DENSE_S <= between_s / count < _SPARSE_S
    ]
    unit = plausible[0] if plausible else "time_ms"
    raise UsageError(
        f"{path}, column {column!r}: as seconds, these are {gaps + 1:,} requests in "
        f"{si(float(times_s[-1]), 's', 6)}, one in {si(between_s, 's', 3)}; call the column {unit} "
        "if that is its unit, or time_s if these are seconds"
    )


def read_rates(path: Path, profile: InferenceProfile) -> dict[RequestClass, Load]:
    """Read a CSV with the columns `input,output,requests_per_s,tokens_per_s`, a row for each class.

    Raises:
        UsageError: If the file cannot be read, a row is wrong, or the profile has no such class.
    """
    table = CsvFile(path, UsageError)
    wanted = ("input", "output", "requests_per_s", "tokens_per_s")
    table.refuse_twice(wanted)
    table.need(wanted, ",".join(wanted))
    # Rates name classes as the profile does, as they have no lengths of their own.
    names = {request_class.name: request_class for request_class in profile.classes}
    demand: dict[RequestClass, Load] = {}
    for row in table:
        name = f"{row['input']}/{row['output']}"
        if name not in names or names[name] in demand:
            problem = (
                "is there twice"
                if name in names
                else f"is no class of the profile, which has {', '.join(names)}"
            )
            raise UsageError(f"{row.where}: {name} {problem}; correct the row")
        requests, tokens = (row.read(column, _RATE) for column in wanted[2:])
        # One without the other is an error of the file, and would plan pools for nothing.
        if (requests > 0) != (tokens > 0):
            raise UsageError(
                f"{row.where}: has requests without tokens, or tokens without requests; correct "
                "the row"
            )
        if requests > 0:
            demand[names[name]] = Load(requests, tokens)
    if not demand:
        raise UsageError(f"{path}: has no requests; write a row for each class")
    return demand


def _parse_time(text: str) -> tuple[float, bool] | None:
    """Return the time that `text` writes, seconds, and whether it is a date; None if it is none."""
    if (seconds := WAIT.parse(text)) is not None:
        return seconds, False
    match = _DATE.fullmatch(text)
    if match is None:
        return None
    day, part, hours, minutes = match.groups()
    try:
        moment = datetime.fromisoformat(f"{day}{hours or '+00'}:{minutes or '00'}")
    except ValueError:
        return None
    return moment.timestamp() + float(part or 0), True


_TIME = Text(
    _parse_time,
    "a time: write seconds such as 12.5, or a date such as 2023-11-16 18:17:03.979",
)
