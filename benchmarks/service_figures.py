"""What the load benchmark found, and the section that says it."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
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
        loaded: the service and the echo at the rate asked for, where half of the reports say again what was said.
        fewer: the same at half that rate.
        calm: the same as `loaded`, where nearly all reports say again what was said.
        peak: the same as fast as they are answered.
        budgets: what was set -> what that changed.
        leaders: (job, pipeline, version known) of each.
        seen: what they saw, as `service_clients.lead` says it.
        memory: when -> resident memory of the service and of its processes, MiB.
    """

    registering_s: float
    loaded: tuple[Spell, Spell]
    fewer: tuple[Spell, Spell]
    calm: tuple[Spell, Spell]
    peak: tuple[Spell, Spell]
    budgets: Mapping[str, Sequence[Change]]
    leaders: Sequence[tuple[str, int, int]]
    seen: Mapping[str, Any]
    memory: Mapping[str, tuple[float, float]]

    def answers(self) -> list[Row]:
        """Those to all reports."""
        return [row for reported, _ in (self.loaded, self.fewer, self.calm, self.peak) for row in reported.rows]


def section_of(size: Size, found: Found, lost: int) -> Section:
    """The section; `lost` reports were acknowledged and are not in the database."""
    spells = {
        f"{size.load_per_s:g}/s": found.loaded,
        f"{size.load_per_s / 2:g}/s": found.fewer,
        f"{size.load_per_s:g}/s, 95 % say again": found.calm,
        "as fast as it goes": found.peak,
    }
    changes = {"a report": _by_reports(found), **found.budgets}
    return Section(
        18,
        "The service under load",
        f"**Measured** on this machine: `planner serve` as it comes, on SQLite in a file. {size.load_jobs} jobs of 16 "
        f"pipelines of 8 stages run; {size.load_leaders} leaders of pipelines have a long poll open, each by a "
        f"connection of its own, and ask again at once. A client posts {size.load_per_s:g} reports a second for "
        f"{size.load_s:g} s by a schedule, whether or not those before are answered, and latencies count from when a "
        "report was due. Beside it, before and after: an application of FastAPI that checks a small body and returns "
        "it, with the same settings of uvicorn and the same bodies. To reach: 500 reports a second, 20 ms at the 99th "
        "percentile, leaders served within a second.",
        [
            Table(_LOAD, [row for asked, pair in spells.items() for row in _load_rows(asked, pair)]),
            Table(_CHANGES, [row for what, all_of in changes.items() for row in _change_rows(what, all_of, found)]),
            Table(_MEMORY, [{"when": when, "own": own, "workers": of} for when, (own, of) in found.memory.items()]),
        ],
        _checks(size, found, changes, lost),
        _notes(size, found),
    )


def _notes(size: Size, found: Found) -> list[str]:
    reported, changed = found.loaded[0], len(_by_reports(found))
    polled = sum(map(len, found.seen["seen"]))
    return [
        f"Registering all jobs one after the other took {found.registering_s:.1f} s. Their frontiers are those of "
        f"{len(size.cases) * len(size.load_microbatches)} pipelines of {min(size.load_microbatches)} to "
        f"{max(size.load_microbatches)} microbatches, and every plan that reports ask for had been made once before: "
        "a plan that is new takes its process as long as number 5 has it, one after the other.",
        "Half of the reports say what their probe last said, or 95 % where that is said; "
        f"{100 * changed / len(reported.rows):.0f} % of those at {size.load_per_s:g}/s made a new version of "
        f"plans, which each leader of that job was sent and asked for the next of: {polled} answers with plans in all, "
        "in the same CPU time.",
        "Changes count from when the report, or the budget, was sent to when a leader has all of a plan that takes it "
        "into account. Where plans have to be made, they are made one after the other by one process.",
        "The clients are Python as well, with HTTP written by hand. Each acknowledged report is on disk: a write of "
        "SQLite with `synchronous=FULL`, for those that came meanwhile together. The echo writes nothing.",
        f"Both run on uvicorn {metadata.version('uvicorn')}.",
    ]


def _load_rows(asked: str, pair: tuple[Spell, Spell]) -> Iterator[dict[str, Any]]:
    reported, echoed = map(_figures, pair)
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
    p50, p99, last = np.percentile(taken_ms, (50, 99, 100)).tolist()
    return {"p50_ms": p50, "p99_ms": p99, "max_ms": last}


def _by_reports(found: Found) -> list[Change]:
    """The versions that reports at the steady rate made, each with the first report that was answered with it."""
    newest = {job: version for job, _, version in found.leaders}
    made: dict[tuple[str, int], Change] = {}
    for row in found.loaded[0].rows:
        answer = json.loads(row.body)
        job, version = answer["job"], answer["version"]
        if answer["changed"] and version > newest.get(job, version):
            change = Change(job, version, row.sent_s, answer["takes_effect"] == "planning")
            made[job, version] = min(change, made.get((job, version), change), key=lambda each: each.sent_s)
    return list(made.values())


def _change_rows(what: str, changes: Sequence[Change], found: Found) -> Iterator[dict[str, Any]]:
    for planned, how in ((False, "plans known"), (True, "plans to be made")):
        those = [each for each in changes if each.was_planned == planned]
        taken_ms = [each for each in _served_ms(those, found) if each is not None]
        if taken_ms:
            yield {"what": f"{what}, {how}", "changes": len(those), "served": len(taken_ms), **_percentiles(taken_ms)}


def _served_ms(changes: Sequence[Change], found: Found) -> list[float | None]:
    """For each leader of a changed job, how long after what changed it was sent the leader had such plans; or never."""
    of_job: dict[str, list[list[tuple[int, float]]]] = {}
    for (job, *_), seen in zip(found.leaders, found.seen["seen"], strict=True):
        of_job.setdefault(job, []).append(seen)
    return [_served_after_ms(change, seen) for change in changes for seen in of_job.get(change.job, [])]


def _served_after_ms(change: Change, seen: Sequence[tuple[int, float]]) -> float | None:
    at = bisect_left(seen, change.version, key=lambda each: each[0])
    return 1e3 * (seen[at][1] - change.sent_s) if at < len(seen) else None


def _checks(size: Size, found: Found, changes: Mapping[str, Sequence[Change]], lost: int) -> list[Check]:
    answers = found.answers()
    acknowledged = sum(row.status == 202 for row in answers)
    rising = all(early < late for seen in found.seen["seen"] for (early, _), (late, _) in pairwise(seen))
    missed = sum(each is None for all_of in changes.values() for each in _served_ms(all_of, found))
    strange = sum(map(len, found.seen["strange"])) + found.seen["lost"]
    return [
        Check(f"of {len(answers)} reports, {acknowledged} were acknowledged", acknowledged == len(answers)),
        Check(f"{lost} of them are not in the database", lost == 0),
        Check("the versions that a leader was given rise", rising),
        Check(f"{missed} times a leader was not given a version of its job, nor a later one", missed == 0),
        Check(f"{strange} of {size.load_leaders} long polls were refused or cut off", strange == 0),
    ]
