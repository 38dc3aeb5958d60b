"""A process from which the ranks of all tests are forked, so that what they need is imported once for all of them.

Each line on its standard input asks for the ranks of a program, as launching.py writes it; their exit codes are a line
on its standard output.
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
    """Run as one rank of what is asked for, with files in its folder for what it says; its exit code."""
    os.chdir(request["folder"])
    for stream, name in ((1, "said"), (2, "complained")):
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
    """Fork the ranks, and wait for them."""
    for name in request["imports"]:
        import_module(name)
    programs, children = import_module(request["module"]), []
    sys.stdout.flush()  # what is said on importing is not for the ranks to repeat
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
        os.dup2(2, 1)  # what engines print is no answer
        for line in sys.stdin:
            print(json.dumps(_codes(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    _serve()
