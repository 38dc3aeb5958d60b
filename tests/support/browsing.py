"""Headless Chromium for tests of pages, and checks of a page."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
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
LONG_MS = 150_000.0  #: much longer than a page takes on a busy machine
IMPACTS = ("minor", "moderate", *_SERIOUS)
_HERE = ("127.0.0.1", "localhost", None)  # None: of a file, or data:


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a browser of Playwright, or skip the test if none is installed."""
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
    """Yield the page at `url`; check that its console stays empty and that no request leaves this
    machine.

    Args:
        browser: from `chromium`.
        url: a page of this machine, http: or file:.
        context: arguments of Playwright's `new_context`, such as color_scheme="dark".
    """
    messages: list[str] = []
    requests: list[str] = []
    with browser.new_context(**context) as fresh:
        fresh.set_default_timeout(LONG_MS)
        page = fresh.new_page()
        page.on(
            "console",
            lambda message: (
                messages.append(message.text) if message.type in ("error", "warning") else None
            ),
        )
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(url)
        yield page
        away = [each for each in requests if urlsplit(each).hostname not in _HERE]
        assert not away, away
        assert not messages, messages


def barriers(page: Any, impacts: Collection[str] = _SERIOUS) -> list[str]:
    """Return the accessibility problems of these impacts that axe-core finds on the page."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        f"{each['id']}: {each['help']}: {each['nodes'][0]['html']}"
        for each in found
        if each["impact"] in impacts
    ]
