"""What the load benchmark found, and the section that says it."""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import chain, pairwise
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
    "server_cpu": ("server, % of a CPU", ".0f"),
    "workers_cpu": ("its other processes, %", ".0f"),
    "clients_cpu": ("these clients, %", ".0f"),
}
_ALONE = {
    "what": ("a report to a job of", ""),
    "own_ms": ("CPU, ms", ".2f"),
    "echo_ms": ("of the echo, ms", ".2f"),
    "ratio": ("ratio", ".2f"),
    "most": ("to reach", ".1f"),
}
_MOST = (2.0, 3.0, 2.2)
_BESIDE = {
    "what": ("beside them", ""),
    "count": ("answers", "d"),
    "same": ("304", "d"),
    "kb": ("kB of the others", ".0f"),
    "p50_ms": ("p50, ms", ".1f"),
    "p99_ms": ("p99, ms", ".1f"),
    "max_ms": ("last, ms", ".1f"),
}
_LARGE = {
    "what": ("registering a large job", ""),
    "took_ms": ("takes, ms", ".0f"),
    "reports": ("reports meanwhile", "d"),
    "reports_ms": ("the slowest, ms", ".1f"),
    "telemetry": ("telemetry meanwhile", "d"),
    "telemetry_ms": ("the slowest, ms", ".1f"),
}
_CHANGES = {
    "what": ("what changed plans", ""),
    "changes": ("jobs changed", "d"),
    "served": ("answers to leaders", "d"),
    "p50_ms": ("p50, ms", ".1f"),
    "p99_ms": ("p99, ms", ".1f"),
    "max_ms": ("last, ms", ".1f"),
}
_MEMORY = {
    "when": ("resident memory, MiB", ""),
    "own": ("service", ".0f"),
    "workers": ("its other processes", ".0f"),
}


class Change(NamedTuple):
    """A version of a job's plans; when what led to it was sent; whether its plans had to be made
    first.
    """

    job: str
    version: int
    sent_s: float
    was_planned: bool


@dataclass(frozen=True)
class Mixed:
    """What was answered while everything that users have went on at once.

    Attributes:
        reported: to reports.
        telemetry: to telemetry.
        taken: to which version of its plans a job runs.
        pages: what was asked for again and again -> those answers.
        large: for each registration of a large job, when it began and when it was answered.
    """

    reported: Spell
    telemetry: Spell
    taken: Spell
    pages: Mapping[str, Sequence[Row]]
    large: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Alone:
    """What was answered while nothing else went on.

    Attributes:
        reported: kind of job -> reports to it, and the same to the echo that has each on disk.
        registering_s: CPU seconds of the service and its processes for a large registration.
    """

    reported: Mapping[str, tuple[Spell, Spell]]
    registering_s: float


@dataclass(frozen=True)
class Found:
    """What one run found.

    Attributes:
        registering_s: how long it took to register all jobs, one after the other.
        mixed: the service under the whole load.
        echoed: the echo, by as many reports a second.
        peak: the service and the echo, by reports as fast as they are answered.
        leaders: (job, version known) of each.
        seen: what they saw, as `service_clients.lead` says it.
        memory: when -> resident memory of the service and of its processes, MiB.
        alone: what was found while nothing else went on.
    """

    registering_s: float
    mixed: Mixed
    echoed: Spell
    peak: tuple[Spell, Spell]
    leaders: Sequence[tuple[str, int]]
    seen: Mapping[str, Any]
    memory: Mapping[str, tuple[float, float]]
    alone: Alone

    def answers(self) -> list[Row]:
        """Those to all reports."""
        return [*self.mixed.reported.rows, *self.peak[0].rows]


