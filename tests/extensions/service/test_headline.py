"""The state of a job is one word, whoever shows it: drawn transitions of jobs, a model that says
what the word has to be, and all that shows it.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from browsing import chromium, opened
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from services import NOW_S, Clock, at_once, frontier_file, job, planned, report, service_at, serving

pytest.importorskip("fastapi")
parser = pytest.importorskip("prometheus_client.parser")

from perseus_planner.extensions.service.headline import together  # noqa: E402
from perseus_planner.extensions.service.metrics import Metrics  # noqa: E402
from perseus_planner.extensions.service.models import (  # noqa: E402
    Counters,
    Jobs,
    JobStatus,
    from_json,
    to_json,
)
from perseus_planner.extensions.service.serve import Address  # noqa: E402
from perseus_planner.extensions.service.service import Service  # noqa: E402
from perseus_planner.extensions.service.store import Storage  # noqa: E402
from perseus_planner.extensions.service.text import (  # noqa: E402
    answer_text,
    jobs_text,
    status_text,
)

LEASE_S = 180.0
NAMES = ("bloom", "gpt", "llama")
SLOWER = "6 % slower than planned: rank 3 computes 12 % longer, the others wait. Next: look."
FASTER = "6 % faster than planned: all ranks compute 6 % shorter. Next: profile."
UNLIKE = "Times are 3 times the plan's, so no saving is stated; profile what you train."


@dataclass
class Known:
    """What the model knows of a job that runs."""

    heard_s: float
    is_silent: bool = False
    slow: frozenset[int] = frozenset()
    sent: str | None = None  #: what its last telemetry was like
    iterations: int = 0
    over_s: float | None = None
    is_over: bool = False
    is_late_beyond: bool = False  #: beyond what reports explain
    slower_s: float | None = None  #: when telemetry last said so, unless that was a minute before
    name: str = ""  #: the state that it has
    since_s: float = 0.0  #: since when

    @property
    def state(self) -> str:
        if self.is_silent:
            return "not heard of"
        if self.is_over:
            return "over budget"
        if self.slower_s is not None and (not self.slow or self.is_late_beyond):
            return "late"
        if self.sent in ("unlike", "off"):
            return "off plan"
        if self.slow:
            return "beside a straggler"
        return "not known" if self.sent is None else "fine"


SENT: dict[str, dict[str, Any]] = {
    "fine": {},
    "slower": {"verdict": SLOWER, "time_over_planned": 1.06},
    "slower of 0.3": {"verdict": SLOWER},
    "faster": {"verdict": FASTER, "time_over_planned": 0.94},
    "faster of 0.3": {"verdict": FASTER},
    "unlike": {"unlike_plan": UNLIKE},
    "off": {"following": 5, "off_plan_since_s": NOW_S},
}


PAGE_SCRIPT = """statuses => import("/static/jobs.js").then(
    ({ stateText }) => statuses.map(stateText))"""


def shown_everywhere(service: Service, stateful: Callable[[Any], list[str]]) -> dict[str, str]:
    """The state of each job, if all that shows it agrees; `stateful` is the page's own words."""
    jobs = service.jobs()
    said = {status.job.name: status.state.name for status in jobs}
    # the API, as a client reads it
    content = json.loads(to_json(Jobs(jobs, together(jobs))))
    assert {each["job"]["name"]: each["state"]["name"] for each in content["jobs"]} == said
    assert jobs_text(from_json(Jobs, json.dumps(content)).jobs) == jobs_text(jobs)
    # the commands: a job's line in the list, and the first lines of its own text
    lines = [line for line in jobs_text(jobs).splitlines() if line.split(" ")[0] in said]
    for status, line in zip(
        sorted(jobs, key=lambda each: each.silent_since_s is not None), lines, strict=True
    ):
        assert line.startswith(status.job.name)
        assert f" {status.state.name}" in line
        (own,) = [line for line in status_text(status).splitlines() if line.startswith("State: ")]
        assert own.startswith(f"State: {status.state.name}")
        assert own.removeprefix("State: ") in line
    # the page
    for status, words in zip(jobs, stateful(content["jobs"]), strict=True):
        assert words.startswith(status.state.name)
        assert words.endswith(f": {status.state.text}")
    # the metrics
    text = Metrics(service, lambda: 0, lambda: None).text().decode()
    found: dict[str, list[str]] = {name: [] for name in said}
    samples = [
        each for family in parser.text_string_to_metric_families(text) for each in family.samples
    ]
    names = [(each.name, tuple(sorted(each.labels.items()))) for each in samples]
    assert len(names) == len(set(names))
    for sample in samples:
        if sample.name == "planner_job_state" and sample.value == 1.0:
            found[sample.labels["training_job"]].append(sample.labels["state"])
        if sample.name == "planner_job_over_budget":
            is_over = said[sample.labels["training_job"]] == "over budget"
            assert sample.value == float(is_over)
        if sample.name == "planner_job_saves_watts":
            (status,) = [each for each in jobs if each.job.name == sample.labels["training_job"]]
            assert sample.value == pytest.approx(status.saves_w)
    assert found == {name: [state] for name, state in said.items()}
    return said


