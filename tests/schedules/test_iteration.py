"""An iteration that cannot run is refused with the node at fault."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from refusals import refusal
from strategies import fixed, problems

from perseus_planner.base.errors import ProfileError, ScheduleError
from perseus_planner.profiles.keys import Key
from perseus_planner.schedules import Computation, Schedule
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.schedules.iteration import Iteration, Operation, parse_operation
from perseus_planner.schedules.pipeline import (
    iteration_from_dict,
    iteration_to_dict,
)

NEEDS_WAIT = "is not a wait: give finite seconds of 0 or more, such as 0.002"
NEEDS_NAME = "name it with lower-case letters, on a rank from 0 to 0"
THREE = Schedule("by hand", (tuple(map(Computation.parse, ("0F0", "0B0", "0F1"))),))
CHAIN = ((), (0,), (1,))
STEP = Operation(0, "step", None, 0, 1.0)

BAD_ITERATIONS = {
    "behind the end": (
        {"predecessors": ((), (3,), ())},
        "0B0 waits for place 3; places are 0 to 2",
    ),
    "before the start": (
        {"predecessors": ((), (), (-3,))},
        "0F1 waits for place -3; places are 0 to 2",
    ),
    "too few": ({"predecessors": ((), ())}, "predecessors: 2 for 3 computations; give as many"),
    "too many": (
        {"predecessors": ((), (), (), ())},
        "predecessors: 4 for 3 computations; give as many",
    ),
    "none for an operation": (
        {"operations": (STEP,)},
        "predecessors: 3 for 4 computations; give as many",
    ),
    "twice the same": (
        {"predecessors": ((), (0, 0), ())},
        "0B0 waits for the same computation twice; keep one, with the longer lag",
    ),
    "itself": (
        {"predecessors": ((), (1,), ())},
        "0B0 can never start: it waits for 0B0, which in the end waits for it; reorder the "
        "schedule",
    ),
    "a cycle through an operation": (
        {"predecessors": ((3,), (0,), (), (1,)), "operations": (STEP,)},
        "0F0 can never start: it waits for 0step, which in the end waits for it; reorder the "
        "schedule",
    ),
    "lags of too few": (
        {"lags_s": ((), (0.0,))},
        "lags_s: is not aligned with predecessors; give a lag for each, or leave them out",
    ),
    "too few lags": (
        {"lags_s": ((), (), (0.0,))},
        "lags_s: is not aligned with predecessors; give a lag for each, or leave them out",
    ),
    "lag below 0": (
        {"lags_s": ((), (0.0,), (-1e-9,))},
        f"lag_s of 0B0 -> 0F1: -1e-09 {NEEDS_WAIT}",
    ),
    "lag NaN": ({"lags_s": ((), (math.nan,), (0.0,))}, f"lag_s of 0F0 -> 0B0: nan {NEEDS_WAIT}"),
    "lag of no number": (
        {"lags_s": ((), (None,), (0.0,))},
        f"lag_s of 0F0 -> 0B0: None {NEEDS_WAIT}",
    ),
    "other kinds": (
        {"kinds": ("F", "F.sync", "F")},
        "kinds: are not those of the computations, with or without a suffix such as .sync",
    ),
    "too few kinds": (
        {"kinds": ("F", "B")},
        "kinds: are not those of the computations, with or without a suffix such as .sync",
    ),
    "one name twice": (
        {"predecessors": (*CHAIN, (2,), (3,)), "operations": (STEP, STEP._replace(time_s=2.0))},
        "0step is there twice; give each operation a different name",
    ),
    "a name in capitals": (
        {"predecessors": (*CHAIN, ()), "operations": (STEP._replace(name="F"),)},
        f"'0F': {NEEDS_NAME}",
    ),
    "an operation on no rank": (
        {"predecessors": (*CHAIN, ()), "operations": (STEP._replace(rank=1),)},
        f"'0step': {NEEDS_NAME}",
    ),
    "an operation of no time": (
        {"predecessors": (*CHAIN, ()), "operations": (STEP._replace(time_s=math.inf),)},
        "0step: inf is not a time: write finite seconds above 0, such as 0.0512",
    ),
    "an operation of no energy": (
        {"predecessors": (*CHAIN, ()), "operations": (STEP._replace(energy_j=True),)},
        "0step: True is not an energy: write finite joules of 0 or more, such as 23.8",
    ),
}


@pytest.mark.parametrize(("changes", "message"), BAD_ITERATIONS.values(), ids=BAD_ITERATIONS.keys())
def test_a_malformed_iteration_is_refused(changes: dict[str, object], message: str):
    assert refusal(ScheduleError, replace, Iteration(THREE, CHAIN), **changes) == message


def test_lags_and_kinds_that_say_nothing_are_none():
    plain = Iteration(THREE, CHAIN)
    assert replace(plain, lags_s=((), (0,), (0.0,)), kinds=("F", "B", "F")) == plain
    assert plain.keys == (Key(0, "F"), Key(0, "B"), Key(0, "F"))


def test_numbers_become_plain_ones():
    step = Operation(0, "step", None, np.int64(0), np.float32(0.5), np.int64(3))
    iteration = Iteration(THREE, (*CHAIN, (2,)), ((), (np.float64(0.25),), (0,), (1,)), (step,))
    assert repr(iteration.lags_s) == "((), (0.25,), (0.0,), (1.0,))"
    assert repr(iteration.operations[0]) == (
        "Operation(number=0, name='step', microbatch=None, rank=0, time_s=0.5, energy_j=3.0)"
    )


@settings(fixed, max_examples=200)
@given(dag=problems(12))
def test_an_iteration_comes_back_from_its_text(dag: PipelineDag):
    content = iteration_to_dict(dag.iteration)
    assert iteration_from_dict(dag.schedule, content) == dag.iteration
    for each in dag.iteration.operations:
        assert parse_operation(str(each), each.rank, each.time_s, each.energy_j) == each
    for key in dag.iteration.keys:
        assert Key.parse(str(key)) == key


@pytest.mark.parametrize(
    "text", ["", "step", "0", "0Step", "0step0.5", "0step 1", "-1step", "0f_g", "0step\n"]
)
def test_other_text_is_not_an_operation(text: str):
    assert (
        refusal(ScheduleError, parse_operation, text, 0, 1.0, None)
        == f"{text!r} is not an operation; write rank or stage, a lower-case name and any "
        "microbatch"
    )


@pytest.mark.parametrize("text", ["", "B", "3", "3X", "3B.", "3B.Sync", "3B.sync ", "-3B", "3B0"])
def test_other_text_is_not_a_stage_and_a_kind(text: str):
    assert (
        refusal(ProfileError, Key.parse, text)
        == f"{text!r} is not a stage and a kind; write them as 3B, or 3B.sync"
    )