def section_of(size: Size, found: Found, lost: int) -> Section:
    """The section; `lost` reports were acknowledged and are not in the database."""
    steady, fast = f"{size.load_per_s:g}/s", "as fast as it goes"
    loads = [
        ("planner serve, all that goes on", steady, found.mixed.reported),
        ("plain FastAPI echo", steady, found.echoed),
        ("planner serve", fast, found.peak[0]),
        ("plain FastAPI echo", fast, found.peak[1]),
    ]
    return Section(
        18,
        "The service under load",
        "**Measured** on this machine: `planner serve` as it comes, on SQLite in a file. "
        f"{size.load_jobs} jobs of {size.load_pipelines} pipelines of 8 stages run; "
        f"{size.load_leaders} leaders of pipelines have a long poll open, each by a connection of "
        f"its own, and ask again at once. For {size.load_s:g} s a client posts "
        f"{size.load_per_s:g} reports a second by a schedule, whether or not those before are "
        "answered; each job posts telemetry every 5 s; "
        f"{size.load_taken_per_s:g} jobs a second say which version of their plans they run; two "
        "dashboards ask for all jobs every 10 s "
        f"and for one every 3 s; /metrics is scraped every 15 s; and {len(found.mixed.large)} "
        f"times a job of {8 * size.load_pipelines_large} ranks is registered, and ended. "
        "Latencies count from when a request was due. To reach: half of a CPU for all of it, 50 ms "
        "at the 99th percentile of reports, and no answer that waits longer for a registration. "
        "Before, one client posts reports of 200 probes to one job, each with another slowdown, "
        "once the one before is answered; and "
        "the same to a plain FastAPI application that commits each to SQLite in the same way.",
        [
            Table(
                _LOAD,
                [{"server": server, "asked": asked, **_figures(of)} for server, asked, of in loads],
            ),
            Table(_ALONE, list(_alone_rows(found.alone))),
            Table(_BESIDE, list(_beside_rows(found.mixed))),
            Table(_LARGE, list(_large_rows(found.mixed))),
            Table(_CHANGES, list(_change_rows(_by_reports(found), found))),
            Table(
                _MEMORY,
                [
                    {"when": when, "own": own, "workers": of}
                    for when, (own, of) in found.memory.items()
                ],
            ),
        ],
        _checks(size, found, lost),
        _notes(size, found),
    )


def _notes(size: Size, found: Found) -> list[str]:
    reported, changed = found.mixed.reported, len(_by_reports(found))
    polled = sum(map(len, found.seen["seen"]))
    return [
        f"A registration of {8 * size.load_pipelines_large:,} ranks takes "
        f"{found.alone.registering_s:.2f} CPU s (to reach: 1).",
        f"Registering all jobs one after the other took {found.registering_s:.1f} s. Their "
        f"frontiers are those of {len(size.cases) * len(size.load_microbatches)} pipelines of "
        f"{min(size.load_microbatches)} to {max(size.load_microbatches)} microbatches, and every "
        "plan that reports ask for had been made once before: a plan that is new takes its "
        "process as long as number 5 has it, one after the other.",
        "Half of the reports say what their probe last said; "
        f"{100 * changed / len(reported.rows):.0f} % of those at {size.load_per_s:g}/s made a new "
        "version of plans, which each leader of that job was sent and asked for the next of: "
        f"{polled} answers with plans in all.",
        "Changes count from when the report was sent to when a leader has all of a plan that "
        "takes it into account. Where plans have to be made, they are made one after the other by "
        "one process.",
        "The clients are Python as well, with HTTP written by hand. Each acknowledged report is "
        "on disk: a write of SQLite with `synchronous=FULL`, for those that came meanwhile "
        "together; the last percent waits for the disk. The echo of the first table writes "
        "nothing.",
        f"Both run on uvicorn {metadata.version('uvicorn')}; the 1-minute load average was "
        f"{os.getloadavg()[0]:.1f} at the end.",
    ]


def _figures(of: Spell) -> dict[str, float]:
    shares = {"server_cpu": of.server_s, "workers_cpu": of.workers_s, "clients_cpu": of.clients_s}
    return {
        "per_s": len(of.rows) / of.wall_s,
        **_percentiles(_taken_ms(of.rows)),
        **{name: 100 * cpu_s / of.wall_s for name, cpu_s in shares.items()},
    }


def _alone_rows(alone: Alone) -> Iterator[dict[str, Any]]:
    for most, (what, pair) in zip(_MOST, alone.reported.items(), strict=True):
        own_ms, echo_ms = (1e3 * each.server_s / len(each.rows) for each in pair)
        figures = {"own_ms": own_ms, "echo_ms": echo_ms, "ratio": own_ms / echo_ms}
        yield {"what": what, **figures, "most": most}