class Jobs3(RuleBasedStateMachine):
    """Three names of jobs, and what may happen to them."""

    page: Callable[[Any], list[str]]
    seen: set[str]

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        folder = self.stack.enter_context(TemporaryDirectory())
        self.clock = Clock()
        storage = self.stack.enter_context(Storage(Path(folder) / "service.sqlite"))
        self.service = self.stack.enter_context(
            Service(storage, now_s=self.clock, run=at_once, lease_s=LEASE_S)
        )
        self.jobs: dict[str, Known] = {}
        self.number = 0

    def teardown(self) -> None:
        self.stack.close()

    name = st.sampled_from(NAMES)

    @initialize()
    def begin(self) -> None:
        for name in NAMES:
            self.register(name)

    @rule(name=name)
    def register(self, name: str) -> None:
        is_new = self.service.register(job(name), frontier_file()).is_new
        assert is_new == (name not in self.jobs)
        if is_new:
            self.jobs[name] = Known(self.clock.now_s)
        else:
            self.heard(name)

    @rule(name=name)
    def end(self, name: str) -> None:
        if self.jobs.pop(name, None) is not None:
            self.service.end(name).result()

    @rule(name=name, pipeline=st.integers(0, 2), slowdown=st.sampled_from([1.0, 1.2, 1.5]))
    def report(self, name: str, pipeline: int, slowdown: float) -> None:
        if name not in self.jobs:
            return
        self.number += 1
        self.clock.now_s += 1.0  # of observations at one time none is the later one
        now_s = self.clock.now_s
        key = f"r{self.number}"
        said = report(key, pipeline, slowdown, observed_s=now_s, begins_s=now_s)
        self.service.report(name, said).result()
        known = self.jobs[name]
        known.slow = known.slow - {pipeline} if slowdown == 1.0 else known.slow | {pipeline}
        self.judge_lateness(name)

    @rule(name=name, share=st.sampled_from([None, 0.97, 1.5]))
    def set_budget(self, name: str, share: float | None) -> None:
        """Without a budget, within one that costs time, and with one that it never reaches."""
        if name in self.jobs:
            full_w = self.service.status(name).expected.baseline_power_w
            power_w = None if share is None else share * full_w
            self.service.set_power(name, power_w).result()
            self.judge_lateness(name)

    @rule(name=name, like=st.sampled_from(sorted(SENT)), power=st.sampled_from([0.9, 2.0]))
    def send(self, name: str, like: str, power: float) -> None:
        """Ten iterations, each of the decided time and of a share of the full power."""
        if name not in self.jobs:
            return
        known = self.jobs[name]
        self.heard(name)
        status = self.service.status(name)
        known.iterations += 10
        iteration_s = status.decision.straggler_time_s * (1.06 if "slower" in like else 1.0)
        self.ran_s = getattr(self, "ran_s", {})
        ran_s = self.ran_s[name] = self.ran_s.get(name, 0.0) + 10 * iteration_s
        self.used_j = getattr(self, "used_j", {})
        power_w = power * status.expected.baseline_power_w
        used_j = self.used_j[name] = self.used_j.get(name, 0.0) + 10 * iteration_s * power_w
        self.number += 1
        sent = Counters(
            run=name,
            iterations=known.iterations,
            time_s=ran_s,
            windows=known.iterations,
            gpu_s=ran_s,
            metered_s=ran_s,
            energy_j=used_j,
            energy_is="measured",
            **{"ranks": 6, "following": 6, **SENT[like]},
        )
        self.service.telemetry(name, sent).result()
        known.sent = like
        if "slower" in like:
            known.slower_s = self.clock.now_s
        elif known.slower_s is not None and self.clock.now_s - known.slower_s >= 60.0:
            known.slower_s = None
        limit_w = self.service.status(name).power_limit_w
        drawn_w = self.service.status(name).telemetry.power_w
        is_over_now = limit_w is not None and drawn_w > 1.02 * limit_w
        known.over_s = (known.over_s or self.clock.now_s) if is_over_now else None
        known.is_over = known.over_s is not None and self.clock.now_s - known.over_s >= 60.0
        self.judge_lateness(name)

    def judge_lateness(self, name: str) -> None:
        status = self.service.status(name)
        if status.telemetry is not None:
            most_s = 1.02 * status.decision.straggler_time_s
            self.jobs[name].is_late_beyond = status.telemetry.iteration_s > most_s

    @rule(name=name)
    def hear(self, name: str) -> None:
        if name in self.jobs:
            self.service.plans(name, 0)
            self.heard(name)

    def heard(self, name: str) -> None:
        known = self.jobs[name]
        known.heard_s = self.clock.now_s
        known.is_silent = False

    @rule(passed_s=st.sampled_from([1.0, 61.0, LEASE_S]))
    def time_passes(self, passed_s: float) -> None:
        self.clock.now_s += passed_s
        self.service.tick()
        for name, known in self.jobs.items():
            known.is_silent |= self.clock.now_s - known.heard_s >= LEASE_S
            self.judge_lateness(name)

    @invariant()
    def all_agree(self) -> None:
        # commands that nobody waits for, as of a job that is heard of again, come before this one
        self.service.set_power(None, None).result()
        planned(self.service)  # they come from another thread, between two looks
        found = shown_everywhere(self.service, type(self).page)
        assert found == {name: known.state for name, known in self.jobs.items()}
        for name, known in self.jobs.items():
            if known.state != known.name:
                known.name = known.state
                known.since_s = self.clock.now_s
            if known.name != "over budget":  # that is since when it draws too much
                assert self.service.status(name).state.since_s == known.since_s
        type(self).seen |= {*found.values()}
        all_jobs = together(self.service.jobs())
        assert all_jobs.silent == sum(known.is_silent for known in self.jobs.values())
        assert all_jobs.heard_of + all_jobs.silent == len(self.jobs)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Any, tmp_path: Path) -> Iterator[Callable[[Any], list[str]]]:
    """The words of the page for statuses, by the function that its lists and its jobs use."""
    with (
        Storage(tmp_path / "page.sqlite") as storage,
        Service(storage, run=at_once) as service,
        serving(service, Address(port=0)) as url,
        opened(browser, url) as page,
    ):
        page.wait_for_selector("#no-jobs:not([hidden])")
        yield lambda statuses: page.evaluate(PAGE_SCRIPT, statuses)


