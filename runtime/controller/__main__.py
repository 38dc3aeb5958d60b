"""`python -m perseus_planner.runtime.controller` prints `ready ADDRESS` and goes on in the
background.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

from perseus_planner.base.errors import PlannerError
from perseus_planner.base.processes import WatchedProcess
from perseus_planner.runtime.controller.protocol import Handshakes
from perseus_planner.runtime.controller.server import Controller


def main() -> int:
    """Serve the ranks of this node until none is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    options, starter = _parse_options(), WatchedProcess(os.getppid())
    if os.fork():
        os._exit(0)  # so that the process that started it has no child to wait for
    try:
        handshakes = Handshakes()
        controller = Controller(handshakes, options.ranks, options.max_changes_per_s, starter)
    except (PlannerError, OSError) as error:
        print(error)
        return 2
    if _report(f"ready {handshakes.address}\n"):
        controller.run()
    return 0


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m perseus_planner.runtime.controller", description=__doc__
    )
    parser.add_argument("--ranks", type=int, required=True, help="number of ranks on this node")
    parser.add_argument(
        "--max-changes-per-s",
        type=float,
        required=True,
        help="rate of the clock changes of all its GPUs together",
    )
    return parser.parse_args()


def _report(line: str) -> bool:
    """Write the line, and close the standard streams; return False if nobody reads it."""
    reader, nowhere = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
    try:
        os.write(reader, line.encode())
    except BrokenPipeError:
        return False
    finally:
        os.close(reader)
    return True


if __name__ == "__main__":
    sys.exit(main())