def _beside_rows(mixed: Mixed) -> Iterator[dict[str, Any]]:
    for what, spell in (("telemetry", mixed.telemetry), ("taken", mixed.taken)):
        rows = spell.rows
        yield {"what": what, "count": len(rows), **_percentiles(_taken_ms(rows))}
    for what, rows in mixed.pages.items():
        new = [row.body for row in rows if row.status == 200]
        sizes = {"same": len(rows) - len(new), "kb": sum(new) / len(new) / 1e3}
        yield {"what": what, "count": len(rows), **sizes, **_percentiles(_taken_ms(rows))}


def _large_rows(mixed: Mixed) -> Iterator[dict[str, Any]]:
    for number, (begin_s, end_s) in enumerate(mixed.large, 1):
        row: dict[str, Any] = {"what": f"{number}.", "took_ms": 1e3 * (end_s - begin_s)}
        for what, rows in (("reports", mixed.reported.rows), ("telemetry", mixed.telemetry.rows)):
            meanwhile = [each for each in rows if each.due_s < end_s and begin_s < each.answered_s]
            row |= {what: len(meanwhile), f"{what}_ms": max(_taken_ms(meanwhile), default=None)}
        yield row


def _taken_ms(rows: Sequence[Row]) -> list[float]:
    return [1e3 * (row.answered_s - row.due_s) for row in rows]


def _percentiles(taken_ms: Sequence[float]) -> dict[str, float]:
    p50, p99, last = np.percentile(taken_ms, (50, 99, 100)).tolist()
    return {"p50_ms": p50, "p99_ms": p99, "max_ms": last}


def _by_reports(found: Found) -> list[Change]:
    """The versions that reports at the steady rate made, each with the first report that was
    answered with it.
    """
    newest = dict(found.leaders)
    made: dict[tuple[str, int], Change] = {}
    for row in found.mixed.reported.rows:
        answer = json.loads(row.body)
        job, version = answer["job"], answer["version"]
        if answer["changed"] and version > newest.get(job, version):
            change = Change(job, version, row.sent_s, answer["takes_effect"] == "planning")
            made[job, version] = min(
                change, made.get((job, version), change), key=lambda each: each.sent_s
            )
    return list(made.values())


def _change_rows(changes: Sequence[Change], found: Found) -> Iterator[dict[str, Any]]:
    for planned, how in ((False, "plans known"), (True, "plans to be made")):
        those = [each for each in changes if each.was_planned == planned]
        taken_ms = [each for each in _served_ms(those, found) if each is not None]
        if taken_ms:
            yield {
                "what": f"a report, {how}",
                "changes": len(those),
                "served": len(taken_ms),
                **_percentiles(taken_ms),
            }


def _served_ms(changes: Sequence[Change], found: Found) -> list[float | None]:
    """For each leader of a changed job, how long after what changed it was sent the leader had
    such plans; or never.
    """
    of_job: dict[str, list[list[tuple[int, float]]]] = {}
    for (job, _), seen in zip(found.leaders, found.seen["seen"], strict=True):
        of_job.setdefault(job, []).append(seen)
    return [
        _served_after_ms(change, seen) for change in changes for seen in of_job.get(change.job, [])
    ]


def _served_after_ms(change: Change, seen: Sequence[tuple[int, float]]) -> float | None:
    at = bisect_left(seen, change.version, key=lambda each: each[0])
    return 1e3 * (seen[at][1] - change.sent_s) if at < len(seen) else None


def _checks(size: Size, found: Found, lost: int) -> list[Check]:
    answers = found.answers()
    acknowledged = sum(row.status == 202 for row in answers)
    mixed = found.mixed
    beside = [*mixed.telemetry.rows, *mixed.taken.rows, *chain(*mixed.pages.values())]
    rising = all(
        early < late for seen in found.seen["seen"] for (early, _), (late, _) in pairwise(seen)
    )
    missed = sum(each is None for each in _served_ms(_by_reports(found), found))
    others = sum(row.status not in (200, 204, 304) for row in beside)
    strange = sum(map(len, found.seen["strange"])) + found.seen["lost"]
    return [
        Check(
            f"of {len(answers)} reports, {acknowledged} were acknowledged",
            acknowledged == len(answers),
        ),
        Check(f"{lost} of them are not in the database", lost == 0),
        Check("the versions that a leader was given rise", rising),
        Check(
            f"{missed} times a leader was not given a version of its job, nor a later one",
            missed == 0,
        ),
        Check(f"{others} of the other requests were refused", others == 0),
        Check(f"{strange} of {size.load_leaders} long polls were refused or cut off", strange == 0),
    ]
