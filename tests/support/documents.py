"""Read the README and the pages of docs/ as a user does: run or check every block in order, in one
folder.

| block | what happens |
|---|---|
| `sh` | each line is run: `planner` in this process, `planner serve &` in the background, all
else by bash |
| `sh title="REASON"` | with one of `REASONS`: the options of each line are parsed by its program,
but it is not run |
| `python` | run; names last from block to block |
| `python title="REASON"` | its imports are run, and calls of the imported names are checked against
their signatures |
| `yaml`, `json`, `csv`, `ini`, `bash`, optionally with a file name as title | parsed, and
written to that file |
| `text title="COMMAND"` | the command is run and must print this; … stands for any text |
| `text title="needs a cluster: COMMAND"` | the same, if there is a cluster |
| `text` that begins with … | a message that only some machines print: its parts must occur in the
sources |
| `text` | must not contain a command |

Anything else fails, as does an indented block. A command in the text, `planner …`, must exist and
have these options."""

from __future__ import annotations

import ast
import configparser
import csv
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from click.testing import CliRunner, Result
from command_options import ROOT, check_python, check_shell
from launching import free_port as free_port
from markdown_it import MarkdownIt
from markdown_it.token import Token

from perseus_planner.cli import console, main

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_CLUSTER = "needs a cluster"
REASONS = {
    "installs",
    "needs a GPU",
    _CLUSTER,
    "needs root",
    "in the training script",
    "until interrupted",
}
PORT = "8400"  #: the port of the service in all pages, replaced by a free one
_PROGRAMS = [
    "planner",
    "curl",
    "pip",
    "python",
    "python3",
    "make",
    "torchrun",
    "deepspeed",
    "sudo",
    "export",
    "bash",
]


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    place: str
    language: str
    title: str | None
    text: str

    def lines(self) -> list[str]:
        """Return the commands without comments, with lines joined after a backslash or inside
        quotation marks.
        """
        found, begun = [], ""
        for line in self.text.replace("\\\n", " ").splitlines():
            begun = f"{begun}\n{line}".strip()
            if begun and not begun.startswith("#") and _is_whole(begun):
                found.append(begun)
            if not begun or begun.startswith("#") or _is_whole(begun):
                begun = ""
        assert not begun, f"{self.place}: a quotation mark is not closed"
        return found


def _is_whole(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return True


def _tokens(page: Path) -> Iterator[Token]:
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text()):
        yield token
        yield from token.children or ()


def blocks(page: Path) -> list[Block]:
    """Return all blocks of a page."""
    found = []
    for token in _tokens(page):
        place = f"{page.name}, line {token.map[0] + 1}" if token.map else page.name
        assert token.type != "code_block", f"{place}: an indented block; put it between fences"
        assert not (token.type == "html_block" and "<pre" in token.content), (
            f"{place}: a block in HTML"
        )
        if token.type == "fence":
            language, _, rest = token.info.partition(" ")
            title = re.fullmatch(r'(?:title="([^"]+)")?', rest)
            assert title, f"{place}: only a title may follow the language, not {rest!r}"
            found.append(Block(place, language, title[1], token.content))
    return found


def inline_commands(page: Path) -> list[str]:
    """Return the commands in the text of a page."""
    code = [token.content for token in _tokens(page) if token.type == "code_inline"]
    return [text for text in code if re.match(r"(planner|make|python [a-z/_]+\.py)\b", text)]


