"""Training under a plan, whole: real engines, real ranks, a clock controller, and emulated GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launching import ranks

pytest.importorskip("torch")

Said = list[dict[str, Any]]  #: of each rank


def said_by(program: str, count: int, folder: Path, *arguments: str) -> Said:
    everyone = ranks(f"runtime_programs:{program}", count, folder, str(folder / "state"), *arguments)
    assert [each.code for each in everyone] == [0] * count, [each.complained for each in everyone]
    return [json.loads(each.said.splitlines()[-1]) for each in everyone]


@pytest.mark.parametrize(
    ("count", "names"), [(2, ["1f1b", "interleaved-1f1b", "interleaved-zb", "zbv"]), (4, ["1f1b", "interleaved-zb"])]
)
def test_every_computation_runs_at_its_clock_and_results_are_the_same_to_the_last_bit(
    count: int, names: list[str], tmp_path: Path
):
    everyone = said_by("torch_schedules", count, tmp_path, *names)
    for name in names:
        for rank in everyone:
            said = rank[name]
            assert said["equal"]
            assert said["orders"] == [said["plan"]] * 3
            assert said["as planned"][:2] == [True, True]
            assert (said["after"], said["problem"], said["heard"]) == (None, None, [])
