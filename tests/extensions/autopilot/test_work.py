"""The work of microbatches, and the laws by which computations follow it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from strategies import soaks

from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.autopilot.batches.exchange import ITERATIONS, LawLearner, fit_law
from perseus_planner.extensions.autopilot.batches.work import load_work, sequence_work, work_of
from perseus_planner.profiles.keys import Key


@pytest.mark.parametrize(
    "microbatch",
    [
        {"cu_seqlens": np.array([0, 3, 5])},
        ({"tokens": np.zeros(5), "packed": {"cu_seqlens_q": [0, 3, 5, 5]}}, "labels"),
        {"position_ids": [[0, 1, 2, 0, 1]]},
        {"positions": [[0, 1, 2, 0, 1]]},
        {"position_ids": [[0, 1, 2], [5, 6, 0]], "cu_seqlens": [0, 3, 5]},
        [{"attention_mask": [[1, 1, 1, 0], [1, 1, 0, 0]]}],
        (("ids",), {"attention_mask": np.array([[True, True, True], [True, True, False]])}),
        {"cu_seqlens": None, "attention_mask": [[1, 1, 1, 0], [1, 1, 0, 0]]},
        ({"position_ids": None}, {"position_ids": [[0, 1, 2, 0, 1]]}),
    ],
)
def test_lengths_are_found_in_a_microbatch(microbatch: Any):
    assert sequence_work(microbatch) == (5.0, 13.0)


def test_a_row_of_positions_that_begins_late_is_a_sequence():
    assert sequence_work({"position_ids": [[4, 5, 0], [0, 1, 2]]}) == (6.0, 4.0 + 1.0 + 9.0)


def test_tensors_are_read_on_the_cpu_only():
    torch = pytest.importorskip("torch")
    assert sequence_work({"cu_seqlens": torch.tensor([0, 3, 5], dtype=torch.int32)}) == (5.0, 13.0)
    with pytest.raises(UsageError, match="on a GPU, where reading it would wait; give its work"):
        sequence_work({"attention_mask": torch.ones(2, 3, device="meta")})


@pytest.mark.parametrize(
    ("microbatch", "message"),
    [
        (
            {"input_ids": [[1, 2]], "position_ids": None},
            "the microbatch has no cu_seqlens, position_ids, positions or attention_mask to tell "
            "its lengths by; give work= a function of yours",
        ),
        (
            {"attention_mask": np.ones((1, 1, 4, 4))},
            "the microbatch has an attention_mask of 4 dimensions, which tells no lengths; give "
            "work= a function of yours",
        ),
    ],
)
def test_a_microbatch_without_lengths_is_refused(microbatch: Any, message: str):
    with pytest.raises(UsageError) as refused:
        sequence_work(microbatch)
    assert str(refused.value) == message


def fails(microbatch: object) -> float:
    raise KeyError("length")


def read_from(error: Exception) -> Iterator[Any]:
    """Return microbatches of which the second cannot be read."""
    yield 1.0
    raise error


@pytest.mark.parametrize(
    ("microbatches", "function", "message"),
    [
        ([1], fails, "work= raised KeyError for microbatch 0: 'length'"),
        (
            [1.0, float("nan")],
            float,
            "the work of microbatch 1 is [nan]; give finite numbers of 0 or more",
        ),
        ([-1.0], float, "the work of microbatch 0 is [-1.0]; give finite numbers of 0 or more"),
        (
            [(1, 2), (1, 2, 3)],
            tuple,
            "the work of microbatch 1 has the shape (3,); give 1 to 8 numbers, as many for each "
            "microbatch",
        ),
        (
            [[[1, 2]]],
            list,
            "the work of microbatch 0 has the shape (1, 2); give 1 to 8 numbers, as many for each "
            "microbatch",
        ),
        (
            ["long"],
            str,
            "the work of a microbatch is not a number or a few: could not convert string to "
            "float: 'long'",
        ),
        ([], float, "the work of no microbatch is given; give a number for each"),
        (read_from(OSError("is gone")), float, "reading the batch raised OSError: is gone"),
        (read_from(UsageError("is not split")), float, "is not split"),
    ],
)
def test_bad_work_is_refused(microbatches: Iterable[Any], function: Any, message: str):
    with pytest.raises(UsageError) as refused:
        work_of(microbatches, function)
    assert str(refused.value) == message


def test_work_is_an_array_of_microbatches_and_numbers():
    assert work_of([3, 4], lambda length: (length, length**2)).tolist() == [[3, 9], [4, 16]]
    assert work_of([3, 4], None).tolist() == [[3.0], [4.0]]
    assert work_of([3, (4,)], None).tolist() == [[3.0], [4.0]]


@pytest.mark.parametrize("seed", [*range(2), *soaks(*range(2, 20))])
def test_a_law_is_found_among_noise_and_pauses(seed: int):
    draws = np.random.default_rng(seed)
    work = draws.lognormal(0.0, 0.35, (ITERATIONS * 8, 1))
    true_s = -0.046 + 0.146 * np.maximum(work[:, 0], 0.4)
    work = np.maximum(work, 0.4)
    time_s = true_s * draws.normal(1.0, 0.02, len(work))
    time_s[draws.random(len(work)) < 0.05] *= draws.uniform(1.5, 10.0)
    law = fit_law(work, time_s)
    # Of 80 times with two numbers; pauses make it a little more.
    assert law.error == pytest.approx(0.02 * (2 / len(work)) ** 0.5, rel=0.5)
    for of in (0.6, 1.0, 2.0):
        found_s, expected_s = law.fixed_s + law.per_work_s[0] * of, -0.046 + 0.146 * of
        assert found_s == pytest.approx(expected_s, rel=0.02)


def test_two_numbers_of_work_are_told_apart_and_what_does_not_vary_has_no_slope():
    draws = np.random.default_rng(1)
    lengths = draws.integers(100, 4000, 200).astype(float)
    work = np.column_stack([lengths, lengths**2, np.full(200, 7.0)])
    time_s = 0.01 + 2e-5 * lengths + 3e-9 * lengths**2
    law = fit_law(work, time_s)
    assert law.per_work_s == pytest.approx((2e-5, 3e-9, 0.0), rel=1e-3)
    assert law.fixed_s == pytest.approx(0.01, rel=1e-2)
    assert law.error == pytest.approx(0.0, abs=1e-3)
    same = fit_law(np.ones((50, 2)), np.full(50, 0.3))
    assert (same.fixed_s, same.per_work_s) == (pytest.approx(0.3), (0.0, 0.0))


def test_a_rank_learns_its_laws_from_ten_iterations_and_then_they_stay():
    draws, learner, new = np.random.default_rng(2), LawLearner(), []
    for iteration in range(200):
        work = draws.uniform(0.5, 2.0, (4, 1))
        factor = 1.0 if iteration < 80 else 3.0  # later the GPU is slow
        seen = [
            ((0, kind), row, factor * (fixed + slope * row[0]))
            for row in work
            for kind, fixed, slope in (("F", 0.1, 0.9), ("B", -0.4, 1.5))
        ]
        if learner.add(seen):
            new.append(iteration + 1)
    assert new == [10, 20, 40, 80]
    assert learner.is_done
    assert learner.laws is not None
    assert learner.laws[0, "F"].per_work_s == pytest.approx((0.9,), rel=1e-4)
    assert learner.laws[0, "B"].fixed_s == pytest.approx(-0.4, rel=1e-4)


def test_an_iteration_of_one_computation_takes_more_iterations_to_tell_two_numbers():
    learner, draws = LawLearner(), np.random.default_rng(3)
    known = [
        learner.add([(Key(0, "F"), np.array([w, w**2]), 1.0 + w)]) for w in draws.uniform(1, 2, 30)
    ]
    assert known.index(True) + 1 == 24


def test_a_function_is_loaded_by_its_name_and_refused_if_there_is_none():
    assert load_work("builtins:float", "--work") is float
    for text, said in (
        ("float", "--work 'float': does not name a function; write package.module:function"),
        (
            "no_such_module:work",
            "--work 'no_such_module:work': importing no_such_module raised ModuleNotFoundError: "
            "No module named 'no_such_module'",
        ),
        (
            "builtins:nothing",
            "--work 'builtins:nothing': builtins has no function 'nothing'; name another",
        ),
    ):
        with pytest.raises(UsageError) as refused:
            load_work(text, "--work")
        assert str(refused.value) == said
