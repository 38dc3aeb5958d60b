"""The benchmarks run at a small size and pass their checks."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from strategies import soaks

RUN = Path(__file__).resolve().parents[2] / "benchmarks" / "run.py"


def benchmarks(*arguments: str, data: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PLANNER_DATA": str(data)}
    command = [sys.executable, str(RUN), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


# Number 17 checks times, which hold only on an idle machine.
SOAKS = {
    "more of planning": range(2, 6),
    "comparisons": range(6, 12),
    "training": range(12, 17),
    "service": [18],
    "noise": [19, 20],
    "budgets": [21],
    "autopilot": [22],
    "estimates": range(24, 28),
    "batches": [32],
}  #: what takes long even at a small size


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param([1], id="planning"),
        *(pytest.param(each, id=name, marks=pytest.mark.soak) for name, each in SOAKS.items()),
    ],
)
def test_a_smoke_run_passes_every_check(
    numbers: Sequence[int], measured_data: Path, tmp_path: Path
):
    only = [f"--only={number}" for number in numbers]
    result = benchmarks("--smoke", *only, "--output", str(tmp_path), data=measured_data)
    assert result.returncode == 0, result.stderr
    (written,) = tmp_path.glob("smoke_*.json")
    sections = json.loads(written.read_text())["sections"]
    assert [section["number"] for section in sections] == list(numbers)
    assert all(check["passed"] for section in sections for check in section["checks"])
    skipped = [section["number"] for section in sections if section["title"] == "Skipped"]
    assert skipped == (
        []
        if importlib.util.find_spec("lowtime")
        else [number for number in numbers if number in (2, 6)]
    )
    assert written.with_suffix(".md").read_text().count("\n## ") == len(sections)


def test_a_run_without_measured_data_is_skipped_with_the_reason(tmp_path: Path):
    result = benchmarks(data=tmp_path)
    assert result.returncode == 0
    missing = tmp_path / "perseus_sosp24"
    expected = (
        f"skipped: no measured profiles: {missing} does not exist; name their folder in "
        "PLANNER_DATA\n"
    )
    assert result.stdout == expected


@pytest.mark.parametrize("number", ["99", *soaks("0")])
def test_an_unknown_number_is_refused(number: str, tmp_path: Path):
    result = benchmarks("--only", number, data=tmp_path)
    assert result.returncode == 2
    assert "invalid choice" in result.stderr
