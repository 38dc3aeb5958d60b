"""Read a trace file for tests, and check that Perfetto and chrome://tracing read it without
loss.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

KNOWN_KEYS = (
    "traceEvents",
    "otherData",
)  #: older versions of Perfetto stop reading at an unknown key
MOST = 2**32 - 1  #: largest number of a process or thread; Perfetto reads larger ones as 0


class ReadTrace:
    """A trace file, read and checked; times are whole nanoseconds.

    Attributes:
        about: values about the trace as a whole.
        processes: number -> name.
        threads: number -> name.
        slices: name of process and thread -> (start, end, event), in the order of their starts.
        counters: name of process, name and unit -> (time, value).
        flows: name of process -> (name, the two slices that the arrow connects, as in `slices`).
    """

    def __init__(self, path: Path) -> None:
        content = json.loads(path.read_text(), parse_float=Decimal, parse_int=Decimal)
        assert tuple(content) == KNOWN_KEYS
        self.about = json.loads(path.read_text())["otherData"]
        events = content["traceEvents"]
        self.processes = {
            e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"
        }
        self.threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        _check_numbers(events)
        self.slices: dict[tuple[str, str], list[tuple[int, int, dict[str, Any]]]] = defaultdict(
            list
        )
        self.counters: dict[tuple[str, str, str], list[tuple[int, float]]] = defaultdict(list)
        flows: dict[Decimal, list[dict[str, Any]]] = defaultdict(list)
        for event in events:
            process = self.processes[event["pid"]]
            if event["ph"] == "X":
                start_ns = _ns(event["ts"])
                where = process, self.threads[event["tid"]]
                self.slices[where].append((start_ns, start_ns + _ns(event["dur"]), event))
            elif event["ph"] == "C":
                ((unit, value),) = event["args"].items()
                self.counters[process, event["name"], unit].append((_ns(event["ts"]), float(value)))
            elif event["ph"] in "sf":
                flows[event["id"]].append(event)
            else:
                assert event["ph"] == "M"
        for row in self.slices.values():
            _check_row(row)
        for steps in self.counters.values():
            assert all(before < after for (before, _), (after, _) in pairwise(steps))
        self.flows = defaultdict(list)
        for start, end in flows.values():  # each has one start and one end
            assert (start["ph"], end["ph"], end["bp"], start["name"], start["pid"]) == (
                "s",
                "f",
                "e",
                end["name"],
                end["pid"],
            )
            pair = self._enclosing(start), self._enclosing(end)
            self.flows[self.processes[start["pid"]]].append((start["name"], *pair))

    def _enclosing(self, event: dict[str, Any]) -> tuple[int, int, dict[str, Any]]:
        """Return the slice that a flow is bound to: the last one that begins no later, if it has
        not ended.
        """
        at_ns, row = (
            _ns(event["ts"]),
            self.slices[self.processes[event["pid"]], self.threads[event["tid"]]],
        )
        found = row[bisect_right(row, at_ns, key=lambda each: each[0]) - 1]
        assert found[0] <= at_ns < found[1], "is not inside a slice"
        return found

    @property
    def end_ns(self) -> int:
        return max(end_ns for row in self.slices.values() for _, end_ns, _ in row)


def integral(
    steps: list[tuple[int, float]], begin_ns: int | None = None, end_ns: int | None = None
) -> float:
    """Return the integral of a counter over time, value times seconds; each value lasts until
    the next one.
    """
    first, last = (
        steps[0][0] if begin_ns is None else begin_ns,
        steps[-1][0] if end_ns is None else end_ns,
    )
    parts = (
        (max(at, first), min(until, last), value) for (at, value), (until, _) in pairwise(steps)
    )
    return sum((until - at) / 1e9 * value for at, until, value in parts if until > at)


def _ns(time_us: Decimal) -> int:
    time_ns = time_us * 1000
    assert time_ns == int(time_ns) >= 0, "is cut off to whole nanoseconds, and left out below 0"
    assert int(time_ns) == round(float(time_us) * 1000), "is read as a double"
    return int(time_ns)


def _check_numbers(events: list[dict[str, Any]]) -> None:
    pids = {event["pid"] for event in events}
    of_thread = {(event["tid"], event["pid"]) for event in events if "tid" in event}
    tids = [tid for tid, _ in of_thread]
    assert len(set(tids)) == len(tids), "threads are told apart by their number alone"
    assert not pids & set(tids), "a thread with the number of a process is its main thread"
    assert all(0 < number <= MOST for number in [*pids, *tids])


def _check_row(row: list[tuple[int, int, dict[str, Any]]]) -> None:
    for (start_ns, end_ns, _), (next_ns, _, _) in pairwise(row):
        assert start_ns <= end_ns <= next_ns
    for _, _, event in row:
        assert event.get("cname", "grey") == "grey"
        assert all(isinstance(value, (str, bool, Decimal)) for value in event["args"].values())
