"""The browser of the tests finds errors, requests and accessibility problems."""

from __future__ import annotations

from pathlib import Path

import pytest
from browsing import barriers, chromium, opened


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


def page_of(folder: Path, text: str) -> str:
    file = folder / "page.html"
    file.write_text(f"<!doctype html><html lang=en><title>page</title><body><main>{text}</main>")
    return file.as_uri()


def test_a_good_page_is_good(browser, tmp_path: Path):
    with opened(browser, page_of(tmp_path, "<h1>Good</h1>")) as page:
        assert page.inner_text("h1") == "Good"
        assert barriers(page) == []


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
