"""`python -m perseus_planner.runtime.controller`: says `ready ADDRESS`, and goes on in the background."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from perseus_planner.errors import PlannerError
from perseus_planner.processes import Watched
from perseus_planner.runtime.controller.arrivals import Arrivals
from perseus_planner.runtime.controller.server import Controller


def main() -> int:
    """Serve the ranks of this node until none is left."""
    for politely in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(politely, signal.SIG_IGN)
    options, starter = _options(), Watched(os.getppid())
    if os.fork():
        os._exit(0)  # so that who started it has no child that it must wait for
    try:
        arrivals = Arrivals()
        controller = Controller(arrivals, options.ranks, options.max_changes_per_s, starter)
    except (PlannerError, OSError) as error:
        print(error)
        return 2
    if _says(f"ready {arrivals.address}\n"):
        controller.run()
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perseus_planner.runtime.controller", description=__doc__)
    parser.add_argument("--ranks", type=int, required=True, help="of this node")
    parser.add_argument("--max-changes-per-s", type=float, required=True, help="of all its GPUs together")
    return parser.parse_args()


def _says(word: str) -> bool:
    """Say it, and let go of who listens, so that nothing said later can fail; False where nobody listens."""
    listener, nowhere = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
    try:
        os.write(listener, word.encode())
    except BrokenPipeError:
        return False
    finally:
        os.close(listener)
    return True


if __name__ == "__main__":
    sys.exit(main())
