"""The accounts of ranks match their GPUs' counters, and all ranks keep them at the same
iterations.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as msgspec_replace

from perseus_planner.engines.engine import PipelineRank
from perseus_planner.extensions.service.agent.outbox import added_up
from perseus_planner.gpu.sensor import chance_w
from perseus_planner.runs import Account, IterationRecord
from perseus_planner.runs.records import PAUSE, PAUSE_S
from perseus_planner.runs.run import RankRecord
from perseus_planner.runtime import telemetry
from perseus_planner.runtime.controller.protocol import AttachReply, GpuSample
from perseus_planner.runtime.controller.rank import SensorEnergy
from perseus_planner.runtime.marks import IterationTimes
from perseus_planner.runtime.telemetry import (
    CHECKPOINT_S,
    CHECKPOINTS,
    Checkpoint,
    Checkpoints,
    Telemetry,
    common_checkpoint,
)

S = 10**9


def row(number: int, **fields: object) -> IterationRecord:
    return IterationRecord(
        iteration=number,
        version=1,
        pipeline=0,
        pipeline_rank=0,
        begin_s=0.0,
        end_s=1.0,
        busy_s=1.0,
        **fields,
    )


def reading(now_ns: int, energy_j: float | None) -> GpuSample:
    return GpuSample(now_ns, now_ns, energy_j, None, None, None, {}, 0, 0, None)


@pytest.fixture(autouse=True)
def every_iteration(monkeypatch: pytest.MonkeyPatch):
    """Keep a checkpoint after every iteration."""
    monkeypatch.setattr(telemetry, "CHECKPOINT_S", 0.0)


def accounted(ran: list[tuple[int, int]], readings: list[GpuSample]) -> Account:
    """Add up iterations that run in these spans on a GPU with these samples."""
    telemetry = Telemetry(0, PipelineRank(0, 1, 0, (0,)), offset_ns=lambda: 0)
    telemetry.update([], [AttachReply("simulated:a100", "", "A100", "simulated"), readings[0]])
    for number, ((begin_ns, end_ns), seen) in enumerate(zip(ran, readings[1:], strict=True)):
        telemetry.on_end(number, None, None)
        telemetry.update([IterationTimes(number, begin_ns, ((begin_ns, end_ns),), end_ns)], [seen])
    telemetry.close()
    return telemetry.checkpoints[-1].account


STEPS = st.lists(
    st.tuples(st.integers(0, S), st.integers(S // 100, 2 * S), st.floats(0.0, 500.0)),
    min_size=1,
    max_size=9,
)


@given(STEPS)
def test_joules_and_seconds_are_all_that_passed_from_the_first_begin_to_the_last_end(steps):
    ran, at_ns = [], 0
    for wait_ns, length_ns, _ in steps:
        ran.append((at_ns + wait_ns, at_ns + wait_ns + length_ns))
        at_ns += wait_ns + length_ns
    joules = [0.0, *accumulate(each_j for *_, each_j in steps)]
    at_ends = [
        reading(at_ns, joule)
        for at_ns, joule in zip([ran[0][0], *(end for _, end in ran)], joules, strict=True)
    ]
    account = accounted(ran, at_ends)
    assert (account.iterations, account.windows, account.energy_is) == (
        len(ran),
        len(ran),
        "simulated",
    )
    passed_s = (ran[-1][1] - ran[0][0]) / S
    assert account.time_s + account.pause_s == pytest.approx(passed_s)
    assert account.time_s == account.gpu_s == pytest.approx(account.metered_s)
    assert account.energy_j + account.pause_j == pytest.approx(joules[-1])
    assert account.inside_s == pytest.approx(sum(end - begin for begin, end in ran) / S)


def test_a_pause_stands_apart_and_so_do_its_joules():
    longest_ns = int((PAUSE * 2.0 + PAUSE_S) * S)
    for gap_ns, time_s, pause_s in ((longest_ns, 9.0, 0.0), (longest_ns + 1, 4.0, 5.0)):
        begin_ns = 2 * S + gap_ns
        # A GPU that draws 100 W all the time, also in the pause.
        seen = [reading(at_ns, at_ns / S * 100.0) for at_ns in (0, 2 * S, begin_ns + 2 * S)]
        account = accounted([(0, 2 * S), (begin_ns, begin_ns + 2 * S)], seen)
        assert (account.time_s, account.energy_j, account.pause_s, account.pause_j) == (
            pytest.approx((time_s, 100 * time_s, pause_s, 100 * pause_s))
        )


def test_an_iteration_whose_joules_are_not_known_is_counted_but_not_metered():
    ran = [(each * S, (each + 1) * S) for each in range(4)]
    joules = [5.0, 9.0, 1.0, 4.0, None]  # the counter restarts, and is missing at the end
    account = accounted(ran, [reading(place * S, each) for place, each in enumerate(joules)])
    assert (account.iterations, account.gpu_s, account.metered_s) == (4, 4.0, 2.0)
    assert account.energy_j == 4.0 + 3.0


def test_latencies_are_of_the_iterations_since_the_counts_before(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(telemetry, "CHECKPOINT_S", 4.0)
    kept = Checkpoints(is_first=True)
    p50_s = [0.9, 0.9, 0.9, 0.9, 0.01, None, 0.03, 0.02]
    for number, each in enumerate(p50_s):
        kept.add(row(number, latency_p50_s=each, latency_p99_s=each and 2 * each, changes_late=1))
    first, second = kept.kept[-2:]
    assert (first.iteration, first.set_p50_s, first.set_p99_s) == (3, 0.9, 1.8)
    assert (second.iteration, second.set_p50_s, second.set_p99_s) == (7, 0.02, 0.06)
    assert (second.account.changes_late, second.account.metered_s) == (8, 0.0)


@given(
    st.floats(0.001, 8.0), st.floats(1.0, 1.4), st.floats(1.0, 1.4), st.integers(0, 3), st.data()
)
def test_ranks_have_checkpoints_of_a_common_iteration_at_different_speeds(
    iteration_s: float, one: float, other: float, ahead: int, data: st.DataObject
):
    telemetry.CHECKPOINT_S = CHECKPOINT_S  # put back by the fixture
    ranks = [Checkpoints(is_first=not rank) for rank in range(3)]
    far = data.draw(st.integers(1, 40)) * max(1, int(CHECKPOINT_S / iteration_s))
    stops = [far, far + ahead, far + data.draw(st.integers(0, 3))]
    for rank, faster, stop in zip(ranks, (1.0, one, other), stops, strict=True):
        for number in range(min(stop, 4000)):
            rank.add(replace(row(number), end_s=iteration_s / faster))
        assert len(rank.kept) <= CHECKPOINTS
        # Neither too often nor too rarely, once it is known how long iterations take.
        assert all(
            1 <= later.iteration - each.iteration <= max(1, CHECKPOINT_S * faster / iteration_s)
            for each, later in pairwise(rank.kept)
        )
    found = common_checkpoint([rank.kept for rank in ranks])
    if found is None:
        assert min(stops) * iteration_s < 4 * max(CHECKPOINT_S, iteration_s)
        return
    (number,) = {each.iteration for each in found}
    assert (min(*stops, 4000) - number) * iteration_s <= 4 * max(CHECKPOINT_S, iteration_s)
    assert [each.account.windows for each in found] == [number + 1] * 3


def at(iteration: int, **state: object) -> Checkpoint:
    """Return the checkpoint of a rank that has run so many iterations, the first at 0."""
    account = Account(windows=iteration + 1, last_iteration=iteration, changes_late=3)
    return Checkpoint(account=account, **state)


def test_ranks_that_have_not_all_counted_have_nothing_in_common():
    some = (at(3), at(7))
    assert common_checkpoint([]) is None
    assert common_checkpoint([some, ()]) is None
    assert common_checkpoint([some, (at(5),)]) is None
    assert common_checkpoint([some, (at(3),)]) == [at(3), at(3)]


def test_all_ranks_together_are_the_sum_of_their_accounts_and_how_they_are_now():
    one, other = at(9, set_p50_s=0.01, set_p99_s=0.02), at(9, set_p50_s=0.03, set_p99_s=0.01)
    before = [Account(), Account()]
    found = added_up("run", [one, other], before)
    assert (found.run, found.windows, found.changes_late) == ("run", 20, 6)
    assert (found.set_p50_s, found.set_p99_s) == (0.02, 0.02)
    assert (found.ranks, found.following, found.off_plan_since_s) == (2, 2, None)
    assert found.waiting == (0.0, 0.0)  # nothing is known of their time
    off_plan = added_up("run", [at(9, off_plan_since_s=since_s) for since_s in (7.0, 5.0)], before)
    assert (off_plan.following, off_plan.off_plan_since_s) == (0, 5.0)
    limited = added_up("run", [one, at(9, site_limit_w=400.0)], before)
    assert (found.gpu_power_limit_w, limited.gpu_power_limit_w) == (None, 400.0)
    other_gpu = added_up("run", [at(9, gpu="H100", planned_gpu="A100")] * 2, before)
    assert found.unlike_plan is None
    assert "it was made for the GPU A100, and a rank trains on H100" in (
        other_gpu.unlike_plan or ""
    )


def test_each_rank_says_what_share_of_the_recent_time_it_waited():
    def rank(gpu_s: float, busy_s: float) -> Checkpoint:
        return Checkpoint(account=Account(windows=9, gpu_s=gpu_s, busy_s=busy_s))

    before = [Account(gpu_s=10.0, busy_s=10.0), Account(gpu_s=10.0, busy_s=0.0)]
    found = added_up("run", [rank(20.0, 16.6667), rank(20.0, 10.5)], before)
    assert found.waiting == (0.333, 0.0)  # what overlaps is at most all of the time
    many = added_up("run", [rank(20.0, 10.0)] * 1025, [Account()] * 1025)
    assert many.waiting == ()


def test_a_rank_is_off_its_plan_since_the_first_of_its_last_iterations_that_were_not_as_planned():
    kept, since_s = Checkpoints(is_first=True), []
    for number, deviation in enumerate(
        [None, "2 microbatches", "2 microbatches", None, "2 microbatches"]
    ):
        record = row(number, deviation=deviation)
        kept.add(replace(record, begin_s=100.0 + number, end_s=101.0 + number))
        since_s.append(kept.kept[-1].off_plan_since_s)
    assert since_s == [None, 101.0, 101.0, None, 104.0]


@pytest.mark.parametrize("iteration_s", [0.1, 0.25, 0.5, 1.0])
def test_the_sensor_is_not_read_in_step_with_iterations(iteration_s: float):
    """The power of a GPU that works for half of each iteration comes out right within chance."""
    energy = SensorEnergy(Random(0).random)
    now_s = 0.0
    for _ in range(40_000):
        now_s += 0.005
        if energy.is_due(now_s):
            is_working = now_s % iteration_s < iteration_s / 2
            energy.add(now_s, 400.0 if is_working else 100.0)
    energy_j = energy.energy_j(now_s)
    assert energy_j is not None
    readings = now_s / 0.5
    assert energy_j / now_s == pytest.approx(250.0, abs=chance_w(150.0, int(readings)))


def test_the_energy_by_the_sensor_is_recorded():
    def read(at_s: int) -> GpuSample:
        sample = reading(at_s * S, 100.0 * at_s)
        return msgspec_replace(sample, sensor_j=150.0 * at_s)

    telemetry = Telemetry(0, PipelineRank(0, 1, 0, (0,)), offset_ns=lambda: 0)
    telemetry.update([], [AttachReply("nvml:0", "", "A100", "measured"), read(0)])
    for number in range(3):
        begin_ns, end_ns = number * 10 * S, (number * 10 + 8) * S
        telemetry.on_end(number, None, None)
        times = IterationTimes(number, begin_ns, ((begin_ns, end_ns),), end_ns)
        telemetry.update([times], [read(number * 10 + 10)])
    telemetry.close()
    assert [row.energy_j for row in telemetry.iterations] == [800.0] * 3
    assert [row.sensor_j for row in telemetry.iterations] == [1200.0] * 3


@pytest.mark.parametrize(
    ("sensor_w", "iterations", "said"),
    [(171.0, 20, "43% apart"), (171.0, 5, None), (280.0, 20, None), (None, 20, None)],
)
def test_a_run_says_where_counter_and_sensor_disagree(
    sensor_w: float | None, iterations: int, said: str | None
):
    rows = tuple(
        IterationRecord(
            iteration=number,
            version=1,
            pipeline=0,
            pipeline_rank=0,
            begin_s=10.0 * number,
            end_s=10.0 * number + 8,
            busy_s=6.0,
            energy_j=2400.0,
            sensor_j=None if sensor_w is None else 8 * sensor_w,
        )
        for number in range(iterations)
    )
    found = RankRecord(3, rows, {}).disagreement
    assert found is None if said is None else said in (found or "")
