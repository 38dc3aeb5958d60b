"""What a job counts: over its runs, through deaths of the service, against all clocks at
maximum; and what is said.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from commands import done, refusal
from hypothesis import given
from hypothesis import strategies as st
from service_stand_in import asking
from services import (
    NOW_S,
    STAGES,
    Clock,
    frontier_file,
    job,
    planned,
    report,
    service_at,
    serving,
    small_frontier,
)

from perseus_planner.extensions.service.client import Client
from perseus_planner.extensions.service.jobs import WRITTEN_AFTER_S
from perseus_planner.extensions.service.models import Conflict, Counters, Scope, UnknownJob
from perseus_planner.extensions.service.serve import Address
from perseus_planner.extensions.service.service import Service
from perseus_planner.extensions.service.tally import Tally, add_counters
from perseus_planner.extensions.service.text import jobs_text, status_text, totals_text
from perseus_planner.runs import Account
from perseus_planner.runs.status import DeciderStatus, read_status, save_status

httpx = pytest.importorskip("httpx")

SHOWN = ("iterations", "energy_j", "changes_late")


def counters(
    iterations: int = 10, run: str = "one", each_s: float = 1.25, each_j: float = 800.0, **more: Any
) -> Counters:
    """Of so many iterations alike on one rank, each metered; a fifth is saved."""
    time_s, energy_j = iterations * each_s, iterations * each_j
    return Counters(
        run=run,
        iterations=iterations,
        time_s=time_s,
        windows=iterations,
        gpu_s=time_s,
        metered_s=time_s,
        energy_j=energy_j,
        judged_j=energy_j,
        lowered=iterations,
        saved_j=energy_j / 4,
        saved_error_j=energy_j / 400,
        energy_is="measured",
        changes_late=iterations // 2,
        **more,
    )


@st.composite
def runs(draw: st.DrawFn, name: str) -> list[Counters]:
    """What a run says again and again of iterations that take what they take, some of them not
    metered.
    """
    steps = st.tuples(
        st.integers(1, 5),
        st.booleans(),
        st.floats(0.25, 4.0),
        st.floats(0.0, 5e3),
        st.integers(0, 3),
    )
    said = [Counters(run=name)]
    for count, is_metered, each_s, each_j, late in draw(st.lists(steps, min_size=1, max_size=5)):
        new = Account(
            iterations=count,
            time_s=count * each_s,
            gpu_s=count * each_s,
            metered_s=count * is_metered * each_s,
            energy_j=count * is_metered * each_j,
            judged_j=count * is_metered * 100.0,
            saved_j=count * is_metered * draw(st.floats(-1e3, 1e3)),
            changes_late=late,
            energy_is=draw(st.sampled_from(["measured", "simulated"])) if is_metered else None,
        )
        said.append(said[-1] + new)
    return said[1:]


RUNS = st.integers(1, 3).flatmap(
    lambda count: st.tuples(*(runs(f"run{number}") for number in range(count)))
)


@given(RUNS, st.data())
def test_whatever_is_lost_repeated_or_late_sums_are_those_of_all_runs_and_never_go_back(
    said, data: st.DataObject
):
    known: Tally | None = None
    late: list[Counters] = []
    for run in said:
        kept = [each for each in run[:-1] if data.draw(st.booleans())]  # the others are lost
        late += kept
        some = data.draw(st.lists(st.sampled_from(late), max_size=6)) if late else []
        for sent in [*kept, *some, run[-1], *some, run[-1]]:
            after = add_counters(known, sent, NOW_S)
            assert known is None or all(
                getattr(after, name) >= getattr(known, name) for name in SHOWN
            )
            known = after
    assert known is not None
    last = [run[-1] for run in said]
    for name in (*SHOWN, "time_s", "metered_s", "saved_j"):
        whole = math.fsum(getattr(each, name) for each in last)
        assert getattr(known, name) == pytest.approx(whole, abs=1e-6), name
    assert (known.energy_is is None) == (sum(each.metered_s for each in last) == 0)
    assert known.saved_j == pytest.approx(sum(plan.saved_j for plan in known.plans), abs=1e-6)


def test_what_was_drawn_and_took_of_late_is_of_what_has_come_since():
    known = add_counters(None, counters(10), NOW_S)
    more = Account(iterations=4, time_s=10.0, gpu_s=20.0, metered_s=6.0, energy_j=2000.0)
    known = add_counters(known, replace(counters(10) + more, energy_is="simulated"), NOW_S + 5)
    assert known is not None
    assert (known.iteration_s, known.power_w) == (2.5, pytest.approx(2 * 2000.0 / 6.0))
    assert (known.energy_is, known.observed_s) == ("simulated", NOW_S + 5)
    assert (known.saved_j, known.energy_j) == (2000.0, 10_000.0)


@pytest.mark.parametrize("name", ["time_s", "windows", "metered_s", "energy_j", "changes_late"])
def test_a_run_whose_counts_fall_is_refused(name: str):
    known = add_counters(None, counters(10), NOW_S)
    with pytest.raises(
        Conflict,
        match=f"^{name}: was .* after more iterations of the same run; count from the begin",
    ):
        add_counters(known, replace(counters(20), **{name: 1}), NOW_S)


@contextmanager
def served(place: Path, clock: Clock) -> Iterator[tuple[Service, Callable[..., httpx.Response]]]:
    with (
        service_at(place, clock) as service,
        asking(service) as ask,
    ):
        yield service, ask


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "service.sqlite"


def post(ask: Callable[..., httpx.Response], sent: Counters, name: str = "gpt") -> int:
    return int(ask("POST", f"/v1/jobs/{name}/telemetry", json=asdict(sent)).status_code)


def told(ask: Callable[..., httpx.Response], name: str = "gpt") -> Any:
    return ask("GET", f"/v1/jobs/{name}").json()["telemetry"]


def test_a_job_that_is_off_its_plans_says_why_and_on_another_machine_it_saves_nothing(place: Path):
    with served(place, Clock()) as (service, _):
        service.register(job(), frontier_file())
        for name, said in (("verdict", "10 % slower"), ("unlike_plan", "another machine")):
            service.telemetry("gpt", counters(20, f"run {name}", **{name: said})).result()
            status = service.status("gpt")
            assert getattr(status, name) == said
            assert said in status_text(status)
            assert (", saved " in status_text(status)) == (name == "verdict")


def test_what_a_run_says_is_what_is_shown_of_its_job(place: Path):
    with served(place, Clock()) as (service, ask):
        service.register(job(), frontier_file())
        assert told(ask) is None
        sent = counters(set_p50_s=0.006, set_p99_s=0.02)
        assert post(ask, sent) == 204
        account = {name: getattr(sent, name) for name in vars(Account())}
        assert told(ask) == {
            **account,
            "iteration_s": 1.25,
            "power_w": 640.0,
            "set_p50_s": 0.006,
            "set_p99_s": 0.02,
            "ranks": 0,
            "following": 0,
            "off_plan_since_s": None,
            "observed_s": NOW_S,
        }


def test_plans_are_expected_to_draw_what_they_say_and_wait_for_the_slowest(place: Path):
    frontier = small_frontier()
    with served(place, Clock()) as (service, ask):
        service.register(job(), frontier_file())
        service.report("gpt", report("slow", 1, 1.3)).result()
        service.report(
            "gpt", report("stage", slowdown=1.1, scope=Scope("stage", "1", 2), cause="compute")
        ).result()
        planned(service)
        status, plans = ask("GET", "/v1/jobs/gpt").json(), service.plans("gpt", 0)
        assert plans is not None
        iteration_s, waiting_w = status["decision"]["straggler_time_s"], frontier.dag.waiting_w
        assert len(set(plans.of_pipeline)) == 3
        energy_j = sum(
            each.energy_j + waiting_w * (iteration_s - each.time_s) for each in plans.plans
        )
        baseline_j = sum(
            each.baseline_energy_j + waiting_w * (iteration_s - each.baseline_time_s)
            for each in plans.plans
        )
        assert status["expected"] == {
            "power_w": pytest.approx(energy_j / iteration_s),
            "baseline_power_w": pytest.approx(baseline_j / iteration_s),
            "origin": frontier.profile.origin,
            "iteration_s": iteration_s,
        }
        assert status["expected"]["power_w"] < status["expected"]["baseline_power_w"]
        found = ask("GET", "/v1/jobs/gpt/pipelines").json()
        decision = status["decision"]
        targets = [decision["targets"][index] for index in decision["of_pipeline"]]
        assert found == {
            "version": plans.version,
            "pipelines": [
                {
                    "pipeline": number,
                    "time_s": plan.time_s,
                    "energy_j": plan.energy_j,
                    "target_s": target["time_s"],
                    "slow_stages": target["slow_stages"],
                    "report": {1: "slow", 2: "stage"}.get(number),
                    "reason": target["reason"],
                }
                for number, (plan, target) in enumerate(zip(plans.plans, targets, strict=True))
            ],
        }
        assert found["pipelines"][2]["slow_stages"] == {"1": 1.1}


def test_the_frontier_of_a_job_is_what_was_registered(place: Path):
    frontier = small_frontier()
    with served(place, Clock()) as (service, ask):
        service.register(job(), frontier_file())
        found = ask("GET", "/v1/jobs/gpt/frontier").json()
        times_s, energies_j = found.pop("times_s"), found.pop("energies_j")
        assert 2 <= len(times_s) == len(set(times_s)) <= 500
        assert times_s == sorted(times_s)
        assert (times_s[0], times_s[-1]) == (frontier.min_time_s, frontier.max_time_s)
        assert energies_j == [pytest.approx(frontier.bound_j(time_s)) for time_s in times_s]
        assert found == {
            "baseline_time_s": frontier.baseline_time_s,
            "baseline_j": frontier.baseline_energy_j,
            "waiting_w": frontier.dag.waiting_w,
            "stages": STAGES,
            "gpus": STAGES,
            "origin": frontier.profile.origin,
        }
        for thinned in map(service.curve("gpt").thinned, (2, 3, 10**6)):
            assert set(zip(thinned.times_s, thinned.energies_j, strict=True)) <= set(
                zip(service.curve("gpt").times_s, service.curve("gpt").energies_j, strict=True)
            )
            assert (thinned.min_time_s, thinned.max_time_s) == (
                frontier.min_time_s,
                frontier.max_time_s,
            )
        assert service.curve("gpt").thinned(10**6) == service.curve("gpt")


def test_what_was_counted_is_there_after_a_kill_but_for_the_last_seconds_which_the_job_sends_again(
    place: Path, tmp_path_factory: pytest.TempPathFactory
):
    clock, left = Clock(), tmp_path_factory.mktemp("left") / "by_the_killed"
    with served(place, clock) as (service, _):
        service.register(job(), frontier_file())
        service.telemetry("gpt", counters(10)).result()
        assert service.tick() == NOW_S + WRITTEN_AFTER_S
        clock.now_s += WRITTEN_AFTER_S
        assert service.tick() == math.inf
        service.telemetry("gpt", counters(20)).result()
        before = service.status("gpt").telemetry
        shutil.copytree(place.parent, left)
    assert before is not None
    clock.now_s += 60.0
    place = left / place.name
    with served(place, clock) as (service, ask):
        found = service.status("gpt").telemetry
        assert found == add_counters(None, counters(10), NOW_S)
        # Prometheus takes a counter that falls to begin anew, and would count all of it twice.
        assert "planner_job_energy_joules_total{" not in ask("GET", "/metrics").text
        assert (
            f'planner_job_saved_joules{{training_job="gpt"}} {found.saved_j}'
            in ask("GET", "/metrics").text
        )
        service.telemetry("gpt", counters(30)).result()
        service.telemetry("gpt", counters(5, "two")).result()
        found = service.status("gpt").telemetry
        assert (found.iterations, found.energy_j) == (35, 35 * 800.0)
        assert found.saved_j == pytest.approx(before.saved_j / 20 * 35)
        text = ask("GET", "/metrics").text
        assert (
            'planner_job_energy_joules_total{energy="measured",training_job="gpt"} 28000.0' in text
        )
        labels = 'energy="measured",training_job="gpt"'
        assert f"planner_job_energy_joules_total{{{labels}}} 28000.0" in text
        assert f"planner_job_baseline_joules_total{{{labels}}} {35 * 1000.0}" in text
        assert 'planner_job_iterations_total{training_job="gpt"} 35.0' in text
    with served(place, clock) as (service, _):  # it ended in peace, so nothing is lost
        assert service.status("gpt").telemetry == found


def test_counts_are_written_in_time_however_often_they_come_and_never_again_while_unchanged(
    place: Path,
):
    clock = Clock()
    with served(place, clock) as (service, _):
        service.register(job(), frontier_file())
        for number in range(1, 5):
            service.telemetry("gpt", counters(10 * number)).result()
            assert service.tick() == NOW_S + WRITTEN_AFTER_S
            clock.now_s += WRITTEN_AFTER_S / 4
        assert service.tick() == math.inf
        known = service.status("gpt").telemetry
        service.telemetry("gpt", counters(40)).result()
        assert service.tick() == math.inf
        assert service.status("gpt").telemetry is known


def test_counts_of_many_jobs_are_written_a_few_at_a_time(place: Path):
    clock = Clock()
    with served(place, clock) as (service, _):
        names = [f"job{number}" for number in range(100)]
        for name in names:
            service.register(job(name), frontier_file())
            service.telemetry(name, counters(10)).result()
        clock.now_s += WRITTEN_AFTER_S
        assert service.tick() == clock.now_s  # so the clock of the service comes again at once
        assert service.tick() == math.inf
        for name in names:
            service.telemetry(name, counters(20)).result()
    with served(place, clock) as (service, _):
        assert {each.telemetry.iterations for each in service.jobs()} == {20}


def test_another_job_of_the_same_name_begins_with_nothing(place: Path):
    clock = Clock()
    with served(place, clock) as (service, ask):
        service.register(job(), frontier_file())
        service.telemetry("gpt", counters(10)).result()
        service.end("gpt").result()
        clock.now_s += 1.0
        service.register(job(), frontier_file())
        assert told(ask) is None
        clock.now_s += WRITTEN_AFTER_S
        service.tick()
    with served(place, clock) as (service, ask):
        assert told(ask) is None
        service.end("gpt").result()
        with pytest.raises(UnknownJob):
            service.telemetry("gpt", counters(10)).result()
        assert post(ask, counters(10)) == 404


def test_what_a_job_saved_is_known_for_ever_after_its_end(place: Path):
    clock, since_s = Clock(), NOW_S
    with served(place, clock) as (service, _):
        for name, iterations in (("gpt", 10), ("other", 30), ("gpt", 20)):
            service.register(job(name), frontier_file())
            service.telemetry(name, counters(iterations)).result()
            clock.now_s += 1.0  # less than it takes until telemetry is written
            if name == "gpt":
                service.end(name).result()
        with pytest.raises(UnknownJob):
            service.status("gpt")
    with served(place, clock) as (service, ask):
        found = service.totals()
        assert [(each.name, each.since_s - since_s, each.ended_s) for each in found] == [
            ("other", 1.0, None),
            ("gpt", 2.0, NOW_S + 3.0),
            ("gpt", 0.0, NOW_S + 1.0),
        ]
        for each, iterations in zip(found, (30, 20, 10), strict=True):
            sums = each.telemetry
            assert sums is not None
            assert (sums.iterations, sums.time_s) == (iterations, 1.25 * iterations)
            assert (sums.energy_j, sums.energy_is) == (800.0 * iterations, "measured")
            assert sums.saved_j == pytest.approx(iterations * found[2].telemetry.saved_j / 10)
            assert [(plan.version, plan.saved_j) for plan in each.plans] == [(None, sums.saved_j)]
        heading, *rows, whole, _, note = totals_text(found).splitlines()
        assert heading.split() == [
            "job",
            "since",
            "until",
            "iterations",
            "seconds",
            "joules",
            "saved",
            "saved",
            "%",
            "energy",
            "is",
        ]
        assert ["it runs" in row for row in rows] == [True, False, False]
        assert whole.split()[:4] == ["all", "60", "75", "48000"]
        assert (
            note == "Saved: joules against all clocks at maximum in iterations as long, where that "
            "is known."
        )
        assert [each["name"] for each in ask("GET", "/v1/totals").json()["jobs"]] == [
            "other",
            "gpt",
            "gpt",
        ]
    assert totals_text(()) == "No job runs or has run."


def test_totals_are_by_the_version_that_the_job_ran_and_bounded():
    tally = None
    for number in range(1, 41):
        version = None if number == 1 else (number + 1) // 2
        tally = add_counters(tally, counters(number), NOW_S, version)
    assert tally is not None
    assert [each.version for each in tally.plans] == [None, *range(5, 21)]
    assert [each.iterations for each in tally.plans] == [8, *[2] * 16]
    for name in ("iterations", "time_s", "energy_j", "saved_j"):
        assert sum(getattr(each, name) for each in tally.plans) == pytest.approx(
            getattr(tally, name)
        )
    back = add_counters(tally, counters(50), NOW_S, 7)
    assert back is not None
    (again,) = (plan for plan in back.plans if plan.version == 7)
    assert (len(back.plans), again.iterations) == (17, 12)


def test_the_version_that_a_job_has_reported_is_that_of_its_counts(place: Path):
    with served(place, Clock()) as (service, _):
        service.register(job(), frontier_file())
        service.telemetry("gpt", counters(10)).result()
        service.taken("gpt", 1, 10).result()
        service.telemetry("gpt", counters(25)).result()
        (found,) = service.totals()
        assert [(each.version, each.iterations) for each in found.plans] == [(None, 10), (1, 15)]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., httpx.Response]]:
    """Asks a service that has the job, which nobody has counted anything of."""
    with served(tmp_path_factory.mktemp("service") / "service.sqlite", Clock()) as (service, ask):
        service.register(job(), frontier_file())
        yield ask


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"energy_is": None}, "energy_is gives the origin of energy_j"),
        ({"metered_s": 0.0}, "energy_is gives the origin of energy_j"),
        ({"metered_s": 0.0, "energy_is": None}, "energy_j is of metered_s"),
        ({"energy_is": "guessed"}, "energy_is"),
        ({"energy_j": -1.0}, "energy_j"),
        ({"time_s": math.nan}, "time_s"),
        ({"iterations": 1.5}, "iterations"),
        ({"run": "two words"}, "run"),
        ({"energy_j": 1e300}, "energy_j"),
        ({"saved_j": -1e300}, "saved_j"),
    ],
)
def test_counts_that_contradict_each_other_are_refused_and_nothing_is_added(
    ask, change, complaint: str
):
    body = json.dumps({**asdict(counters(10)), **change})
    answer = ask(
        "POST", "/v1/jobs/gpt/telemetry", content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code in (400, 422)
    assert complaint in answer.json()["detail"]
    assert told(ask) is None


def test_counts_that_fall_are_refused_over_http_too(place: Path):
    with served(place, Clock()) as (service, ask):
        service.register(job(), frontier_file())
        assert [
            post(ask, sent) for sent in (counters(10), replace(counters(20), energy_j=1.0))
        ] == [204, 409]
        assert told(ask)["iterations"] == 10


def test_the_client_sends_counts_and_reads_what_follows(place: Path):
    with (
        service_at(place) as service,
        serving(service, Address(port=0)) as url,
        Client(url) as client,
    ):
        service.register(job(), frontier_file())
        assert client.status("gpt").telemetry is None
        assert "Ran:" not in status_text(client.status("gpt"))
        off_plan = {"ranks": 8, "following": 6, "off_plan_since_s": NOW_S - 90.0}
        client.telemetry("gpt", counters(10, set_p50_s=0.006, set_p99_s=0.02, **off_plan))
        status, known = client.status("gpt"), service.status("gpt")
        assert status.telemetry is not None
        assert known.telemetry is not None
        for each in fields(status.telemetry):
            assert getattr(status.telemetry, each.name) == getattr(known.telemetry, each.name)
        assert status.expected == known.expected
        (totals,) = client.totals()
        assert (totals.name, totals.ended_s, totals.telemetry) == ("gpt", None, status.telemetry)
        shown = json.loads(done(f"status --totals --json --service {url}"))
        assert shown["jobs"][0]["telemetry"]["saved_j"] == known.telemetry.saved_j
        assert done(f"status --totals --service {url}") == f"{totals_text(client.totals())}\n"
        assert refusal(f"status gpt --totals --service {url}") == (
            2,
            "",
            "Error: --totals: shows all jobs, once; leave out the name of a job, and --watch\n",
        )
        assert client.pipelines("gpt") == service.pipelines("gpt")[1]
        points, curve = client.frontier("gpt"), service.curve("gpt")
        assert (points.times_s, points.energies_j) == (curve.times_s, curve.energies_j)
        assert (points.baseline_j, points.gpus, points.origin) == (
            curve.baseline_j,
            STAGES,
            curve.origin,
        )
        power, ran = status_text(status).splitlines()[3:5]
        assert power.startswith("Power: ")
        assert power.endswith(
            "W with all clocks at maximum, both in iterations of 0.6533 s, replayed from a "
            "measured profile; recently 640 W, measured; saves 363.4 W against 1003 W with all "
            "clocks at maximum in iterations of 1.25 s, extra beside stragglers: 0 W"
        )
        assert ran.startswith(
            "Ran: 10 iterations, recently 1.25 s each, from begin to begin, until "
        )
        assert "; 8000 J, measured, saved " in ran
        assert (
            " a 95 % interval) against all clocks at maximum; clocks set in 6 ms, 99 % in " in ran
        )
        assert "; 6 of 8 ranks follow their plan, not all since " in ran
        assert "(20.00 % ± 0.39, a 95 % interval)" in ran
        at_full = replace(status.telemetry, lowered=0, saved_j=0.0, saved_error_j=0.0)
        assert ", no clock was lowered, nothing was saved; " in status_text(
            replace(status, telemetry=at_full)
        )
        unknown = replace(status.telemetry, judged_j=0.0, saved_j=0.0)
        assert ", what was saved is not known: " in status_text(replace(status, telemetry=unknown))


def test_a_job_in_autopilot_says_what_the_autopilot_knows(place: Path, tmp_path: Path):
    says = "learning, planned to save 12.3 ± 0.4 % of the energy at full clocks"
    columns = {"saving": 0.123, "owed_s": -0.002, "trials": 3.0, "core_share": None}
    knows = DeciderStatus("learning", says, 41, 1.25, columns)
    with (
        service_at(place) as service,
        serving(service, Address(port=0)) as url,
        Client(url) as client,
    ):
        service.register(job(), frontier_file())
        client.telemetry("gpt", counters(10))
        assert client.status("gpt").autopilot is None
        client.telemetry("gpt", counters(20, autopilot=knows))
        assert json.loads(done(f"status gpt --json --service {url}"))["autopilot"] == asdict(knows)
        assert f"\nAutopilot: {says}\n" in done(f"status gpt --service {url}")
        assert re.search(
            rf"  fine since [^:]*:\d\d:\d\d \w+: autopilot: {re.escape(says)}\n",
            jobs_text(client.jobs()),
        )
    with service_at(place) as service:
        assert service.status("gpt").autopilot == knows
    save_status(tmp_path, knows)
    assert read_status(tmp_path) == knows
