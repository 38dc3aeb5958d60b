"""ed traces: instances are servers, as an event model of them is; energy adds up, and changes
take what they take.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from event_model import Asked, gpu_physics, measured, poisson, run
from hypothesis import given, settings
from hypothesis import strategies as st
from inference_cases import LONG, PROFILE, SHORT, steady

from perseus_planner.base.errors import InfeasibleGpus, UsageError
from perseus_planner.extensions.inference.plan import ChangeCosts, Pool, plan_pools
from perseus_planner.extensions.inference.serving import Shape, save_served
from perseus_planner.extensions.inference.simulation import (
    CHANGES,
    BatchingServer,
    Fluid,
    Instance,
    Pace,
    Request,
    Served,
    Settings,
    read_paces,
    replay,
)
from perseus_planner.extensions.inference.workload import (
    Cell,
    Configuration,
    InferenceProfile,
    Objectives,
    RequestClass,
    Trace,
    read_inference_profile,
    read_trace,
)

ONE, TWO, FAST = Configuration(1, 1000), Configuration(2, 1000), Configuration(2, 2000)


def profile_of(cells: dict[tuple[RequestClass, Configuration], Cell]) -> InferenceProfile:
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
"""Short requests need least energy on one GPU, long ones on two."""


def trace_of(requests: list[tuple[float, int, int]]) -> Trace:
    times_s, inputs, outputs = zip(*requests, strict=True)
    return Trace(np.array(times_s), np.array(inputs), np.array(outputs))


PACE = Pace(0.001, 0.2, ((1.0, 0.02, 4.0), (5.0, 0.04, 8.0)), 50.0)
POOL = Pool(SHORT, ONE, 1, {SHORT: 500.0})


def pace_physics(tokens: int, requests: int) -> tuple[float, float]:
    """Return what an iteration takes by PACE."""
    time_s, energy_j = (0.015 + 0.005 * requests, 3.0 + requests) if requests else (0.0, 0.0)
    return time_s + 0.001 * tokens, energy_j + 0.2 * tokens


@settings(max_examples=40)
@given(
    requests=st.lists(
        st.tuples(st.floats(0.0, 1.0), st.integers(1, 700), st.integers(1, 30)), max_size=25
    ),
    most=st.integers(1, 8),
    looks=st.lists(st.floats(0.0, 20.0), max_size=5),
)
def test_a_server_does_what_the_event_model_does(
    requests: list[tuple[float, int, int]], most: int, looks: list[float]
):
    """However often it is looked at, and in whatever order prompts and tokens come."""
    asked = [Asked(*each) for each in sorted(requests)]
    _, energy_j = run(asked, pace_physics, 50.0, chunk=256, most=most)
    server = BatchingServer(POOL, 0.0, {ONE: PACE}, 256, most)
    found: dict[int, Served] = {}
    for number, each in enumerate(asked):
        for at_s in sorted(look for look in looks if look < each.arrival_s):
            found.update({served.request.number: served for served in server.advance(at_s)})
        found.update({done.request.number: done for done in server.advance(each.arrival_s)})
        server.add(Request(number, each.arrival_s, SHORT, each.input_tokens, each.output_tokens))
    found.update({served.request.number: served for served in server.advance(math.inf)})
    assert server.energy_j == pytest.approx(energy_j)
    assert len(found) == len(asked)
    for number, each in enumerate(asked):
        assert found[number].ttft_s == pytest.approx(each.ttft_s)
        assert found[number].tbt_s == pytest.approx(each.tbt_s)


def test_requests_that_come_at_once_wait_and_are_late():
    """400 requests at one instant, a minute of work: nearly all are later than 250 ms."""
    cell = Cell(2500.0, 30.0, 0.1, 0.03, 50.0, 0.1, 0.2, 0.0005, 0.001, 8)
    of = RequestClass(256.0, 100.0, "256/100")
    profile = InferenceProfile({(of, ONE): (cell,)}, "clock", Objectives(), "")
    requests = [(0.0, 200, 50)] * 400 + [(1000.0, 200, 50)]
    found = replay(profile, trace_of(requests), Settings(8, epoch_s=3600.0))
    assert found["most_gpus"] <= 8
    assert found["late"] is not None
    assert found["late"] > 350
    assert found["ttft_p95_s"] > 0.25


CLASS = Shape(128, 32)


@pytest.fixture(scope="module")
def modelled(tmp_path_factory: pytest.TempPathFactory) -> InferenceProfile:
    """The profile of a server of the event model, as it would be measured and read."""
    rows, shape, folder = [], CLASS, tmp_path_factory.mktemp("profile")
    for clock in (1410, 1005):
        physics, closed = gpu_physics(clock), []
        for concurrency in (1, 8, 32):
            first = measured(physics, 600.0, Shape(shape.input_tokens, 1), clock, concurrency, None)
            row = measured(physics, 600.0, shape, clock, concurrency, None).with_tokens(first)
            closed.append(row)
        most = closed[-1].requests_per_s
        rows += closed
        for share in (0.3, 0.6, 0.85):
            row = measured(physics, 600.0, shape, clock, None, share * most, 600)
            rows.append(row.with_tokens_as(closed))
    save_served(rows, "clock", "simulated", folder / "a.csv")
    return read_inference_profile(folder / "a.csv", Objectives((0.6,), 0.25))


@pytest.mark.parametrize("is_drawn", [False, True], ids=["requests of the class", "drawn lengths"])
def test_a_plan_holds_against_the_event_model(modelled: InferenceProfile, is_drawn: bool):
    """Profile, plan and replay of a server, beside the event model of it: its energy is planned
    and replayed within 5 % (10 % with drawn lengths), and half a point more or less is late.
    """
    profile, idle_w = modelled, 600.0
    asked = poisson(9.5, 1200, CLASS, 7)
    if is_drawn:
        drawn = np.random.default_rng(3)
        for each in asked:
            each.input_tokens = int(drawn.integers(20, 129))
            each.output_tokens = int(drawn.integers(2, 33))
    trace = trace_of([(each.arrival_s, each.input_tokens, each.output_tokens) for each in asked])
    length_s = trace.end_s
    demand = trace.demand(profile, trace.classes(profile), 0.0, length_s * (1 + 1e-9))
    (pool,) = plan_pools(profile, demand, 1, length_s).pools
    plan = plan_pools(profile, demand, 1, length_s)
    found = replay(
        profile, trace, Settings(1, epoch_s=2 * length_s, chunk_tokens=512, most_requests=64)
    )
    _, energy_j = run(asked, gpu_physics(pool.at.setting), idle_w)
    late = sum(each.ttft_s > 0.6 or each.tbt_s > 0.25 for each in asked)
    close = 0.1 if is_drawn else 0.05
    assert plan.power_w * length_s == pytest.approx(energy_j, rel=close)
    assert found["energy_j"] == pytest.approx(energy_j, rel=close)
    assert found["late"] / len(asked) == pytest.approx(late / len(asked), abs=0.005)


def test_a_plan_and_its_replay_agree_on_a_steady_load():
    """Instances on segments of the curve, under the load that they are planned for."""
    cells = tuple(
        Cell(load, power_w * 150 / load, None, None, 100.0)
        for load, power_w in ((500.0, 300.0), (1000.0, 350.0), (2000.0, 400.0))
    )
    profile = InferenceProfile({(SHORT, ONE): cells}, "clock", Objectives(), "")
    trace = trace_of([(each * 0.06, 100, 50) for each in range(30000)])
    plan = plan_pools(profile, trace.demand(profile, trace.classes(profile), 0, 1800), 4, 1800)
    found = replay(profile, trace, Settings(4))
    assert found["energy_j"] / 1800 == pytest.approx(plan.power_w, rel=0.01)
    assert found["late"] is None


def test_a_replay_of_many_requests_takes_seconds():
    cell = Cell(3000.0, 30.0, 0.1, 0.03, 50.0, 0.1, 0.2, 0.0002, 0.0005, 32)
    profile = profile_of({(SHORT, ONE): cell})
    trace = trace_of([(number * 0.05, 100 + number % 100, 90) for number in range(20000)])
    begin_s = time.process_time()
    assert replay(profile, trace, Settings(16))["late"] is not None
    assert time.process_time() - begin_s < 30


def test_a_steady_trace_needs_the_energy_of_its_requests():
    found = replay(PLAIN, trace_of(steady(600)), Settings(16))
    per_hundred_s = 900 * 10.0 + 100 * 40.0  # a tenth of 1000 requests is long
    assert found["energy_j"] == pytest.approx(6 * per_hundred_s, rel=0.01)
    assert {found[name] for name in (*CHANGES, "change_j", "short_periods")} == {0}
    assert found["most_gpus"] == found["gpus"]
    assert sum(period["requests"] for period in found["periods"]) == 6000


def shifting(seconds: int) -> Trace:
    """Short requests, then long ones."""
    short = [(each * 0.1, 100, 50) for each in range(10 * seconds)]
    long = [(seconds + each * 0.1, 2000, 50) for each in range(20 * seconds)]
    return trace_of([*short, *long])


def test_new_instances_take_their_time():
    """Long requests from the second epoch on: until pools for them are there, others serve."""
    found = replay(PLAIN, shifting(600), Settings(64, epoch_s=600.0))
    assert found["instance_changes"] >= 1
    assert found["change_j"] > 0
    assert found["most_gpus"] > found["periods"][0]["gpus"]
    assert sum(period["requests"] for period in found["periods"]) == 18000


def test_instances_that_have_stopped_are_not_in_use_at_the_end_of_their_tick():
    """At 600 s new instances begin to load; they are ready, and the others stop, after 900 s."""
    found = replay(PLAIN, shifting(600), Settings(64, epoch_s=600.0, prediction="perfect"))
    assert found["instance_changes"] == 1
    before, same, loading, *after = [period["gpus"] for period in found["periods"]]
    assert before == same
    assert set(after) == {loading - before}


@pytest.mark.parametrize("stop_s", [0.0, 60.0, 300.0, 900.0, math.inf])
@pytest.mark.parametrize(
    "instance",
    [
        lambda: BatchingServer(POOL, 0.0, {ONE: PACE}, 256, 8),
        lambda: Fluid(POOL, 0.0, profile_of({(SHORT, ONE): Cell(500.0, 10.0, idle_w=50.0)})),
    ],
    ids=["server", "fluid"],
)
def test_an_instance_draws_no_power_once_it_has_stopped(
    instance: Callable[[], Instance], stop_s: float
):
    stopping = instance()
    stopping.until_s = stop_s
    for tick_end_s in (300.0, 600.0):
        assert list(stopping.advance(tick_end_s)) == []
    assert stopping.energy_j == pytest.approx(50.0 * min(stop_s, 600.0))


def test_an_instance_that_stops_finishes_what_it_has():
    stopping = BatchingServer(POOL, 0.0, {ONE: PACE}, 256, 8)
    stopping.add(Request(0, 0.0, SHORT, 100, 50))
    stopping.until_s = 0.5
    ((served, _, _),) = stopping.advance(300.0)
    assert served.number == 0
    _, energy_j = run([Asked(0.0, 100, 50)], pace_physics, 50.0, chunk=256, most=8)
    assert stopping.energy_j == pytest.approx(energy_j)


def test_what_costs_more_than_it_saves_is_not_changed():
    def replayed(costs: ChangeCosts) -> dict[str, Any]:
        return replay(PLAIN, shifting(600), Settings(64, costs, 600.0, "perfect"))

    cheap, dear = replayed(ChangeCosts()), replayed(ChangeCosts((1.0, 1.0, 1.0), 1e9))
    assert dear["change_j"] >= cheap["change_j"]
    assert dear["clock_changes"] == 0


def test_gpus_that_cannot_serve_every_class_are_refused():
    with pytest.raises(InfeasibleGpus, match="no pools on 1 GPUs carry this load"):
        replay(PLAIN, trace_of([(0.0, 2000, 0)]), Settings(1))


def test_gpus_that_are_too_few_serve_what_they_can():
    found = replay(PLAIN, trace_of(steady(120)), Settings(3))
    assert found["short_periods"] > 0
    assert found["most_gpus"] <= 3
    assert sum(period["requests"] for period in found["periods"]) == 1200


def test_epochs_without_a_length_are_refused():
    with pytest.raises(UsageError, match="settings: an epoch has 1 s or more"):
        Settings(8, epoch_s=0.0)


def test_the_profile_of_the_documents_is_replayed_under_every_policy(tmp_path: Path):
    (tmp_path / "a.csv").write_text(PROFILE)
    profile = read_inference_profile(tmp_path / "a.csv")
    assert read_paces(profile) == {}
    found = {
        name: replay(profile, trace_of(steady(300)), Settings(16), name)
        for name in ("highest", "planner")
    }
    assert found["planner"]["energy_j"] < found["highest"]["energy_j"]


def test_the_published_trace_saves_what_the_table_says(measured_data: Path):
    serving = measured_data / "serving"
    if not serving.is_dir():
        pytest.skip(f"no serving data: {serving} is not there; name its folder in PLANNER_DATA")
    profile = read_inference_profile(serving / "energy_llama2_70b.csv")
    trace = read_trace(serving / "azure_llm_trace_2023_code.csv")
    baseline, clock, planner = (
        replay(profile, trace, Settings(128), name) for name in ("highest", "clock", "planner")
    )
    assert 1 - planner["energy_j"] / baseline["energy_j"] == pytest.approx(0.44, abs=0.01)
    assert 1 - clock["energy_j"] / baseline["energy_j"] == pytest.approx(0.16, abs=0.01)
