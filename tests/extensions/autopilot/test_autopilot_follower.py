"""What ranks and the autopilot tell each other, and how a rank runs the autopilot's programs."""
# ruff: noqa: TID253 - these tests are there for torch

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from msgspec.structs import replace

pytest.importorskip("torch")

from torch.distributed import HashStore

from perseus_planner import Profile
from perseus_planner.base.errors import PlanError, UsageError
from perseus_planner.base.wires import decode, encode
from perseus_planner.extensions.autopilot import ComputationObservation, Decision
from perseus_planner.extensions.autopilot.decider import AutopilotDecider
from perseus_planner.extensions.autopilot.ranks.coordinator import observed_key, rank_key
from perseus_planner.extensions.autopilot.ranks.messages import (
    Frame,
    FromProcess,
    JobDescription,
    LogLine,
    Noted,
    Observations,
    ObservedGpu,
    Places,
    Programs,
    RankTraining,
    Status,
    Waits,
    at_full_clocks,
    noted,
    order_number,
    program_runs,
)
from perseus_planner.extensions.autopilot.ranks.observer import Observer
from perseus_planner.extensions.autopilot.ranks.planner import Planner
from perseus_planner.extensions.autopilot.ranks.rank_ledger import RankLedger
from perseus_planner.extensions.autopilot.status import AutopilotStatus
from perseus_planner.runtime import planner_runtime
from perseus_planner.runtime.controller.protocol import SETTLE_NS, ControlChange, GpuSample
from perseus_planner.runtime.decider import Learnt
from perseus_planner.runtime.follower import Follower
from perseus_planner.runtime.guarantee import Ledger
from perseus_planner.runtime.hook import Hook
from perseus_planner.runtime.job import TrainingJob
from perseus_planner.runtime.marks import NO_REQUEST, IterationTimes, Marks, parse_clock_request
from perseus_planner.runtime.options import AutopilotSettings
from perseus_planner.runtime.program import Program
from perseus_planner.runtime.sending import runs_of
from perseus_planner.runtime.switching import NodeShare
from perseus_planner.schedules import Computation, one_f_one_b

T = TypeVar("T")
RANKS = one_f_one_b(2, 3).ranks
ORDERS = {order_number(order): order for order in RANKS}
TOP_MHZ = 1410
MS = 1_000_000


@pytest.mark.parametrize(
    ("owed_s", "said"),
    [
        (0.0015, "the ledger owes 1.5 ms of at most 2.87 ms"),
        (-0.0101, "the ledger has a credit of 10.1 ms and may owe 2.87 ms"),
    ],
)
def test_a_status_says_what_is_to_come_and_what_is_owed(owed_s: float, said: str):
    status = AutopilotStatus("following", 62, 1.0, 0.1, owed_s=owed_s, burst_s=0.00287, trials=3)
    assert f"3 operating points to try in iteration 62 and 0 not known yet, {said}" in str(status)


def programs(
    clocks: Sequence[Sequence[Sequence[int]]],
    decision: int = 1,
    ledger: Ledger | None = None,
    modes: Sequence[Sequence[Sequence[str]]] = (),
) -> Programs:
    """Return programs of one clock for each computation of each rank, of each pipeline."""
    of_pipelines = tuple(tuple(map(tuple, pipeline)) for pipeline in clocks)
    status = AutopilotStatus("learning", 7)
    in_modes = tuple(tuple(map(tuple, pipeline)) for pipeline in modes)
    decided = Decision(0, decision, "learning", of_pipelines, ledger, modes=in_modes)
    runs = program_runs(decided)
    return Programs(
        decision, tuple(ORDERS), top=TOP_MHZ, time_s=0.5, ledger=ledger, status=status, **runs
    )


def program_of(
    sent: Programs, version: int = 2, pipeline: int = 0, rank: int = 0, orders: Any = ORDERS
) -> Program:
    """Return the program of one rank, as it arrives there."""
    return Programs.program_of(encode(sent), version, pipeline, rank, orders)


