"""The processor time of the clock controller of a node, beside that of another checkout in one run.

    git worktree add ../before 84fe46d2
    python benchmarks/controller_cost.py ../before

Eight ranks write requests as training does, and a GPU's calls take no time, so what is measured is
the controller alone. Each checkout runs in turn, several times; the table has the medians. The
share of a core is **measured** and depends on the machine; the ratio is what counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
from results import Table

ROOT = Path(__file__).resolve().parents[1]
RANKS = 8
LASTS_S = 8.0
ROUNDS = 3
CLOCKS_MHZ = tuple(range(1200, 1320, 15))

#: name -> milliseconds of a computation, and how many different clocks it goes through
PLANS = {
    "busy: computations of 20 ms, a change after each": (20.0, 8),
    "busy: computations of 3 ms, a change after each": (3.0, 8),
    "idle: computations of 20 ms at one clock": (20.0, 1),
    "idle: computations of 3 ms at one clock": (3.0, 1),
}
_COLUMNS = {
    "plan": ("8 ranks", ""),
    "before": ("the other checkout, % of a core", ".2f"),
    "now": ("this one, % of a core", ".2f"),
    "ratio": ("this one / the other", ".2f"),
}

_SERVE = """
from perseus_planner.runtime.controller.protocol import Handshakes
from perseus_planner.runtime.controller.server import Controller
handshakes = Handshakes()
print(handshakes.address, flush=True)
Controller(handshakes, {ranks}, 100.0).run()
"""

_DRIVE = """
import sys, time
from contextlib import ExitStack
from threading import Thread
from perseus_planner.runtime.controller.client import Connection
from perseus_planner.runtime.controller.protocol import AttachRequest
from perseus_planner.runtime.marks import clock_request
address, clocks = sys.argv[1], int(sys.argv[3])
period_s, lasts_s = float(sys.argv[2]), float(sys.argv[4])
with ExitStack() as stack:
    requests = [AttachRequest(n, "simulated:a100-sxm?call=0", "clock", None) for n in range(8)]
    connections = [stack.enter_context(Connection(address, each)) for each in requests]
    for each in connections:
        each.attach(60.0)
    print("attached", flush=True)
    sys.stdin.readline()
    begun_s, count = time.monotonic(), 0
    while time.monotonic() - begun_s < lasts_s:
        place = count % 64
        for each in connections:
            each.request[0] = clock_request(place, 1200 + 15 * (place % clocks))
            each.messages()
        count += 1
        time.sleep(max(0.0, begun_s + count * period_s - time.monotonic()))
    print("done", flush=True)
    sys.stdin.readline()
"""


def share(checkout: Path, period_s: float, clocks: int) -> float:
    """Return the share of a core that the controller of a checkout takes."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    with ExitStack() as stack:

        def started(code: str, *arguments: object) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-c", code, *map(str, arguments)],
                env=environment,
                cwd=checkout,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.kill)
            return process

        server = started(_SERVE.format(ranks=RANKS))
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        driver = started(_DRIVE, address, period_s, clocks, LASTS_S)
        assert driver.stdin is not None
        assert driver.stdout is not None
        assert driver.stdout.readline() == "attached\n"
        time.sleep(0.5)  # what attaching takes is not counted
        controller = psutil.Process(server.pid)
        before = controller.cpu_times()
        print(file=driver.stdin, flush=True)
        assert driver.stdout.readline() == "done\n"
        after = controller.cpu_times()
        return (after.user + after.system - before.user - before.system) / LASTS_S


def measure(other: Path) -> Table:
    """Return the table of both checkouts."""
    rows = []
    for plan, (period_ms, clocks) in PLANS.items():
        shares: dict[Path, list[float]] = {ROOT: [], other: []}
        for _ in range(ROUNDS):
            for checkout, found in shares.items():
                found.append(100 * share(checkout, period_ms / 1e3, clocks))
        before, now = statistics.median(shares[other]), statistics.median(shares[ROOT])
        rows.append({"plan": plan, "before": before, "now": now, "ratio": now / before})
    return Table(_COLUMNS, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("other", type=Path, help="a checkout of another version")
    print(measure(parser.parse_args(arguments).other.resolve()).markdown())


if __name__ == "__main__":
    main()
