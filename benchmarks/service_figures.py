"""What the load benchmark found, and the section that says it."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from data import Size
from results import Check, Section, Table
from service_processes import Row, Spell

_LOAD = {
    "server": ("server", ""),
    "asked": ("asked for", ""),
    "per_s": ("answered, 1/s", ".0f"),
    "p50_ms": ("p50, ms", ".2f"),
    "p99_ms": ("p99, ms", ".2f"),
    "max_ms": ("last, ms", ".1f"),
    "p50_ratio": ("p50, echo = 1", ".2f"),
    "p99_ratio": ("p99, echo = 1", ".2f"),
    "cpu_ms": ("CPU of the server for each, ms", ".2f"),
    "cpu_ratio": ("that, echo = 1", ".2f"),
    "server_cpu": ("server, % of a CPU", ".0f"),
    "workers_cpu": ("its other processes, %", ".0f"),
    "clients_cpu": ("all clients, %", ".0f"),
}
_CHANGES = {
    "what": ("what changed plans", ""),
    "changes": ("jobs changed", "d"),
    "served": ("answers to leaders", "d"),
    "p50_ms": ("p50, ms", ".1f"),
    "p99_ms": ("p99, ms", ".1f"),
    "max_ms": ("last, ms", ".1f"),
}
_MEMORY = {"when": ("resident memory, MiB", ""), "own": ("service", ".0f"), "workers": ("its other processes", ".0f")}


class Change(NamedTuple):
    """A version of a job's plans; when what led to it was sent; whether its plans had to be made first."""

    job: str
    version: int
    sent_s: float
    was_planned: bool


@dataclass(frozen=True)
class Found:
    """What one run found.

    Attributes:
        registering_s: how long it took to register all jobs, one after the other.
        loaded: the service and the echo at the rate asked for.
        peak: the same as fast as they are answered.
        budgets: what was set -> what that changed.
        leaders: (job, pipeline, version known) of each.
        seen: what they saw, as `service_clients.lead` says it.
        memory: when -> resident memory of the service and of its processes, MiB.
    """

    registering_s: float
    loaded: tuple[Spell, Spell]
    peak: tuple[Spell, Spell]
    budgets: Mapping[str, Sequence[Change]]
    leaders: Sequence[tuple[str, int, int]]
    seen: Mapping[str, Any]
    memory: Mapping[str, tuple[float, float]]

    def answers(self) -> list[Row]:
        """Those to all reports."""
        return self.loaded[0].rows + self.peak[0].rows


def section_of(size: Size, found: Found, lost: int) -> Section:
    """The section; `lost` reports were acknowledged and are not in the database."""
    changes = {"a report": list(_changes(found.loaded[0].rows)), **found.budgets}
    return Section(
        18,
        "The service under load",
        "",
        [
            Table(
                _LOAD,
                [*_load_rows(f"{size.load_per_s:g}/s", found.loaded), *_load_rows("as fast as it goes", found.peak)],
            ),
            Table(_CHANGES, list(_change_rows(changes, found))),
            Table(_MEMORY, [{"when": when, "own": own, "workers": of} for when, (own, of) in found.memory.items()]),
        ],
        _checks(found, lost),
        [f"registering {found.registering_s}"],
    )


def _load_rows(asked: str, spells: tuple[Spell, Spell]) -> Iterator[dict[str, Any]]:
    reported, echoed = map(_figures, spells)
    ratios = {f"{name}_ratio": reported[f"{name}_ms"] / echoed[f"{name}_ms"] for name in ("p50", "p99", "cpu")}
    yield {"server": "planner serve", "asked": asked, **reported, **ratios}
    yield {"server": "plain FastAPI echo", "asked": asked, **echoed}


def _figures(of: Spell) -> dict[str, float]:
    taken_ms = [1e3 * (row.answered_s - row.due_s) for row in of.rows]
    shares = {"server_cpu": of.server_s, "workers_cpu": of.workers_s, "clients_cpu": of.clients_s}
    return {
        "per_s": len(of.rows) / of.wall_s,
        **_percentiles(taken_ms),
        "cpu_ms": 1e3 * of.server_s / len(of.rows),
        **{name: 100 * cpu_s / of.wall_s for name, cpu_s in shares.items()},
    }


def _percentiles(taken_ms: Sequence[float]) -> dict[str, float]:
    p50, p99, last = np.percentile(taken_ms, (50, 99, 100)).tolist() if taken_ms else [float("nan")] * 3
    return {"p50_ms": p50, "p99_ms": p99, "max_ms": last}


def _changes(rows: Sequence[Row]) -> Iterator[Change]:
    for row in rows:
        answer = json.loads(row.body)
        if answer["changed"]:
            yield Change(answer["job"], answer["version"], row.sent_s, answer["takes_effect"] == "planning")


def _change_rows(changes: Mapping[str, Sequence[Change]], found: Found) -> Iterator[dict[str, Any]]:
    for what, all_of in changes.items():
        for planned, how in ((False, "its plans known"), (True, "its plans to be made")):
            those = [each for each in all_of if each.was_planned == planned]
            taken_ms = _served_ms(those, found)
            if those:
                yield {
                    "what": f"{what}, {how}",
                    "changes": len(those),
                    "served": len(taken_ms),
                    **_percentiles(taken_ms),
                }


def _served_ms(changes: Sequence[Change], found: Found) -> list[float]:
    """For each leader of a changed job, how long after what changed it was sent the leader had such plans; or never."""
    of_job: dict[str, list[list[tuple[int, float]]]] = {}
    for (job, *_), seen in zip(found.leaders, found.seen["seen"], strict=True):
        of_job.setdefault(job, []).append(seen)
    return [
        1e3 * (seen[at][1] - change.sent_s) if (at := bisect_left(seen, [change.version])) < len(seen) else float("inf")
        for change in changes
        for seen in of_job.get(change.job, [])
    ]


def _checks(found: Found, lost: int) -> list[Check]:
    answers = found.answers()
    acknowledged = sum(row.status == 202 for row in answers)
    rising = all(early < late for seen in found.seen["seen"] for (early, _), (late, _) in pairwise(seen))
    strange = sum(map(len, found.seen["strange"])) + found.seen["lost"]
    return [
        Check(f"of {len(answers)} reports, {acknowledged} were acknowledged", acknowledged == len(answers)),
        Check(f"{lost} of these are not in the database", lost == 0),
        Check("the versions that a leader was given rise", rising),
        Check(f"{strange} long polls were refused or cut off", strange == 0),
    ]
