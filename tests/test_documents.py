"""What README and docs/ tell readers to do works; `documents.py` has the rules."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import PAGES, ROOT, Reader, check_inline, commands_of, free_port, inline_commands, starts_service
from made_runs import write_run

from perseus_planner import Plan
from perseus_planner.cli import main

DOCS = PAGES[1:]


def _before(command: str) -> None:
    """What the reader would have meanwhile: what training wrote, and curl."""
    if command.startswith("planner show run"):
        write_run(Path("run"), Plan.load("plan.yaml"), 3)
    if "curl " in command and shutil.which("curl") is None:
        pytest.skip("curl is not installed, and the rest of the page needs it")


@pytest.fixture(scope="module")
def after_readme(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Who has read README, in the folder that it left, with the service that it started."""
    folder, port = tmp_path_factory.mktemp("reader"), free_port()
    for name in ("examples", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PLANNER_TOKEN", "")
        reader = Reader(port, patch.setenv, _before)
        try:
            reader.reads(PAGES[0])
            yield reader
        finally:
            reader.close()


def test_all_that_readme_shows_runs_as_written(after_readme: Reader):
    assert Path("plan.yaml").exists()


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.stem)
def test_all_that_a_page_shows_runs_as_written_after_readme(
    after_readme: Reader, page: Path, monkeypatch: pytest.MonkeyPatch
):
    reader = Reader(free_port() if starts_service(page) else after_readme.port, monkeypatch.setenv, _before)
    try:
        reader.reads(page)
    finally:
        reader.close()


def test_every_command_is_shown_somewhere():
    assert commands_of(PAGES) == set(main.commands)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_in_the_text_are_such(page: Path):
    for command in inline_commands(page):
        check_inline(command)
