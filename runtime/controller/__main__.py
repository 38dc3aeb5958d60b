"""`python -m perseus_planner.runtime.controller` prints `ready ADDRESS` and goes on in the
background.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

from perseus_planner.base.errors import PlannerError
from perseus_planner.base.processes import WatchedProcess, report_ready
from perseus_planner.runtime.controller.protocol import Handshakes
from perseus_planner.runtime.controller.server import Controller


def main() -> int:
    """Serve the ranks of this node until none is left."""
    # Who ends a job sends these to all of its processes; ranks leave by themselves, and GPUs are
    # reset then.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, required=True, help="number of ranks on this node")
    parser.add_argument("--max-changes-per-s", type=float, required=True, help="of all its GPUs")
    options = parser.parse_args()
    # Before the fork: the starter is this process's parent until then.
    starter = WatchedProcess(os.getppid())
    if os.fork():
        os._exit(0)  # so that the process that started it has no child to wait for
    try:
        handshakes = Handshakes()
        controller = Controller(handshakes, options.ranks, options.max_changes_per_s, starter)
    except (PlannerError, OSError) as error:
        print(error)
        return 2
    if report_ready(handshakes.address):
        controller.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
