"""Writes timelines in the Trace Event Format, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Their requirements beyond the format's document:

- Slices of one thread are nested or disjoint. Perfetto drops or moves a slice that ends within
  another.
- Times are microseconds, read as whole nanoseconds. Times here are therefore whole nanoseconds
  after the start, written with three decimals, so that neighbours share their border to the last
  digit.
- Process 0 and thread 0 are Linux' idle ones, and Perfetto names a thread by its number alone,
  whatever its process. So all numbers are above 0, and no two processes or threads share one.
- A counter keeps a value until its next one.
- An arrow is a flow: it starts in the slice that encloses its start and, with `"bp":"e"`, ends in
  the one that encloses its end. At a border that is the later slice, so a flow starts one
  nanosecond before the end of its slice.
- `displayTimeUnit` is left out, because older versions of Perfetto took it for the unit of all
  times.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from perseus_planner.base.errors import UsageError
from perseus_planner.base.files import replacing

WAITING = "waiting"
"""The category of slices without computation; chrome://tracing draws them in grey."""
_GREY = "grey"  #: one of the colour names of chrome://tracing, which refuses others


@dataclass(frozen=True)
class Slice:
    """A bar on a thread."""

    name: str  #: label of the bar
    category: str  #: category to search for
    start_ns: int  #: nanoseconds after the start of the trace
    end_ns: int  #: likewise, not before `start_ns`
    #: name -> text, number or bool; shown when the bar is clicked.
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Thread:
    """A row of slices, in the order of time."""

    name: str
    slices: Sequence[Slice]


@dataclass(frozen=True)
class Counter:
    """A number over time."""

    name: str  #: name of the quantity
    unit: str  #: unit of its values
    #: (nanoseconds after the start, value from then on), in the order of time.
    steps: Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Flow:
    """An arrow from the end of a slice to the start of another one, of the same process."""

    name: str  #: what flows
    thread: int  #: place of the thread that it comes from
    from_ns: int  #: end of the slice that it comes from
    to_thread: int  #: place of the thread that it goes to
    to_ns: int  #: start of the slice that it goes to


@dataclass(frozen=True)
class Process:
    """A group of threads with their counters, and the flows between them."""

    name: str
    threads: Sequence[Thread]
    counters: Sequence[Counter]
    flows: Sequence[Flow] = ()


def steps(spans: Iterable[tuple[int, float]], end_ns: int) -> list[tuple[int, float]]:
    """Return the steps of a counter. The last value is repeated at the end, so that the counter can
    be integrated.

    Args:
        spans: (nanoseconds after the start, value from then on), in the order of time; the last of
            equal times counts.
        end_ns: when the last value ends.
    """
    kept: list[tuple[int, float]] = []
    for at_ns, value in spans:
        if kept and kept[-1][0] == at_ns:
            kept.pop()
        if not kept or kept[-1][1] != value:
            kept.append((at_ns, value))
    return [*kept, (end_ns, kept[-1][1])] if kept and end_ns > kept[-1][0] else kept


def total(counters: Sequence[Counter], name: str) -> Counter:
    """Return the sum of counters that have one unit, starting when all of them have a value."""
    changes = sorted(
        (at_ns, number, value)
        for number, counter in enumerate(counters)
        for at_ns, value in counter.steps
    )
    values, started, sums = [0.0] * len(counters), set(), []
    for at_ns, number, value in changes:
        values[number] = value
        started.add(number)
        if len(started) == len(counters):
            sums.append((at_ns, math.fsum(values)))
    return Counter(name, counters[0].unit, steps(sums, changes[-1][0]))


def write_trace(
    path: str | os.PathLike[str], processes: Sequence[Process], about: Mapping[str, Any]
) -> None:
    """Write a trace, whole or not at all. Equal traces give equal bytes.

    Args:
        path: the file.
        processes: the content.
        about: name -> text or number, about the trace as a whole.

    Raises:
        UsageError: If the file cannot be written.
    """
    with replacing(path, UsageError) as file:
        file.write(b'{"traceEvents":[\n')
        for number, event in enumerate(_events(processes)):
            file.write((",\n" if number else "").encode() + _json(event))
        file.write(b'\n],\n"otherData":' + _json(about) + b"}\n")


def _events(processes: Sequence[Process]) -> Iterator[dict[str, Any]]:
    numbers, flows = count(len(processes) + 1), count(1)
    for pid, process in enumerate(processes, 1):
        yield _named("process", process.name, pid)
        threads = [(next(numbers), thread) for thread in process.threads]
        for tid, thread in threads:
            yield _named("thread", thread.name, pid, tid=tid)
            yield {
                "ph": "M",
                "name": "thread_sort_index",
                "pid": pid,
                "tid": tid,
                "args": {"sort_index": tid},
            }
        for tid, thread in threads:
            for thread_slice in thread.slices:
                yield _complete(thread_slice, pid, tid)
        for flow in process.flows:
            what = {"name": flow.name, "cat": "transfer", "id": next(flows), "pid": pid}
            yield {"ph": "s", **what, "tid": threads[flow.thread][0], "ts": _us(flow.from_ns - 1)}
            yield {
                "ph": "f",
                "bp": "e",
                **what,
                "tid": threads[flow.to_thread][0],
                "ts": _us(flow.to_ns),
            }
        for counter in process.counters:
            for at_ns, value in counter.steps:
                yield {
                    "ph": "C",
                    "name": counter.name,
                    "pid": pid,
                    "ts": _us(at_ns),
                    "args": {counter.unit: value},
                }


def _named(what: str, name: str, pid: int, **thread: int) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "pid": pid, **thread, "args": {"name": name}}


def _complete(each: Slice, pid: int, tid: int) -> dict[str, Any]:
    colour = {"cname": _GREY} if each.category == WAITING else {}
    times = {"ts": _us(each.start_ns), "dur": _us(each.end_ns - each.start_ns)}
    what = {"ph": "X", "name": each.name, "cat": each.category, "pid": pid, "tid": tid}
    return {**what, **times, **colour, "args": dict(each.details)}


def _us(time_ns: int) -> float:
    """Return microseconds; written as text they have at most three decimals."""
    return time_ns / 1000


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
