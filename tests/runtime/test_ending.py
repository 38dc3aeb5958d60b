"""Rank 0, which holds the job's store, goes last, so that no rank asks a store that is gone."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

pytest.importorskip("torch")

from launching import Ended, ended, started


def run(program: str, count: int, folder: Path) -> list[Ended]:
    """Run ranks as a user without a launcher does, with all that torch prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = str(Path(__file__).parents[1] / "support" / "ending_programs.py")
    environment = {
        "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCH_CPP_LOG_LEVEL": "WARNING",
        "PLANNER_STATE_DIR": str(folder / "state"),
    }  # fmt: skip
    processes = [
        started([script, program], folder, RANK=str(rank), LOCAL_RANK=str(rank), **environment) for rank in range(count)
    ]
    return [ended(process) for process in processes]


def test_a_normal_end_prints_nothing(tmp_path: Path):
    everyone = run("trains", 3, tmp_path)
    assert [(each.code, each.stderr) for each in everyone] == [(0, "")] * 3


def test_all_ranks_read_why_rank_0_refuses(tmp_path: Path):
    everyone = run("has_no_plan", 3, tmp_path)
    assert [each.code for each in everyone] == [1, 1, 1]
    refusal = "absent.yaml: no such file; check the path"
    texts = [each.stderr.splitlines()[-1].partition("Error: ")[2] for each in everyone]
    assert texts == [refusal, *[f"rank 0 does not begin: {refusal}"] * 2]
