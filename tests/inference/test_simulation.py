"""Replayed traces: energy adds up, requests are late for a reason, and changes take what they
take.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from inference_cases import LONG, PROFILE, SHORT, steady

from perseus_planner.base.errors import InfeasibleGpus, UsageError
from perseus_planner.inference.cells import (
    Cell,
    Configuration,
    InferenceProfile,
    Objectives,
    read_inference_profile,
)
from perseus_planner.inference.programme import Change, ChangeCosts, Pool
from perseus_planner.inference.servers import Request, Server
from perseus_planner.inference.simulation import Replay, Settings, replay
from perseus_planner.inference.workload import Trace, read_trace

ONE, TWO, FAST = Configuration(1, 1000), Configuration(2, 1000), Configuration(2, 2000)


def profile_of(cells: dict[tuple[object, Configuration], Cell]) -> InferenceProfile:
    return InferenceProfile(
        {key: (cell,) for key, cell in cells.items()}, "clock", Objectives(), ""
    )


PLAIN = profile_of(
    {
        (SHORT, ONE): Cell(1000.0, 10.0),
        (SHORT, TWO): Cell(1000.0, 14.0),
        (LONG, TWO): Cell(1000.0, 40.0),
        (SHORT, FAST): Cell(1000.0, 20.0),
        (LONG, FAST): Cell(2000.0, 50.0),
    }
)
"""Short requests need least energy on one GPU, long ones on two, at a clock that carries half of
the highest.
"""


def trace_of(requests: list[tuple[float, int, int]]) -> Trace:
    times_s, inputs, outputs = zip(*requests, strict=True)
    return Trace(np.array(times_s), np.array(inputs), np.array(outputs))


def server_of(pool: Pool, profile: InferenceProfile = PLAIN, burst_s: float = 0.0) -> Server:
    return Server(profile, pool, burst_s, {SHORT: 150.0, LONG: 2000.0})


def request(number: int, deadline_s: float, tokens: float, arrival_s: float = 0.0) -> Request:
    return Request(deadline_s, number, arrival_s, SHORT, SHORT, tokens)


def test_the_earliest_deadline_starts_first():
    server = server_of(Pool(SHORT, ONE, 1, {SHORT: 500.0}))
    for each in (request(0, 9.0, 2000.0), request(1, 5.0, 1000.0), request(2, 1.5, 1000.0)):
        server.add(each)
    server.start(0.0)
    assert [each.number for each in sorted(server.queue)] == [
        1,
        0,
    ]  # the second fills the instance for a second
    server.start(10.0)
    assert (server.late, server.filled_s, server.wait_s(0.0)) == (set(), 4.0, 4.0)


def test_a_request_that_starts_after_its_deadline_is_late_unless_a_burst_is_averaged():
    for burst_s, late in ((0.0, {1}), (2.0, set())):
        server = server_of(Pool(SHORT, ONE, 1, {SHORT: 500.0}), burst_s=burst_s)
        server.add(request(0, 0.25, 2000.0))
        server.add(request(1, 0.5, 1000.0))
        server.start(10.0)
        assert server.late == late


def test_more_instances_share_the_backlog():
    server = server_of(Pool(SHORT, ONE, 1, {SHORT: 500.0}))
    server.add(request(0, 0.25, 4000.0))
    server.start(0.0)
    server.resize(2, 1.0)
    assert server.filled_s == 2.5
    server.resize(0, 1.0)
    assert server.wait_s(1.0) == np.inf


def test_a_steady_trace_needs_the_energy_of_its_requests_and_none_is_late():
    trace = trace_of(steady(120, every_s=0.5))
    found = replay(PLAIN, trace, Settings(8, prediction="perfect"))
    long = sum(inputs > 256 for _, inputs, _ in steady(120, every_s=0.5))
    assert found.energy_j == pytest.approx(10.0 * (found.requests - long) + 40.0 * long)
    assert (found.requests, found.late, found.moved, found.change_j, found.changes) == (
        240,
        0,
        0,
        0.0,
        (0, 0, 0),
    )
    (period,) = found.periods
    assert (period.requests, period.late, period.gpus) == (240, 0, found.most_gpus)
    assert period.power_w * 120 == pytest.approx(found.energy_j)
    baseline = replay(PLAIN, trace, Settings(8, prediction="perfect"), "highest")
    assert baseline.energy_j == pytest.approx(20.0 * (found.requests - long) + 50.0 * long)


def test_idle_instances_are_counted():
    cells = {key: changed_cell._replace(idle_w=5.0) for key, (changed_cell,) in PLAIN.cells.items()}
    trace = trace_of([(0.0, 100, 50), (99.0, 100, 50)])
    found = replay(profile_of(cells), trace, Settings(1, prediction="perfect"))
    assert found.energy_j == pytest.approx(100 * 5.0 + 2 * (10.0 - 5.0 * 0.15))


def burst(count: int, tokens: int, at_s: float) -> list[tuple[float, int, int]]:
    return [(at_s + number * 1e-3, tokens, 0) for number in range(count)]


def test_a_burst_climbs_to_the_next_larger_pool():
    calm = [(float(second), 500 if second % 5 == 4 else 100, 0) for second in range(20)]
    requests = sorted([*calm, *burst(15, 100, 19.5)])
    settings = Settings(3, prediction="last", instances_s=10.0, sharding_s=10.0, burst_s=1.0)
    found = replay(PLAIN, trace_of(requests), settings)
    assert 0 < found.moved < 15
    assert (
        found.energy_j > 10.0 * 31 + 40.0 * 4
    )  # short requests in the pool of long ones need more


def test_a_burst_that_no_pool_carries_raises_the_clock_where_that_carries_more():
    requests = [(float(second), 2000, 0) for second in range(0, 20, 4)] + burst(8, 2000, 17.0)
    trace = trace_of(sorted(requests))
    settings = Settings(2, prediction="last", instances_s=10.0, sharding_s=10.0, burst_s=1.0)
    raised, plain = replay(PLAIN, trace, settings), replay(PLAIN, trace, settings, "degree")
    assert raised.changes[2] > 0
    assert plain.changes[2] == 0


def test_a_wrongly_predicted_output_costs_energy_and_no_request_is_lost():
    path, rows = (
        Path("words.csv"),
        "short,short,1,1000,10\nshort,long,1,1000,30\nshort,long,2,1000,50\n",
    )
    path.write_text(f"input,output,tensor_degree,clock_mhz,energy_j\n{rows}")
    profile = read_inference_profile(path)
    trace = trace_of([(0.5 * number, 100, 50 if number % 2 else 500) for number in range(240)])
    right = replay(profile, trace, Settings(16, prediction="perfect"))
    wrong = replay(profile, trace, Settings(16, prediction="perfect", mispredicted=0.2, seed=1))
    assert right.energy_j == pytest.approx(120 * 10 + 120 * 30)
    assert wrong.energy_j > right.energy_j
    assert wrong.requests == right.requests == 240
    assert (
        replay(profile, trace, Settings(16, prediction="perfect", mispredicted=0.2, seed=1))
        == wrong
    )


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def growing(gpus: int, costs: ChangeCosts) -> Replay:
    """Replay short requests that become five times as many after a minute."""
    few = [(float(second), 400, 50) for second in range(60)]
    many = [(60 + 0.2 * number, 400, 50) for number in range(600)]
    profile = profile_of({(LONG, TWO): Cell(1000.0, 40.0), (LONG, ONE): Cell(500.0, 45.0)})
    settings = Settings(
        gpus, costs, instances_s=60.0, sharding_s=60.0, prediction="perfect", burst_s=1.0
    )
    return replay(profile, trace_of([*few, *many]), settings)


def test_new_instances_take_their_time():
    quick, slow = (
        growing(16, ChangeCosts(instance=Change(time_s, 42300.0))) for time_s in (0.0, 30.0)
    )
    assert quick.changes[0] == slow.changes[0] == 1
    assert quick.late < slow.late
    assert quick.change_j == slow.change_j > 0


def test_what_costs_more_than_it_saves_is_not_changed():
    requests = [(float(second), 100 if second < 100 else 2000, 50) for second in range(200)]
    cheap, dear = (
        replay(
            PLAIN,
            trace_of(requests),
            Settings(8, costs, instances_s=50.0, sharding_s=50.0, prediction="perfect"),
        )
        for costs in (ChangeCosts(), ChangeCosts(*[Change(1.0, 1e9)] * 3))
    )
    assert dear.change_j >= cheap.change_j
    assert dear.changes[2] == 0


def test_idle_hours_bursts_and_a_single_request_are_replayed():
    requests = [*steady(60), *[(7200.0 + 0.01 * number, 100_000, 9) for number in range(50)]]
    found = replay(PLAIN, trace_of(requests), Settings(8))
    assert (found.requests, sum(period.requests for period in found.periods)) == (650, 650)
    assert found.late == sum(period.late for period in found.periods) > 0
    assert found.energy_j == pytest.approx(
        sum(period.power_w * 300 for period in found.periods[:-1]), rel=0.2
    )
    single = replay(PLAIN, trace_of([(0.0, 10, 0)]), Settings(1))
    assert (single.requests, single.energy_j) == (1, 10.0)


def test_gpus_that_cannot_serve_every_class_are_refused():
    with pytest.raises(InfeasibleGpus, match="no pools on 1 GPUs carry this load"):
        replay(PLAIN, trace_of([(0.0, 2000, 0)]), Settings(1))


def test_gpus_that_are_too_few_serve_what_they_can():
    found = replay(PLAIN, trace_of(steady(120)), Settings(3, burst_s=1.0))
    assert found.short_periods > 0
    assert found.late > 0
    assert found.most_gpus <= 3


def test_periods_are_refused_that_are_shorter_than_those_within():
    with pytest.raises(UsageError, match="periods: instances change no more often than sharding"):
        Settings(8, instances_s=60.0)


def test_the_profile_of_the_documents_is_replayed_under_every_policy(folder: Path):
    (folder / "a.csv").write_text(PROFILE)
    profile = read_inference_profile(folder / "a.csv")
    found = {
        name: replay(profile, trace_of(steady(300)), Settings(16), name)
        for name in ("highest", "planner")
    }
    assert found["planner"].energy_j < found["highest"].energy_j
    assert found["planner"].late <= found["highest"].late


def test_the_published_trace_saves_what_the_table_says_and_no_more_requests_are_late(
    measured_data: Path,
):
    serving = measured_data / "serving"
    if not serving.is_dir():
        pytest.skip(f"no serving data: {serving} is not there; name its folder in PLANNER_DATA")
    profile = read_inference_profile(serving / "energy_llama2_70b.csv")
    trace = read_trace(serving / "azure_llm_trace_2023_code.csv")
    baseline, clock, planner = (
        replay(profile, trace, Settings(128), name) for name in ("highest", "clock", "planner")
    )
    assert 1 - planner.energy_j / baseline.energy_j == pytest.approx(0.44, abs=0.01)
    assert 1 - clock.energy_j / baseline.energy_j == pytest.approx(0.16, abs=0.01)
    assert planner.late <= baseline.late + 0.001 * planner.requests
