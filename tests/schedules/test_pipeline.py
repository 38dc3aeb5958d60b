"""What an engine's iteration waits for: transfers, fixed operations, and variants."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal
from strategies import any_schedule, extras, fixed

from perseus_planner import schedules
from perseus_planner.base.errors import ScheduleError
from perseus_planner.schedules import Computation, Schedule
from perseus_planner.schedules.iteration import Iteration
from perseus_planner.schedules.pipeline import FixedOperation, Transfer, Variant, pipeline_iteration

NEEDS_WAIT = "is not a wait: give finite seconds of 0 or more, such as 0.002"
NEEDS_NUMBERS = "is not a list of whole numbers of 0 or more; write one, such as (0, 3)"
NEEDS_WHEN = "is unknown; write start, end, or before or after and a kind, such as before F"
NEEDS_NAME = "name it with lower-case letters, on a rank from 0 to 1"


def parsed(*ranks: str) -> Schedule:
    return Schedule("by hand", tuple(tuple(map(Computation.parse, rank.split())) for rank in ranks))


def waits(iteration: Iteration) -> dict[str, dict[str, float]]:
    """Name -> what it waits for -> seconds."""
    names = iteration.names
    return {
        name: {names[other]: lag_s for other, lag_s in before}
        for name, before in zip(names, iteration.waits, strict=True)
    }


def programs(iteration: Iteration) -> list[str]:
    """What each rank runs, in order."""
    return [" ".join(iteration.names[place] for place in program) for program in iteration.programs]


def test_weight_gradients_wait_for_their_own_input_gradients_only():
    assert waits(pipeline_iteration(parsed("0F0 0I0 0W0", "1F0 1I0 1W0"))) == {
        **{"0F0": {}, "0I0": {"0F0": 0.0, "1I0": 0.0}, "0W0": {"0I0": 0.0}},
        **{"1F0": {"0F0": 0.0}, "1I0": {"1F0": 0.0}, "1W0": {"1I0": 0.0}},
    }


def test_whole_and_split_backwards_feed_each_other():
    iteration = pipeline_iteration(parsed("0F0 0B0", "1F0 1I0 1W0", "2F0 2B0"))
    assert waits(iteration)["0B0"] == {"0F0": 0.0, "1I0": 0.0}
    assert waits(iteration)["1I0"] == {"1F0": 0.0, "2B0": 0.0}


def test_a_transfer_takes_time_between_ranks_and_none_within_one():
    v_shaped = parsed("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")
    found = waits(pipeline_iteration(v_shaped, transfer=Transfer((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))))
    lags_s = {
        (before, after): lag_s
        for after, each in found.items()
        for before, lag_s in each.items()
        if lag_s
    }
    assert lags_s == {
        **{("0F0", "1F0"): 0.1, ("2F0", "3F0"): 0.3},  # from stage 1 to 2 is no way at all
        **{("3B0", "2B0"): 0.6, ("1B0", "0B0"): 0.4},
    }


def test_one_number_holds_for_every_boundary_and_the_default_is_no_lag():
    schedule = schedules.one_f_one_b(3, 2)
    one = pipeline_iteration(schedule, transfer=Transfer(0.25, 0.5))
    assert one == pipeline_iteration(schedule, transfer=Transfer([0.25, 0.25], (0.5, 0.5)))
    assert pipeline_iteration(schedule, transfer=Transfer((0.0, 0.0))) == pipeline_iteration(
        schedule
    )
    assert pipeline_iteration(schedule).lags_s == ()


def test_operations_run_where_and_in_the_order_they_are_given():
    iteration = pipeline_iteration(
        schedules.interleaved_1f1b(1, 2, 1),
        operations=[
            FixedOperation("load", "before F", 0.1, where=(0,)),
            FixedOperation("warm-up", "start", 0.2),
            FixedOperation("check", "start", 0.3),
            FixedOperation("reduce", "after B", 0.4),
            FixedOperation("clip", "after B", 0.5, where=[1]),
            FixedOperation("optimizer", "end", 0.6, 7.0),
        ],
    )
    assert programs(iteration) == [
        "0warm-up 0check 0load0 0F0 1F0 1B0 1reduce0 1clip0 0B0 0reduce0 0optimizer",
    ]
    assert [(each.time_s, each.energy_j, each.rank) for each in iteration.operations][-1] == (
        0.6,
        7.0,
        0,
    )
    assert waits(iteration)["1reduce0"] == {"1B0": 0.0}
    assert waits(iteration)["0B0"] == {"1clip0": 0.0, "1B0": 0.0}


def test_ranks_number_what_starts_and_ends_and_stages_what_belongs_to_a_microbatch():
    iteration = pipeline_iteration(
        schedules.zbv(2, 1),
        operations=[
            FixedOperation("step", "end", 1.0, where=(1,)),
            FixedOperation("share", "after W", 1.0, where=(3,)),
        ],
    )
    assert [(str(each), each.rank) for each in iteration.operations] == [
        ("3share0", 0),
        ("1step", 1),
    ]


@pytest.mark.parametrize(
    ("microbatches", "stages", "chosen"),
    [
        ("first", None, "0B0 1B0"),
        ("last", None, "0B2 1B2"),
        ("last", (1,), "1B2"),
        ("all", [0], "0B0 0B1 0B2"),
        ((0, 2, 9), (1,), "1B0 1B2"),
        ([1], None, "0B1 1B1"),
    ],
)
def test_a_variant_renames_its_computations(microbatches, stages, chosen: str):
    schedule = schedules.one_f_one_b(2, 3)
    iteration = pipeline_iteration(schedule, variants=[Variant("B.sync", microbatches, stages)])
    renamed = [
        str(c)
        for c, key in zip(iteration.computations, iteration.keys, strict=True)
        if key.kind == "B.sync"
    ]
    assert renamed == chosen.split()
    assert {key.kind for key in iteration.keys} == {"F", "B", "B.sync"}


def test_first_and_last_are_those_that_a_stage_runs_first_and_last():
    schedule = parsed("0F0 0F1 0F2 0B2 0B1 0B0")
    iteration = pipeline_iteration(
        schedule, variants=[Variant("B.sync", "last"), Variant("F.warm", "first")]
    )
    assert iteration.kinds == ("F.warm", "F", "F", "B", "B", "B.sync")


@settings(fixed, max_examples=200)
@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 4), microbatches=st.integers(1, 6))
def test_an_iteration_runs_each_rank_in_its_order_whatever_stands_beside(
    seed: int, ranks: int, microbatches: int
):
    schedule = any_schedule(seed, ranks, microbatches)
    beside = extras(seed, schedule)
    iteration = pipeline_iteration(schedule, **beside)
    count = len(iteration.computations)
    for rank, program in enumerate(iteration.programs):
        assert (
            tuple(iteration.computations[place] for place in program if place < count)
            == schedule.ranks[rank]
        )
        assert all(before in iteration.predecessors[place] for before, place in pairwise(program))
    # An operation belongs to one rank, and all that follows on it waits for it.
    expected = 0
    for each in beside["operations"]:
        number = {"start": range(ranks), "end": range(ranks)}.get(each.when)
        stages = [c.stage for c in schedule.computations() if each.when.endswith(f" {c.kind}")]
        expected += sum(
            each.where is None or n in each.where for n in (stages if number is None else number)
        )
    assert len(iteration.operations) == expected


BAD_EXTRAS = {
    "transfer NaN": (lambda: Transfer(math.nan), f"transfer, forward_s: nan {NEEDS_WAIT}"),
    "transfer below 0": (
        lambda: Transfer(0.1, [0.1, -0.1]),
        f"transfer, backward_s: -0.1 {NEEDS_WAIT}",
    ),
    "transfer text": (lambda: Transfer("2ms"), f"transfer, forward_s: '2ms' {NEEDS_WAIT}"),
    "transfer yes": (lambda: Transfer(True), f"transfer, forward_s: True {NEEDS_WAIT}"),
    "unknown when": (
        lambda: FixedOperation("load", "before X", 1.0),
        f"operation load, when: 'before X' {NEEDS_WHEN}",
    ),
    "when a number": (
        lambda: FixedOperation("load", 3, 1.0),
        f"operation load, when: 3 {NEEDS_WHEN}",
    ),
    "where a number": (
        lambda: FixedOperation("load", "start", 1.0, where=3),
        f"operation load, where: 3 {NEEDS_NUMBERS}",
    ),
    "where below 0": (
        lambda: FixedOperation("load", "start", 1.0, where=(0, -1)),
        f"operation load, where: (0, -1) {NEEDS_NUMBERS}",
    ),
    "variant without suffix": (
        lambda: Variant("B", "last"),
        "variant: 'B' is not a kind with a suffix; write one, such as B.sync",
    ),
    "variant of no kind": (
        lambda: Variant("backward.sync", "last"),
        "variant: 'backward.sync' is not a kind with a suffix; write one, such as B.sync",
    ),
    "variant of unknown microbatches": (
        lambda: Variant("B.sync", "middle"),
        "variant B.sync, microbatches: 'middle' is unknown; write first, last, all or a list of "
        "numbers",
    ),
    "variant of one microbatch": (
        lambda: Variant("B.sync", 3),
        f"variant B.sync, microbatches: 3 {NEEDS_NUMBERS}",
    ),
    "variant of no stages": (
        lambda: Variant("B.sync", "last", ("1",)),
        f"variant B.sync, stages: ('1',) {NEEDS_NUMBERS}",
    ),
}


@pytest.mark.parametrize(("make", "message"), BAD_EXTRAS.values(), ids=BAD_EXTRAS.keys())
def test_malformed_transfers_operations_and_variants_are_refused(make, message: str):
    assert refusal(ScheduleError, make) == message


BAD_FITS = {
    "too few boundaries": (
        {"transfer": Transfer(0.1, ())},
        "transfer, backward_s: has 0 numbers for 1 boundaries between stages; give one for each, "
        "or one for all",
    ),
    "too many boundaries": (
        {"transfer": Transfer([0.1, 0.2])},
        "transfer, forward_s: has 2 numbers for 1 boundaries between stages; give one for each, or "
        "one for all",
    ),
    "operation on no rank": (
        {"operations": [FixedOperation("load", "start", 1.0, where=(2,))]},
        "operation load: applies to nothing in the schedule; correct when or where, or remove it",
    ),
    "operation beside nothing": (
        {
            "operations": [
                FixedOperation("load", "start", 1.0),
                FixedOperation("share", "after W", 1.0),
            ]
        },
        "operation share: applies to nothing in the schedule; correct when or where, or remove it",
    ),
    "operation twice": (
        {"operations": [FixedOperation("load", "start", 1.0), FixedOperation("load", "end", 1.0)]},
        "0load is there twice; give each operation a different name",
    ),
    "operation of no name": (
        {"operations": [FixedOperation("Load data", "start", 1.0)]},
        f"'0Load data': {NEEDS_NAME}",
    ),
    "operation of no time": (
        {"operations": [FixedOperation("load", "start", 0.0)]},
        "0load: 0.0 is not a time: write finite seconds above 0, such as 0.0512",
    ),
    "operation of no energy": (
        {"operations": [FixedOperation("load", "before F", 1.0, -1.0)]},
        "0load0: -1.0 is not an energy: write finite joules of 0 or more, such as 23.8",
    ),
    "variant of nothing": (
        {"variants": [Variant("W.sync", "last")]},
        "variant W.sync: applies to nothing in the schedule; correct or remove it",
    ),
    "variant of no stage": (
        {"variants": [Variant("B.sync", "last", (2,))]},
        "variant B.sync: applies to nothing in the schedule; correct or remove it",
    ),
    "two variants": (
        {"variants": [Variant("B.sync", "last"), Variant("B.recompute", "all", (1,))]},
        "1B2 is both B.sync and B.recompute; keep one of the variants",
    ),
}


@pytest.mark.parametrize(("beside", "message"), BAD_FITS.values(), ids=BAD_FITS.keys())
def test_operations_and_variants_that_do_not_fit_the_schedule_are_refused(
    beside: dict[str, object], message: str
):
    assert (
        refusal(ScheduleError, pipeline_iteration, schedules.one_f_one_b(2, 3), **beside) == message
    )


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (
            ("0F0 0I0", "1F0 1W0"),
            "computation 2: 0I0 can never run: it waits for 1B0 or 1I0, and both are missing; add "
            "one",
        ),
        (
            ("0F0 0W0",),
            "computation 2: 0W0 can never run: it waits for 0I0, which is missing; add it",
        ),
        (("0I0",), "computation 1: 0I0 can never run: it waits for 0F0, which is missing; add it"),
        (
            ("0F0 0W0 0I0",),
            "computation 2: 0W0 can never run: it waits for 0I0, which comes after it on the same "
            "rank; move 0I0 before it",
        ),
    ],
)
def test_a_split_backward_without_its_inputs_is_refused(ranks: tuple[str, ...], message: str):
    assert (
        refusal(ScheduleError, pipeline_iteration, parsed(*ranks))
        == f"schedule by hand, rank 0, {message}"
    )
