"""The runtime's adapter for Megatron-core, on real ranks that train a GPTModel through its own
schedules.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from launching import ranks

if any(find_spec(name) is None for name in ("torch", "megatron")):
    pytest.skip("torch or megatron-core is not installed", allow_module_level=True)


def all_print(what: str, program: str, count: int, folder: Path, *arguments: str) -> None:
    everyone = ranks(f"megatron_programs:{program}", count, folder, *arguments)
    assert [each.code for each in everyone] == [0] * count, [each.stderr for each in everyone]
    assert [each.stdout for each in everyone] == [f"{what}\n"] * count


@pytest.mark.parametrize(
    ("count", "shapes"),
    [
        (1, ["0,0,3"]),
        (2, ["0,0,1", "0,0,5", "2,0,4", "2,3,5", "3,0,6"]),  # virtual stages, group, microbatches
        (4, ["0,0,2", "0,0,6", "2,0,8", "2,5,9"]),
    ],
)
def test_the_hook_sees_what_runs_and_what_was_expected(
    count: int, shapes: list[str], tmp_path: Path
) -> None:
    all_print("equal", "orders", count, tmp_path, *shapes)


def test_training_is_bit_for_bit_the_same_and_the_users_timers_get_every_call(
    tmp_path: Path,
) -> None:
    all_print("equal", "results", 2, tmp_path)


def test_evaluation_reaches_no_hook(tmp_path: Path) -> None:
    all_print("silent", "evaluations", 2, tmp_path)


def test_another_number_of_microbatches_leaves_the_plan_for_that_iteration(tmp_path: Path) -> None:
    all_print("left and back", "changes", 2, tmp_path)


def test_microbatches_of_unknown_number_are_reported_as_they_come(tmp_path: Path) -> None:
    all_print("seen", "unknown", 1, tmp_path)


def test_what_is_asked_of_timers_comes_from_those_that_were_there(tmp_path: Path) -> None:
    all_print("passed on", "timers", 1, tmp_path)


def test_the_timers_of_every_config_are_put_back(tmp_path: Path) -> None:
    all_print("restored", "restores", 2, tmp_path)


def test_an_iteration_that_ends_in_an_error_is_begun_anew(tmp_path: Path) -> None:
    all_print("anew", "dies", 1, tmp_path)


def test_what_timers_do_not_show_is_refused(tmp_path: Path) -> None:
    all_print("refused", "refusals", 1, tmp_path)


def test_the_loops_of_megatron_lm_do_not_drop_the_hook(tmp_path: Path) -> None:
    all_print("seen", "megatron_lm", 2, tmp_path)


def test_pipelines_side_by_side_are_distinguished(tmp_path: Path) -> None:
    all_print("seated", "seats", 4, tmp_path)
