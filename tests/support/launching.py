"""Real ranks on this machine: processes that meet through torch.distributed, and what they say."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_QUIET = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "FATAL"}


Said = list[dict[str, Any]]  #: of each rank


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    code: int
    said: str
    complained: str


def ranks(program: str, count: int, folder: Path, *arguments: str, imports: Sequence[str] = ()) -> list[Ended]:
    """What becomes of `count` ranks that run `program`; nobody ends one when another dies.

    It is a function of rank_programs.py, or "module:function" one of another module in this folder. What it imports by
    itself, each rank would: name it in `imports` too where that takes long.
    """
    module, _, function = program.rpartition(":")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    request = {
        "module": module or "rank_programs",
        "imports": list(imports),
        "program": function,
        "arguments": arguments,
        "count": count,
        "folder": str(folder),
        "environment": {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    }
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    print(json.dumps(request), file=server.stdin, flush=True)
    codes = json.loads(server.stdout.readline())
    return [
        Ended(code, *(_taken(folder / f"{name}-{rank}") for name in ("said", "complained")))
        for rank, code in enumerate(codes)
    ]


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
        said, complained = process.communicate()
    finally:
        process.kill()
    return Ended(process.returncode, said, complained)


def torchrun(count: int, folder: Path, *command: str) -> subprocess.Popen[str]:
    """The launcher of `count` ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    return started([*launcher, *command], folder)


def deepspeed(count: int, folder: Path, *command: str) -> subprocess.Popen[str]:
    """DeepSpeed's launcher of `count` ranks; it gives each an argument --local_rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ["-m", "deepspeed.launcher.runner", "--num_gpus", str(count), "--master_port", str(port)]
    return started([*launcher, *command], folder)


@cache
def _server() -> subprocess.Popen[str]:
    """The process that forks ranks; it ends with this one, which closes its input."""
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("rank_server.py"))],
        env={**os.environ, **_QUIET},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _taken(path: Path) -> str:
    text = path.read_text()
    path.unlink()
    return text


def said_by(program: str, count: int, folder: Path, *arguments: str, imports: Sequence[str] = ()) -> Said:
    everyone = ranks(program, count, folder, str(folder / "state"), *arguments, imports=imports)
    assert [each.code for each in everyone] == [0] * count, "\n".join(each.complained for each in everyone)
    return [json.loads(each.said.splitlines()[-1]) for each in everyone]
