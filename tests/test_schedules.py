"""Computations as text, and 1F1B against another statement of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import fixed

from perseus_planner.errors import ScheduleError
from perseus_planner.schedules import Computation, one_f_one_b


def greedy(stages: int, microbatches: int, stage: int) -> list[str]:
    """1F1B as a rule: never more microbatches in flight than there are stages from here on; else forwards first.

    Narayanan et al., SC'21, section 2.2: with that rule a rank keeps the activations of few microbatches only.
    """
    order, forwards, backwards = [], 0, 0
    while backwards < microbatches:
        if forwards < microbatches and forwards - backwards < stages - stage:
            order.append(f"{stage}F{forwards}")
            forwards += 1
        else:
            order.append(f"{stage}B{backwards}")
            backwards += 1
    return order


@pytest.mark.parametrize("stages", range(1, 7))
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 8, 13])
def test_1f1b_is_forwards_first_within_what_may_be_in_flight(stages: int, microbatches: int):
    schedule = one_f_one_b(stages, microbatches)
    for stage, rank in enumerate(schedule.ranks):
        assert [str(computation) for computation in rank] == greedy(stages, microbatches, stage)
    assert (schedule.stages, schedule.microbatches) == (stages, microbatches)


def test_1f1b_reads_as_in_the_paper():
    text = [" ".join(map(str, rank)) for rank in one_f_one_b(3, 4).ranks]
    assert text == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]
    assert str(one_f_one_b(3, 4)) == "1f1b, 3 stages x 4 microbatches"


@pytest.mark.parametrize("bad", [0, -1, 2.0, "8", None, True])
def test_a_schedule_of_no_whole_number_is_refused(bad):
    with pytest.raises(ScheduleError, match=r"stages is .*; give a whole number of at least 1"):
        one_f_one_b(bad, 8)
    with pytest.raises(ScheduleError, match=r"microbatches is .*; give a whole number of at least 1"):
        one_f_one_b(8, bad)


@fixed
@given(stage=st.integers(0, 10**6), kind=st.sampled_from("FB"), microbatch=st.integers(0, 10**6))
def test_a_computation_reads_back_from_its_text(stage: int, kind: str, microbatch: int):
    computation = Computation(stage, kind, microbatch)
    assert Computation.parse(str(computation)) == computation


@pytest.mark.parametrize("text", ["", "F", "3F", "F17", "3X17", "3f17", " 3F17", "3F17 ", "3F17\n", "3F17F1", "-3F1"])
def test_other_text_is_no_computation(text: str):
    with pytest.raises(ScheduleError) as caught:
        Computation.parse(text)
    assert str(caught.value) == f"{text!r} is no computation; write stage, kind (F or B) and microbatch, e.g. 3F17"


def test_whole_numbers_of_numpy_are_whole_numbers():
    assert one_f_one_b(np.int64(2), np.int32(3)) == one_f_one_b(2, 3)
