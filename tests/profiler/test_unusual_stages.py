"""Stages that are frozen, empty, an embedding or a loss alone, or have adapters, on every engine:
they can be profiled, solved, planned and trained by the plan, with the same results.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import results_of

pytest.importorskip("torch")

WELL = {
    "planned": True,
    "equal": True,
    "deviations": [None, None],
    "problem": None,
    "warnings": [],
}


def check(engine: str, names: list[str], folder: Path, *imports: str) -> None:
    program = f"unusual_programs:{engine}_stages"
    results = results_of(program, 2, folder, *names, imports=imports)
    for rank in results:
        assert list(rank) == names
        for name, found in rank.items():
            found.pop("timed")
            assert found == WELL, name


@pytest.mark.parametrize(
    "names",
    [
        ["frozen first", "loss alone", "frozen middle, split"],
        pytest.param(
            [
                "vision tower",
                "frozen last",
                "embedding alone",
                "frozen embedding",
                "adapters",
                "recomputed",
                "backward once",
                "frozen but for the last",
                "empty middle",
                "frozen first, split",
                "frozen halves",
            ],
            marks=pytest.mark.soak,
        ),
    ],
)
def test_torch(names: list[str], tmp_path: Path) -> None:
    check("torch", names, tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        ["frozen first", "half frozen"],
        pytest.param(
            [
                "vision tower",
                "frozen last",
                "adapters",
                "embedding alone",
                "frozen embedding",
                "loss alone",
                "recomputed",
            ],
            marks=pytest.mark.soak,
        ),
    ],
)
def test_deepspeed(names: list[str], tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    check("deepspeed", names, tmp_path, "deepspeed.pipe")


@pytest.mark.parametrize(
    "names",
    [
        ["frozen first", "empty rank"],
        pytest.param(
            [
                "frozen embedding",
                "frozen last",
                "adapters",
                "loss alone",
                "embedding alone",
                "empty",
                "frozen, interleaved",
                "further tokens",
            ],
            marks=pytest.mark.soak,
        ),
    ],
)
def test_megatron(names: list[str], tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    check("megatron", names, tmp_path, "tiny_gpt")
