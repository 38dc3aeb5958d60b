"""Fork the ranks of all tests from one process, which imports what they need once.

Each line on standard input requests the ranks of a program, in the format of launching.py. The
reply is a line on standard output with their exit codes.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
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


def _codes(request: dict[str, Any]) -> list[int]:
    """Fork the ranks, wait for them and return their exit codes."""
    for name in request["imports"]:
        import_module(name)
    programs, children = import_module(request["module"]), []
    sys.stdout.flush()  # otherwise the ranks would print the output of the imports again
    for rank in range(request["count"]):
        child = os.fork()
        if not child:
            code = _become_rank(programs, rank, request)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _serve() -> None:
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # the output of engines must not mix with the replies
        for line in sys.stdin:
            print(json.dumps(_codes(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    _serve()
