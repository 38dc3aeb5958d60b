"""The hook against a plain model of its rules: the request at every moment, whatever an engine
does.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import smooth_profile

from perseus_planner import Frontier, schedules, solve
from perseus_planner.base.errors import PlanError
from perseus_planner.runtime.hook import RAISED, Hook
from perseus_planner.runtime.marks import (
    KEPT,
    NO_REQUEST,
    OUTSIDE,
    Marks,
    clock_request,
    parse_clock_request,
)
from perseus_planner.runtime.program import Expected, Program
from perseus_planner.schedules import WHOLE, Computation, one_f_one_b


@cache
def frontier(microbatches: int, kind: str) -> Frontier:
    make = {"1f1b": schedules.one_f_one_b, "gpipe": schedules.gpipe}[kind]
    return solve(smooth_profile(2), make(2, microbatches))


@cache
def program(microbatches: int, kind: str, slowdown: float, rank: int, version: int = 1) -> Program:
    found = frontier(microbatches, kind)
    return Program.of_plan(version, found.plan_for(slowdown * found.baseline_time_s), rank)


PROGRAMS = st.builds(
    program,
    st.sampled_from([1, 2, 3]),
    st.sampled_from(["1f1b", "gpipe"]),
    st.sampled_from([1.0, 1.1, 1.3]),
    st.just(1),
    st.sampled_from([1, 2]),
)
COMPUTATIONS = st.builds(Computation, st.integers(0, 1), st.sampled_from("FB"), st.integers(0, 3))


@dataclass
class Ran:
    """What an engine does in one iteration, and its program."""

    program: Program | None
    microbatches: int | None
    computations: list[Computation]
    is_broken_off: bool  #: in the last computation, after which nothing more is endings


@st.composite
def behaviours(draw: st.DrawFn, programs: list[Program | None]) -> Ran:
    chosen = draw(st.sampled_from(programs))
    planned = (
        list(chosen.computations)
        if chosen is not None
        else draw(st.lists(COMPUTATIONS, max_size=4))
    )
    kind = draw(
        st.sampled_from(
            ["planned", "planned", "planned", "fewer", "more", "other order", "anything"]
        )
    )
    if kind == "fewer":
        planned = planned[: draw(st.integers(0, len(planned)))]
    elif kind == "more":
        planned += draw(st.lists(COMPUTATIONS, min_size=1, max_size=3))
    elif kind == "other order":
        planned = draw(st.permutations(planned))
    elif kind == "anything":
        planned = draw(st.lists(COMPUTATIONS, max_size=8))
    said = st.sampled_from(
        [None, chosen.expected.plan.schedule.microbatches if chosen is not None else 2, 7]
    )
    return Ran(chosen, draw(said), planned, bool(planned) and draw(st.integers(0, 5)) == 0)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Program | None, list[Ran]]:
    programs = [*draw(st.lists(PROGRAMS, min_size=1, max_size=2)), None]
    return draw(st.sampled_from(programs)), draw(st.lists(behaviours(programs), max_size=7))


def begins_as_planned(ran: Ran, count: int) -> bool:
    """Whether the first `count` computations and the number of microbatches are those of the
    program.
    """
    assert ran.program is not None
    right = (None, ran.program.expected.plan.schedule.microbatches)
    return (
        ran.microbatches in right
        and tuple(ran.computations[:count]) == ran.program.computations[:count]
    )


def is_clean(ran: Ran) -> bool:
    if ran.program is None or ran.is_broken_off:
        return False
    return begins_as_planned(ran, len(ran.computations)) and len(ran.computations) == len(
        ran.program.computations
    )


def standing(before: list[Ran], first: Program | None, ran: Ran, begun: int, ended: int) -> int:
    """Return the expected request after some computations of an iteration, by the rules and the
    history.
    """
    earlier = before[-1].program if before else first
    is_followed = ran.program is not earlier or not before or is_clean(before[-1])
    if ran.program is None or not is_followed or not begins_as_planned(ran, begun):
        return NO_REQUEST
    clocks = ran.program.clocks
    return clock_request(ended % len(clocks), clocks[ended % len(clocks)])


def after(ran: Ran) -> int:
    return (
        clock_request(0, ran.program.clocks[0]) | OUTSIDE
        if ran.program is not None and is_clean(ran)
        else NO_REQUEST
    )


@dataclass
class Recorder:
    """A `ProgramSource` that returns programs from a list and records its calls."""

    programs: list[Program | None]
    asked: list[int] = field(default_factory=list)
    endings: list[tuple[int, Program | None, str | None]] = field(default_factory=list)

    def program_for(self, iteration: int) -> Program | None:
        self.asked.append(iteration)
        return self.programs[iteration]

    def on_end(
        self, iteration: int, program: Program | None, deviation: str | None, *_: object
    ) -> None:
        self.endings.append((iteration, program, deviation))


@given(runs())
def test_the_request_follows_the_rules_at_every_moment(run):
    first, behaviour = run
    shared, source = (
        memoryview(bytearray(8)).cast("Q"),
        Recorder([ran.program for ran in behaviour]),
    )
    marks = Marks(shared)
    hook = Hook(marks, source, first)
    at_first = clock_request(0, first.clocks[0]) | OUTSIDE if first is not None else NO_REQUEST
    assert shared[0] == at_first
    spans = []
    for number, ran in enumerate(behaviour):
        before = behaviour[:number]
        hook.begin_iteration(ran.microbatches)
        assert shared[0] == standing(before, first, ran, 0, 0)
        assert hook.iteration == number
        for place, computation in enumerate(ran.computations):
            hook.begin(*computation)
            assert shared[0] == standing(before, first, ran, place + 1, place)
            if ran.is_broken_off and place == len(ran.computations) - 1:
                break
            hook.end()
            assert shared[0] == standing(before, first, ran, place + 1, place + 1)
        spans.append(len(ran.computations) - ran.is_broken_off)
        if is_clean(ran):
            now = shared[0]
            hook.begin_update()
            assert shared[0] == (now | OUTSIDE if now else NO_REQUEST)
        if not ran.is_broken_off:
            hook.end_iteration()
            assert shared[0] == after(ran)
    hook.end_iteration()
    hook.end_iteration()
    assert not behaviour or shared[0] == after(behaviour[-1])
    assert source.asked == list(range(len(behaviour)))
    endings = [
        (number, program, deviation is None) for number, program, deviation in source.endings
    ]
    expected = [
        (i, ran.program, ran.program is None or is_clean(ran)) for i, ran in enumerate(behaviour)
    ]
    assert endings == expected
    timed = marks.finished()
    assert [(each.number, len(each.spans_ns)) for each in timed] == list(enumerate(spans))
    for each in timed:
        times = [
            each.begin_ns,
            *(time_ns for span in each.spans_ns for time_ns in span),
            each.end_ns,
        ]
        assert times == sorted(times)


@pytest.mark.parametrize(
    ("microbatches", "computations", "said"),
    [
        (3, [], "3 microbatches, and the plan has 2"),
        (2, ["1F0", "1F1"], "1F1, where the plan has 1B0"),
        (2, ["1F0", "1B0", "1F1", "1B1", "1F2"], "1F2, where the plan has nothing more"),
        (None, ["1F0", "1B0"], "2 computations, and the plan has 4"),
        (2, ["1F0", "1B0", "1F1", "1B1"], None),
    ],
)
def test_a_deviation_is_reported_once(microbatches, computations, said):
    source = Recorder([program(2, "1f1b", 1.0, 1)])
    hook = Hook(Marks(memoryview(bytearray(8)).cast("Q")), source, source.programs[0])
    hook.begin_iteration(microbatches)
    for text in computations:
        hook.begin(*Computation.parse(text))
        hook.end()
    hook.end_iteration()
    ((_, _, deviation),) = source.endings
    assert deviation == said


@given(st.integers(0, 2**28 - 2), st.integers(1, 2**16 - 1))
def test_a_request_holds_a_position_and_a_value(place, value):
    assert parse_clock_request(clock_request(place, value)) == (place, value)
    assert parse_clock_request(clock_request(place, value) | OUTSIDE) == (place, value)
    assert 0 < clock_request(place, value) < OUTSIDE
    assert parse_clock_request(NO_REQUEST) == (None, 0)


def test_times_that_nobody_reads_do_not_pile_up():
    marks = Marks(memoryview(bytearray(8)).cast("Q"))
    for number in range(2 * KEPT):
        marks.begin_iteration(number)
        marks.end_iteration()
    assert [each.number for each in marks.finished()] == list(range(KEPT, 2 * KEPT))
    assert marks.finished() == []


def test_a_program_is_its_ranks_part_of_the_plan():
    for rank in (0, 1):
        part = program(3, "1f1b", 1.1, rank)
        assert part.computations == part.expected.plan.schedule.ranks[rank]
        assert [part.expected.plan.clocks[str(each)] for each in part.computations] == list(
            part.clocks
        )


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_the_plan_does_not_have_is_refused(rank):
    expected = f"the plan is for pipelines of 2 ranks, and this is rank {rank} of a pipeline; "
    with pytest.raises(PlanError, match=expected):
        Program.of_plan(1, program(2, "1f1b", 1.0, 0).expected.plan, rank)


@given(st.data())
def test_an_engines_order_is_refused_at_its_first_difference(data):
    part = program(2, "1f1b", 1.0, 1)
    order = tuple(
        data.draw(st.one_of(st.permutations(part.computations), st.lists(COMPUTATIONS, max_size=6)))
    )
    if order == part.computations:
        part.check_order(order, "an engine")
        return
    with pytest.raises(PlanError) as refused:
        part.check_order(order, "an engine")
    place = next(i for i in range(7) if order[i : i + 1] != part.computations[i : i + 1])
    there, here = (
        [*map(str, each[place : place + 1]), "missing"][0] for each in (order, part.computations)
    )
    assert f"computation {place + 1} is {there} there and {here} in the plan" in str(refused.value)
    assert "is not what an engine runs on rank 1 of the pipeline" in str(refused.value)


@given(PROGRAMS, st.data())
def test_an_iteration_that_raises_is_no_deviation_and_the_next_one_has_its_clocks(
    program: Program, data: st.DataObject
):
    shared, source = memoryview(bytearray(8)).cast("Q"), Recorder([program, program])
    hook = Hook(Marks(shared), source, program)
    hook.begin_iteration()
    for computation in program.computations[: data.draw(st.integers(0, len(program.computations)))]:
        hook.begin(*computation)
        hook.end()
    hook.abandon_iteration()
    hook.abandon_iteration()
    assert shared[0] == NO_REQUEST
    assert source.endings == [(0, None, RAISED)]
    hook.begin_iteration()
    assert shared[0] == clock_request(0, program.clocks[0])


def test_a_program_that_comes_while_an_iteration_runs_counts_from_the_next_computation():
    order = one_f_one_b(1, 2).ranks[0]
    full = Program(1, order, (9, 9, 9, 9), expected=Expected(1.0, 9))
    awaits, lower = replace(full, awaits=True), replace(full, clocks=(5, 6, 6, 7), then=9)
    shared, source = memoryview(bytearray(8)).cast("Q"), Recorder([awaits, awaits])
    hook = Hook(Marks(shared), source, None)
    hook.begin_iteration()
    seen = []
    for place, computation in enumerate(order):
        hook.begin(*computation)
        seen.append(parse_clock_request(shared[0]))
        if place == 1:
            source.programs[0] = lower
        hook.end()
    assert seen == [(0, 9), (1, 9), (2, 6), (3, 7)]
    assert shared[0] == clock_request(0, 9)
    hook.end_iteration()
    assert shared[0] == clock_request(0, 9) | OUTSIDE
    assert source.endings == [(0, replace(lower, clocks=(9, 9, 6, 7)), None)]
    assert source.asked == [0, 0, 0]
    hook.begin_iteration()
    assert shared[0] == clock_request(0, 9)


def test_a_program_that_comes_in_the_only_computation_comes_too_late():
    full = Program(1, WHOLE.ranks[0], (9,), expected=Expected(1.0, 9))
    awaits, lower = replace(full, awaits=True), replace(full, clocks=(5,), then=9)
    shared, source = memoryview(bytearray(8)).cast("Q"), Recorder([awaits, lower])
    hook = Hook(Marks(shared), source, None)
    for clock in (9, 5):
        hook.begin_iteration()
        hook.begin(*WHOLE.ranks[0][0])
        assert parse_clock_request(shared[0]) == (0, clock)
        hook.end()
        hook.end_iteration()
        assert parse_clock_request(shared[0]) == (0, 9)
    assert [program for _, program, _ in source.endings] == [awaits, lower]


def test_the_microbatches_of_an_iteration_are_shown_to_who_asks():
    shown = []
    program = Program(1, one_f_one_b(1, 2).ranks[0], (9,) * 4)
    for show in (None, lambda count, batch: shown.append((count, batch and batch()))):
        source = Recorder([program, program])
        hook = Hook(Marks(memoryview(bytearray(8)).cast("Q")), source, None, show)
        hook.begin_iteration(2, lambda: ["a", "b"])
        hook.end_iteration()
        hook.begin_iteration(3)
    assert shown == [(2, ["a", "b"]), (3, None)]


class Noted:
    """A `ProgramSource` without programs."""

    def program_for(self, _: int) -> None:
        return None

    def on_end(self, *_: object) -> None:
        pass

    def on_unfollowed(self, _: str) -> None:
        pass


def test_only_the_iteration_after_an_evaluation_is_marked() -> None:
    marks = Marks(memoryview(bytearray(8)).cast("Q"))
    hook = Hook(marks, Noted(), None)
    for evaluates in (False, True, False):
        if evaluates:
            hook.note_evaluation()
        hook.begin_iteration(1)
        hook.begin(0, "F", 0)
        hook.end()
        hook.end_iteration()
    assert [times.follows_evaluation for times in marks.finished()] == [False, True, False]