CLOCKS = st.tuples(
    *(st.lists(st.sampled_from([1410, 1200, 210]), min_size=6, max_size=6) for _ in RANKS)
)


@given(st.lists(CLOCKS, min_size=1, max_size=3))
def test_each_rank_decodes_its_own_program(clocks):
    sent = programs(clocks, ledger=Ledger(0.5, burst_s=0.001))
    for pipeline, expected in enumerate(clocks):
        for rank, order in enumerate(RANKS):
            program = program_of(sent, 9, pipeline, rank)
            assert (program.computations, program.clocks) == (order, tuple(expected[rank]))
            assert (program.version, noted(program).decision, program.microbatches) == (9, 1, 3)
            assert program.note == Noted(1, program.note.order, sent.ledger, sent.status)
            assert set(at_full_clocks(program).clocks) == {TOP_MHZ}
            assert noted(at_full_clocks(program)).decision == 0


def test_each_rank_decodes_the_modes_of_its_computations_and_full_clocks_are_in_its_own_way():
    clocks, modes = [[[1200] * 6] * 2] * 2, [[["own", "keep"] * 3, ["keep"] * 6], [["own"] * 6] * 2]
    sent = programs(clocks, modes=modes)
    for pipeline, expected in enumerate(modes):
        for rank in range(2):
            program = program_of(sent, 9, pipeline, rank)
            assert program.modes == tuple(expected[rank])
            assert at_full_clocks(program).modes == ()
    assert program_of(programs(clocks)).modes == ()


@pytest.mark.parametrize(
    ("data", "orders", "said"),
    [
        (b"{", ORDERS, "cannot be read"),
        (b'{"orders":[1,2]}', ORDERS, "cannot be read"),
        (encode(programs([[[1410] * 6] * 2])), {}, "for another order"),
        (encode(programs([[[1410] * 5] * 2])), ORDERS, "for another order"),
    ],
)
def test_a_program_that_is_not_for_this_rank_is_refused(data, orders, said):
    with pytest.raises(PlanError, match=said):
        Programs.program_of(data, 2, 0, 0, orders)


class Given(Follower):
    """Runs by programs from a list, in iterations that last so long."""

    def __init__(self, given: Sequence[Program | None], times_s: Sequence[float]) -> None:
        job, lasting = TrainingJob(HashStore(), 0, 1), iter(times_s)
        self.decider = AutopilotDecider(ended_s=lambda: next(lasting))
        super().__init__(job, NodeShare(), self.decider, nothing)
        self.agreement.version_at = lambda iteration: iteration  # type: ignore[method-assign]
        self._programs = {number: program for number, program in enumerate(given) if program}


def nothing(*_: object) -> Any:
    """Take the end of an iteration."""


def trained(
    given: Sequence[Program | None],
    runs: Sequence[Sequence[Computation]],
    times_s: Sequence[float],
):
    """Run iterations on a rank that the autopilot pilots; return the rank, and the clocks asked
    for in each.
    """
    source, shared, asked = Given(given, times_s), memoryview(bytearray(8)).cast("Q"), []
    hook = Hook(Marks(shared), source, None)
    for run in runs:
        hook.begin_iteration()
        clocks = []
        for computation in run:
            hook.begin(*computation)
            clocks.append(parse_clock_request(shared[0])[1])
            hook.end()
        hook.end_iteration()
        asked.append(clocks)
    return source, asked


def test_a_rank_whose_ledger_is_overdrawn_runs_the_next_iteration_at_full_clocks_until_it_is_paid():
    ledger = Ledger(1.0, max_slowdown=0.01, burst_s=0.02)
    program = program_of(programs([[[1200] * 6] * 2], ledger=ledger))
    times_s = [1.0, 1.05, 1.0, 1.0, 1.0, 1.0]
    source, asked = trained([program] * 6, [RANKS[0]] * 6, times_s)
    full = [clocks[1] == TOP_MHZ for clocks in asked]
    assert full == [False, False, True, True, False, False]
    assert [set(clocks[1:]) for clocks in asked] == [{TOP_MHZ} if each else {1200} for each in full]
    assert [noted(each.program).decision for each in source.decider.ended if each.program] == [
        0 if each else 1 for each in full
    ]


