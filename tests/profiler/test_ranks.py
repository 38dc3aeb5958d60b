"""Ranks that profile together: real processes, gloo, and the simulated GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import ranks

from perseus_planner.base.errors import UsageError
from perseus_planner.profiler.ranks.group import RankPosition, position_of
from perseus_planner.profiler.ranks.neighbours import neighbours
from perseus_planner.profiles.profiles import Profile

pytest.importorskip("torch")


def test_ranks_are_laid_out_stage_by_stage() -> None:
    assert [position_of(rank, 6, 3, 2) for rank in (0, 1, 2, 5)] == [
        RankPosition(0, 3, 0, 2),
        RankPosition(0, 3, 1, 2),
        RankPosition(1, 3, 0, 2),
        RankPosition(2, 3, 1, 2),
    ]


def test_a_wrong_number_of_ranks_is_refused() -> None:
    with pytest.raises(UsageError) as error:
        position_of(0, 4, 3, 2)
    assert (
        str(error.value)
        == "3 stages on 2 GPUs each need 6 ranks, but there are 4; start 6 ranks, of one pipeline "
        "only"
    )


def test_each_stage_waits_for_the_next_and_the_last_for_the_one_before() -> None:
    assert neighbours([[0, 2, 4], [1, 3, 5]]) == {0: 2, 2: 4, 4: 2, 1: 3, 3: 5, 5: 3}
    assert neighbours([[0]]) == {}


def test_ranks_gather_and_block_on_each_other(tmp_path: Path) -> None:
    for each in ranks("gather_and_block", 4, tmp_path):
        assert (each.code, each.stdout) == (0, "done\n"), each.stderr


def test_an_error_of_one_rank_ends_all_with_one_message(tmp_path: Path) -> None:
    everyone = ranks("refuse", 3, tmp_path)
    assert [each.code for each in everyone] == [2, 2, 2]
    assert [each.stderr for each in everyone] == ["", "rank 1 cannot go on\n", ""]


def test_when_a_rank_is_killed_the_others_end_with_one_message_and_keep_their_rows(
    tmp_path: Path,
) -> None:
    first, dead, last = ranks("killed", 3, tmp_path, "profile.yaml")
    assert (first.code, dead.code, last.code) == (2, -9, 2)
    messages = [line for each in (first, last) for line in each.stderr.splitlines()]
    assert len(messages) == 1, messages
    assert "rank 1" in messages[0]
    assert (tmp_path / "profile.rows-0.json").exists()
    assert not (tmp_path / "profile.yaml").exists()


def test_a_tensor_parallel_stage_measures_all_its_ranks(tmp_path: Path) -> None:
    everyone = ranks(
        "stages", 4, tmp_path, "simulated:a100-sxm?noise=0&drift=0", "2", "2", "both.yaml"
    )
    assert [each.code for each in everyone] == [0] * 4, everyone
    assert [each.stdout for each in everyone] == ["rank 0\n"] + 3 * ["another rank\n"]
    profile = Profile.load(tmp_path / "both.yaml")
    assert (profile.stages, profile.gpus_per_stage, profile.origin) == (2, 2, "simulated")
    assert profile.blocking_w(0) > 100  # two waiting GPUs
    assert sorted(file.name for file in tmp_path.iterdir()) == ["both.csv", "both.yaml"]
