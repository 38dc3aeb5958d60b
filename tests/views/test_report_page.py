"""The report in a real browser: accessible, usable by keyboard, small with many computations,
and self-contained; and what that browser finds wrong.
"""

from __future__ import annotations

import re
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import pytest
from browsing import IMPACTS, barriers, chromium, opened
from commands import done
from made_runs import write_run
from strategies import smooth_profile

from perseus_planner import schedules, solve
from perseus_planner.plans.plan import Plan
from perseus_planner.profiles.profiles import Profile
from perseus_planner.schedules.iteration import Iteration
from perseus_planner.schedules.pipeline import pipeline_iteration
from perseus_planner.views.report import make_report, page
from perseus_planner.views.savings import EnergyRates, IterationSize
from perseus_planner.views.sources import Sources

PHONE = {"viewport": {"width": 390, "height": 844}}


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write the page of a small pipeline from all kinds of files."""
    folder = tmp_path_factory.mktemp("report")
    profile = smooth_profile(3, step_mhz=150)
    frontier = solve(profile, schedules.one_f_one_b(3, 6))
    plan = frontier.plan_for(1.02 * frontier.baseline_time_s)
    profile.save(folder / "profile.yaml")
    frontier.save(folder / "frontier.npz")
    plan.save(folder / "plan.yaml")
    (folder / "run").mkdir()
    write_run(folder / "run", plan)
    names = " ".join(
        str(folder / name) for name in ("frontier.npz", "plan.yaml", "run", "profile.yaml")
    )
    done(f"report {names} -o {folder / 'report.html'} --tokens-per-iteration 4096")
    return (folder / "report.html").as_uri()


@pytest.mark.needs("lab")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_has_all_figures_and_no_barrier(browser, report: str, theme: str):
    with opened(browser, report, color_scheme=theme) as page:
        page.locator("#curve-5 svg").wait_for()  # drawn before it is scrolled to
        assert (
            page.locator("#energy-ranks rect.bar").count() == 3 * 2 * 3
        )  # ranks, computing and waiting, iterations
        assert (
            page.locator("#energy-phases rect.bar").count() == 3 * 2 * 2
        )  # the phases of a run are not recorded
        assert (
            page.locator("#frontier svg[role=img]")
            .get_attribute("aria-label")
            .startswith("Energy of an iteration")
        )
        assert page.locator("#timelines .timeline").count() == 3
        assert page.locator("#frontier .mark").count() >= 6
        assert page.locator("#changes rect.bar").count() == 3
        assert barriers(page, IMPACTS) == []


def test_it_fits_a_phone(browser, report: str):
    with opened(browser, report, **PHONE) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert barriers(page, IMPACTS) == []


def test_paper_gets_light_colours_and_every_curve(browser, report: str):
    with opened(browser, report, color_scheme="dark") as page:
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        page.emulate_media(media="print")
        assert page.locator(".multiples svg").count() == 6
        assert (
            page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        )
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        page.emulate_media(media="screen")
        assert (
            page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
        )


def test_the_numbers_of_a_chart_unfold(browser, report: str):
    with opened(browser, report) as page:
        page.locator("#frontier summary").click()
        assert page.locator("#frontier tbody tr").filter(has_text="plan.yaml").is_visible()


def test_the_timeline_is_read_and_zoomed_by_keyboard(browser, report: str):
    with opened(browser, report) as page:
        first = page.locator("#timelines canvas").first
        first.focus()
        page.keyboard.press("ArrowRight")
        status = page.locator("#timelines .readout").first
        assert status.inner_text().startswith("Rank 0, 0F0: forward of microbatch 0, stage 0")
        page.keyboard.press("ArrowDown")
        assert status.inner_text().startswith("Rank 1, 1F")
        whole = picture(page)
        page.keyboard.press("+")
        zoomed = picture(page)
        assert zoomed != whole
        page.keyboard.press("0")
        assert picture(page) == whole


def test_the_wheel_zooms_and_a_drag_selects(browser, report: str):
    with opened(browser, report) as page:
        canvas = page.locator("#timelines canvas").first
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        whole, scrolled, y = picture(page), page.evaluate("scrollY"), box["y"] + 8

        def without_pointer() -> str:
            page.mouse.move(box["x"] + 1, box["y"] - 20)
            return picture(page)

        page.mouse.move(box["x"] + 200, y)
        page.mouse.move(box["x"] + 300, y)
        page.mouse.wheel(0, -300)
        zoomed = without_pointer()
        assert zoomed != whole
        assert page.evaluate("scrollY") == scrolled
        canvas.dblclick()
        assert without_pointer() == whole
        page.mouse.move(box["x"] + 300, y)
        page.mouse.down()
        page.mouse.move(box["x"] + 420, y)
        page.mouse.up()
        assert without_pointer() not in (whole, zoomed)
        canvas.focus()
        page.keyboard.press("Escape")
        assert without_pointer() == whole


def test_a_forward_and_a_backward_differ_in_shape(browser, report: str):
    with opened(browser, report) as page:
        # Rank 2 runs forward and backward in turn. Only below a forward is the panel seen.
        blank = """() => {
            const canvas = document.querySelector("#timelines canvas"), context = canvas.getContext("2d");
            const row = 2 * 29 + 24, y = Math.round(row * devicePixelRatio);
            const data = context.getImageData(40, y, canvas.width - 44, 1).data;
            return Array.from({ length: data.length / 4 }, (_, at) => data.slice(4 * at, 4 * at + 3).join());
        }"""  # noqa: E501
        below = page.evaluate(blank)
        changes = sum(
            one != next_one for one, next_one in pairwise([each == "255,255,255" for each in below])
        )
        assert changes >= 2 * 6
        keys = page.locator(".keys li:visible").all_inner_texts()
        assert keys[:2] == ["forward: upper part", "backward: full height"]


@pytest.mark.needs("lab")
@pytest.mark.parametrize("width", [1280, 390])
def test_every_point_is_at_its_place_with_a_label_that_nothing_crosses(
    browser, report: str, width: int
):
    with opened(browser, report, viewport={"width": width, "height": 844}) as page:
        found = page.evaluate("""() => {
            const all = (of) => [...document.querySelectorAll(`#frontier ${of}`)];
            const boxes = (of) => all(of).map((each) => each.getBoundingClientRect());
            const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
            const [line] = all("path.line"), labels = boxes(".label");
            const at = (share) => {
                const point = line.getPointAtLength(share * line.getTotalLength()), matrix = line.getScreenCTM();
                return point.matrixTransform(matrix);
            };
            const on = Array.from({ length: 400 }, (_, index) => at(index / 399));
            const inside = (box, { x, y }) => box.left < x && x < box.right && box.top + 3 < y && y < box.bottom - 3;
            const pairs = (boxes) => boxes.flatMap((a, i) => boxes.slice(i + 1).filter((b) => meet(a, b)));
            const struck = labels.filter((box) => on.some((point) => inside(box, point)));
            const { points } = JSON.parse(document.getElementById("data").textContent).frontier;
            const centres = boxes(".mark").map((box) => [(box.left + box.right) / 2, box.bottom]);
            return [centres, points, all(".label tspan").map((each) => each.textContent), struck.length, pairs(labels).length];
        }""")  # noqa: E501
        centres, points, names, *troubles = found
        assert troubles == [0, 0]
        assert len(centres) == len(points) >= 6
        assert sorted(names) == sorted(each["name"].replace("bound, ", "") for each in points)
        # Marks are as far apart as times are: none is moved aside, so faster is farther left.
        times_s = sorted(each["time_s"] for each in points)
        places = sorted(x for x, _ in centres)
        scale = (places[-1] - places[0]) / (times_s[-1] - times_s[0])
        for x, time_s in zip(places, times_s, strict=True):
            assert x == pytest.approx(places[0] + scale * (time_s - times_s[0]), abs=1.0)


def test_the_colour_is_of_power_or_of_clocks(browser, report: str):
    with opened(browser, report) as page:
        by_power = picture(page, 1)  # in the pipeline before, all is at the top of both scales
        page.locator("[data-colour=clock]").click()
        assert picture(page, 1) != by_power
        assert page.locator(".scale .high").inner_text() == "1,410\u00a0MHz"
        assert page.locator("[data-colour=clock]").get_attribute("aria-pressed") == "true"


def test_the_pointer_finds_computations_and_waiting(browser, report: str):
    with opened(browser, report) as page:
        page.locator("#timelines canvas").first.scroll_into_view_if_needed()
        box = page.locator("#timelines canvas").first.bounding_box()
        status = page.locator("#timelines .readout").first
        page.mouse.move(box["x"] + 44, box["y"] + 8)
        assert "0F0" in status.inner_text()
        page.mouse.move(box["x"] + 44, box["y"] + 2 * 29 + 8)
        assert status.inner_text().startswith("Rank 2 waits")


def test_16_ranks_of_512_microbatches_are_drawn_and_are_no_elements_of_the_page(
    browser, tmp_path: Path
):
    profile = replace(smooth_profile(16, step_mhz=150), origin="simulated")
    iteration = pipeline_iteration(schedules.one_f_one_b(16, 512))
    plans = {
        name: plan_of(profile, iteration, clocks) for name, clocks in (("before", 1), ("after", 4))
    }
    file = tmp_path / "report.html"
    file.write_text(
        page(make_report(Sources(profile, plans=plans), EnergyRates(), IterationSize()))
    )
    assert file.stat().st_size < 5e6
    with opened(browser, file.as_uri()) as fresh:
        metrics = fresh.context.new_cdp_session(fresh)
        metrics.send("Performance.enable")
        fresh.locator("#timelines canvas").first.focus()
        fresh.keyboard.press("ArrowRight")
        fresh.keyboard.press("+")
        assert "0F0" in fresh.locator("#timelines .readout").first.inner_text()
        counts = {
            each["name"]: each["value"]
            for each in metrics.send("Performance.getMetrics")["metrics"]
        }
        assert 0 < counts["Nodes"] < 16 * 512
        assert 0 < counts["LayoutCount"] < 100


def picture(page, which: int = 0) -> str:
    """Return the picture of a timeline once it is drawn."""
    drawn = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    url = page.evaluate(
        f"{drawn}.then(() => document.querySelectorAll('#timelines canvas')[{which}].toDataURL())"
    )
    return sha256(url.encode()).hexdigest()


def plan_of(profile: Profile, iteration: Iteration, choices: int) -> Plan:
    """Return a plan that uses the highest `choices` clocks in turn; its times and energies do
    not matter.
    """
    keys = zip(iteration.computations, iteration.keys, strict=True)
    clocks = {
        str(each): profile.measurements[key][i % choices].clock_mhz
        for i, (each, key) in enumerate(keys)
    }
    table = {
        key: {row.clock_mhz: row for row in rows} for key, rows in profile.measurements.items()
    }
    numbers = (30.0, 30.0, 9e4, 8e4, 30.0, 1e5)  # times and energies, about right
    return Plan(
        iteration,
        clocks,
        table,
        profile.digest,
        None,
        "simulated",
        profile.blocking_power_w,
        *numbers,
    )


# --- The browser finds errors, requests and accessibility problems


def page_of(folder: Path, text: str) -> str:
    file = folder / "page.html"
    file.write_text(f"<!doctype html><html lang=en><title>page</title><body><main>{text}</main>")
    return file.as_uri()


def test_a_good_page_is_good(browser, tmp_path: Path):
    with opened(browser, page_of(tmp_path, "<h1>Good</h1>")) as page:
        assert page.inner_text("h1") == "Good"
        assert barriers(page, IMPACTS) == []


def test_an_error_of_a_script_is_found(browser, tmp_path: Path):
    with (
        pytest.raises(AssertionError, match="no such thing"),
        opened(browser, page_of(tmp_path, "<script>throw Error('no such thing')</script>")),
    ):
        pass


def test_a_request_that_leaves_the_machine_is_found(browser, tmp_path: Path):
    with (
        pytest.raises(AssertionError, match="example"),
        opened(
            browser, page_of(tmp_path, "<img alt='' src='http://192.0.2.1/example.png'>")
        ) as page,
    ):
        page.wait_for_load_state()


def test_an_element_without_a_name_is_found(browser, tmp_path: Path):
    with opened(
        browser, page_of(tmp_path, "<h1>Bad</h1><img src='data:,'><button></button>")
    ) as page:
        assert any("button-name" in each for each in barriers(page))


def test_small_charts_have_two_ticks_and_the_heading_keeps_from_the_edge(browser, report: str):
    with opened(browser, report) as page:
        page.locator("#curve-5 svg").wait_for()
        ticks = page.eval_on_selector_all(
            ".multiples svg",
            "charts => charts.map(c => c.querySelectorAll('text[text-anchor=middle]').length)",
        )
        assert ticks
        assert min(ticks) >= 2
        assert page.locator("h1").bounding_box()["y"] >= 16  # px


def test_no_line_ends_between_a_number_and_its_percent_sign(browser, report: str):
    with opened(browser, report) as page:
        text = page.locator("main").inner_text()
    assert "\u00a0%" in text
    assert not re.findall(r".*\d %.*", text)
