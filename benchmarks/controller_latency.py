"""Number 15: time from the request of a clock until it is set, for the ways of clock_setters.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from clock_setters import CLOCKS_MHZ, WAYS
from data import Size
from results import Check, Section, Table

_NAMES = {
    "controller": "one process per node, one shared request per rank",
    "thread": "a thread in each rank, queue.SimpleQueue",
    "queue": "a process for each rank, multiprocessing.Queue",
}
_COLUMNS = {
    "rate": ("requests per rank and second", "d"),
    "way": ("set by", ""),
    "set": ("set, %", ".0f"),
    "given_up": ("ranks given up", "d"),
    "median_ms": ("request to set: median, ms", ".1f"),
    "p99_ms": ("p99, ms", ".1f"),
    "median_ratio": ("median, controller = 1", ".2f"),
    "p99_ratio": ("p99, controller = 1", ".2f"),
    "at_wanted": ("time at the requested clock, %", ".1f"),
    "core": ("the controller, % of a core", ".1f"),
}

RankResult = Mapping[str, Any]
"""Results of a rank: `asked`, when it made each request; `set`, (which, when) for each clock
set; `given_up`.
"""


def measure(size: Size) -> Section:
    """Time every way at every rate, with the same GPUs."""
    runs = {(rate, way): _run(way, rate, size) for rate in size.setting_rates_per_s for way in WAYS}
    results = {key: ranks for key, (ranks, _) in runs.items()}
    count, busy_share = size.setting_ranks, _busy_share(size.setting_ranks)
    rows = []
    for (rate, way), ranks in results.items():
        row, base = _row(ranks), _row(results[rate, "controller"])
        ratios = {
            f"{name}_ratio": row[f"{name}_ms"] / base[f"{name}_ms"] for name in ("median", "p99")
        }
        controller_s = runs[rate, way][1]
        core = None if controller_s is None else 100 * controller_s / size.setting_s
        rows.append({"rate": rate, "way": _NAMES[way], **row, **ratios, "core": core})
    lasts = all(
        rank["given_up"] or _is_same(rank["set"][-1][0], len(rank["asked"]) - 1)
        for ranks in results.values()
        for rank in ranks
    )
    orders = all(sorted(rank["set"]) == rank["set"] for ranks in results.values() for rank in ranks)
    return Section(
        15,
        "Setting clocks: from the request to the clock",
        f"**Measured** times, in processes of this machine; the GPUs are **simulated**: {count} "
        "on one lock that each call holds for 1.8 to 14 ms, median 4.5 ms, as measured on an "
        f"A800. Each rank requests {len(CLOCKS_MHZ)} clocks in turn for {size.setting_s:g} s, and "
        f"is busy in Python for {busy_share:.0%} of that time, right after each request.",
        [Table(_COLUMNS, rows)],
        [
            Check(
                "the clock that each rank requested last was set last, unless the rank was given "
                "up",
                lasts,
            ),
            Check("clocks were set in the order of their requests", orders),
        ],
        [
            "The controller only sets the latest value. A request that is overtaken before it can "
            "be served is not set, and has no latency; a rank is given up if most of its changes "
            "are overtaken. Queues serve all requests, so they fall behind if there are more than "
            "the lock allows, about 23 per rank and second.",
            f"{count} ranks share {os.cpu_count()} CPUs here, and are busy for so small a share "
            "of the time that they do not wait for CPUs. A training process that is always busy "
            "delays its own threads further, by up to 5 ms at each switch.",
        ],
    )


def _busy_share(ranks: int) -> float:
    """Return the share of its time in which a rank is busy: half of the CPUs together, at most
    half of one.
    """
    return min(0.5, 0.5 * (os.cpu_count() or 1) / ranks)


def _row(ranks: Sequence[RankResult]) -> dict[str, float]:
    waits_ms = [
        (set_ns - rank["asked"][which]) / 1e6 for rank in ranks for which, set_ns in rank["set"]
    ]
    return {
        "given_up": sum(rank["given_up"] for rank in ranks),
        "set": 100 * len(waits_ms) / sum(len(rank["asked"]) for rank in ranks),
        "median_ms": float(np.percentile(waits_ms, 50)),
        "p99_ms": float(np.percentile(waits_ms, 99)),
        "at_wanted": 100 * float(np.mean([_share_at_wanted(rank) for rank in ranks])),
    }


def _share_at_wanted(rank: RankResult) -> float:
    """Return the share of the time from the first to the last request in which the clock is the
    requested one.
    """
    asked = rank["asked"]
    moments = sorted(
        {*asked, *(set_ns for _, set_ns in rank["set"] if asked[0] < set_ns < asked[-1])}
    )
    at_wanted_ns = wanted = 0
    position, set_so_far = 0, -1
    for start_ns, end_ns in pairwise(moments):
        while wanted + 1 < len(asked) and asked[wanted + 1] <= start_ns:
            wanted += 1
        while position < len(rank["set"]) and rank["set"][position][1] <= start_ns:
            set_so_far, position = rank["set"][position][0], position + 1
        if set_so_far >= 0 and _is_same(set_so_far, wanted):
            at_wanted_ns += end_ns - start_ns
    return at_wanted_ns / (asked[-1] - asked[0])


def _is_same(one: int, other: int) -> bool:
    """Whether two numbers of requests mean the same clock."""
    return (one - other) % len(CLOCKS_MHZ) == 0


def _run(way: str, rate: int, size: Size) -> tuple[list[RankResult], float | None]:
    """Run all ranks; return their results, and the CPU seconds of the controller since all were
    ready, if there is one.
    """
    with tempfile.NamedTemporaryFile() as lock, ExitStack() as stack:
        server, address = None, ""
        if way == "controller":
            server = stack.enter_context(_start("serve", lock.name, {"ranks": size.setting_ranks}))
            address = server.stdout.readline().strip()
        ranks = []
        for rank in range(size.setting_ranks):
            own = {
                "rank": rank,
                "ranks": size.setting_ranks,
                "gpu": f"simulated:a100-sxm?seed={rank}",
                "count": max(2, round(rate * size.setting_s)),
            }
            pace = {
                "period-s": 1 / rate,
                "busy-s": _busy_share(size.setting_ranks) / rate,
                "address": address,
            }
            ranks.append(_start(way, lock.name, {**own, **pace}))
        try:
            for process in ranks:
                process.stdout.readline()  # it is ready
            before_s = _cpu_s(server)
            start_ns = time.monotonic_ns() + 100_000_000
            for process in ranks:
                print(start_ns, file=process.stdin, flush=True)
            found = [json.loads(process.communicate()[0]) for process in ranks]
            return found, None if server is None else _cpu_s(server) - before_s
        finally:
            for process in ranks:
                process.kill()
                process.communicate()


def _cpu_s(process: subprocess.Popen[str] | None) -> float:
    """Return the CPU seconds of a process that runs, or has ended and is not waited for yet."""
    if process is None:
        return 0.0
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


def _start(way: str, lock: str, options: Mapping[str, object]) -> subprocess.Popen[str]:
    program = Path(__file__).with_name("clock_setters.py")
    written = [f"--{name}={value}" for name, value in {"lock": lock, **options}.items()]
    return subprocess.Popen(
        [sys.executable, str(program), way, *written],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
