"""Clocks by time: offsets, guards, arming, and two real ranks whose engine is not known."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from launching import results_of

from perseus_planner import Plan, schedules
from perseus_planner.base.errors import PlanError
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.runtime.by_time import MEASURED, EdgeTimes, Guard, Segment, Timing, guarded
from perseus_planner.runtime.controller.armed import ArmedClocks
from perseus_planner.runtime.controller.protocol import (
    LATEST_BYTES,
    AttachRequest,
    LatestStarts,
)
from perseus_planner.runtime.controller.rank import Rank
from perseus_planner.runtime.controller.watcher import ClockRequest
from perseus_planner.runtime.hook import Hook
from perseus_planner.runtime.marks import (
    BEGUN,
    OUTSIDE,
    IterationTimes,
    Marks,
    clock_request,
)
from perseus_planner.runtime.program import Program
from perseus_planner.runtime.timed_plan import TimedPlan
from perseus_planner.schedules.pipeline import pipeline_iteration

MS = 1_000_000
S = 1_000_000_000


@st.composite
def segments(draw: st.DrawFn) -> list[Segment]:
    found: list[Segment] = []
    now_s = 0.0
    for _ in range(draw(st.integers(1, 6))):
        clock = draw(st.sampled_from([900, 1000, 1200, 1410]))
        begin_s = now_s + draw(st.sampled_from([0.0, 0.001, 0.05]))
        now_s = begin_s + draw(st.sampled_from([0.002, 0.03, 0.4]))
        if not found or found[-1].clock != clock:
            found.append(Segment(clock, begin_s, now_s))
    return found


GUARDS = st.builds(
    Guard,
    timer_s=st.sampled_from([0.0, 0.001, 0.02, 0.3]),
    whole_s=st.sampled_from([0.0, 0.01, 0.2]),
    iteration_s=st.sampled_from([0.05, 1.0, 3.0]),
)


@given(segments(), GUARDS, st.floats(-1.0, 1.0))
def test_no_computation_is_below_its_clock_within_the_guard(
    planned: list[Segment], guard: Guard, shift: float
):
    """Whenever an iteration comes, within the guard, its computations have their clock or more."""
    clocks = guarded(planned, guard)
    ends_s = [until_s for _, until_s in clocks]
    assert ends_s == sorted(set(ends_s))
    assert ends_s[-1] == float("inf")
    assert all(one[0] != other[0] for one, other in pairwise(clocks))
    assert {clock for clock, _ in clocks} <= {segment.clock for segment in planned}
    for segment in planned:
        for moment_s in (segment.begin_s, (segment.begin_s + segment.end_s) / 2, segment.end_s):
            # What comes before shifts a moment by no more than the guard there.
            at_s = moment_s + 0.999 * shift * guard.at(moment_s)
            inside = at_s + (1e-9 if moment_s == segment.begin_s else -1e-9)
            clock = next(clock for clock, until_s in clocks if inside < until_s)
            assert clock >= segment.clock


def test_a_low_segment_shorter_than_two_guards_is_left_out():
    planned = [Segment(1410, 0.0, 1.0), Segment(900, 1.0, 1.15), Segment(1200, 1.15, 2.0)]
    assert guarded(planned, Guard(0.1)) == [(1410, 1.1), (1200, float("inf"))]
    assert guarded(planned, Guard(0.05)) == [
        (1410, 1.05),
        (900, pytest.approx(1.1)),
        (1200, float("inf")),
    ]


def test_changes_between_two_computations_are_made_while_the_rank_waits():
    planned = [Segment(1410, 0.0, 1.0), Segment(900, 1.5, 2.0), Segment(1410, 3.0, 4.0)]
    assert guarded(planned, Guard(0.1)) == [(1410, 1.5), (900, 2.0), (1410, float("inf"))]


def measured(times_s: list[float], expected_s: float = 1.0) -> EdgeTimes:
    edges = EdgeTimes()
    for time_s in times_s:
        edges.add(time_s, expected_s)
    for _ in times_s[1:]:
        edges.add_pause(0.1)
    return edges


def test_nothing_is_timed_before_eight_iterations_were_measured():
    assert not measured([1.02] * (MEASURED - 1)).timing.is_measured
    timing = measured([1.02] * MEASURED).timing
    assert timing.is_measured
    assert timing.scale == pytest.approx(1.02)
    assert timing.iteration_s == pytest.approx(1.02)
    # By default a clock is set in 5 +- 2 ms, and a begin is seen +- 5 ms late.
    assert timing.guard_s == pytest.approx(1.5 * (0.002**2 + 0.005**2) ** 0.5)
    assert not timing.is_too_short
    assert measured([0.07] * MEASURED, 0.07).timing.is_too_short


def test_the_guard_is_the_largest_of_three():
    assert Timing(iteration_s=10.0).guard_s == 0.05
    assert Timing(iteration_s=10.0, deviation_s=0.2).guard_s == 0.2
    assert Timing(iteration_s=10.0, begin_deviation_s=0.5).guard_s == pytest.approx(0.75, rel=1e-3)


@given(st.floats(1.2, 9.0))
def test_one_iteration_that_was_held_up_hardly_moves_the_next(held_up: float):
    edges = measured([1.0, 1.004, 0.996, 1.002] * 8)
    before = edges.timing
    edges.add(held_up, 1.0)
    assert edges.timing.scale == pytest.approx(before.scale, abs=0.004)
    assert edges.timing.guard_s < 0.02


def test_the_guard_grows_with_the_offset_to_that_of_the_whole_iteration():
    guard = Timing(iteration_s=10.0, deviation_s=0.2).guard
    assert guard.at(10.0) == guard.at(12.0) == 0.2
    assert guard.at(2.5) == pytest.approx(0.1)
    # What the timer needs does not depend on the offset.
    assert guard.at(0.0) == guard.at(-1.0) == pytest.approx(1.5 * (0.002**2 + 0.005**2) ** 0.5)
    assert guard.at_scale(2.0).at(1.25) == pytest.approx(0.05)
    assert guard.widened(1.5).at(2.5) == pytest.approx(0.15)


def test_lasting_changes_are_followed():
    edges = measured([1.0] * 32)
    for _ in range(40):
        edges.add(1.05, 1.0)
    assert edges.timing.scale == pytest.approx(1.05, abs=0.002)


def test_a_pause_for_a_checkpoint_is_none_of_the_usual_ones():
    edges = measured([1.0] * 20)
    edges.add_pause(5.0)
    assert edges.timing.pause_s == pytest.approx(0.1)
    (least_ns, longest_ns), *_ = edges.timing.row([Segment(900, 0.0, 1.0)])
    assert least_ns < 0.1 * S < longest_ns < 0.15 * S


ROW = [(90 * MS, 110 * MS), (1410, 200 * MS), (900, 700 * MS), (1410, 1 << 62)]


def taken(armed: ArmedClocks, until_ns: int) -> list[tuple[int, int]]:
    """Return the clocks that become due, with when, in milliseconds."""
    found = []
    while armed.next_ns is not None and armed.next_ns <= until_ns:
        due = armed.take(armed.next_ns)
        assert due is not None
        found.append((due.clock, due.due_ns // MS))
    return found


def test_clocks_are_armed_where_an_iteration_begins_when_it_usually_does():
    armed = ArmedClocks()
    assert not armed.begin(0, -MS, ROW)  # no iteration has ended
    armed.end(900 * MS)
    assert armed.begin(S, 999 * MS, ROW)
    assert taken(armed, 2 * S) == [(1410, 1000), (900, 1200), (1410, 1700)]
    assert armed.next_ns is None


@pytest.mark.parametrize("begin_ns", [S - 15 * MS, S + 15 * MS, 2 * S])
def test_an_iteration_that_begins_at_an_unusual_time_is_not_armed_and_the_next_is(begin_ns: int):
    armed = ArmedClocks()
    armed.begin(0, -MS, ROW)
    armed.end(900 * MS)
    assert not armed.begin(begin_ns, begin_ns - MS, ROW)
    assert armed.next_ns is None
    armed.end(begin_ns + S)
    assert armed.begin(begin_ns + S + 100 * MS, begin_ns + S + 99 * MS, ROW)


def test_an_end_that_was_not_seen_lies_between_two_looks():
    row = [(0, 10 * MS), *ROW[1:]]
    armed = ArmedClocks()
    armed.begin(0, -MS, row)
    assert armed.begin(S, S - 5 * MS, row)
    assert not armed.begin(2 * S, 2 * S - 50 * MS, row)


def test_nothing_is_due_after_the_end():
    armed = ArmedClocks()
    armed.begin(0, -MS, ROW)
    armed.end(900 * MS)
    armed.begin(S, 999 * MS, ROW)
    assert taken(armed, S) == [(1410, 1000)]
    armed.end(S + 300 * MS)
    assert armed.next_ns is None


@given(
    st.lists(st.tuples(st.integers(1, 2000), st.integers(0, 2**62)), min_size=1, max_size=8),
    st.integers(0, 9),
)
def test_a_row_is_read_as_it_was_written(row: list[tuple[int, int]], iteration: int):
    latest = LatestStarts(memoryview(bytearray(LATEST_BYTES)))
    table = latest.write(iteration, [row])
    assert latest.row(table, 0) == row
    assert latest.row(table, 1) is None
    assert latest.row(table + 1, 0) is None


class Controlled:
    """A rank as the controller has it, by an injected clock."""

    def __init__(self, row: list[tuple[int, int]]) -> None:
        latest = LatestStarts(memoryview(bytearray(LATEST_BYTES)))
        self.table = latest.write(1, [row])
        self.shared = SimpleNamespace(request=[0], latest=latest)
        request = AttachRequest(0, "nvml:0", "clock", None)
        self.rank = Rank(Mock(), request, self.shared, os.getpid())
        self.turn = False

    def iteration(self, begin_ms: int, end_ms: int) -> list[tuple[int, int]]:
        """Run an iteration, looked at every millisecond; return values with when they were due."""
        found = []
        self.turn = not self.turn
        word = clock_request(0, 1410, again=self.turn, table=self.table, by_time=True)
        following = clock_request(0, 1410, again=not self.turn, table=self.table, by_time=True)
        self.shared.request[0] = word
        assert self.asked(begin_ms - 1) is None  # nothing before it begins
        self.shared.request[0] = word | BEGUN
        for at_ms in range(begin_ms, end_ms):
            request = self.asked(at_ms)
            if request is not None:
                found.append((at_ms, request.value))
        self.shared.request[0] = following | OUTSIDE
        request = self.asked(end_ms)
        if request is not None:
            found.append((end_ms, request.value))
        return found

    def asked(self, at_ms: int) -> ClockRequest | None:
        return self.rank.poll_request(at_ms * MS)


def test_a_controller_sets_clocks_at_their_offsets_and_resets_the_gpu_at_the_end():
    controlled = Controlled(ROW)
    assert controlled.iteration(1000, 2000) == [(1000, 0)]  # no begin is trusted before
    armed = [(2100, 1410), (2300, 900), (2800, 1410), (3100, 0)]
    assert controlled.iteration(2100, 3100) == armed
    assert controlled.rank.changes_per_iteration == 2
    controlled.shared.request[0] = 0  # another number of microbatches, for example
    controlled.asked(3150)
    assert controlled.iteration(3200, 4000) == [(3200, 0)]
    assert controlled.iteration(4100, 4350) == [(4100, 1410), (4300, 900), (4350, 0)]


def a_plan(changes: int = 2, microbatches: int = 6) -> Plan:
    """Return a plan of two ranks in which the clock of each changes so often."""
    schedule = schedules.one_f_one_b(2, microbatches)
    clocks = {}
    for program in schedule.ranks:
        for place, computation in enumerate(program):
            is_low = 0 < place < len(program) - 1 if changes == 2 else bool(place % 2)
            clocks[str(computation)] = 900 if is_low and changes else 1410
    rows = {900: Measurement(900, 0.1, 1.0), 1410: Measurement(1410, 0.1, 2.0)}
    keys = [(stage, kind) for stage in range(2) for kind in "FB"]
    iteration = pipeline_iteration(schedule)
    ordered = {str(each): clocks[str(each)] for each in schedule.computations()}
    full = dict.fromkeys(keys, rows[1410])
    time_s = 0.1 * (2 * microbatches + 2)
    return Plan(
        iteration,
        ordered,
        dict.fromkeys(keys, rows),
        "0" * 64,
        None,
        "simulated",
        1.0,
        *[time_s, time_s, 30.0, 30.0, time_s, 40.0],
        full_clocks=full,
    )


def test_a_plan_with_too_many_changes_is_refused_with_the_command_to_plan_again():
    said = (
        "the plan changes the clock of a rank 12 times in an iteration, and where only its begin "
        "and end are seen at most 4 changes can be made, by time; plan again with `planner plan "
        "--max-changes 4`"
    )
    with pytest.raises(PlanError) as caught:
        TimedPlan().followed(Program.of_plan(1, a_plan(changes=12), 0))
    assert str(caught.value) == said


class Timed:
    """A rank that follows a plan by time."""

    def __init__(self, plan: Plan) -> None:
        self.decider = TimedPlan()
        self.latest = LatestStarts(memoryview(bytearray(LATEST_BYTES)))
        self.decider.begin(SimpleNamespace(latest=self.latest))
        self.program = self.decider.followed(Program.of_plan(1, plan, 0))
        self.word = memoryview(bytearray(8)).cast("Q")
        self.hook = Hook(Marks(self.word), self, self.program)
        self.now_ns = 0
        self.ran: list[Program | None] = []
        self.deviations: list[str | None] = []
        self.problem: str | None = None

    def on_unfollowed(self, problem: str) -> None:
        self.problem = problem

    def program_for(self, iteration: int) -> Program | None:
        return self.decider.program_for(iteration, self.program)

    def on_end(self, iteration, program, deviation, order=None) -> None:
        self.ran.append(program)
        self.deviations.append(deviation)
        self.decider.on_end(iteration, program, deviation, order)

    def iteration(self, time_s: float, microbatches: int | None = None) -> None:
        begin_ns = self.now_ns + 100 * MS
        self.now_ns = begin_ns + round(time_s * S)
        self.hook.begin_iteration(microbatches)
        self.hook.begin(0, "F", 0)
        self.begun = self.word[0]
        self.hook.end()
        self.hook.end_iteration()
        span = begin_ns, self.now_ns
        self.decider.look([IterationTimes(self.hook.iteration, begin_ns, (span,), span[1])], [])


def test_a_rank_runs_at_full_clocks_until_it_is_measured_then_by_time():
    rank = Timed(a_plan())
    for _ in range(MEASURED + 2):
        rank.iteration(1.4)
    by_time = [program is not None and program.table is not None for program in rank.ran]
    assert by_time == [False] * MEASURED + [True] * 2
    assert [program.clocks for program in rank.ran[:MEASURED] if program] == [(1410,)] * MEASURED
    row = rank.latest.row(rank.ran[-1].table.number, 0)
    assert [clock for clock, _ in row[1:]] == [1410, 900, 1410]
    assert rank.program.expected.plan is not None  # what the runtime says that it runs by
    costs = rank.ran[-1].expected.costs
    assert costs.is_lowered
    assert 0.0 < costs.each[0].full_j - costs.each[0].energy_j < 10.0


def test_an_iteration_with_other_microbatches_is_not_timed_and_neither_is_the_next():
    rank = Timed(a_plan(microbatches=6))
    for _ in range(MEASURED + 1):
        rank.iteration(1.4, 6)
    assert rank.begun & BEGUN
    rank.iteration(1.4, 5)
    assert rank.begun == 0
    assert rank.deviations[-1] == "5 microbatches, and the plan has 6"
    rank.iteration(1.4, 6)
    assert rank.begun == 0
    rank.iteration(1.4, 6)
    assert rank.begun & BEGUN


def test_nothing_is_marked_in_a_graph_that_is_followed_by_time():
    """A replay would write the marks, and each would cancel the clocks by time."""
    rank = Timed(a_plan())
    before = rank.word[0]
    rank.hook.capture(1)
    assert rank.word[0] == before


@pytest.mark.parametrize(
    ("microbatches", "problem"),
    [
        (
            6,
            "an iteration runs 0F1 where the plan has 0B1; solve for the schedule and the number "
            "of microbatches that you train with",
        ),
        (5, None),  # of which the hook says so, iteration by iteration
    ],
)
def test_what_runs_before_there_is_a_graph_is_compared_with_the_plan(
    microbatches: int, problem: str | None
):
    rank = Timed(a_plan(microbatches=6))
    order = schedules.one_f_one_b(2, 6).ranks[0]
    rank.hook.end_eager(order, 6)
    assert rank.problem is None
    swapped = [*order[:4], order[1], *order[5:]]
    assert str(order[4]) == "0B1"
    rank.hook.end_eager(swapped, microbatches)
    assert rank.problem == problem


def test_short_iterations_run_at_the_highest_clock_of_the_rank():
    rank = Timed(a_plan())
    for _ in range(MEASURED + 1):
        rank.iteration(0.07)
    assert rank.ran[-1] is not None
    assert not rank.ran[-1].table
    assert rank.ran[-1].clocks == (1410,)


def test_one_clock_a_rank_needs_no_measurement():
    rank = Timed(a_plan(changes=0))
    rank.iteration(1.4)
    assert [program.clocks for program in rank.ran if program] == [(1410,)]
    assert not rank.ran[0].table


def test_a_new_plan_is_timed_by_what_is_known_already():
    rank = Timed(a_plan())
    for _ in range(MEASURED + 1):
        rank.iteration(1.4)
    rank.program = rank.decider.followed(Program.of_plan(2, a_plan(), 0))
    rank.iteration(1.4)
    rank.iteration(1.4)
    assert [program.table is not None for program in rank.ran[-2:] if program] == [False, True]
    assert rank.ran[-1].version == 2


@given(st.floats(0.97, 1.03))
def test_where_iterations_end_is_told_from_their_first_times(factor: float):
    plan = a_plan()
    own_s = plan.timeline.spans["1B5"].end_s
    assume(abs(factor - 1.0) < 0.02)
    for end_s in (own_s, plan.time_s):
        rank = Timed(plan)
        rank.program = rank.decider.followed(Program.of_plan(1, plan, 1))
        for _ in range(MEASURED):
            rank.iteration(factor * end_s)
        assert rank.decider.timing.scale == pytest.approx(factor)


def test_ranks_of_an_unknown_engine_follow_their_plan_by_time(tmp_path: Path):
    pytest.importorskip("torch")
    everyone = results_of("by_time_programs:unknown_engine", 2, tmp_path)
    for result in everyone:
        assert result["warnings"] == []
        assert result["first"] == [1410]
        assert result["after"] is None
        assert len(result["timed"]) >= 3
        assert all(clocks == result["planned"] for clocks in result["timed"])
    assert everyone[0]["planned"] == [1410, 900, 1410]
    assert everyone[1]["planned"] == [1200, 1005]
    assert [result["pipeline"] for result in everyone] == [0, 0]


def test_replays_of_megatrons_graph_are_shown_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    graphs = pytest.importorskip("megatron.core.full_cuda_graph")
    from runtime_training import Recorder

    from perseus_planner.engines.edges import EdgeHook
    from perseus_planner.engines.guard import HookGuard
    from perseus_planner.engines.megatron_graphs import showing_replays

    wrapper_class = graphs.FullCudaGraphWrapper
    replays = []

    def run(*_: object, **__: object) -> str:
        replays.append("eager")
        return "losses"

    monkeypatch.setattr(graphs, "StaticBufferLoader", lambda: None)
    monkeypatch.setattr(wrapper_class, "data_read", lambda *_: [])
    monkeypatch.setattr(wrapper_class, "cuda_graph", {"training": None, "validation": None})
    monkeypatch.setattr(wrapper_class, "result", {"training": "losses", "validation": None})
    monkeypatch.setattr(wrapper_class, "curr_iteration", {"training": 0, "validation": 0})
    recorder = Recorder()
    guard = HookGuard(EdgeHook(recorder))
    monkeypatch.setattr(wrapper_class, "__call__", showing_replays(guard))
    wrapper = wrapper_class(run, cuda_graph_warmup_steps=9)
    call = dict.fromkeys(("model", "data_iterator", "seq_length"))

    assert wrapper(**call, num_microbatches=4, forward_only=False) == "losses"
    assert recorder.iterations == []  # it runs eagerly, in another time than its graph
    wrapper_class.cuda_graph["training"] = SimpleNamespace(replay=lambda: replays.append("graph"))
    assert wrapper(**call, num_microbatches=4, forward_only=False) == "losses"
    wrapper(**call, num_microbatches=4, forward_only=True)
    wrapper(**call, num_microbatches=4, forward_only=False)
    assert recorder.iterations == [{"microbatches": 4, "computations": ["0F0"]}] * 2
    assert recorder.evaluations == 1
    assert replays == ["eager", "graph", "eager", "graph"]