def test_a_job_has_one_state_whoever_shows_it(page: Callable[[Any], list[str]]):
    machine = type("Drawn", (Jobs3,), {"page": staticmethod(page), "seen": set()})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=12, stateful_step_count=20, deadline=None)
    )
    assert len(machine.seen) >= 4


def counted(iterations: int, status: JobStatus, power: float = 0.9, **more: Any) -> Counters:
    """So many iterations of the decided time, each of a share of the power at full clocks."""
    time_s = iterations * status.decision.straggler_time_s
    used_j = power * time_s * status.expected.baseline_power_w
    sums = {"time_s": time_s, "gpu_s": time_s, "metered_s": time_s, "energy_j": used_j}
    ranks = {"ranks": 6, "following": 6}
    run = f"run-{power}"
    return Counters(
        run=run, iterations=iterations, energy_is="measured", **{**sums, **ranks, **more}
    )


def test_the_page_of_a_job_and_the_list_say_the_state_that_the_command_says(
    browser: Any, tmp_path: Path
):
    clock = Clock()
    with (
        Storage(tmp_path / "walk.sqlite") as storage,
        Service(storage, now_s=clock, run=at_once, lease_s=LEASE_S) as service,
        serving(service, Address(port=0)) as url,
        ExitStack() as pages,
    ):
        for name in ("gpt", "other"):
            service.register(job(name), frontier_file())
        of_job = pages.enter_context(opened(browser, f"{url}/#/jobs/gpt", timezone_id="UTC"))
        of_all = pages.enter_context(opened(browser, f"{url}/#/", timezone_id="UTC"))

        def look(state: str, text: str) -> None:
            """At the page of the job, the list of all, and the command."""
            service.set_power(None, None).result()
            planned(service)
            status = service.status("gpt")
            assert (status.state.name, text in status.state.text) == (state, True), status.state
            assert state in status_text(status)
            is_calm = state in ("fine", "not known")
            words = re.compile(f"^{state}.*: .*{re.escape(text)}", re.IGNORECASE)
            of_job.locator("#state-text").filter(has_text=words).wait_for()
            assert ("slow" in of_job.get_attribute("#state", "class").split()) != is_calm
            assert of_job.title().lower().startswith("gpt" if is_calm else state)
            of_all.reload()
            row = of_all.locator("#all-jobs tbody tr", has_text="gpt")
            row.wait_for()
            assert row.locator("td").last.inner_text().startswith(state)
            # What is not heard of draws and saves nobody knows what.
            cards = of_job.inner_text("#cards")
            is_heard_of = state != "not heard of"
            assert ("less than" in cards or "more than" in cards) <= is_heard_of, cards
            power = [line for line in status_text(status).splitlines() if "Power: " in line]
            assert ("not known" in power[0]) != is_heard_of
            shown_everywhere(service, lambda jobs: of_all.evaluate(PAGE_SCRIPT, jobs))

        def send(iterations: int, **fields: Any) -> None:
            clock.now_s += 5.0
            service.telemetry("gpt", counted(iterations, calm, **fields)).result()

        calm = service.status("gpt")
        look("not known", "sends no telemetry")
        send(10)
        look("fine", "iterations take")
        assert "saves" in of_job.inner_text("#cards")
        slower = {"verdict": SLOWER, "time_over_planned": 1.06}
        send(20, **slower)
        look("late", "6 % slower than planned: rank 3 computes")
        faster = {"verdict": FASTER, "time_over_planned": 0.94}
        send(30, **faster)
        look("late", "6 % slower than planned: rank 3 computes")  # times near the limit would flap
        clock.now_s += 61.0
        send(35, **faster)
        look("fine", "iterations take")
        send(40, unlike_plan=UNLIKE)
        look("off plan", "no saving is stated")
        off = {"following": 5, "off_plan_since_s": NOW_S}
        send(50, **off)
        look("off plan", "1 of 6 ranks do not follow their plan")
        send(60)
        slow = report("a", observed_s=clock.now_s, begins_s=clock.now_s)
        service.report("gpt", slow).result()
        look("beside a straggler", "because of pipeline 1")
        service.clear("gpt", "a").result()
        service.set_power("gpt", calm.expected.baseline_power_w).result()
        for iterations in (10, 20):
            send(iterations, power=2.0)
            clock.now_s += 61.0
        look("over budget", "and its budgets allow")
        service.plans("other", 0)
        clock.now_s += LEASE_S
        service.plans("other", 0)
        service.tick()
        look("not heard of", "its power is not known")
        card = of_all.locator("#all-cards li", has_text="Power, all GPUs")
        assert "without 1\u00a0job not heard of" in card.inner_text()
        assert service.status("other").state.name == "not known"


