"""Rank 0, which holds the job's store, goes last, so that no rank asks a store that is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from launching import Ended, ranks


def run(program: str, folder: Path) -> list[Ended]:
    """Run three ranks, with all that torch prints."""
    return ranks(
        f"runtime_faults:{program}", 3, folder, str(folder / "state"), torch_says="WARNING"
    )


def test_a_normal_end_prints_nothing(tmp_path: Path):
    everyone = run("trains", tmp_path)
    assert [(each.code, each.stderr) for each in everyone] == [(0, "")] * 3


def test_all_ranks_read_why_rank_0_refuses(tmp_path: Path):
    everyone = run("has_no_plan", tmp_path)
    assert [each.code for each in everyone] == [1, 1, 1]
    refusal = "absent.yaml: no such file; check the path"
    texts = [each.stderr.splitlines()[-1].partition("Error: ")[2] for each in everyone]
    assert texts == [refusal, *[f"rank 0 does not begin: {refusal}"] * 2]
