"""`planner doctor --rehearse`: what a profile needs, tried on all ranks, as one table with one
verdict.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from perseus_planner.base.prefixes import si
from perseus_planner.base.units import COUNT
from perseus_planner.cli import console

if TYPE_CHECKING:
    from perseus_planner.profiler.rehearsal import RankRehearsal, Rehearsal


def rehearse_and_report(
    gpu: str = "cuda", *, locks: bool, stages: int | None, as_json: bool
) -> None:
    """Rehearse on this rank, print the result on rank 0, and exit with 1 on all ranks if one has
    a problem.
    """
    from perseus_planner.profiler.rehearsal import rehearse

    if stages is not None:
        COUNT.check(stages, "--stages")
    with rehearse(gpu, locks=locks, stages=stages) as result:
        if os.environ.get("RANK", "0") == "0":
            console.report(result, _text(result), [], as_json=as_json)
        if result.is_stuck:  # destroying the process group would wait for the same message
            sys.stdout.flush()
            os._exit(1)
    if not result.has_passed:
        click.get_current_context().exit(1)


def _text(result: Rehearsal) -> str:
    from perseus_planner.base.tables import table

    nodes = len({rank.node for rank in result.ranks})
    sizes = ", ".join(
        f"{size} x {size}" for size in sorted({rank.size for rank in result.ranks} - {0})
    )
    head = f"Rehearsal on {_count(len(result.ranks), 'rank')} of {_count(nodes, 'node')}"
    head += f"; the load is a matrix product of {sizes}" if sizes else ""
    texts = [head, table(_columns(result.ranks))]
    for title, lines in (
        ("Problems:", [(rank.rank, text) for rank in result.ranks for text in rank.problems]),
        ("Remarks:", [(rank.rank, text) for rank in result.ranks for text in rank.remarks]),
    ):
        if lines:
            texts.append("\n".join([title, *_by_ranks(lines)]))
    return "\n\n".join([*texts, _verdict(result)])


def _columns(ranks: Sequence[RankRehearsal]) -> list[list[str]]:
    columns = {
        "rank": [str(rank.rank) for rank in ranks],
        "node": [rank.node for rank in ranks],
        "GPU": [rank.name or "-" for rank in ranks],
        "locked -> achieved": [_clocks(rank) for rank in ranks],
        "power": [
            ", ".join(si(run.power_w, "W", 3) for run in rank.runs if run.precision == "bf16")
            for rank in ranks
        ],
        "counter": [_time(rank.counter_step_s) for rank in ranks],
        "fp32": [_time(_run_s(rank, "fp32")) for rank in ranks],
        "bf16": [_time(_run_s(rank, "bf16")) for rank in ranks],
        "free memory": [_memory(rank) for rank in ranks],
        "messages from": [_messages(rank) for rank in ranks],
    }
    return [[name, *(cell or "-" for cell in cells)] for name, cells in columns.items()]


def _clocks(rank: RankRehearsal) -> str:
    runs = [run for run in rank.runs if run.precision == "bf16"]
    return ", ".join(
        f"{'-' if run.locked_mhz is None else run.locked_mhz} -> {run.achieved_mhz:.0f} MHz"
        + (f" ({', '.join(run.throttle)})" if run.throttle else "")
        for run in runs
    )


def _run_s(rank: RankRehearsal, precision: str) -> float | None:
    return next((run.time_s for run in rank.runs if run.precision == precision), None)


def _memory(rank: RankRehearsal) -> str:
    if rank.free_bytes is None or rank.total_bytes is None:
        return ""
    return f"{rank.free_bytes / 2**30:.1f} of {rank.total_bytes / 2**30:.1f} GiB"


def _messages(rank: RankRehearsal) -> str:
    return ", ".join(
        f"{each.sender}: {si(each.size_bytes / each.time_s, 'B/s', 3)}" for each in rank.received
    )


def _time(time_s: float | None) -> str:
    return "" if time_s is None else si(time_s, "s", 3)


def _by_ranks(lines: Sequence[tuple[int, str]]) -> list[str]:
    """Return each text once, after the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, text in lines:
        ranks.setdefault(text, []).append(rank)
    return [
        f"  rank{'s' * (len(having) > 1)} {', '.join(map(str, having))}: {text}"
        for text, having in ranks.items()
    ]


def _verdict(result: Rehearsal) -> str:
    ranks = _count(len(result.ranks), "rank")
    failed = sum(bool(rank.problems) for rank in result.ranks)
    if failed:
        return f"Verdict: no profile can be made here yet, for problems on {failed} of {ranks}."
    observed = sum(rank.locks is False for rank in result.ranks)
    if observed:
        return (
            f"Verdict: a profile can be made with --observe; clocks cannot be set on {observed} "
            f"of {ranks}."
        )
    if any(rank.locks is None for rank in result.ranks):
        return "Verdict: a profile can be made with --observe; setting clocks was not tried."
    return "Verdict: a profile can be made here."


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