def test_a_rank_that_is_not_the_first_overlooks_that_an_iteration_ends_later_than_its_pipeline():
    ledgers = [RankLedger(is_first=is_first) for is_first in (True, False)]
    for ledger in ledgers:
        ledger.renew(Ledger(1.0, max_slowdown=0.01, burst_s=0.02))
    overdrawn = []
    for iteration, time_s in enumerate((1.035, 1.025)):  # 0.025 s are owed, then 0.04 s
        for ledger in ledgers:
            ledger.add(iteration, time_s, full_clocks=False)
            ledger.add(iteration, time_s, full_clocks=False)  # as another thread does
        overdrawn.append([each.is_overdrawn for each in ledgers])
    ledgers[1].add(2, 1.02, full_clocks=False)
    assert overdrawn == [[True, False], [True, False]]
    assert ledgers[1].is_overdrawn


def test_a_newer_program_brings_terms_that_count_the_iterations_before():
    old = Ledger(1.0, max_slowdown=0.01, burst_s=0.02)
    new = Ledger(2.0, max_slowdown=0.01, burst_s=0.02, owed_s=0.01, last=0)
    first, second = (
        program_of(programs([[[1200] * 6] * 2], ledger=ledger), version)
        for version, ledger in enumerate((old, new), 2)
    )
    source, _ = trained([first, second], [RANKS[0]] * 2, [1.02, 2.0])
    assert source.decider.ledger.ledger is not None
    assert source.decider.ledger.ledger.reference_s == 2.0
    assert source.decider.ledger.ledger.owed_s == pytest.approx(0.01 - 0.02)


def test_what_an_iteration_ran_is_noted_without_a_program_and_after_a_deviation():
    program = program_of(programs([[[1200] * 6] * 2]))
    other = one_f_one_b(2, 5).ranks[0]
    shorter = RANKS[0][:-2]
    ran = [RANKS[0], RANKS[0], other, RANKS[0], shorter]
    source, asked = trained([None, program, program, program, program], ran, [1.0] * 5)
    assert [each.order for each in source.decider.ended] == list(map(order_number, ran))
    assert [each.program is not None for each in source.decider.ended] == [
        False,
        True,
        False,
        True,
        False,
    ]
    assert set(source.decider.orders.values()) == {RANKS[0], other, shorter}
    assert set(asked[2][5:]) == {NO_REQUEST}  # the first difference


FRAMES = st.builds(
    Frame,
    rank=st.integers(0, 2**20),
    order=st.integers(0, 2**32 - 1),
    iteration=st.integers(0, 2**40),
    decision=st.integers(0, 2**40),
    time_s=st.floats(0.0, 100.0),
    spans_s=st.lists(st.floats(0.0, 100.0)).map(tuple),
    changes=st.lists(st.tuples(st.floats(0.0, 100.0), st.integers(0, 3000))).map(tuple),
    energy_j=st.none() | st.floats(0.0, 1e6),
    throttled_s=st.floats(0.0, 10.0),
)


@given(FRAMES, st.data())
def test_a_frame_arrives_as_it_was_sent_or_not_at_all(frame, data):
    packed = encode(frame)
    assert decode(packed, Frame) == frame
    with pytest.raises(ValueError, match="not what this version writes"):
        decode(packed[: data.draw(st.integers(0, len(packed) - 1))], Frame)