@dataclass
class Reader:
    """Reads pages, and runs what they show in the current folder.

    Attributes:
        port: The port of the service that a page starts or uses.
        export: Sets an environment variable while the page is read.
        before: Called with each command before it is run.
        has_cluster: Whether blocks that need a cluster are run too.
        names: The names that the page's Python blocks have defined.
    """

    port: int
    export: Callable[[str, str], None]
    before: Callable[[str], None] = lambda command: None
    has_cluster: bool = False
    names: dict[str, Any] = field(default_factory=dict)
    _served: list[subprocess.Popen[str]] = field(default_factory=list)

    def read(self, page: Path) -> None:
        """Run or check all blocks, in order, after writing all files."""
        found = blocks(page)
        for block in found:
            if block.language in _DATA:
                _DATA[block.language](block.text)
                if block.title:
                    Path(block.title).write_text(block.text)
        for block in found:
            self._read(block)
        self.names.clear()

    def close(self) -> None:
        """Stop the service that a page has started."""
        for process in self._served:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=300)
        self._served.clear()

    def _read(self, block: Block) -> None:
        if block.language == "text":
            self._compare(block)
            return
        if block.language in _DATA:
            return
        assert block.language in ("sh", "python"), (
            f"{block.place}: there is no rule for a block of {block.language!r}"
        )
        assert block.title is None or block.title in REASONS, (
            f"{block.place}: {block.title!r} is not one of {REASONS}"
        )
        if block.language == "python":
            code = compile(block.text, block.place, "exec")
            check_python(block.text) if block.title else exec(code, self.names)
            return
        for line in block.lines():
            if block.title and not (self.has_cluster and block.title == _CLUSTER):
                check_shell(line)
            else:
                self._run(line, block.place)

    def _compare(self, block: Block) -> None:
        if block.title is None:
            programs = [
                word for word in map(_program, block.text.splitlines()) if word in _PROGRAMS
            ]
            assert not programs, f"{block.place}: a command in a block of text; make it sh"
            if block.text.startswith("…"):
                parts = [part.strip() for part in block.text.split("…") if part.strip()]
                missing = [part for part in parts if not any(part in text for text in _texts())]
                assert not missing, f"{block.place}: no source has {missing}"
            return
        command = block.title.removeprefix(f"{_CLUSTER}: ")
        if command != block.title and not self.has_cluster:
            check_shell(command)
            return
        result = _invoked(_words(self._ported(command)))
        said = re.sub(r"\s+", " ", result.output).strip()
        pattern = ".*".join(map(re.escape, re.sub(r"\s+", " ", block.text).strip().split("…")))
        assert re.search(pattern, said), f"{block.place}: it prints\n{result.output}"

    def _ported(self, text: str) -> str:
        return text.replace(PORT, str(self.port))

    def _run(self, line: str, place: str) -> None:
        line = self._ported(line)
        self.before(line)
        exported = re.fullmatch(r"export (\w+)=(.*)", line)
        if exported:
            self.export(exported[1], _bash(f"printf %s {exported[2]}", place))
        elif line.startswith("planner serve"):
            self._serve(line, place)
        elif line.startswith("planner ") and not re.search(r"[$|<>;&]", line.partition(" #")[0]):
            result = _invoked(_words(line))
            assert (result.exit_code, result.stderr) == (0, ""), f"{place}: {line}\n{result.output}"
        else:
            said = _bash(line, place)
            assert '{"title":' not in said, f"{place}: {line}\n{said}"

    def _serve(self, line: str, place: str) -> None:
        """Start a service instead of the one before, and wait until it listens."""
        self.close()
        options = _words(line.partition("&")[0])
        at = [] if {"--unix", "--port"} & set(options) else ["--port", str(self.port)]
        python = [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else [])]
        process = subprocess.Popen(
            [*python, "-m", "perseus_planner", *options, *at],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_STATE_HOME": str(Path("state").absolute())},
            # A background process ignores SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        self._served.append(process)
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("Listening at "), (
            f"{place}: {process.stderr.read()}"
        )


def _bash(line: str, place: str) -> str:
    """Run a line with the planner on the path and without input; return what it prints."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", line],
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert ran.returncode == 0, f"{place}: {line}\n{ran.stdout}{ran.stderr}"
    return ran.stdout


@cache
def _texts() -> list[str]:
    """Return all constant texts of the sources, including the parts of f-strings."""
    files = [
        file
        for folder in ("perseus_planner", "profiler", "runtime")
        for file in (ROOT / folder).rglob("*.py")
    ]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


_DATA: dict[str, Callable[[str], object]] = {
    "yaml": lambda text: list(yaml.safe_load_all(text)),
    "json": json.loads,
    "csv": lambda text: list(csv.DictReader(text.splitlines(), strict=True)),
    "ini": lambda text: check_unit(text),
    "bash": lambda text: subprocess.run(["bash", "-n"], input=text, text=True, check=True),
}


def check_unit(text: str) -> None:
    """Check the command that a systemd unit executes."""
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign] # its keys keep their case
    unit.read_string(text)
    path, _, rest = unit["Service"]["ExecStart"].partition(" ")
    check_shell(f"{Path(path).name} {rest}")


def _invoked(words: list[str]) -> Result:
    """Run a command of the planner, which does not say how far it is on a slow machine."""
    with mock.patch.object(console, "_LINE_S", math.inf):
        return CliRunner().invoke(main, words)


def _words(line: str) -> list[str]:
    return shlex.split(line, comments=True)[1:]


def _program(line: str) -> str:
    return (line.removeprefix("$ ").split() or [""])[0]


def starts_service(page: Path) -> bool:
    """Return whether a page starts a service."""
    run = (block for block in blocks(page) if block.language == "sh" and not block.title)
    return any(line.startswith("planner serve") for block in run for line in block.lines())


def commands_of(pages: list[Path]) -> set[str]:
    """Return the subcommands of the planner that the pages show."""
    lines = [
        line
        for page in pages
        for block in blocks(page)
        if block.language == "sh"
        for line in block.lines()
    ]
    return {
        found for line in lines for found in re.findall(r"(?:^|\| )planner ([\w-]+)(?=\s|$)", line)
    }