def test_a_job_near_the_limit_is_late_until_it_has_been_in_time_for_a_minute(tmp_path: Path):
    """What Prometheus sees does not change with every message, so its alert can fire and stay."""
    clock = Clock()
    with (
        Storage(tmp_path / "service.sqlite") as storage,
        Service(storage, now_s=clock, run=at_once) as service,
    ):
        service.register(job(), frontier_file())
        calm = service.status("gpt")
        slower = {"verdict": SLOWER, "time_over_planned": 1.06}
        found = []
        for number in range(1, 41):
            clock.now_s += 5.0
            is_slow = number in (2, 4, 7, 12, 20)
            fields = slower if is_slow else {}
            service.telemetry("gpt", counted(number, calm, **fields)).result()
            state = service.status("gpt").state
            found.append((state.name, state.since_s))
    late_s = NOW_S + 10.0
    fine_s = NOW_S + 5.0 * (20 + 12)  # twelve messages after the last one
    assert found == [
        ("fine", NOW_S + 5.0),
        *[("late", late_s)] * 30,
        *[("fine", fine_s)] * 9,
    ]


def test_iterations_over_a_deadline_are_late_though_plans_are_kept_inside_of_them(tmp_path: Path):
    """As with data that comes late between two iterations, of which a plan knows nothing."""
    clock = Clock()
    with (
        Storage(tmp_path / "service.sqlite") as storage,
        Service(storage, now_s=clock, run=at_once) as service,
    ):
        service.register(job(), frontier_file())
        deadline_s = 1.1 * service.curve("gpt").baseline_time_s
        service.set_deadline("gpt", deadline_s).result()
        ran_s = 0.0
        found = []
        for number, factor in enumerate([1.0, 1.01, 1.034, 1.034], 1):
            clock.now_s += 5.0
            ran_s += factor * deadline_s
            service.telemetry("gpt", Counters(run="a", iterations=number, time_s=ran_s)).result()
            if number == 1:
                version = service.status("gpt").version
                service.taken("gpt", version, 1).result()
            found.append(service.status("gpt").state)
        assert [state.name for state in found] == ["fine", "fine", "late", "late"]
        assert "3.4 % longer than its deadline of" in found[-1].text
        # A deadline that has just been moved says nothing of iterations before it.
        service.set_deadline("gpt", service.curve("gpt").baseline_time_s).result()
        assert service.status("gpt").version > version
        clock.now_s += 60.0
        ran_s += deadline_s
        service.telemetry("gpt", Counters(run="a", iterations=5, time_s=ran_s)).result()
        assert service.status("gpt").state.name == "fine"


