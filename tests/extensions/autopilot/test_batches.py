"""Clocks that follow the batch: what ranks tell each other, what is decided, and training as a
whole.
"""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batch_world import (
    KINDS,
    LEARNT,
    MICROBATCHES,
    calm_saving,
    drawn,
    predicted,
    profile_of,
)
from launching import results_of
from serving import Serving
from waiting import LONG_S, eventually

from perseus_planner import PipelineDag, Profile, schedules
from perseus_planner.base.errors import PlannerError, ProfileError, RankError, UsageError
from perseus_planner.base.wires import decode, encode
from perseus_planner.engines.deepspeed import ReadAhead
from perseus_planner.extensions.autopilot.batches.batches import Batches, _Asked
from perseus_planner.extensions.autopilot.batches.exchange import (
    Exchange,
    OwnTime,
    RankLaws,
    Seat,
    Slowest,
    send_profile,
    sent_profile,
)
from perseus_planner.extensions.autopilot.batches.leader import MOST_COUNTS, Leader, Ran
from perseus_planner.extensions.autopilot.batches.solver import BatchPlanner, Law
from perseus_planner.extensions.autopilot.job import CHANGE
from perseus_planner.extensions.service.agent.agent import LearningAgent
from perseus_planner.extensions.service.agent.outbox import (
    RankLocation,
    ServiceSettings,
    StoreMessages,
)
from perseus_planner.extensions.service.client import Client
from perseus_planner.extensions.service.models import ReportRequest, Scope
from perseus_planner.profiles.keys import Key
from perseus_planner.runs import IterationRecord
from perseus_planner.runs.verdict import StragglerDetector
from perseus_planner.runtime import planner_runtime
from perseus_planner.runtime.controller.protocol import LATEST_BYTES, LatestStarts
from perseus_planner.runtime.decider import ServiceExchange
from perseus_planner.runtime.job import JobWarnings, TrainingJob
from perseus_planner.runtime.marks import IterationTimes
from perseus_planner.runtime.options import AutopilotSettings
from perseus_planner.runtime.program import Program

torch = pytest.importorskip("torch")

GPU = "emulated:a100-sxm/0"
PROFILE = profile_of(2)
SCHEDULE = schedules.one_f_one_b(2, MICROBATCHES)
SETTINGS = AutopilotSettings(learn=False)
UNEQUAL = [[1.0] * MICROBATCHES, [2.0] * MICROBATCHES]  #: work of two pipelines
SCALE = 3.0  #: of computations of which the energy is told
KNOWN = 20  #: iterations after which clocks follow


TOP = PROFILE.measurements[0, "F"][0].clock_mhz
MADE = "made"  #: noted with a program that is the test's own
#: from here on computations take no less
POWER_LIMITED = max(
    min(m.clock_mhz for m in rows if m.time_s <= 1.0001 * rows[0].time_s)
    for rows in PROFILE.measurements.values()
)


def mean_s(kind: str) -> float:
    return PROFILE.measurements[0, kind][0].time_s


