"""A real browser for tests of pages: headless Chromium; and what is wrong with a page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

_CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
# The first two are for containers; the others keep it from asking its makers for updates.
_OPTIONS = (
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--no-first-run",
)
_SERIOUS = ("serious", "critical")
_HERE = ("127.0.0.1", "localhost", None)  # None: of a file, or data:


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of Playwright; the test is skipped where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api")
    program = next(filter(None, map(shutil.which, _CHROMIUM)), None)
    if program is None:
        pytest.skip("no Chromium on this machine; install Debian's package chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=_OPTIONS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Any, url: str, **context: Any) -> Iterator[Any]:
    """A page at `url`; when the block ends well, nothing was said on its console and no request left this machine.

    Args:
        browser: of `chromium`.
        url: http: of this machine, or file:.
        context: of Playwright's `new_context`, such as color_scheme="dark", viewport={"width": 390, "height": 844}.
    """
    said: list[str] = []
    asked: list[str] = []
    with browser.new_context(**context) as fresh:
        page = fresh.new_page()
        page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(url)
        yield page
        away = [each for each in asked if urlsplit(each).hostname not in _HERE]
        assert not away, away
        assert not said, said


def barriers(page: Any) -> list[str]:
    """What axe-core finds on the page that keeps people from using it, of the serious kinds."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [f"{each['id']}: {each['help']}" for each in found if each["impact"] in _SERIOUS]
