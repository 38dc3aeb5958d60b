"""Run real ranks on this machine: processes that connect through torch.distributed."""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import SystemRandom
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_QUIET = {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "FATAL",
}

_PORTS = (16_000, 32_000)
"""From which `free_port` takes one: the first, and the one after the last."""


Results = list[dict[str, Any]]  #: of each rank


@dataclass(frozen=True)
class Ended:
    """A process that has ended.

    Attributes:
        code: Its exit code.
        stdout: What it printed on standard output.
        stderr: What it printed on standard error.
    """

    code: int
    stdout: str
    stderr: str


def ranks(
    program: str,
    count: int,
    folder: Path,
    *arguments: str,
    imports: Sequence[str] = (),
    torch_says: str = "FATAL",
) -> list[Ended]:
    """Run `program` on `count` ranks and wait for all of them, also if one of them dies.

    Args:
        program: A function of rank_programs.py, or "module:function" for another module in this
            folder.
        count: The number of ranks.
        folder: The folder to run in.
        arguments: The arguments of the function.
        imports: Modules to import once before forking, which the function imports and which are
            slow to import.
        torch_says: The least severity of what torch prints.
    """
    server = _server(torch_says)
    codes = _asked(server, program, count, folder, arguments, imports=list(imports))
    return [
        Ended(code, *(_taken(folder / f"{name}-{rank}") for name in ("stdout", "stderr")))
        for rank, code in enumerate(codes)
    ]


def launched(program: str, count: int, folder: Path, *arguments: str) -> int:
    """Start `program` on ranks that end with each other, and return the process that waits for
    them, as a launcher does; do not wait for it.
    """
    launcher: int = _asked(_server("FATAL"), program, count, folder, arguments, launcher=True)
    return launcher


def _asked(
    server: subprocess.Popen[str],
    program: str,
    count: int,
    folder: Path,
    arguments: Sequence[str],
    **options: object,
) -> Any:
    """Return the reply of a server to a request."""
    module, _, function = program.rpartition(":")
    request = {
        "module": module or "rank_programs",
        "program": function,
        "arguments": arguments,
        "count": count,
        "folder": str(folder),
        "environment": {
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        },
        "imports": [],
        "launcher": False,
    }
    assert server.stdin is not None
    assert server.stdout is not None
    print(json.dumps(request | options), file=server.stdin, flush=True)
    return json.loads(server.stdout.readline())


def free_port() -> int:
    """Return a port of loopback on which nothing listens.

    It is below the ports that systems give to connections. One of those may be taken again by a
    connection of another test before the process that it is for listens on it, and then its ranks
    wait for each other without end.
    """
    choose = SystemRandom()  # as tests that run at once may have equal seeds
    while True:
        port = choose.randrange(*_PORTS)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def started(command: Sequence[str], folder: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, **_QUIET, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> Ended:
    try:
        stdout, stderr = process.communicate()
    finally:
        process.kill()
    return Ended(process.returncode, stdout, stderr)


def by_themselves(count: int, folder: Path, *command: str, **environment: str) -> list[Ended]:
    """Start each rank by itself, as srun does, and wait for all of them."""
    job = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job |= environment
    begun = [
        started(command, folder, **job, RANK=str(rank), LOCAL_RANK=str(rank))
        for rank in range(count)
    ]
    return [ended(process) for process in begun]


def torchrun(count: int, folder: Path, *command: str) -> subprocess.Popen[str]:
    """Start `count` ranks with torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    return started([*launcher, *command], folder)


def deepspeed(count: int, folder: Path, *command: str) -> subprocess.Popen[str]:
    """Start `count` ranks with the launcher of DeepSpeed, which passes --local_rank to each."""
    launcher = ["-m", "deepspeed.launcher.runner", "--num_gpus", str(count)]
    return started([*launcher, "--master_port", str(free_port()), *command], folder)


@cache
def _server(torch_says: str) -> subprocess.Popen[str]:
    """Start a process that forks what each line of its input asks for, until this one ends and
    closes that input.
    """
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("rank_server.py"))],
        env={**os.environ, **_QUIET, "TORCH_CPP_LOG_LEVEL": torch_says},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.__exit__, None, None, None)  # closes its input and waits
    return process


def _taken(path: Path) -> str:
    text = path.read_text()
    path.unlink()
    return text


def results_of(
    program: str, count: int, folder: Path, *arguments: str, imports: Sequence[str] = ()
) -> Results:
    everyone = ranks(program, count, folder, str(folder / "state"), *arguments, imports=imports)
    assert [each.code for each in everyone] == [0] * count, "\n".join(
        each.stderr for each in everyone
    )
    return [json.loads(each.stdout.splitlines()[-1]) for each in everyone]
