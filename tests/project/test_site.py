"""The pages of docs/ as `make docs` builds them: their links work, and they need no network."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from browsing import IMPACTS, barriers, chromium, opened
from command_options import ROOT
from markdown_it import MarkdownIt
from strategies import few_and_many

HAS_REFERENCE = find_spec("griffe_sphinx") is not None
FETCHED = {
    "link": "href",
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "image": "href",
    "use": "href",
}


class Fetched(HTMLParser):
    """The addresses that a browser fetches to show a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get(FETCHED.get(tag, ""))
        if address:
            self.addresses.append(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip(
        "material", reason="mkdocs-material is not installed; pip install 'perseus-planner[docs]'"
    )
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "--quiet",
            "--site-dir",
            str(folder),
            *_config(folder),
        ],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},  # a warning about future releases of mkdocs
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (built.returncode, built.stdout, built.stderr) == (0, "", "")
    return folder


def _config(folder: Path) -> list[str]:
    """Return the option for a configuration without the pages from docstrings, if mkdocstrings
    is not installed.
    """
    if HAS_REFERENCE:
        return []
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    config["plugins"] = [each for each in config["plugins"] if "mkdocstrings" not in each]
    config["docs_dir"], config["hooks"] = (
        str(ROOT / "docs"),
        [str(ROOT / each) for each in config["hooks"]],
    )
    config["exclude_docs"] += "\nreference.md"
    config["nav"][-1]["Reference"].remove("reference.md")
    path = folder.with_suffix(".yml")
    path.write_text(yaml.safe_dump(config))
    return ["--config-file", str(path)]


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    """Serve the pages over HTTP, and yield the address."""
    handler = partial(Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class Quiet(SimpleHTTPRequestHandler):
    """Logs nothing."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.parametrize(
    "look",
    [
        {"color_scheme": "light"},
        {"color_scheme": "dark", "viewport": {"width": 390, "height": 844}},
    ],
    ids=["light", "dark, phone"],
)
@few_and_many("names", ["index", "planning"], ["faq", "exploring", "reference"])
def test_axe_finds_nothing_on_pages_not_even_of_the_theme(
    served: str, site: Path, look: dict[str, Any], names: list[str]
):
    with chromium() as browser:
        for name in names if HAS_REFERENCE else set(names) - {"reference"}:
            with opened(browser, f"{served}/{name}.html", **look) as page:
                page.locator(".md-search[aria-label]").wait_for(state="attached")
                assert barriers(page, IMPACTS) == [], name


def test_a_page_that_is_opened_from_a_folder_finds_words(site: Path):
    with chromium() as browser, opened(browser, (site / "index.html").as_uri()) as page:
        page.locator(".md-search__input").press_sequentially(
            "blocking power"
        )  # the page looks at keys
        page.locator(".md-search-result__item").first.wait_for()


def test_the_reference_has_what_the_package_exports(site: Path):
    if not HAS_REFERENCE:
        pytest.skip("mkdocstrings is not installed; pip install 'perseus-planner[docs]'")
    text = (site / "reference.html").read_text()
    documented = set(re.findall(r'id="perseus_planner\.(?:[\w.]+\.)?(\w+)"', text))
    assert documented >= {
        "solve",
        "Profile",
        "Frontier",
        "Plan",
        "Replicas",
        "Job",
        "Run",
        "Monitor",
        "Client",
    }
    assert documented >= {
        "plan_for",
        "baseline_time_s",
        "planner_runtime",
        "profile_pipeline",
        "PlannerError",
    }


def test_every_page_is_built_and_fetches_nothing_from_other_hosts(site: Path):
    pages = {page.name for page in site.glob("*.html")}
    written = {f"{page.stem}.html" for page in (ROOT / "docs").glob("*.md")}
    assert pages >= (written if HAS_REFERENCE else written - {"reference.html"})
    for page in site.rglob("*.html"):
        away = [
            each for each in Fetched(page.read_text()).addresses if re.match(r"(?:\w+:)?//", each)
        ]
        assert not away, f"{page.name}: {away}"
    for sheet in site.rglob("*.css"):
        assert not re.search(
            r"(?:url\(\s*[\"']?|@import\s+[\"'])(?:https?:)?//", sheet.read_text()
        ), sheet.name


def test_pages_open_from_a_folder(site: Path):
    with chromium() as browser:
        for name in ("index", "how-it-works"):
            with opened(browser, (site / f"{name}.html").as_uri()) as page:
                assert page.locator("h1").count() == 1


def test_the_links_of_the_readme_lead_to_files_and_headings():
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text())
    assert len(links) > 10
    for link in links:
        name, _, anchor = link.partition("#")
        assert (ROOT / name).exists(), link
        assert not anchor or anchor in anchors(ROOT / name), link


def anchors(page: Path) -> set[str]:
    """Return the anchors of its headings, as GitHub and mkdocs make them."""
    tokens = MarkdownIt("commonmark").parse(page.read_text())
    titles = [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def test_the_figure_of_savings_is_what_its_command_draws():
    made = runpy.run_path(str(ROOT / "docs" / "figures" / "savings.py"))["svg"]()
    assert made == (ROOT / "docs" / "figures" / "savings.svg").read_text()
