"""What README and docs/ tell readers to do works; `documents.py` has the rules."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import PAGES, ROOT, Reader, check_inline, commands_of, free_port, inline_commands
from made_runs import write_run

from perseus_planner import Plan
from perseus_planner.cli import main

README, *DOCS = PAGES


def _before(command: str) -> None:
    """What the reader would have meanwhile: what training wrote, and curl."""
    if command.startswith("planner show run"):
        write_run(Path("run"), Plan.load("plan.yaml"), 3)
    if "curl " in command and shutil.which("curl") is None:
        pytest.skip("curl is not installed, and the rest of the page needs it")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Who has read README, and goes on in the folder that it left, with the service that it started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("reader"))
        port = free_port()
        patch.setenv("PLANNER_SERVICE", f"http://127.0.0.1:{port}")
        patch.setenv("PLANNER_TOKEN", "")
        for name in ("examples", "benchmarks"):
            Path(name).symlink_to(ROOT / name)
        reader = Reader(port, _before)
        try:
            yield reader
        finally:
            reader.close()


def test_all_that_readme_shows_runs_as_written(reader: Reader):
    reader.reads(README)


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.stem)
def test_all_that_a_page_shows_runs_as_written_after_readme(reader: Reader, page: Path):
    reader.reads(page)


def test_every_command_is_shown_somewhere():
    assert commands_of(PAGES) == set(main.commands)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_in_the_text_are_such(page: Path):
    for command in inline_commands(page):
        check_inline(command)
