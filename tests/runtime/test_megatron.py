"""The runtime's adapter for Megatron-core, on real ranks that train a GPTModel through its own
schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from launching import Ended, ranks, results_of
from megatron_shapes import SHAPES, Shape

if any(find_spec(name) is None for name in ("torch", "megatron")):
    pytest.skip("torch or megatron-core is not installed", allow_module_level=True)


# By the number of ranks; "orders" with virtual stages, group and microbatches.
PROGRAMS = {
    1: ("refusals", "orders 0,0,3", "unknown", "timers", "dies", "shapes"),
    2: (
        "orders 0,0,1 0,0,5 2,0,4 2,3,5 3,0,6",
        *("results", "evaluations", "changes", "packs", "restores", "megatron_lm"),
        *("half_seen", "multimodule", "reruns", "experts", "shapes"),
    ),
    4: ("orders 0,0,2 0,0,6 2,0,8 2,5,9", "seats", "shapes"),
}

Pass = Callable[[int, str], None]


@pytest.fixture(scope="module")
def all_pass(tmp_path_factory: pytest.TempPathFactory) -> Pass:
    """Check that all ranks passed a program or a shape, or skip the test if this core lacks what it
    needs; those of one number of ranks run in one launch.
    """

    @cache
    def everyone(count: int) -> list[Ended]:
        folder = tmp_path_factory.mktemp("ranks")
        return ranks("megatron_programs:several", count, folder, *PROGRAMS[count])

    def check(count: int, program: str) -> None:
        for each in everyone(count):
            lines = each.stdout.splitlines()
            if program not in lines:
                begin = f"{program}: "
                lack = next((line for line in lines if line.startswith(begin)), None)
                assert lack is not None, each.stderr
                pytest.skip(lack.removeprefix(begin))

    return check


@pytest.mark.parametrize("count", PROGRAMS)
def test_the_hook_sees_what_runs_and_what_was_expected(count: int, all_pass: Pass) -> None:
    all_pass(count, "orders")


@pytest.mark.parametrize(
    ("count", "shapes"), [(2, "2,0,4,1 2,3,5,1 3,0,4,1 0,0,4,2"), (4, "2,0,4,2")]
)
def test_where_experts_are_overlapped_each_pair_is_one_computation(
    count: int, shapes: str, tmp_path: Path
) -> None:
    # On ranks of their own: process groups of all shapes stay until the end.
    for each in ranks("megatron_programs:several", count, tmp_path, f"combined {shapes}"):
        assert "combined" in each.stdout.splitlines(), each.stderr


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_of_each_shape_the_hook_sees_what_runs(shape: Shape, all_pass: Pass) -> None:
    all_pass(shape.ranks, shape.name)


def test_an_iteration_whose_backwards_start_no_timers_is_the_last_that_is_followed(
    all_pass: Pass,
) -> None:
    all_pass(2, "half_seen")


def test_a_training_that_is_only_half_seen_goes_on_without_clocks_and_says_so_once(
    tmp_path: Path,
) -> None:
    everyone = results_of("megatron_programs:unfollowed", 2, tmp_path)
    unseen = (
        "Megatron-core's timers show 8 forwards and 0 backwards in an iteration that should run 8 "
        "of each, so the planner does not see all that runs"
    )
    assert [rank["problem"] for rank in everyone] == [unseen] * 2
    assert [rank["equal"] for rank in everyone] == [True] * 2
    assert all(rank["iterations"] <= 1 for rank in everyone)
    (text,) = [text for rank in everyone for text in rank["warnings"]]
    assert text.endswith(f"{unseen}; training goes on at the GPU's default clocks")


def test_a_pipeline_of_several_modules_is_not_followed(all_pass: Pass) -> None:
    all_pass(2, "multimodule")


def test_an_iteration_that_a_paged_stash_runs_again_is_followed_twice(all_pass: Pass) -> None:
    all_pass(2, "reruns")


def test_the_logged_losses_of_experts_outlast_repeated_forwards(all_pass: Pass) -> None:
    all_pass(2, "experts")


def test_training_is_bit_for_bit_the_same_and_the_users_timers_get_every_call(
    all_pass: Pass,
) -> None:
    all_pass(2, "results")


def test_lengths_of_packed_microbatches_are_shown(all_pass: Pass) -> None:
    all_pass(2, "packs")


def test_evaluation_reaches_no_hook(all_pass: Pass) -> None:
    all_pass(2, "evaluations")


def test_another_number_of_microbatches_leaves_the_plan_for_that_iteration(all_pass: Pass) -> None:
    all_pass(2, "changes")


def test_a_schedule_whose_arguments_have_other_names_is_not_followed_and_that_is_said(
    all_pass: Pass,
) -> None:
    all_pass(1, "unknown")


def test_what_is_asked_of_timers_comes_from_those_that_were_there(all_pass: Pass) -> None:
    all_pass(1, "timers")


def test_the_timers_of_every_config_are_put_back(all_pass: Pass) -> None:
    all_pass(2, "restores")


def test_an_iteration_that_ends_in_an_error_is_begun_anew(all_pass: Pass) -> None:
    all_pass(1, "dies")


def test_what_timers_do_not_show_is_refused(all_pass: Pass) -> None:
    all_pass(1, "refusals")


def test_the_loops_of_megatron_lm_do_not_drop_the_hook(all_pass: Pass) -> None:
    all_pass(2, "megatron_lm")


def test_pipelines_side_by_side_are_distinguished(all_pass: Pass) -> None:
    all_pass(4, "seats")