def test_each_computation_has_the_clock_in_force_and_the_change_that_came_into_it():
    spans_s = (0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 5.0)
    changes = ((0.0, 1410), (1.0, 1200), (2.5, 900), (3.1, 600), (3.2, 1410), (4.0, 0))
    seen = Frame(0, 1, 5, 2, 5.0, spans_s, changes, 7.0).observation(1, 3, 2, 0.1)
    assert seen[:5] == (1, 3, 5, 2, 5.0)
    assert (seen.energy_j, seen.energy_step_s) == (14.0, 0.1)
    assert seen.computations == (
        ComputationObservation(0.0, 1.0, 1410),
        ComputationObservation(1.0, 2.0, 1200),
        ComputationObservation(2.0, 3.0, 1200, 2.5, 900),
        ComputationObservation(3.0, 4.0, None),  # two changes came into it
        ComputationObservation(4.0, 5.0, None),  # the clock was reset, and is not known
    )
    modes = ("own", "keep", "keep", "own", "keep")
    frame = Frame(0, 1, 5, 2, 5.0, spans_s, changes, modes=runs_of(modes))
    ran = frame.observation(1, 3, 2, 0.1).computations
    assert [each.mode for each in ran] == list(modes)
    assert [each[:5] for each in ran] == [each[:5] for each in seen.computations]


def test_an_observer_writes_times_changes_and_the_energy_between_two_samples():
    program = program_of(programs([[[1200] * 6] * 2], modes=[[["own", "keep"] * 3] * 2]))
    store, source = HashStore(), Given([None, program, program, program], [0.065] * 4)
    observer = Observer(store, 3, source.decider, ObservedGpu("a GPU", "simulated", (1410, 1200)))
    hook, times = Hook(Marks(memoryview(bytearray(8)).cast("Q")), source, None), []
    for number in range(4):
        hook.begin_iteration()
        for computation in RANKS[0]:
            hook.begin(*computation)
            hook.end()
        hook.end_iteration()
        begin_ns = 100 * number * MS
        spans_ns = tuple((begin_ns + 10 * i * MS, begin_ns + 10 * (i + 1) * MS) for i in range(6))
        times.append(IterationTimes(number, begin_ns, spans_ns, begin_ns + 65 * MS))
    observer.take(times[:1], [])
    assert decode(store.get(observed_key(3)), Frame) == Frame(
        3, order_number(RANKS[0]), 0, 0, 0.065
    )
    told = decode(store.get(rank_key(3)), RankTraining)
    assert told == RankTraining(RANKS[0], ObservedGpu("a GPU", "simulated", (1410, 1200)))

    def set_at(ms: int, value: int) -> ControlChange:
        return ControlChange(0, value, 0, 0, ms * MS - SETTLE_NS, None)

    def sample(ms: int, energy_j: float) -> GpuSample:
        return GpuSample(
            0, ms * MS, energy_j, None, None, None, {"sw-thermal": ms / 1000}, 0, 0, None
        )

    observer.take(times[1:2], [set_at(95, 1200), set_at(125, 900), sample(60, 5.0)])
    assert decode(store.get(observed_key(3)), Frame).iteration == 0  # not sampled yet
    observer.take([], [sample(160, 25.0)])
    frame = decode(store.get(observed_key(3)), Frame)
    assert (frame.iteration, frame.decision, frame.energy_j) == (1, 1, 20.0)
    assert frame.throttled_s == pytest.approx(0.1)
    assert frame.modes == runs_of(program.modes) == (("own", 1), ("keep", 1)) * 3
    assert frame.changes == ((0.0, 1200), (0.025, 900))
    assert frame.spans_s[:4] == (0.0, 0.01, 0.01, 0.02)
    observer.take(
        times[2:], []
    )  # a sample is missing: the iteration is told without energy once the next has ended
    frame = decode(store.get(observed_key(3)), Frame)
    assert (frame.iteration, frame.energy_j, frame.changes) == (2, None, ((0.0, 900),))


