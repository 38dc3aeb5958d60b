"""What is asked of a cluster: traces of requests, rates by class, and the demand of a period; their
CSV files.

A trace has a row for each request, in the order of time: its time, in seconds or as a date, its
input tokens and its output tokens. The columns are `time`, `input_tokens` and `output_tokens`, or
those of the Azure LLM inference traces, `TIMESTAMP`, `ContextTokens` and `GeneratedTokens`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.base.errors import UsageError, shown
from perseus_planner.base.prefixes import si
from perseus_planner.base.tables import CsvFile, Text
from perseus_planner.base.units import INDEX, WAIT, Rule

if TYPE_CHECKING:
    import numpy.typing as npt

    from perseus_planner.inference.cells import InferenceProfile, RequestClass

_COLUMNS = (
    ("time", "timestamp"),
    ("input_tokens", "contexttokens"),
    ("output_tokens", "generatedtokens"),
)
_DATE = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(\.\d+)?(?:(Z)|([+-])(\d\d):?(\d\d))?")
_TOKENS = INDEX._replace(wanted="a number of tokens: write a whole number of 0 or more")
_RATE = Rule(float, True, "a rate: write a number of 0 or more in a second, such as 12.5")
_DAY_S = 86400
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


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order of time."""

    times_s: npt.NDArray[np.float64]  #: when each arrives, seconds after the first one
    input_tokens: npt.NDArray[np.int64]  #: of each request
    output_tokens: npt.NDArray[np.int64]  #: of each request

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """Input and output tokens of each request."""
        return self.input_tokens + self.output_tokens

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
        inputs = {
            request_class.input_tokens: request_class.name.partition("/")[0]
            for request_class in profile.classes
        }
        outputs = {
            request_class.output_tokens: request_class.name.partition("/")[2]
            for request_class in profile.classes
        }
        order = {
            (request_class.input_tokens, request_class.output_tokens): number
            for number, request_class in enumerate(profile.classes)
        }
        table = np.array(
            [
                [order.get((first, second), -1) for second in sorted(outputs)]
                for first in sorted(inputs)
            ]
        )
        place, other = (
            np.minimum(np.searchsorted(sorted(bounds), tokens), len(bounds) - 1)
            for bounds, tokens in ((inputs, self.input_tokens), (outputs, self.output_tokens))
        )
        class_numbers = table[place, other]
        if class_numbers.min() < 0:
            request = int(np.argmin(class_numbers))
            of_input, of_output = sorted(inputs)[place[request]], sorted(outputs)[other[request]]
            missing = f"{inputs[of_input]}/{outputs[of_output]}"
            raise UsageError(
                f"request {request + 1} of the trace has {self.input_tokens[request]} input and "
                f"{self.output_tokens[request]} output tokens, but the profile has no class "
                f"{missing}; measure it"
            )
        return class_numbers

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
        slots = max(1, round(length_s / _BUSIEST_S))
        slot = np.minimum(
            ((self.times_s[first:last] - begin_s) * slots / length_s).astype(int), slots - 1
        )
        loads = {}
        for number in np.unique(classes[first:last]):
            chosen = classes[first:last] == number
            tokens = self.tokens[first:last][chosen]
            busiest = np.bincount(slot[chosen], weights=tokens).max() * slots
            total = max(float(tokens.sum()), 1.0)
            load = Load(
                len(tokens) / length_s,
                total / length_s,
                max(float(busiest) / total, 1.0),
                float(self.input_tokens[first:last][chosen].sum()) / length_s,
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
    time, first, last = (_column_of(table, names) for names in _COLUMNS)
    times, inputs, outputs, kinds = list[float](), list[int](), list[int](), set[bool]()
    for row in table:
        time_s, is_date = row.read(time, _TIME)
        kinds.add(is_date)
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
    return Trace(np.array(times) - times[0], np.array(inputs), np.array(outputs))


def _column_of(table: CsvFile, names: Sequence[str]) -> str:
    """Return the column of a trace that has one of the names."""
    columns = [column for column in table.header if column.lower() in names]
    if len(columns) != 1:
        problem = (
            f"columns {' and '.join(map(repr, columns))}" if columns else f"no column {names[0]!r}"
        )
        raise UsageError(
            f"{table.where}: has {problem}; write the header time,input_tokens,output_tokens, or "
            "TIMESTAMP,ContextTokens,GeneratedTokens, separated by commas"
        )
    return columns[0]


def read_rates(path: Path, profile: InferenceProfile) -> dict[RequestClass, Load]:
    """Read a CSV with the columns `input,output,requests_per_s,tokens_per_s`, a row for each class.

    Raises:
        UsageError: If the file cannot be read, a row is wrong, or the profile has no such class.
    """
    table = CsvFile(path, UsageError)
    wanted = ("input", "output", "requests_per_s", "tokens_per_s")
    if sorted(table.header) != sorted(wanted):
        raise UsageError(f"{table.where}: is not a header of rates; write {','.join(wanted)}")
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


def scaled(demand: Mapping[RequestClass, Load], share: float) -> dict[RequestClass, Load]:
    """Return the demand with `share` of all rates."""
    return {
        request_class: load._replace(
            requests_per_s=load.requests_per_s * share,
            tokens_per_s=load.tokens_per_s * share,
            input_tokens_per_s=load.input_tokens_per_s and load.input_tokens_per_s * share,
        )
        for request_class, load in demand.items()
    }


def _parse_time(text: str) -> tuple[float, bool] | None:
    """Return the time that `text` writes, seconds, and whether it is a date; None if it is none."""
    if (seconds := WAIT.parse(text)) is not None:
        return seconds, False
    match = _DATE.fullmatch(text)
    moment_s = _moment_s(match[1], match[2]) if match else None
    offset_s = 3600 * int(match[6] or 0) + 60 * int(match[7] or 0) if match else 0
    if match is None or moment_s is None or offset_s >= _DAY_S:
        return None
    return moment_s - (-offset_s if match[5] == "-" else offset_s) + float(match[3] or 0), True


_TIME = Text(
    _parse_time,
    "a time: write seconds such as 12.5, or a date such as 2023-11-16 18:17:03.979",
)


@lru_cache(1024)
def _moment_s(day: str, time: str) -> float | None:
    """Return a date as seconds since 1970, or None if there is no such date."""
    try:
        return (
            datetime.strptime(f"{day} {time}", "%Y-%m-%d %H:%M:%S")
            .replace(tzinfo=timezone.utc)
            .timestamp()
        )
    except ValueError:
        return None
