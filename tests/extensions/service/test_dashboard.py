"""The page that the service shows at `/`, in a real browser before a real service."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browsing import IMPACTS, LONG_MS, barriers, chromium, opened
from launching import free_port
from services import at_once, frontier_file, job, service_at, serving, small_frontier
from waiting import LONG_S, calmly

pytest.importorskip("fastapi")
pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

from perseus_planner.extensions.service.access import ROLES, TOKENS_VARIABLE, read_tokens  # noqa: E402
from perseus_planner.extensions.service.models import PowerStep  # noqa: E402
from perseus_planner.extensions.service.serve import Address  # noqa: E402
from perseus_planner.extensions.service.service import Service  # noqa: E402
from perseus_planner.extensions.service.store import Storage  # noqa: E402

LIGHT, DARK = {"color_scheme": "light"}, {"color_scheme": "dark"}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
SECRETS = {role: f"{role}-0123456789abcdef" for role in ROLES}
SLOW = {"source": "ops", "scope": {"kind": "pipeline", "value": 1}, "slowdown": 1.3}
COUNTED = {
    "run": "first",
    "iterations": 123_456,
    "time_s": 100_000.0,
    "gpu_s": 100_000.0,
    "metered_s": 100_000.0,
    "energy_j": 9e7,
    "judged_j": 9e7,
    "lowered": 100,
    "saved_j": 1e7,
    "energy_is": "simulated",
    "changes_late": 17,
    "set_p50_s": 0.0123,
    "set_p99_s": 0.0311,
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    file = tmp_path_factory.mktemp("service") / "service.sqlite"
    with service_at(file) as service:
        service.register(job("calm"), frontier_file())
        yield service


@pytest.fixture(scope="module")
def url(service: Service) -> Iterator[str]:
    with serving(service, Address(port=0)) as url:
        yield url


@pytest.fixture(autouse=True)
def gpt(service: Service) -> Iterator[None]:
    """A job of which nothing was ever reported: after a report, plans are held for a while."""
    service.register(job("gpt"), frontier_file())
    yield
    service.end("gpt").result()


@contextmanager
def looking(browser: Any, url: str, name: str = "gpt", **context: Any) -> Iterator[Any]:
    """The page of a job."""
    with opened(browser, f"{url}/#/jobs/{name}", **context) as page:
        page.wait_for_selector("#job:not([hidden])")
        yield page


def post(url: str, content: dict[str, Any]) -> str:
    """Report something as any client does; its key."""
    answer = httpx.post(f"{url}/v1/jobs/gpt/reports", json=content, timeout=LONG_S)
    assert answer.status_code == 202, answer.text
    return answer.json()["report"]["key"]


def has(page: Any, place: str, text: str) -> None:
    """Wait until that text is shown there."""
    page.locator(place).filter(has_text=text).first.wait_for(timeout=LONG_MS)


def tab_to(page: Any, wanted: str) -> None:
    """Go there as who has a keyboard alone does."""
    for _ in range(60):
        if page.evaluate("wanted => document.activeElement.matches(wanted)", wanted):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"Tab does not lead to {wanted}")


def test_a_job_is_shown_with_its_pipelines_and_why(browser: Any, url: str):
    with looking(browser, url) as page:
        assert page.inner_text("#job-title") == "gpt"
        has(page, "#reason", "Nothing is reported slow")
        has(page, "#pipelines tbody tr", "0\u20132 (3)")  # equal ones in one row
        has(page, "#cards li", "Iteration time")
        has(page, "#frontier .legend", "Pipelines 0\u20132")
        assert (
            page.locator("#frontier svg[role=img]")
            .get_attribute("aria-label")
            .startswith("The least energy")
        )
        assert page.inner_text("#job-list [aria-current=page] .title") == "gpt"
        page.get_by_role("link", name="calm").click()
        has(page, "#job-title", "calm")
        assert page.url.endswith("#/jobs/calm")


def test_a_report_of_a_client_is_seen_as_it_comes_and_goes(
    browser: Any, url: str, service: Service
):
    with looking(browser, url) as page:
        page.evaluate(
            "() => { window.moves = 0; Element.prototype.animate = () => { window.moves += 1; }; }"
        )
        key = post(url, {**SLOW, "ttl_s": 3600, "cause": "data"})
        has(page, "#reports li", "Pipeline 1 slowdown 1.3")
        has(page, "#pipelines tbody tr", "slow: Pipeline 1")
        has(page, "#pipelines tbody tr", "0, 2")
        shown = page.inner_text("#reports li")
        assert all(each in shown for each in ("ops", "data", "Until"))
        assert key not in shown  # names, not keys
        assert "because of pipeline 1" in page.inner_text("#state-text")
        assert not page.is_visible("#reason")  # it would say the same again
        assert "before it waits for slower pipelines" in page.inner_text("#frontier-caption")
        waiting, slow, _ = service.pipelines("gpt")[1]
        assert waiting.time_s > slow.time_s
        has(page, "#pipelines tbody tr", f"{waiting.time_s:.4f}")
        assert page.evaluate("window.moves") > 0  # the points of 0 and 2
        httpx.delete(f"{url}/v1/jobs/gpt/reports/{key}", timeout=LONG_S)
        page.wait_for_selector("#no-reports:not([hidden])")
        has(page, "#reason", "Nothing is reported slow")


def test_what_has_not_changed_is_not_sent_again(browser: Any, url: str):
    with looking(browser, url) as page:
        has(page, "#reason", "Nothing is reported slow")
        with page.expect_response(
            lambda answer: answer.status == 304 and answer.url.endswith("/v1/jobs/gpt")
        ):
            page.evaluate("() => dispatchEvent(new Event('online'))")
        has(page, "#reason", "Nothing is reported slow")


def test_nothing_moves_for_who_wants_it_so(browser: Any, url: str):
    with looking(browser, url, reduced_motion="reduce") as page:
        page.evaluate("() => { Element.prototype.animate = () => { throw new Error('moved'); }; }")
        post(url, SLOW)
        has(page, "#pipelines tbody tr", "slow: Pipeline 1")


def test_a_straggler_is_reported_and_cleared_with_the_keyboard_alone(
    browser: Any, url: str, service: Service
):
    with looking(browser, url) as page:
        tab_to(page, "#scope-kind")
        page.keyboard.type("Rank")
        tab_to(page, "#scope-value")
        page.keyboard.type("3")
        tab_to(page, "#slowness")
        page.keyboard.type("Score")
        tab_to(page, "#amount")
        page.keyboard.type("0.8")
        tab_to(page, "#begins")
        page.keyboard.type("soon")
        page.keyboard.press("Enter")
        has(page, "#report-form .response", "soon is not a time; write it as 30s, 30m or 2h")
        page.keyboard.press("Control+A")
        page.keyboard.type("0s")
        tab_to(page, "#ttl")
        page.keyboard.type("2h")
        page.keyboard.press("Enter")
        has(page, "#reports li", "Rank 3 slowdown 1.25")
        has(page, "#report-form .response", "Reported: ")
        (report,) = service.reports("gpt")
        assert (report.source, report.slowdown, report.cause) == ("dashboard", 1.25, "unknown")
        assert report.expires_s - report.begins_s == 7200
        tab_to(page, "#reports button")
        page.keyboard.press("Enter")
        page.wait_for_selector("#no-reports:not([hidden])")
        has(page, "#reports-response", "Cleared Rank 3")
        assert page.evaluate("document.activeElement.id") == "reports-title"


def test_what_the_service_refuses_is_said(browser: Any, url: str, service: Service):
    with opened(browser, f"{url}/#/jobs/gpt") as page:
        page.wait_for_selector("#job:not([hidden])")
        page.fill("#scope-value", "7x")
        page.fill("#amount", "1.2")
        page.click("#report-form button")
        has(page, "#report-form .response.bad", "7x is not a pipeline; write 0 for the first one")
        assert service.reports("gpt") == ()


def test_deadline_and_power_budget_are_set_and_taken_back(browser: Any, url: str, service: Service):
    with looking(browser, url) as page:
        deadline_s = round(small_frontier().baseline_time_s * 1.2, 4)
        page.fill("#deadline", str(deadline_s))
        page.keyboard.press("Enter")
        has(page, "#deadline-form .response", "Set: ")
        has(page, "#cards", f"wanted without stragglers: {deadline_s:.4f} s, as set")
        assert service.status("gpt").job.deadline_s == deadline_s
        page.click("#deadline-form .remove")
        has(page, "#cards", "all clocks at maximum")
        page.fill("#power", "1000000")
        page.keyboard.press("Enter")
        has(page, "#cards", "at most 1,000 kW allowed")
        assert service.status("gpt").job.power_w == 1e6


@pytest.fixture(scope="module")
def guarded(service: Service) -> Iterator[str]:
    """The same service for those who have a token."""
    lines = "".join(f"{secret} {role} the-{role}-client\n" for role, secret in SECRETS.items())
    with serving(service, Address(port=0), read_tokens(None, {TOKENS_VARIABLE: lines})) as url:
        yield url


def sign_in(page: Any, secret: str) -> None:
    page.wait_for_selector("#sign-in:not([hidden])")
    assert page.evaluate("document.activeElement.id") == "token"
    page.keyboard.type(secret)
    page.keyboard.press("Enter")


def test_without_a_token_the_page_tells_nothing_and_asks_for_one(browser: Any, guarded: str):
    with opened(browser, f"{guarded}/#/jobs/gpt") as page:
        sign_in(page, "wrong-0123456789abcdef")
        has(page, "#token-error", "does not know that token")
        assert "calm" not in page.content()
        assert barriers(page, IMPACTS) == []
        sign_in(page, SECRETS["operate"])
        has(page, "#job-title", "gpt")
        assert page.is_visible("#settings")
        page.reload()  # it stays in the tab
        has(page, "#who", "the-operate-client, role operate")
        page.click("#sign-out")
        page.wait_for_selector("#sign-in:not([hidden])")
        assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [
            0,
            0,
            "",
        ]


def test_who_may_only_read_finds_no_way_to_report(browser: Any, guarded: str, url: str):
    post(url, SLOW)
    with opened(browser, f"{guarded}/#/jobs/gpt") as page:
        sign_in(page, SECRETS["read"])
        has(page, "#reports li", "Pipeline 1")
        assert page.locator("main button:visible").count() == 0
        assert page.locator("#report-form, #settings").filter(visible=True).count() == 0


def test_who_may_report_is_named_as_the_source_and_sets_no_wishes(
    browser: Any, guarded: str, service: Service
):
    with opened(browser, f"{guarded}/#/jobs/gpt") as page:
        sign_in(page, SECRETS["report"])
        page.fill("#scope-value", "2")
        page.fill("#amount", "1.5")
        page.keyboard.press("Enter")
        has(page, "#reports li", "the-report-client")
        assert not page.is_visible("#settings")
        assert [each.source for each in service.reports("gpt")] == ["the-report-client"]


@contextmanager
def service_process(folder: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    command = [
        sys.executable,
        *(["-P"] if sys.version_info >= (3, 11) else []),
        "-m",
        "perseus_planner",
        "serve",
    ]
    with subprocess.Popen(
        [*command, "--port", str(port)], cwd=folder, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline().startswith("Listening at ")
            yield process
        finally:
            process.kill()


def test_a_service_that_is_killed_is_said_to_be_away_and_its_page_recovers(
    browser: Any, folder: Path
):
    port = free_port()
    (folder / "state" / "perseus-planner").mkdir(parents=True)
    with (
        Storage(folder / "state" / "perseus-planner" / "service.sqlite") as storage,
        Service(storage, run=at_once) as first,
    ):
        first.register(job("gpt"), frontier_file())
    with browser.new_context() as fresh:
        fresh.set_default_timeout(LONG_MS)
        page = fresh.new_page()
        with service_process(folder, port) as process:
            page.goto(f"http://127.0.0.1:{port}/")
            has(page, "#job-title", "gpt")  # the only one
            page.fill("#scope-value", "1")
            page.fill("#amount", "1.4")
            process.send_signal(signal.SIGKILL)
            page.wait_for_selector("#away:not([hidden])")
            has(page, "#standing", "Cannot be reached; trying again")
            has(page, "#away-age", " old.")
            assert page.inner_text("#job-title") == "gpt"  # what was known is still shown
            assert barriers(page, IMPACTS) == []
            page.click("#report-form button")
            has(page, "#report-form .response", "The service cannot be reached")
        with service_process(folder, port):
            page.dispatch_event("#try-now", "click")  # it goes away by itself, too
            has(page, "#standing-text", "Live")
            page.wait_for_selector("#away", state="hidden")
            page.click("#report-form button")
            has(page, "#reports li", "Pipeline 1 slowdown 1.4")


def test_a_job_that_ends_is_said_to_be_gone(browser: Any, url: str, service: Service):
    service.register(job("short"), frontier_file())
    with browser.new_context() as fresh:  # its console tells of the answer 404
        fresh.set_default_timeout(LONG_MS)
        page = fresh.new_page()
        page.goto(f"{url}/#/jobs/short")
        has(page, "#job-title", "short")
        service.end("short").result()
        has(page, "#gone", "No job short runs here")
        page.click("#gone a")
        page.wait_for_selector("#all:not([hidden])")


def test_the_jobs_in_which_something_is_slow_are_named_beside_all(browser: Any, url: str):
    post(url, SLOW)
    with opened(browser, f"{url}/#/") as page:
        has(page, "#all-jobs tr.slow", "beside a straggler since ")
        has(page, "#all-jobs tr.slow", ": iterations take")
        has(page, "#all-cards", "1 beside a straggler")
        has(page, "#all-cards", "Extra beside stragglers")
        assert page.locator("#all-jobs tr.slow").count() == 1


def test_the_budgets_of_a_schedule_are_announced(browser: Any, url: str, service: Service):
    later = (PowerStep(4e9, 2e6), PowerStep(4.1e9, None))
    service.set_power("gpt", None, later).result()
    service.set_power(None, 3e6, later).result()
    try:
        with looking(browser, url) as page:
            has(page, "#cards", "at most 2,000 kW from ")
        with opened(browser, f"{url}/#/") as page:
            has(page, "#all-cards", "Power budget, all jobs")
            has(page, "#all-cards", "no budget from ")
    finally:
        service.set_power(None, None).result()


def test_a_table_says_of_every_job_what_it_uses_and_how_it_is(
    browser: Any, url: str, service: Service
):
    httpx.post(
        f"{url}/v1/jobs/gpt/telemetry", json={**COUNTED, "ranks": 6, "following": 6}, timeout=LONG_S
    ).raise_for_status()
    post(url, SLOW)
    for look in (LIGHT, PHONE):
        with opened(browser, f"{url}/#/", **look) as page:
            has(page, "#all-jobs tr.slow", "gpt")
            cells = page.locator("#all-jobs tr", has_text="gpt").locator("td").all_inner_texts()
            assert cells[:3] == ["6", "0.8493\u00a0s", "0.8100\u00a0s"]  # planned; measured
            assert cells[5] == "6 of 6"
            assert cells[6].startswith("beside a straggler since ")
            calm = page.locator("#all-jobs tr", has_text="calm").locator("td").all_inner_texts()
            assert calm[2] == "\u2013"  # nobody has measured it
            assert re.match("not known since .*: it sends no telemetry", calm[6])
            assert barriers(page, IMPACTS) == []
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_no_saving_is_shown_of_a_job_whose_plans_are_of_another_machine(browser: Any, url: str):
    sent = {**COUNTED, "unlike_plan": "This plan is for another machine"}
    httpx.post(f"{url}/v1/jobs/gpt/telemetry", json=sent, timeout=LONG_S).raise_for_status()
    for address, cards in (("#/", "#all-cards"), ("#/jobs/gpt", "#cards")):
        with opened(browser, f"{url}/{address}") as page:
            has(page, cards, "Power, all GPUs")
            assert not re.search("% (less|more)", page.inner_text(cards))
            assert page.locator(f"{cards} .meter:not(.none)").count() == 0


def test_a_job_has_its_events_and_its_autopilot(browser: Any, url: str):
    autopilot = {
        "phase": "learning",
        "iteration": 7,
        "reference_s": 0.8,
        "saving": 0.113,
        "saving_stderr": 0.012,
        "owed_s": -0.4,
        "burst_s": 2.0,
        "trials": 2,
        "unknown": 14,
    }
    for iterations in (100, 200):
        sent = {
            "run": "first",
            "iterations": iterations,
            "time_s": 0.8 * iterations,
            "gpu_s": 4.8 * iterations,
            "metered_s": 4.8 * iterations,
            "energy_j": 4800.0 * iterations,
            "energy_is": "simulated",
            "autopilot": autopilot,
            "waiting": [0.31, 0.12, 0.3, 0.3, 0.31, 0.42],
        }
        httpx.post(f"{url}/v1/jobs/gpt/telemetry", json=sent, timeout=LONG_S).raise_for_status()
    post(url, {**SLOW, "source": "dcgm"})
    budget = httpx.put(f"{url}/v1/jobs/gpt/power", json={"power_w": 5000.0}, timeout=LONG_S)
    budget.raise_for_status()
    with looking(browser, url, viewport={"width": 390, "height": 844}) as page:
        has(page, "#events li", "pipeline 1 slow 1.3x (dcgm), 2 others aim for")
        has(page, "#events li", "registered with 3 pipelines of 2 GPUs")
        page.locator("#history-time svg").wait_for()
        marks = page.locator("#history-time .event title").all_text_contents()
        assert any("pipeline 1 slow 1.3x (dcgm)" in text for text in marks)
        legend = page.locator("#history-power .legend").inner_text()
        assert legend.split("\n") == ["Power", "budget of 5,000\u00a0W"]
        page.select_option("#history-range", "3600")
        page.locator("#history-time .event").first.wait_for(state="attached")
        has(page, "#waiting-caption", "rank 1 (12 %) waited least and rank 5 (42 %) most")
        assert page.locator("#waiting-ranks .bar").count() == 6
        why = page.locator("#pipelines .why").first  # a block of its own on a phone
        assert why.bounding_box()["width"] > 250
        facts = page.inner_text("#autopilot")
        assert "Phase: learning." in facts
        assert "11.3 ± 1.2\u00a0%" in facts
        assert "Ledger: time to spare" in facts


def test_a_name_is_a_text_and_never_a_part_of_the_page(browser: Any, url: str):
    evil = "<img src=/x onerror=alert(1)><b>bold</b>"
    key = post(url, {**SLOW, "source": evil, "key": "%2e?#&<b>"})
    with looking(browser, url) as page:
        has(page, "#reports li", evil)
        assert page.locator("#job img, #job b").count() == 0
        page.click("#reports button")
        page.wait_for_selector("#no-reports:not([hidden])")
        assert key == "%2e?#&<b>"


@pytest.mark.parametrize("look", [LIGHT, DARK | PHONE], ids=["light", "dark, phone"])
def test_nothing_keeps_people_from_using_it(browser: Any, url: str, look: dict[str, Any]):
    post(url, SLOW)
    with looking(browser, url, **look) as page:
        has(page, "#reports li", "Pipeline 1")
        assert barriers(page, IMPACTS) == []
        wide, width = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide <= width


def test_two_hundred_jobs_are_found_by_name(browser: Any, url: str, service: Service):
    listed = httpx.get(f"{url}/v1/jobs", timeout=LONG_S).json()
    (known,) = (each for each in listed["jobs"] if each["job"]["name"] == "calm")
    many = [{**known, "job": {**known["job"], "name": f"run-{number}"}} for number in range(200)]
    with opened(browser, f"{url}/#/") as page:
        page.route("**/v1/jobs", lambda route: route.fulfill(json={**listed, "jobs": many}))
        page.reload()
        has(page, "#jobs-count", "(200)")
        has(page, "#all-cards li", "200")
        assert page.locator("#job-list .title").nth(9).inner_text() == "run-9"
        calmly(lambda: check_filter(page))
        assert page.locator("#job-list li").count() == 11


def check_filter(page: Any) -> None:
    """Check that the list follows the filter within a second."""
    page.fill("#filter", "")
    has(page, "#jobs-count", "(200)")
    began_ms = page.evaluate("performance.now()")
    page.fill("#filter", "N-17")
    has(page, "#jobs-count", "(11 of 200)")
    assert page.evaluate("performance.now()") - began_ms < 1000


def test_what_is_saved_says_where_it_comes_from_and_what_it_costs(browser: Any, url: str):
    assert (
        httpx.post(f"{url}/v1/jobs/gpt/telemetry", json=COUNTED, timeout=LONG_S).status_code == 204
    )
    told = httpx.get(f"{url}/v1/jobs/gpt", timeout=LONG_S).json()["telemetry"]
    kwh = told["saved_j"] / 3.6e6
    with looking(browser, url) as page:
        cards = {
            each.split("\n")[0]: each.replace("\u00a0", " ")
            for each in page.locator("#cards li").all_inner_texts()
        }
        for name, parts in {
            "Iteration time": (f"{told['iteration_s']:.4f}", "measured", ", replayed"),
            "Power, all GPUs": (
                f"{told['power_w']:.1f}",
                "simulated",
                "with all clocks at maximum, replayed",
            ),
            "Saved so far": (
                f"{kwh:.4g}",
                "kWh",
                "simulated",
                "123,456 iterations",
                "than all clocks at maximum",
            ),
            "Cost saved so far": (
                f"{kwh * 1.2 * 0.12:.2f}",
                "USD",
                "kg CO₂e",
                f"for {kwh * 1.2:.4g}",
                "kWh with PUE 1.2",
                "at 0.12 USD/kWh, 0.4 kg CO₂e/kWh",
            ),
            "A clock change takes": (
                "12.30",
                "ms",
                "simulated",
                "99 % within 31.10 ms",
                "17 changes came late",
            ),
        }.items():
            assert all(part in cards[name] for part in parts), cards[name]
        assert "Simulated: the energy is that of a model of the GPU" in page.inner_text("#origin")
        page.fill("#price", "1.2")
        has(page, "#cards", f"{kwh * 1.2 * 1.2:.2f}")
        page.fill("#pue", "")  # nothing is computed with a field that is empty
        has(page, "#cards", f"{kwh * 1.2 * 1.2:.2f}")
        page.reload()
        page.wait_for_selector("#job:not([hidden])")
        assert page.input_value("#price") == "1.2"


def test_nothing_of_a_job_is_left_on_the_page_of_the_next_one(browser: Any, url: str):
    begin_s = 1.7e9
    points = [
        {"at_s": begin_s + 60 * minute, "iteration_s": 1.0, "power_w": 2e3, "saved_j": 1e6 * minute}
        for minute in range(10)
    ]
    events = [{"at_s": begin_s, "text": "began long ago"}]
    history = {"points": points, "events": events, "waiting": [0.1, 0.7], "budgets": []}
    empty = {"points": [], "events": [], "waiting": [], "budgets": []}
    with looking(browser, url) as page:
        page.route("**/jobs/gpt/history", lambda route: route.fulfill(json=history))
        page.route("**/jobs/calm/history", lambda route: route.fulfill(json=empty))
        has(page, "#history-saved", "minutes since")
        has(page, "#waiting-caption", "rank 1 (70")
        page.click("#job-list a[href='#/jobs/calm']")
        page.locator("#job-title").filter(has_text="calm").wait_for()
        page.locator("#frontier svg").first.wait_for()
        left = ["#history", "#waiting-ranks", "#waiting-caption", "#events"]
        texts = "".join(map(page.text_content, left))
        assert "minutes since" not in texts
        assert "rank 1" not in texts
        assert "long ago" not in texts


def test_of_what_nobody_measured_the_page_says_what_it_is(browser: Any, url: str):
    with looking(browser, url) as page:
        shown = page.inner_text("#job")
        assert "This job sends no telemetry, so nothing here is measured on it" in shown
        assert set(page.locator("#cards .origin:visible").all_inner_texts()) == {"replayed"}


def test_a_part_of_the_curves_is_enlarged_by_dragging_and_left_by_the_list(browser: Any, url: str):
    begin_s = 1.7e9
    points = [
        {"at_s": begin_s + 60 * minute, "iteration_s": 1.0, "power_w": 2e3, "saved_j": 1e6 * minute}
        for minute in range(100)
    ]
    history = {"points": points, "events": [{"at_s": begin_s, "text": "began"}]}
    history |= {"waiting": [], "budgets": []}
    with looking(browser, url, viewport={"width": 1440, "height": 900}) as page:
        status = httpx.get(f"{url}/v1/jobs/gpt", timeout=LONG_S).json()
        status["job"]["since_s"] = begin_s
        page.route("**/jobs/gpt/history", lambda route: route.fulfill(json=history))
        page.route("**/jobs/gpt", lambda route: route.fulfill(json=status))
        has(page, "#history-saved", "minutes since")
        assert not page.is_visible("#waiting")
        rows = page.locator("#history-time details tbody tr")
        assert rows.count() == 100
        page.locator("#history-saved svg").first.scroll_into_view_if_needed()
        box = page.locator("#history-saved svg").first.bounding_box()
        middle = box["y"] + box["height"] / 2
        page.mouse.move(box["x"] + 0.4 * box["width"], middle)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.6 * box["width"], middle, steps=3)
        assert page.locator("#history-saved .chosen").bounding_box()["width"] > 10
        page.mouse.up()
        assert page.locator("#history-range").input_value() == "chosen"
        assert 10 < rows.count() < 40  # of all curves, not only of that which was dragged over
        assert page.locator("#history .event").count() == 0
        assert barriers(page, IMPACTS) == []
        page.select_option("#history-range", "0")
        assert rows.count() == 100
