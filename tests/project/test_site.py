"""The pages of docs/ as `make docs` builds them: their links work, and they need no network."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from browsing import chromium, opened
from command_options import ROOT
from markdown_it import MarkdownIt

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
    pytest.importorskip("material", reason="mkdocs-material is not installed; pip install 'perseus-planner[docs]'")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},  # a warning about future releases of mkdocs
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (built.returncode, built.stdout, built.stderr) == (0, "", "")
    return folder


def test_every_page_is_built_and_fetches_nothing_from_other_hosts(site: Path):
    pages = {page.name for page in site.glob("*.html")}
    assert pages >= {f"{page.stem}.html" for page in (ROOT / "docs").glob("*.md")}
    for page in site.rglob("*.html"):
        away = [each for each in Fetched(page.read_text()).addresses if re.match(r"(?:\w+:)?//", each)]
        assert not away, f"{page.name}: {away}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:url\(\s*[\"']?|@import\s+[\"'])(?:https?:)?//", sheet.read_text()), sheet.name


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