def test_what_a_job_saves_is_against_iterations_as_long_as_those_that_ran(tmp_path: Path):
    clock = Clock()
    with (
        Storage(tmp_path / "service.sqlite") as storage,
        Service(storage, now_s=clock, run=at_once) as service,
    ):
        service.register(job(), frontier_file())
        calm = service.status("gpt")
        curve = service.curve("gpt")
        pipelines = calm.job.pipelines
        clock.now_s += 5.0
        long_s = 1.5 * calm.decision.straggler_time_s
        drawn_w = 0.6 * calm.expected.baseline_power_w
        sums = {"time_s": long_s, "gpu_s": long_s, "metered_s": long_s}
        sent = Counters(
            run="a", iterations=1, energy_is="measured", energy_j=drawn_w * long_s, **sums
        )
        service.telemetry("gpt", sent).result()
        waited_j = curve.waiting_w * (long_s - curve.baseline_time_s)
        baseline_w = pipelines * (curve.baseline_j + waited_j) / long_s
        assert service.status("gpt").saves_w == pytest.approx(baseline_w - drawn_w)


def test_an_answer_to_a_budget_names_it_and_does_not_say_that_nothing_changes(tmp_path: Path):
    with (
        Storage(tmp_path / "service.sqlite") as storage,
        Service(storage, now_s=Clock(), run=at_once) as service,
    ):
        service.register(job(), frontier_file())
        full_w = service.status("gpt").expected.baseline_power_w
        service.set_power("gpt", 10.0 * full_w).result()
        planned(service)
        (wide,) = service.set_power("gpt", 10.0 * full_w).result()
        assert not wide.changed
        text = answer_text(wide)
        assert "its plans stay as they are" in text
        assert "nothing changes" not in text
        (narrow,) = service.set_power("gpt", 0.85 * full_w).result()
        assert narrow.changed
        assert narrow.reason.endswith(", to keep the power budget of the job")
        assert "nothing is reported slow" in narrow.reason
        service.set_power("gpt", None).result()
        (shared,) = service.set_power(None, 0.85 * full_w).result()
        assert shared.reason.endswith(", to keep the power budget of all jobs")


def test_while_plans_are_made_power_is_of_those_that_run_and_no_stage_is_called_slow(
    tmp_path: Path,
):
    held = threading.Event()
    held.set()

    def run(function: Any, *arguments: Any) -> Any:
        assert held.wait(300.0)
        return function(*arguments)

    with service_at(tmp_path / "service.sqlite", Clock(), run=run) as service:
        service.register(job(), frontier_file())
        before = service.status("gpt")
        held.clear()
        service.set_power("gpt", 0.8 * before.expected.power_w).result()
        status = service.status("gpt")
        assert status.promised > status.version
        assert status.expected == before.expected
        assert status.decision.straggler_time_s > before.decision.straggler_time_s
        # The share of the power stays what sets the time, whatever the deadline is.
        answer = service.set_deadline("gpt", 1.01 * before.decision.straggler_time_s).result()
        assert not answer.changed
        assert "slow stages" not in answer.reason
        assert answer.expected_saving_w is not None
        text = answer_text(answer)
        assert "version 2 of its plans, which is being planned, stays as it was asked for" in text
        assert "its plans stay as they are" not in text
        held.set()
        planned(service)


def test_a_status_says_what_is_decided_once(tmp_path: Path):
    with service_at(tmp_path / "service.sqlite", Clock()) as service:
        service.register(job(), frontier_file())
        assert "\nDecided: nothing is reported slow" in status_text(service.status("gpt"))
        service.report("gpt", report("k")).result()
        planned(service)
        status = service.status("gpt")
        assert status_text(status).count(status.decision.reason) == 1
        extra = f"extra beside stragglers: {status.expected_saving_w:.4g} W, by the bound of"
        assert extra in status_text(status)


def test_moments_are_told_with_their_zone(monkeypatch: pytest.MonkeyPatch):
    """Who reads them is often elsewhere than who runs the command."""
    from perseus_planner.extensions.service.text import _moment

    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    try:
        assert _moment(1_700_000_000.0) == "2023-11-14 23:13:20 CET"
        assert _moment(time.time()).endswith((" CET", " CEST"))
    finally:
        monkeypatch.undo()
        time.tzset()