@pytest.mark.parametrize(
    ("pipelines", "ranks", "gpus", "every", "observing"),
    [(1, 4, 1, 1, 4), (4, 2, 1, 1, 8), (2, 2, 3, 1, 4), (40, 8, 1, 5, 64), (3, 100, 1, 3, 100)],
)
def test_in_large_jobs_pipelines_take_turns(
    pipelines: int, ranks: int, gpus: int, every: int, observing: int
):
    everyone = [
        (pipeline, rank)
        for pipeline in range(pipelines)
        for rank in range(ranks)
        for _ in range(gpus)
    ]
    places = Places.among(everyone)
    assert (places.pipelines, places.gpus_per_stage, places.every) == (pipelines, gpus, every)
    turns = [places.observed_in(iteration) for iteration in range(every)]
    assert len(turns[0]) == observing
    assert sorted(rank for turn in turns for rank in turn) == list(range(0, len(everyone), gpus))


def description(state: Path | None = None, **changed: object) -> JobDescription:
    """Return a job of one pipeline on a GPU with three clocks."""
    gpu = ObservedGpu("a GPU", "simulated", (1410, 1200, 900))
    job = JobDescription(
        settings=AutopilotSettings(slowdown=1.5),
        places=Places({0: (0, 0), 1: (0, 1)}, 1, 1, 1),
        trainings={rank: RankTraining(order, gpu) for rank, order in enumerate(RANKS)},
        sets_clocks=True,
        state=None if state is None else str(state),
    )
    return replace(job, **changed)


def replied(replies: Sequence[FromProcess], kind: type[T]) -> T:
    """Return the last reply of a kind."""
    return [reply for reply in replies if isinstance(reply, kind)][-1]


def observed(
    iteration: int,
    decision: int,
    clocks: Sequence[Sequence[int]],
    modes: Sequence[Sequence[str]] = ((), ()),
) -> Observations:
    """Return the message of an iteration in which each computation takes 0.1 s at the top, and
    as much more below, but less in the mode keep.
    """
    frames = []
    for rank, (order, mhz) in enumerate(zip(RANKS, clocks, strict=True)):
        ends, spans, changes = 0.0, list[float](), list[tuple[float, int]]()
        for clock, mode in zip(mhz, modes[rank] or ["own"] * len(mhz), strict=True):
            changes.append((ends, clock))
            spans += [ends, ends + (0.08 if mode == "keep" else 0.1) * TOP_MHZ / clock]
            ends = spans[-1]
        head = (rank, order_number(order), iteration, decision, ends, tuple(spans), tuple(changes))
        frame = Frame(*head, 100.0, call_s=0.02, modes=runs_of(modes[rank]))
        frames.append(Raw(encode(frame)))
    return Observations(iteration + 2, tuple(frames))


def test_a_dry_run_says_that_no_clocks_are_tried():
    told = {
        sets_clocks: [
            reply.text
            for reply in Planner().take([description(sets_clocks=sets_clocks)])
            if isinstance(reply, LogLine)
        ]
        for sets_clocks in (True, False)
    }
    assert told == {
        True: ["reference"],
        False: ["a dry run tries no clocks: the autopilot learns full clocks alone", "reference"],
    }


def test_the_planner_answers_a_job_with_full_clocks_and_observations_with_programs(tmp_path: Path):
    state = tmp_path / "made" / "autopilot.yaml"
    planner = Planner(Mock(side_effect=range(10**6)))
    replies = planner.take([description(state)])
    first = program_of(replied(replies, Programs))
    assert (noted(first).decision, set(first.clocks)) == (0, {TOP_MHZ})
    seen = set()
    clocks, decision = [[TOP_MHZ] * 6] * 2, 0
    for iteration in range(12):
        replies = planner.take([observed(iteration, decision, clocks)])
        status = replied(replies, Status).status
        assert status.iteration == iteration + 2
        seen.add(status.phase)
        if Programs in map(type, replies):
            ran = [program_of(replied(replies, Programs), rank=rank) for rank in range(2)]
            clocks, decision = [list(each.clocks) for each in ran], noted(ran[0]).decision
    assert "learning" in seen
    assert ran[0].expected.busy_s is not None
    assert ran[0].expected.busy_s == pytest.approx(
        sum(0.1 * TOP_MHZ / clock for clock in ran[0].clocks), rel=0.1
    )
    assert planner.save() == []
    assert planner._autopilot is not None
    assert planner._autopilot.job.clock_change.call_s == 0.02  # as the ranks measured
    profile = Profile.load(state)
    assert profile.gpu == "a GPU"
    assert {len(rows) for rows in profile.measurements.values()} <= {1, 2, 3}
    replies = Planner().take([description(state)])
    assert f"rows that were learnt before, from {state}" in replies[0].text
    told = description(state).trainings
    another = ObservedGpu("another", "simulated", (1410, 1200))
    other = {rank: RankTraining(each.order, another) for rank, each in told.items()}
    replies = Planner().take([description(state, trainings=other)])
    kept = state.with_name("autopilot.2-stages.a-gpu.yaml")
    text = (
        f"what was learnt before is not used: {state} is for the GPU 'a GPU', and this job has "
        f"'another'; it is kept in {kept}, for when the job is resumed as before"
    )
    assert replies[0] == LogLine(text, is_warning=True)
    assert Profile.load(kept) == profile


