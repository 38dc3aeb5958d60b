"""The commands and code in the README and in docs/ work; `documents.py` has the rules."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click import ClickException
from command_options import ROOT, check_inline
from command_pages import PAGE, page_text
from documents import PAGES, Reader, blocks, commands_of, free_port, inline_commands, starts_service
from made_runs import write_run
from yaml import YAMLError

from perseus_planner import Plan
from perseus_planner.cli import main

DOCS = PAGES[1:]
#: Pages of releases tell of commands that were, so what they name need not exist today.
OF_TODAY = [page for page in PAGES if page.parent.name != "releases"]


def _before(command: str) -> None:
    """Provide what a reader has by now: the record of a training run, and curl."""
    if command.startswith("planner show run"):
        write_run(Path("run"), Plan.load("plan.yaml"), 3)
    if "curl " in command and shutil.which("curl") is None:
        pytest.skip("curl is not installed, and the rest of the page needs it")


@pytest.fixture(scope="module")
def after_readme(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A reader of the README, in the folder that it left, with the service that it started."""
    folder, port = tmp_path_factory.mktemp("reader"), free_port()
    for name in ("examples", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PLANNER_TOKEN", "")
        reader = Reader(port, patch.setenv, _before)
        try:
            reader.read(PAGES[0])
            yield reader
        finally:
            reader.close()


def test_the_readme_runs_as_written(after_readme: Reader):
    assert Path("plan.yaml").exists()


def test_the_readme_is_short_and_writes_no_file_twice():
    assert len(PAGES[0].read_text().splitlines()) <= 150
    lines = [line for block in blocks(PAGES[0]) if block.language == "sh" for line in block.lines()]
    written = [file for line in lines for file in re.findall(r"(?:-o|--plot|--record) (\S+)", line)]
    assert len(written) >= 5
    assert len(set(written)) == len(written)


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.stem)
def test_a_page_runs_as_written_after_the_readme(
    after_readme: Reader, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(Path.cwd(), tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    reader = Reader(
        free_port() if starts_service(page) else after_readme.port, monkeypatch.setenv, _before
    )
    try:
        reader.read(page)
    finally:
        reader.close()


def test_every_command_is_shown_somewhere():
    assert commands_of(OF_TODAY) == set(main.commands)


def test_every_option_of_every_command_stands_on_the_page_of_commands():
    remedy = "run python tests/support/command_pages.py"
    assert PAGE.read_text(encoding="utf-8") == page_text(), remedy


@pytest.mark.parametrize("page", OF_TODAY, ids=lambda page: page.stem)
def test_commands_in_the_text_exist(page: Path):
    for command in inline_commands(page):
        check_inline(command)


@pytest.mark.parametrize(
    "text",
    [
        "    planner show plan.yaml\n",
        "<pre>planner show plan.yaml</pre>\n",
        "```\nplanner show plan.yaml\n```\n",
        "```console\nplanner show plan.yaml\n```\n",
        "```text\n$ planner show plan.yaml\n```\n",
        "```text\n…nothing prints this…\n```\n",
        '```text title="planner reset"\nAll is set.\n```\n',
        '```sh title="no time"\nplanner show plan.yaml\n```\n',
        '```sh title="needs a GPU"\nnvidia-smi\n```\n',
        '```sh title="installs"\npip install .[gold]\n```\n',
        '```python title="in the training script"\nfrom perseus_planner import '
        "solve\nsolve(profile, colour=1)\n```\n",
        "```sh\nfalse\n```\n",
        "```sh\nplanner show nothing.yaml\n```\n",
        "```yaml\n{\n```\n",
        "```ini\n[Service]\nExecStart=/bin/planner serve --colour\n```\n",
    ],
)
def test_a_wrong_block_is_found(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    page = folder / "page.md"
    page.write_text(text)
    with pytest.raises((AssertionError, TypeError, ClickException, YAMLError)):
        Reader(0, monkeypatch.setenv).read(page)


@pytest.mark.parametrize(
    "command", ["planner fly", "planner show --colour", "make gold", "python benchmarks/gold.py"]
)
def test_a_wrong_command_in_the_text_is_found(command: str):
    with pytest.raises((AssertionError, KeyError)):
        check_inline(command)
