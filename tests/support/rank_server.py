"""Fork the ranks of all tests from one process, which imports what they need once.

Each line on standard input requests the ranks of a program, in the format of launching.py. The
reply is a line on standard output with their exit codes; or, where a launcher is to wait for them,
its process number.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any


def _become_rank(programs: ModuleType, rank: int, request: dict[str, Any]) -> int:
    """Run as one rank of the requested program, with its output in files of its folder; return
    the exit code.
    """
    os.chdir(request["folder"])
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.environ.update(request["environment"], RANK=str(rank), LOCAL_RANK=str(rank))
    try:
        getattr(programs, request["program"])(*request["arguments"])
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _fork_ranks(programs: ModuleType, request: dict[str, Any]) -> list[int]:
    """Fork the ranks; return their process numbers."""
    children = []
    sys.stdout.flush()  # otherwise the ranks would print the output of the imports again
    for rank in range(request["count"]):
        child = os.fork()
        if not child:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            code = _become_rank(programs, rank, request)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        children.append(child)
    return children


def _become_launcher(programs: ModuleType, request: dict[str, Any]) -> None:
    """Start the ranks and end with them; if one fails, end the others."""
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    ranks = _fork_ranks(programs, request)
    for _ in ranks:
        _, status = os.wait()
        for rank in ranks if status else ():
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGTERM)


def _reply(request: dict[str, Any], launchers: set[int]) -> int | list[int]:
    """Return the launcher, or the exit codes of all ranks."""
    for name in request["imports"]:
        import_module(name)
    programs = import_module(request["module"])
    if not request["launcher"]:
        ranks = _fork_ranks(programs, request)
        return [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    launcher = os.fork()
    if not launcher:
        try:
            _become_launcher(programs, request)
        finally:
            os._exit(0)
    launchers.add(launcher)
    return launcher


def _serve() -> None:
    launchers = set[int]()

    def reap(*_: object) -> None:
        for launcher in [*launchers]:
            if os.waitpid(launcher, os.WNOHANG)[0]:
                launchers.remove(launcher)

    signal.signal(signal.SIGCHLD, reap)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # the output of engines must not mix with the replies
        for line in sys.stdin:
            print(json.dumps(_reply(json.loads(line), launchers)), file=answers, flush=True)


if __name__ == "__main__":
    support = Path(__file__).parent
    sys.path[:0] = [str(support), str(support.parents[1] / "benchmarks")]
    _serve()