def test_the_planner_tries_the_modes_of_the_job_and_begins_with_what_was_learnt_of_them(
    tmp_path: Path,
):
    job = description(tmp_path / "a.yaml", modes=("own", "keep"), shares_microbatch=True)
    planner = Planner(Mock(side_effect=range(10**6)))
    planner.take([job])
    ran, tried = [([TOP_MHZ] * 6, ())] * 2, set[str]()
    for iteration in range(14):
        clocks, modes = zip(*ran, strict=True)
        replies = planner.take([observed(iteration, int(iteration > 1), clocks, modes)])
        if Programs in map(type, replies):
            parts = [program_of(replied(replies, Programs), rank=rank) for rank in range(2)]
            ran = [(list(each.clocks), each.modes) for each in parts]
            for part in parts:
                tried |= set(part.modes)
                of_microbatch: dict[int, set[str]] = {}
                for computation, mode in zip(part.computations, part.modes, strict=True):
                    of_microbatch.setdefault(computation.microbatch, set()).add(mode)
                assert all(len(each) == 1 for each in of_microbatch.values())
    assert tried == {"own", "keep"}
    assert planner.save() == []
    profile = Profile.load(tmp_path / "a.yaml")
    assert profile.modes is not None
    assert list(profile.modes.ways) == ["own", "keep"]
    replies = Planner().take([job])
    assert f"rows that were learnt before, from {job.state}" in replies[0].text
    replies = Planner().take([replace(job, modes=("own",), shares_microbatch=False)])
    assert "has the modes own, keep, and this job own" in replies[0].text


def test_a_service_is_told_what_is_learnt(tmp_path: Path):
    planner = Planner()
    planner.take([description(is_shared=True)])
    messages = [
        learnt
        for iteration in range(4)
        for learnt in planner.take([observed(iteration, 0, [[TOP_MHZ] * 6] * 2)])
        if isinstance(learnt, Learnt)
    ]
    learnt = messages[-1]
    assert len(messages) == 1  # no more rows were learnt since
    assert learnt.rows == 4
    assert learnt.time_s > 0.6
    (tmp_path / "profile.csv").write_text(learnt.profile_csv)
    (tmp_path / "profile.yaml").write_text(learnt.profile_yaml)
    measured = Profile.load(tmp_path / "profile.yaml").measurements
    assert sum(map(len, measured.values())) == 4


def test_a_service_is_told_at_once_of_many_new_rows_and_after_a_minute_of_any():
    clock = Mock(return_value=0.0)
    planner = Planner(clock)
    planner.take([description(is_shared=True)])

    def told(iteration: int, *mhz: int) -> list[int]:
        replies = planner.take([observed(iteration, 1, [[each] * 6 for each in mhz])])
        return [each.rows for each in replies if isinstance(each, Learnt)]

    assert [told(iteration, TOP_MHZ, TOP_MHZ) for iteration in range(2)] == [[4], []]
    assert told(2, 1200, 1200) == [8]
    planner._told_rows = 7  # one row is new
    assert told(3, TOP_MHZ, TOP_MHZ) == []
    clock.return_value = 61.0
    assert told(4, TOP_MHZ, TOP_MHZ) == [8]
    clock.return_value = 200.0
    assert told(5, TOP_MHZ, TOP_MHZ) == [], "nothing is new"


