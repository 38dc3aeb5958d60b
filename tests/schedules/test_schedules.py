"""Computations as text, what schedules and their sizes may be, and 1F1B against another
statement of it.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal
from strategies import fixed

from perseus_planner import schedules
from perseus_planner.base.errors import ScheduleError
from perseus_planner.schedules import (
    NAMES,
    Computation,
    Schedule,
    check_pipeline,
    generate,
    one_f_one_b,
)


def greedy(stages: int, microbatches: int, stage: int) -> list[str]:
    """1F1B as a rule: never more microbatches in flight than there are stages from here on; else
    forwards first.

    Narayanan et al., SC'21, section 2.2: with that rule a rank keeps the activations of few
    microbatches only."""
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


@pytest.mark.parametrize("bad", [0, -1, 2.0, "8", None, True])
def test_a_size_that_is_not_a_whole_number_is_refused(bad):
    with pytest.raises(ScheduleError, match=r"stages: .* is not a whole number of at least 1"):
        one_f_one_b(bad, 8)
    with pytest.raises(
        ScheduleError, match=r"microbatches: .* is not a whole number of at least 1"
    ):
        one_f_one_b(8, bad)


@fixed
@given(stage=st.integers(0, 10**6), kind=st.sampled_from("FBIW"), microbatch=st.integers(0, 10**6))
def test_a_computation_reads_back_from_its_text(stage: int, kind: str, microbatch: int):
    computation = Computation(stage, kind, microbatch)
    assert Computation.parse(str(computation)) == computation


@pytest.mark.parametrize(
    "text",
    ["", "F", "3F", "F17", "3X17", "3f17", " 3F17", "3F17 ", "3F17\n", "3F17F1", "-3F1", "٣F1"],
)
def test_other_text_is_not_a_computation(text: str):
    assert (
        refusal(ScheduleError, Computation.parse, text)
        == f"{text!r} is not a computation; write stage, kind (F, B, I or W) and microbatch, e.g. "
        "3F17"
    )


def test_a_computation_with_too_long_a_number_is_refused():
    with pytest.raises(ScheduleError, match=r"is not a computation; .*") as caught:
        Computation.parse("9" * 10**6 + "F0")
    assert len(str(caught.value)) < 200


def test_whole_numbers_of_numpy_are_whole_numbers():
    assert one_f_one_b(np.int64(2), np.int32(3)) == one_f_one_b(2, 3)


def parsed(*ranks: str) -> Schedule:
    return Schedule("by hand", tuple(tuple(map(Computation.parse, rank.split())) for rank in ranks))


def flaw_of(*ranks: str) -> str:
    return refusal(ScheduleError, check_pipeline, parsed(*ranks))


def test_a_schedule_describes_itself():
    schedule = parsed("0F0 3F0 3B0 0I0 0W0", "1F0 2F0 2B0 1B0")
    check_pipeline(schedule)
    assert (schedule.stages, schedule.microbatches, schedule.stage_ranks) == (4, 1, (0, 1, 1, 0))
    assert schedule.kinds == ("F", "B", "I", "W")
    assert " ".join(map(str, schedule.computations())) == "0F0 3F0 3B0 0I0 0W0 1F0 2F0 2B0 1B0"
    assert str(schedule) == "by hand, 4 stages on 2 ranks x 1 microbatches"


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((), "schedule by hand: has no ranks; give at least one"),
        (
            ("0F0", ""),
            "schedule by hand, rank 1: runs nothing; give each rank at least one computation",
        ),
        (("0F0 0B0 0F0",), "schedule by hand, rank 0, computation 3: 0F0 is there twice; keep one"),
        (("0F0", "0F0"), "schedule by hand, rank 1, computation 1: 0F0 is there twice; keep one"),
        (
            ("0F0 0F1", "1F0 0B0"),
            "schedule by hand, rank 1, computation 2: stage 0 is on rank 0 too; keep a stage on "
            "one rank",
        ),
        (
            ("0F0 3F0", "1F0"),
            "schedule by hand, rank 0, computation 2: stage 2 is missing though there is stage 3; "
            "number them from 0 without a hole",
        ),
    ],
)
def test_a_malformed_schedule_is_refused_at_birth(ranks: tuple[str, ...], message: str):
    assert refusal(ScheduleError, parsed, *ranks) == message


@pytest.mark.parametrize(
    "bad", [Computation(0, "X", 0), Computation(-1, "F", 0), Computation(0, "F", 0.0)]
)
def test_a_schedule_of_malformed_computations_is_refused(bad: Computation):
    with pytest.raises(
        ScheduleError,
        match=r"rank 0, computation 1: Computation\(.*\) is not a computation; give whole",
    ):
        Schedule("by hand", ((bad,),))


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (
            ("0F0 0B0", "1F0"),
            "rank 0, computation 2: 0B0 can never run: it waits for 1B0 or 1I0, and both are "
            "missing; add one",
        ),
        (
            ("0B0", "1F0 1B0"),
            "rank 1, computation 1: 1F0 can never run: it waits for 0F0, which is missing; add it",
        ),
        (
            ("0F0 0I0 0W0", "1F0 1W0 1I0"),
            "rank 1, computation 2: 1W0 can never run: it waits for 1I0, which comes after it on "
            "the same rank; move 1I0 before it",
        ),
        (
            ("0B0 0F0", "1F0 1B0"),
            "rank 0, computation 1: 0B0 can never run: it waits for 1B0, which comes after 1F0, "
            "which in the end waits for it; reorder them",
        ),
        (("0F0", "1F0 1B0"), "rank 0, computation 1: 0F0 has no backward; add 0B0, or 0I0 and 0W0"),
        (("0F0 0I0", "1F0 1B0"), "rank 0, computation 2: 0I0 is only half a backward; add 0W0"),
        (
            ("0F0 0B0 0W0", "1F0 1B0"),
            "rank 0, computation 3: 0W0 is a part of 0B0, which is present too; keep one of them",
        ),
        (
            ("0F0 0B0 0F2 0B2", "1F0 1B0 1F2 1B2"),
            "rank 0, computation 3: microbatch 1 is missing though there is microbatch 2; number "
            "them from 0 without a hole",
        ),
    ],
)
def test_an_incomplete_pipeline_is_refused_with_the_computation_at_fault(
    ranks: tuple[str, ...], message: str
):
    assert flaw_of(*ranks) == f"schedule by hand, {message}"


def test_a_backward_follows_one_in_parts_and_the_other_way_round():
    check_pipeline(parsed("0F0 0F1 0B0 0I1 0W1", "1F0 1I0 1W0 1F1 1B1"))


def test_the_names_are_those_of_the_command_line():
    assert list(NAMES) == [
        "gpipe",
        "1f1b",
        "looped-bfs",
        "interleaved-1f1b",
        "combined-1f1b",
        "zb-h1",
        "interleaved-zb",
        "zbv",
        "dualpipe-v",
        "dualpipe-v-overlapped",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_gives_its_schedule(name: str):
    own = NAMES[name].virtual_stages
    schedule = generate(name, ranks=2, microbatches=4, virtual_stages=None if own else 3)
    assert (schedule.name, len(schedule.ranks), schedule.microbatches) == (name, 2, 4)
    assert schedule.stages == 2 * (own or 3)
    if own:
        assert generate(name, ranks=2, microbatches=4, virtual_stages=own) == schedule


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"name": "order.grid"},
            "there is no schedule 'order.grid'; the name of a text grid ends in .csv or .txt",
        ),
        ({"name": "1f1B"}, "there is no schedule '1f1B'; did you mean 1f1b?"),
        (
            {"name": "best"},
            "there is no schedule 'best'; give one of gpipe, 1f1b, looped-bfs, interleaved-1f1b, "
            "combined-1f1b, zb-h1, interleaved-zb, zbv, dualpipe-v, dualpipe-v-overlapped",
        ),
        (
            {"name": "interleaved-1f1b"},
            "schedule interleaved-1f1b: how many virtual stages a rank holds is missing; give 2 or "
            "more",
        ),
        (
            {"name": "interleaved-zb", "virtual_stages": 0},
            "virtual_stages: 0 is not a whole number of at least 1",
        ),
        (
            {"name": "zb-h1", "virtual_stages": 2},
            "schedule zb-h1: has 1 stage per rank, not 2; leave virtual stages out",
        ),
        (
            {"name": "zbv", "virtual_stages": 3},
            "schedule zbv: has 2 stages per rank, not 3; leave virtual stages out",
        ),
        (
            {"name": "dualpipe-v", "microbatches": 7},
            "dualpipe-v on 4 ranks has 8 stages and needs as many microbatches, not 7; give 8 or "
            "more, or take zbv",
        ),
        (
            {"name": "interleaved-1f1b", "virtual_stages": 2, "microbatches": 10},
            "10 microbatches in groups of 4 leave a last group of 2, fewer than the 4 ranks; "
            "give a group of 5, or 8 or 12 microbatches",
        ),
        (
            {"name": "interleaved-zb", "virtual_stages": 2, "microbatches": 11},
            "11 microbatches on 4 ranks do not make 2 equal groups; give 10 or 12 microbatches",
        ),
        (
            {"name": "gpipe", "ranks": 10**6, "microbatches": 10**6},
            "1000000 stages x 1000000 microbatches are more than 1000000 forwards; give smaller "
            "numbers",
        ),
    ],
)
def test_a_name_or_size_that_gives_no_schedule_is_refused(arguments: dict, message: str):
    assert (
        refusal(ScheduleError, generate, **{"ranks": 4, "microbatches": 8} | arguments) == message
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [0, -1, 2.0, "8", None, True])
def test_every_generator_refuses_a_size_that_is_not_a_whole_number(name: str, bad):
    virtual = None if NAMES[name].virtual_stages else 2
    for sizes in ({"ranks": bad, "microbatches": 8}, {"ranks": 4, "microbatches": bad}):
        with pytest.raises(ScheduleError, match=r": .* is not a whole number of at least 1"):
            generate(name, **sizes, virtual_stages=virtual)


@pytest.mark.parametrize("group", [3, 9, 0, 2.0])
def test_a_group_out_of_range_is_refused(group):
    with pytest.raises(
        ScheduleError,
        match=r"group(: .* is not a whole number of at least 1| is .*; give a whole number from 4 "
        r"to 8)",
    ):
        schedules.interleaved_1f1b(4, 2, 8, group)


@fixed
@given(
    ranks=st.integers(1, 6),
    virtual=st.integers(2, 4),
    microbatches=st.integers(1, 20),
    data=st.data(),
)
def test_the_advice_in_the_refusal_of_a_group_works(
    ranks: int, virtual: int, microbatches: int, data
):
    least = min(ranks, microbatches)
    group = data.draw(st.integers(least, microbatches))
    rest = microbatches % group
    if not 0 < rest < least:
        check_pipeline(schedules.interleaved_1f1b(ranks, virtual, microbatches, group))
        return
    with pytest.raises(ScheduleError) as caught:
        schedules.interleaved_1f1b(ranks, virtual, microbatches, group)
    other, fewer, more = map(int, re.findall(r"[0-9]+", str(caught.value).split(";")[1]))
    check_pipeline(schedules.interleaved_1f1b(ranks, virtual, microbatches, other))
    check_pipeline(schedules.interleaved_1f1b(ranks, virtual, fewer, group))
    check_pipeline(schedules.interleaved_1f1b(ranks, virtual, more, group))


def test_one_virtual_stage_is_the_schedule_without_interleaving():
    assert schedules.interleaved_1f1b(4, 1, 10).ranks == one_f_one_b(4, 10).ranks
    assert schedules.interleaved_1f1b(4, 1, 10, group=7).ranks == one_f_one_b(4, 10).ranks
    assert schedules.interleaved_zero_bubble(4, 1, 11).ranks == schedules.zb_h1(4, 11).ranks


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "dualpipe-v"])
def test_no_ranks_are_refused_for_any_number_of_stages(name: str):
    with pytest.raises(ScheduleError):
        schedules.generate_for_stages(name, 4, microbatches=8, ranks=0)
