"""`planner doctor --rehearse`: what a profile needs, tried on all ranks, as one table with one
verdict.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

from perseus_planner.base.prefixes import counted, si
from perseus_planner.base.units import COUNT
from perseus_planner.cli import console

if TYPE_CHECKING:
    from perseus_planner.profiler.rehearsal import LoadRun, RankRehearsal, Rehearsal


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
    nodes = len({rank.node for rank in result.ranks})
    sizes = sorted({rank.size for rank in result.ranks} - {0})
    head = f"Rehearsal on {counted(len(result.ranks), 'rank')} of {counted(nodes, 'node')}"
    if sizes:
        head += f"; the load is a matrix product of {', '.join(f'{n} x {n}' for n in sizes)}"
    texts = [head, _table(result.ranks)]
    for title, lines in (
        ("Problems:", [(rank.rank, text) for rank in result.ranks for text in rank.problems]),
        ("Remarks:", [(rank.rank, text) for rank in result.ranks for text in rank.remarks]),
    ):
        if lines:
            texts.append("\n".join([title, *_by_ranks(lines)]))
    return "\n\n".join([*texts, _verdict(result)])


def _table(ranks: Sequence[RankRehearsal]) -> str:
    from perseus_planner.base.tables import Column, lay_out, table

    def time(precision: str) -> Callable[[RankRehearsal], str | None]:
        return lambda rank: next(
            (si(run.time_s, "s", 3) for run in rank.runs if run.precision == precision), None
        )

    cells: dict[str, Callable[[RankRehearsal], object]] = {
        "rank": lambda rank: rank.rank,
        "node": lambda rank: rank.node,
        "GPU": lambda rank: rank.name,
        "locked -> achieved": lambda rank: ", ".join(map(_clock, _bf16(rank))),
        "power": lambda rank: ", ".join(si(run.power_w, "W", 3) for run in _bf16(rank)),
        "counter": lambda rank: rank.counter_step_s and si(rank.counter_step_s, "s", 3),
        "fp32": time("fp32"),
        "bf16": time("bf16"),
        "free memory": _memory,
        "messages from": lambda rank: ", ".join(
            f"{message.sender}: {si(message.size_bytes / message.time_s, 'B/s', 3)}"
            for message in rank.received
        ),
    }
    columns = [Column(name, cell, "<") for name, cell in cells.items()]
    return table([[cell or "-" for cell in column] for column in lay_out(ranks, *columns)])


def _bf16(rank: RankRehearsal) -> list[LoadRun]:
    return [run for run in rank.runs if run.precision == "bf16"]


def _clock(run: LoadRun) -> str:
    locked = "-" if run.locked_mhz is None else run.locked_mhz
    throttle = f" ({', '.join(run.throttle)})" if run.throttle else ""
    return f"{locked} -> {run.achieved_mhz:.0f} MHz{throttle}"


def _memory(rank: RankRehearsal) -> str | None:
    if rank.free_bytes is None or rank.total_bytes is None:
        return None
    return f"{rank.free_bytes / 2**30:.1f} of {rank.total_bytes / 2**30:.1f} GiB"


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
    ranks = counted(len(result.ranks), "rank")
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