def test_there_is_a_line_a_minute_while_clocks_are_tried_and_then_silence():
    clock = Mock(return_value=0.0)
    planner, lines = Planner(clock), list[float]()
    for second in range(0, 1000, 10):
        clock.return_value = float(second)
        trials = int(second < 300 or 700 <= second < 720)  # and again, as a stage has changed
        lines += [
            float(second)
            for _ in planner._log(AutopilotStatus("learning", 1, 1.0, 0.1, trials=trials))
        ]
    assert lines == [0.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 700.0, 760.0, 820.0]


def test_beside_a_slower_pipeline_the_ledger_allows_as_much():
    planner = Planner()
    planner.take([description(settings=AutopilotSettings(learn=False))])
    planner.take([observed(number, 0, [[TOP_MHZ] * 6] * 2) for number in range(3)])

    def slowdown(iteration: int) -> float:
        replies = planner.take([observed(iteration, 0, [[TOP_MHZ] * 6] * 2)])
        ledger = replied(replies, Programs).ledger
        assert ledger is not None
        return ledger.slowdown

    planner.take([Waits((1.2,))])
    assert slowdown(3) > 1.1
    planner.take([Waits(())])
    for iteration in range(4, 6):  # those that are ahead
        planner.take([observed(iteration, 0, [[TOP_MHZ] * 6] * 2)])
    planner._sent = None  # so that it answers with programs
    assert slowdown(6) == 1.0


def test_another_order_is_planned_with_what_is_known():
    planner = Planner()
    planner.take([description()])
    for iteration in range(3):
        planner.take([observed(iteration, 0, [[TOP_MHZ] * 6] * 2)])
    longer = {order_number(order): order for order in one_f_one_b(2, 5).ranks}
    told = {
        rank: RankTraining(order, description().trainings[rank].gpu)
        for rank, order in enumerate(longer.values())
    }
    replies = planner.take([description(trainings=told)])
    program = program_of(replied(replies, Programs), rank=1, orders=longer)
    assert (program.microbatches, noted(program).decision) == (5, 1)  # at once
    assert not any("not used" in reply.text for reply in replies if isinstance(reply, LogLine))
    assert planner.take(
        [observed(3, 0, [[TOP_MHZ] * 6] * 2)]
    )  # ranks that still run the other order teach nothing
    profile = planner._learned()
    assert profile is not None
    times_s = [row.time_s for rows in profile.measurements.values() for row in rows]
    assert times_s == [pytest.approx(0.1, rel=0.01)] * len(times_s)


def test_the_planner_says_what_it_cannot_plan():
    told = {rank: RankTraining(order[1:], None) for rank, order in enumerate(RANKS)}
    warning, status = Planner().take([description(trainings=told)])
    assert isinstance(warning, LogLine)
    assert warning.is_warning
    assert warning.text.startswith("the autopilot cannot plan what this job runs: ")
    assert status == Status(AutopilotStatus("stopped"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"slowdown": 0.9}, "slowdown"),
        ({"max_changes": -1}, "max_changes"),
    ],
)
def test_options_that_do_not_go_with_the_autopilot_are_refused(options: dict[str, Any], said: str):
    with pytest.raises(UsageError, match=said), planner_runtime(object(), **options):
        pass


def test_a_dry_run_observes_full_clocks_alone():
    planner = Planner()
    planner.take([description(sets_clocks=False)])
    for iteration in range(6):
        replies = planner.take([observed(iteration, 0, [[TOP_MHZ] * 6] * 2)])
        if Programs in map(type, replies):
            assert set(program_of(replied(replies, Programs)).clocks) == {TOP_MHZ}
    assert replied(replies, Status).status.reference_s is not None