class Pipelines:
    """The ranks of pipelines of a job, whose iterations take what their work says, without
    waiting for it.
    """

    def __init__(
        self,
        pipelines: int,
        orders: Sequence[Any] = SCHEDULE.ranks,
    ) -> None:
        self.said: list[tuple[str, str]] = []
        self.service = ServiceExchange()
        store, self.iteration = torch.distributed.HashStore(), -1
        self.batches = [
            Batches(
                Exchange(store, seat),
                seat,
                orders[rank],
                PROFILE,
                SETTINGS,
                float,
                lambda key, text: self.said.append((key, text)),
            )
            for pipeline in range(pipelines)
            for rank in range(2)
            for seat in [Seat(pipeline, rank, 2, pipelines, has_followers=True)]
        ]
        self.latest = [LatestStarts(memoryview(bytearray(LATEST_BYTES))) for _ in self.batches]
        for number, (each, latest) in enumerate(zip(self.batches, self.latest, strict=True)):
            each.start(latest, None if number else self.service)

    def run(
        self, work: Any, shown: Any = None, *, slow: float = 1.0, hampered: float = 1.0
    ) -> list[Program]:
        """Run one iteration with its (pipelines, microbatches) work; return the last programs. It
        takes `slow` times as long if a clock is lower, and rank 1 computes `hampered` times as
        long.
        """
        self.iteration += 1
        ranks = schedules.one_f_one_b(2, len(work[0])).ranks
        for number, each in enumerate(self.batches):
            rows = work if shown is None else shown
            rows = list(rows[number // 2] if np.ndim(rows) == 2 else rows)
            each.show(len(work[0]), (lambda rows=rows: rows) if each.leads else None)
            each.program_for(self.iteration)
        programs = []
        for each in self.batches:
            eventually(lambda each=each: self.iteration in each._known)
            programs.append(each.program_for(self.iteration))
        came = list(programs)
        for number, program in enumerate(programs):
            if program is None:
                order = ranks[number % 2]
                programs[number] = Program(1, order, (TOP,) * len(order), note=MADE)
        ran_s = max(
            replayed_s(programs[number : number + 2], work[number // 2])
            for number in range(0, len(programs), 2)
        )
        slow = slow if any(is_lowered(program) for program in programs) else 1.0
        for number, (each, program) in enumerate(zip(self.batches, programs, strict=True)):
            slower = slow * (hampered if number == 1 else 1.0)
            ends = np.cumsum([0, *times_s_of(program, work[number // 2])]) * 1e9 * slower
            spans = tuple(pairwise(ends.astype(int).tolist()))
            if came[number] is None:
                each.on_end(self.iteration, None, None, [(*c,) for c in program.computations])
            else:
                each.on_end(self.iteration, program, None, None)
            each.observe([IterationTimes(self.iteration, 0, spans, int(ran_s * slow * 1e9))])
        return programs

    def stop(self) -> None:
        for each in self.batches:
            each.stop(5.0)


def times_s_of(program: Program, work: Sequence[float]) -> list[float]:
    times_s = []
    for c, clock in zip(program.computations, program.clocks, strict=True):
        fixed, slope = KINDS[c.kind]
        rows = {row.clock_mhz: row.time_s for row in PROFILE.measurements[c.stage, c.kind]}
        times_s.append(rows[clock] * (fixed + slope * work[c.microbatch]))
    return times_s


def replayed_s(programs: Sequence[Program], work: Sequence[float]) -> float:
    """Return the time of a pipeline's iteration."""
    took = [dict(zip(p.computations, times_s_of(p, work), strict=True)) for p in programs]
    ended: dict[Any, float] = {}
    left, free = [list(p.computations) for p in programs], [0.0, 0.0]
    while any(left):
        for rank in (0, 1):
            while left[rank]:
                before = schedules.dependency_of(left[rank][0], took[0] | took[1], 1)
                if before is not None and before not in ended:
                    break
                c = left[rank].pop(0)
                begun = max(free[rank], 0.0 if before is None else ended[before])
                ended[c] = free[rank] = begun + took[rank][c]
    return max(free)


@pytest.fixture(name="two")
def _two(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("_LEAST_TIMEOUT_S", "_MOST_TIMEOUT_S"):  # however busy the machine is
        monkeypatch.setattr(f"perseus_planner.extensions.autopilot.batches.batches.{name}", LONG_S)
    made = Pipelines(2)
    yield made
    made.stop()


def is_lowered(program: Program) -> bool:
    return program.note == "lowered"


def full_s(programs: Sequence[Program], work: Sequence[float]) -> float:
    return replayed_s([each.at((TOP,) * len(each.clocks)) for each in programs], work)


def test_clocks_follow_the_batch_once_its_laws_are_known(
    two: Pipelines,
):
    work, lower = drawn(2), 0
    for iteration in range(KNOWN + 10):
        programs = two.run(work[iteration])
        followed = [is_lowered(program) for program in programs]
        if iteration < 12:
            assert not any(followed)
        if iteration >= KNOWN:
            pairs = list(zip((programs[:2], programs[2:]), work[iteration], strict=True))
            slowest = int(np.argmax([full_s(*pair) for pair in pairs]))
            lower += sum(followed)
            limit_s = full_s(*pairs[slowest])
            assert max(replayed_s(*pair) for pair in pairs) <= limit_s * 1.0001
            for number, (program, rank) in enumerate(zip(programs, two.batches, strict=True)):
                ran_s = sum(times_s_of(program, work[iteration][number // 2]))
                assert rank.planned_busy_s(iteration) == pytest.approx(ran_s, rel=1e-3)
                assert program.then == (program.expected.top if is_lowered(program) else 0)
                assert (program.table is not None) == is_lowered(program)
                latest, fastest = two.latest[number], 10**15
                for position, clock in enumerate(program.clocks if program.table else ()):
                    assert latest.clock(program.table.number, position, -fastest) == clock
                    found = latest.clock(program.table.number, position, fastest)
                    assert (found == clock) == (clock >= POWER_LIMITED)
    assert lower >= 10
    status = two.batches[0].status
    assert status is not None
    said = status.batches
    assert said is not None
    full = [[sum(times_s_of(program, each)) for each in pair] for pair in work[13:]]
    assert 0.5 * np.std(full) < said.waiting * np.mean(full) < 1.5 * np.std(full)
    assert 0.25 < said.spread < 0.5
    assert said.error == pytest.approx(0.0, abs=1e-3)
    assert 0.0 <= said.order < 0.3
    assert str(status).startswith("following, clocks follow the batch: microbatches differ by ")
    assert two.batches[2].status is None
    assert two.said == []


def test_numbers_of_microbatches_that_change_are_learnt_from_what_runs(
    monkeypatch: pytest.MonkeyPatch,
):
    for name in ("_LEAST_TIMEOUT_S", "_MOST_TIMEOUT_S"):
        monkeypatch.setattr(f"perseus_planner.extensions.autopilot.batches.batches.{name}", LONG_S)
    two = Pipelines(2, (None, None))  # as no order is known before
    of_4, of_6 = drawn(2), drawn(2, 6)
    for iteration in range(KNOWN):
        programs = two.run(of_4[iteration])
        assert [p.note != MADE for p in programs] == [iteration > 0] * 4
    assert any(is_lowered(p) for p in programs)
    assert not any(is_lowered(p) for p in two.run(of_6[0]))  # full clocks, and its order is noted
    assert any(is_lowered(p) for p in two.run(of_4[KNOWN]))
    followed = [[is_lowered(p) for p in two.run(of_6[i])] for i in range(1, 24)]
    assert [any(each) for each in followed].index(True) <= 12
    assert all(any(each) for each in followed[12:])
    assert two.said == []
    two.stop()


def test_clocks_follow_for_32_numbers_of_microbatches_and_more_run_at_full_clocks(
    monkeypatch: pytest.MonkeyPatch,
):
    for name in ("_LEAST_TIMEOUT_S", "_MOST_TIMEOUT_S"):
        monkeypatch.setattr(f"perseus_planner.extensions.autopilot.batches.batches.{name}", LONG_S)
    two = Pipelines(2, (None, None))
    of_4 = drawn(2)
    for iteration in range(KNOWN):
        two.run(of_4[iteration])
    others = [count for count in range(2, 36) if count != MICROBATCHES]
    for count in others[: MOST_COUNTS - 1]:  # each is run once to know its order
        assert not any(is_lowered(p) for p in two.run(drawn(2, count)[0]))
    assert two.said == []
    for count in others[MOST_COUNTS - 1 :]:
        for again in range(3):
            programs = two.run(drawn(2, count)[again])
            assert [p.note for p in programs] == [MADE] * 4
    assert {key for key, _ in two.said} == {"numbers"}
    assert two.said[0][1] == (
        "clocks follow the batch for the first 32 numbers of microbatches that a training runs, "
        "and 34 is one more; such iterations run at full clocks"
    )
    # The numbers that are known go on.
    assert any(is_lowered(p) for i in range(4) for p in two.run(of_4[KNOWN + i]))
    assert all(len(rank._orders.all) == MOST_COUNTS for rank in two.batches)
    two.stop()


def test_where_batches_are_alike_the_static_plan_runs_and_is_told():
    leader = Leader(PROFILE, SETTINGS, is_whole=False)
    laws = {Key(s, kind): Law(0.0, (mean_s(kind),), error=0.02) for s in range(2) for kind in KINDS}
    leader.learn(
        tuple(decode(encode(RankLaws.of([rank], laws)), RankLaws) for rank in SCHEDULE.ranks)
    )
    assert leader._laws == laws
    alike = np.ones((MICROBATCHES, 1))
    leader.prepare(alike)
    planner = leader._planners[MICROBATCHES]
    assert planner.dag.profile.clock_change == CHANGE  # as the profile does not say
    target_s = planner.full_clocks_s(alike)
    plan = planner.plan(alike, target_s)
    assert plan.is_static
    without = BatchPlanner(planner.dag, laws, max_changes=SETTINGS.max_changes)
    assert plan.energy_j <= without.plan(alike, target_s).energy_j
    for iteration in range(8):
        own = leader.own(iteration, alike)
        slowest = Slowest(own.time_s, True, False, came=own.came)
        leader.decide(alike, slowest)
    status = leader._batch_status
    assert status.static == 1.0
    said = "microbatches are alike in 100 % of iterations, which run a static plan"
    assert str(status).endswith(said)
    # Unlike batches get no static plan.
    other = Leader(PROFILE, SETTINGS, is_whole=False)
    other.learn(tuple(RankLaws.of([rank], laws) for rank in SCHEDULE.ranks))
    other.prepare(alike * np.linspace(0.5, 1.5, MICROBATCHES)[:, None])
    assert other._planners[MICROBATCHES]._static is None


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        (
            [1.0, float("nan"), 1.0, 1.0],
            "the work of microbatch 1 is [nan]; give finite numbers of 0 or more",
        ),
        ([1.0, -1.0, 1.0, 1.0], "the work of microbatch 1 is [-1.0]; give finite"),
        ([1.0] * 3, "the work of 3 microbatches is given, and the iteration has 4"),
        (["long"] * 4, "work= raised ValueError for microbatch 0: could not convert string"),
    ],
)
def test_an_iteration_with_bad_work_runs_at_full_clocks(
    shown: list[Any], said: str, two: Pipelines
):
    work = drawn(2)
    for iteration in range(KNOWN):
        two.run(work[iteration])
    assert not any(is_lowered(program) for program in two.run(work[KNOWN], shown))
    assert {text.startswith(said) for _, text in two.said} == {True}, two.said
    assert all(text.endswith("such iterations run at full clocks") for _, text in two.said)
    assert {key for key, _ in two.said} == {"work"}
    assert all(is_lowered(program) for program in two.run(UNEQUAL)[:2])


def test_work_that_is_given_counts_and_an_engine_that_shows_no_batch_is_said(two: Pipelines):
    work = drawn(2)
    first, _, third, _ = two.batches
    for each in (first, third):
        each.program_for(0)
    eventually(lambda: len(two.said) == 2)
    assert two.said[0] == (
        "work",
        "the engine does not show the batch of an iteration; say its work before each, by "
        "runtime.batch(work=...); such iterations run at full clocks",
    )
    two.iteration = 0
    for iteration in range(1, KNOWN + 2):
        ran = UNEQUAL if iteration > KNOWN else work[iteration]
        first.give(list(ran[0]))
        third.give(list(ran[1]))
        programs = two.run(ran, ["not looked at"])
    assert all(is_lowered(program) for program in programs[:2])
    assert len(two.said) == 2


def test_microbatches_are_put_in_the_order_in_which_the_iteration_is_shortest(two: Pipelines):
    work, rows, as_is = drawn(2), [0.4, 0.4, 0.4, 3.0], tuple(range(MICROBATCHES))
    first, second, *_ = two.batches
    assert first.give(list(work[0][0]), order=True) == as_is  # nothing is known yet
    for iteration in range(KNOWN):
        two.run(work[iteration])
    assert first.give(rows) == as_is
    two.run([rows, work[KNOWN][1]], ["not looked at"])
    order = first.give(rows, order=True)
    assert sorted(order) == list(as_is)
    ordered = [rows[i] for i in order]
    programs = two.run([ordered, work[KNOWN][1]], ["not looked at"])[:2]
    assert first._known[two.iteration].work[:, 0].tolist() == ordered
    assert full_s(programs, ordered) < 0.99 * full_s(programs, rows)
    assert first.give([1.0, 1.0, 1.0, float("nan")], order=True) == as_is
    assert second.give(rows, order=True) == as_is  # which has no plans


def test_work_is_counted_beside_the_training_thread_and_no_batch_is_kept(two: Pipelines):
    class Microbatch:
        def __float__(self) -> float:
            counted.append(threading.current_thread())
            return 1.0

    counted, first = list[threading.Thread](), two.batches[0]
    shown = [Microbatch() for _ in range(MICROBATCHES)]
    alive = weakref.ref(shown[0])
    first.show(MICROBATCHES, lambda: shown)
    for each in two.batches:
        each.program_for(0)
    eventually(lambda: 0 in first._known)
    assert len(counted) == MICROBATCHES
    assert threading.current_thread() not in counted
    shown = []
    assert alive() is None


def test_a_pipeline_that_tells_nothing_in_time_is_not_waited_for(
    two: Pipelines, monkeypatch: pytest.MonkeyPatch
):
    work = drawn(2)
    for iteration in range(KNOWN):
        two.run(work[iteration])
    batches = "perseus_planner.extensions.autopilot.batches.batches"
    monkeypatch.setattr(f"{batches}._MOST_TIMEOUT_S", 0.01)
    for each in two.batches[2:]:
        each.stop(5.0)
    alone = two.batches[:2]
    for each in alone:
        if each.leads:
            each.show(MICROBATCHES, lambda: list(work[KNOWN][0]))
        each.program_for(KNOWN)
    for each in alone:
        eventually(lambda each=each: not each.program_for(KNOWN).awaits)
    programs = [each.program_for(KNOWN) for each in alone]
    own_s = full_s(programs, work[KNOWN][0])
    assert replayed_s(programs, work[KNOWN][0]) <= own_s * 1.0001


@pytest.mark.parametrize("slow", [1.03, 1.2])
def test_iterations_that_are_longer_than_agreed_are_paid_at_full_clocks(
    slow: float, two: Pipelines
):
    work = drawn(2)
    for iteration in range(KNOWN):
        two.run(work[iteration])
    followed = [
        any(is_lowered(program) for program in two.run(work[iteration], slow=slow))
        for iteration in range(KNOWN, KNOWN + 34)
    ]
    assert any(followed[:3])
    known_late = 4  # what is charged is known some iterations later
    credit, agreed = 0.2, 0.005 * len(followed)
    assert (slow - 1.0) * (sum(followed) - known_late) <= agreed + credit


def test_iterations_are_as_long_as_a_deadline_at_the_service_lets_them_be(
    two: Pipelines, tmp_path: Path
):
    pytest.importorskip("fastapi")
    work = np.tile(drawn(2), (3, 1, 1))
    for iteration in range(KNOWN):
        two.run(work[iteration])

    def longer(iterations: Sequence[int], slow: float = 1.0) -> list[float]:
        """How long those with lower clocks are, beside full clocks."""
        found = []
        for iteration in iterations:
            each, programs = work[iteration], two.run(work[iteration], slow=slow)
            pairs = list(zip((programs[:2], programs[2:]), each, strict=True))
            if any(is_lowered(program) for program in programs):
                ran_s, top_s = (max(f(*pair) for pair in pairs) for f in (replayed_s, full_s))
                found.append(ran_s / top_s)
        return found

    server = Serving(tmp_path)
    server.start()
    job = TrainingJob(torch.distributed.HashStore(), 0, 4)
    for rank in range(4):
        location = RankLocation(rank, rank // 2, rank % 2, f"node{rank}", f"GPU-{rank}")
        StoreMessages(job.own_store).write_location(location)
    settings = ServiceSettings(server.address, "sft", None, is_learning=True)
    agent = LearningAgent(settings, job, 2, two.service, JobWarnings(job))
    agent.start()
    try:
        with Client(server.address) as client:
            eventually(lambda: [each.job.name for each in client.jobs()] == ["sft"])
            learnt = two.service.learnt
            assert learnt is not None
            assert client.frontier("sft").times_s[0] == pytest.approx(learnt.time_s, rel=1e-3)
            slow = ReportRequest("a test", Scope("pipeline", "1"), slowdown=1.3, key="a")
            client.report("sft", slow)
            eventually(lambda: two.service.waits_s)
            assert two.service.calm_s == ()
            assert max(longer(range(KNOWN, KNOWN + 4))) < 1.0001
            client.clear("sft", "a")
            client.set_deadline("sft", 1.1 * learnt.time_s)
            eventually(lambda: two.service.calm_s)
            assert min(longer(range(KNOWN + 4, KNOWN + 14))) > 1.08
            assert longer(range(KNOWN + 14, KNOWN + 28), slow=1.2)  # until it is known
            assert len(longer(range(KNOWN + 28, KNOWN + 44), slow=1.2)) < 8
            client.set_deadline("sft", None)
            eventually(lambda: not two.service.calm_s)
            assert max(longer(range(KNOWN + 44, KNOWN + 48)), default=0.0) < 1.0001
    finally:
        agent.close()
        server.end(signal.SIGTERM)


@pytest.mark.parametrize("is_known", [True, False])
def test_work_that_is_told_wrong_is_not_charged_to_clocks(is_known: bool):
    work, rng = np.tile(drawn(1)[:, 0, :, None], (10, 1, 1)), np.random.default_rng(1)
    leader, paid = Leader(PROFILE, SETTINGS, is_whole=False), 0
    other = np.random.default_rng(2)
    laws = {
        Key(s, kind): Law(fixed * mean_s(kind), (slope * mean_s(kind),))
        for s in range(2)
        for kind, (fixed, slope) in KINDS.items()
    }
    leader.learn(tuple(RankLaws.of([rank], laws) for rank in SCHEDULE.ranks))
    leader.prepare(None)
    planner = BatchPlanner(PipelineDag.from_schedule(PROFILE, SCHEDULE), laws)
    for iteration, each in enumerate(work):
        own = leader.own(iteration, each)
        slowest = Slowest(own.time_s, True, own.pays, came=own.came)
        leader.decide(each, slowest)
        wrong = np.exp(0.05 * rng.normal(size=MICROBATCHES))
        by_law = [laws[Key(c.stage, c.kind)].full_s(each[c.microbatch]) for c in SCHEDULE.ranks[0]]
        jitter = np.exp(0.02 * other.normal(size=len(by_law)))
        as_came = [
            jitter[i] * wrong[c.microbatch] * s
            for i, (c, s) in enumerate(zip(SCHEDULE.ranks[0], by_law, strict=True))
        ]
        pairs = tuple(zip(as_came, by_law, strict=True))
        ran = Ran(iteration, 1.02 * planner.full_clocks_s(each, wrong), slowest)
        leader.account(replace(ran, work=each, at_full_clocks_s=pairs) if is_known else ran)
        paid += own.pays
    assert (paid == 12) == is_known  # 3 references, one more, and 8 audits
    if is_known:
        assert leader.error == pytest.approx(0.05, rel=0.2)
        leader.learn(tuple(RankLaws.of([rank], laws) for rank in SCHEDULE.ranks[::-1]))
        leader._planners.clear()
        leader.prepare(None)
        assert leader._planners[MICROBATCHES].dag.profile.jitter == pytest.approx(0.02, rel=0.2)


def test_a_gpu_is_slow_against_its_own_work(two: Pipelines):
    work, detector, found = drawn(2), StragglerDetector(), list[float]()
    for iteration in range(44):
        hampered = 1.2 if iteration >= 34 else 1.0
        program = two.run(work[iteration], hampered=hampered)[1]
        record = IterationRecord(
            iteration=iteration,
            version=None,
            pipeline=0,
            pipeline_rank=1,
            begin_s=0.0,
            end_s=1.0,
            busy_s=hampered * sum(times_s_of(program, work[iteration][0])),
            planned_busy_s=two.batches[1].planned_busy_s(iteration),
        )
        detector, detection = detector.after(record)
        if detection is not None:
            found.append(detection.slowdown)
    assert found == [pytest.approx(1.2, rel=0.01)]


def test_the_profile_comes_from_rank_0(tmp_path: Path):
    store = torch.distributed.HashStore()
    with pytest.raises(RankError) as refused:
        sent_profile(store)
    assert str(refused.value) == (
        "rank 0 has no work=, and this rank has; give planner_runtime work= on all"
    )
    PROFILE.save(tmp_path / "profile.yaml")
    send_profile(store, tmp_path / "profile.yaml")
    assert sent_profile(store) == PROFILE


def batches_of(seat: Seat, order: Any) -> Batches:
    exchange = Exchange(torch.distributed.HashStore(), seat)
    return Batches(exchange, seat, order, PROFILE, SETTINGS, float, print)


def test_a_profile_of_something_else_is_refused():
    seat = Seat(0, 2, 3, 1, has_followers=True)
    order = schedules.one_f_one_b(3, MICROBATCHES).ranks[2]
    with pytest.raises(ProfileError) as refused:
        Batches(
            Exchange(torch.distributed.HashStore(), seat),
            seat,
            order,
            PROFILE,
            SETTINGS,
            float,
            print,
        )
    assert str(refused.value) == (
        "the profile has no F of stage 2, which this training runs; profile the stages that you "
        "train"
    )
    seat, order = Seat(0, 1, 2, 1, has_followers=True), SCHEDULE.ranks[1]
    batches = Batches(
        Exchange(torch.distributed.HashStore(), seat), seat, order, PROFILE, SETTINGS, float, print
    )
    for name, control, said in (
        ("other", "clock", "the profile is for the GPU 'simulated a100-sxm', and this rank has"),
        ("simulated a100-sxm", "power-limit", "the profile's control is 'clock', and this"),
    ):
        with pytest.raises(ProfileError, match=said):
            batches.check_gpu(name, control)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"plan": "plan.yaml"}, "work: clocks follow each batch, and not plan 'plan.yaml'"),
        ({}, "work: what clocks cost is not learnt while they follow the batch; turn learn off"),
        ({"learn": False, "state": None}, "work: what clocks cost is not learnt"),
        ({"learn": False, "state": "none.yaml"}, "none.yaml"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options: dict[str, Any], said: str):
    with pytest.raises(PlannerError, match=said), planner_runtime(gpu=GPU, work=float, **options):
        pass


def test_slowest_is_the_longest_that_was_told_in_time():
    store = torch.distributed.HashStore()
    first, second = (Exchange(store, Seat(number, 0, 1, 2)) for number in (0, 1))
    assert first.slowest(0, OwnTime(3.0), 0.01) == Slowest(3.0, mean_s=3.0)
    assert second.slowest(0, OwnTime(2.0), 0.01) == Slowest(3.0, mean_s=3.0)
    alone = Slowest(2.0, pays=True, mean_s=2.0)
    assert second.slowest(1, OwnTime(2.0, pays=True), 0.01) == alone
    both = Slowest(2.0, is_whole=True, pays=True, mean_s=1.5)
    assert first.slowest(1, OwnTime(1.0), 0.01) == both
    assert first.slowest(2, OwnTime(1.0), 0.01) == Slowest(1.0, mean_s=1.0)
    assert second.slowest(2, OwnTime(4.0), 0.01) == Slowest(4.0, mean_s=1.0)
    assert second.slowest(3, OwnTime(), 0.01) == Slowest()
    assert first.slowest(3, OwnTime(1.0), 0.01) == Slowest(1.0, mean_s=1.0)
    told = OwnTime(4.0, came=((2, 5.0), (3, 6.0)), ordered_s=3.0)
    second.slowest(4, told, 0.01)
    found = first.slowest(4, OwnTime(2.0, came=((1, 9.0), (2, 7.0)), ordered_s=2.0), 0.01)
    assert (found.came, found.mean_s, found.ordered_s) == (((2, 7.0),), 3.0, 3.0)
    one = Exchange(store, Seat(0, 0, 1, 1))
    whole = Slowest(4.0, is_whole=True, came=told.came, mean_s=4.0, ordered_s=3.0)
    assert one.slowest(3, told, 0.01) == whole


ENGINES = [
    pytest.param(
        *(engine, stages),
        marks=[
            pytest.mark.soak,
            pytest.mark.skipif(
                engine in ("deepspeed", "megatron") and find_spec(engine) is None,
                reason=f"{engine} is not installed",
            ),
        ],
    )
    for engine, stages in (("torch", 2), ("deepspeed", 2), ("megatron", 2), ("ddp", 0))
]


def trained(
    engine: str, profile: Profile, scale: float, folder: Path, *others: str
) -> list[dict[str, Any]]:
    """Return what the ranks say of a training, of which the results are the same."""
    profile.save(folder / "profile.yaml")
    imports = ["deepspeed.pipe"] if engine == "deepspeed" else []
    program = ("batch_programs:trained", 4, folder, engine, str(scale), *others)
    results = results_of(*program, imports=imports)
    for result in results:
        assert result["equal"]
        assert result["warnings"] == []
        assert result["after"] is None
    return results


def test_training_by_the_batch_gives_the_same_losses(tmp_path: Path):
    for result in trained("torch", profile_of(2, 0.3), 0.3, tmp_path):
        assert result["clocks"] > 2


@pytest.mark.parametrize(("engine", "stages"), ENGINES)
def test_training_by_the_batch_saves_energy_at_no_time(engine: str, stages: int, tmp_path: Path):
    profile = profile_of(stages, SCALE)
    calm, saved, longer = calm_saving(trained(engine, profile, SCALE, tmp_path, "full"))
    work = drawn(4 // max(stages, 1))[LEARNT:][calm]
    schedule = SCHEDULE if stages else schedules.WHOLE
    virtual, _ = predicted(profile, schedule, work if stages else work.mean(axis=2, keepdims=True))
    assert 0.8 * virtual < saved < 1.2 * virtual
    assert longer < 0.02


def test_what_is_read_ahead_comes_in_its_order_and_ends_where_it_ended():
    def drawn_until_it_fails() -> Any:
        yield from "abc"
        raise KeyError("lost")

    ahead = ReadAhead(drawn_until_it_fails())
    assert ahead.read(2) == ["a", "b"]
    rest = ahead.rest
    assert [next(rest), next(rest), next(rest)] == ["a", "b", "c"]
    with pytest.raises(KeyError):
        next(rest)
    for count, read in ((3, ["a", "b", "c"]), (5, ["a", "b", "c"])):
        ahead = ReadAhead(iter("abc"))
        assert ahead.read(count) == read
        assert list(ahead.rest) == read
    ahead = ReadAhead(drawn_until_it_fails())
    assert ahead.read(5) == ["a", "b", "c"]
    rest = ahead.rest
    assert [next(rest), next(rest), next(rest)] == ["a", "b", "c"]
    with pytest.raises(KeyError, match="lost"):
        next(rest)
    assert list(rest) == []


def test_data_that_a_collator_reuses_are_not_read_ahead_and_reach_the_training_as_they_were():
    buffer = torch.zeros(2)

    def collated() -> Any:
        for number in range(4):
            buffer.fill_(number)
            yield (buffer,)

    ahead = ReadAhead(collated())
    with pytest.raises(UsageError, match="writes a microbatch over one before"):
        ahead.read(4)
    assert [each[0].tolist() for each in ahead.rest] == [[n, n] for n in map(float, range(4))]
    constant = torch.ones(2)
    assert len(ReadAhead(iter([(constant,)] * 4)).read(4)) == 4


def test_laws_that_the_store_does_not_take_are_told_in_the_next_round(
    two: Pipelines, monkeypatch: pytest.MonkeyPatch
):
    batches = two.batches[1]
    laws = RankLaws((), ())
    told = []

    def tell_laws(given: RankLaws) -> None:
        told.append(given)
        if len(told) == 1:
            raise RuntimeError("the store is gone for a moment")

    monkeypatch.setattr(batches._exchange, "tell_laws", tell_laws)
    monkeypatch.setattr(batches, "_follow", lambda _: None)
    batches._learner.laws = laws
    for iteration in range(3):
        batches._asked = _Asked(iteration)
        batches._round()
    assert told == [laws, laws]
