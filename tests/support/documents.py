"""README and the pages of docs/ as a reader takes them: every block in order, in one folder; none is left out.

| block | what becomes of it |
|---|---|
| `sh` | each line is run: `planner` in this process, `planner serve` beside it, all else by bash |
| `sh title="REASON"` | one of `REASONS`: each line is read by the program's own parser of options, and not run |
| `python` | run; names are kept from block to block |
| `python title="REASON"` | its imports are made, and its calls of what they import are held against the signatures |
| `yaml`, `json`, `csv`, `ini`, a file's name as title or none | read; where it has a name it is then that file |
| `text title="COMMAND"` | what that command prints on both streams; … stands for any text |
| `text` that begins with … | a message that only some machines give: its parts stand in the sources |
| `text` | no command: a formula, a picture |

Anything else is refused, an indented block, too. In the text, `planner …` has options that there are.
"""

from __future__ import annotations

import ast
import configparser
import csv
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner
from command_options import ROOT, check_python, check_shell
from markdown_it import MarkdownIt
from markdown_it.token import Token

from perseus_planner.cli import main

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
REASONS = {"installs", "needs a GPU", "needs a cluster", "needs root", "in the training script", "until interrupted"}
PORT = "8400"  #: of the service, in every page; run on a free one
_PROGRAMS = ["planner", "curl", "pip", "python", "python3", "make", "torchrun", "deepspeed", "sudo", "export", "bash"]


@dataclass(frozen=True)
class Block:
    """What stands between fences."""

    place: str
    language: str
    title: str | None
    text: str

    def lines(self) -> list[str]:
        """The commands: each with the lines that a backslash or an open quotation mark continues, without comments."""
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
    """All blocks of a page; one that no rule speaks of fails."""
    found = []
    for token in _tokens(page):
        place = f"{page.name}, line {token.map[0] + 1}" if token.map else page.name
        assert token.type != "code_block", f"{place}: an indented block; put it between fences"
        assert not (token.type == "html_block" and "<pre" in token.content), f"{place}: a block in HTML"
        if token.type == "fence":
            language, _, rest = token.info.partition(" ")
            title = re.fullmatch(r'(?:title="([^"]+)")?', rest)
            assert title, f"{place}: only a title may follow the language, not {rest!r}"
            found.append(Block(place, language, title[1], token.content))
    return found


def inline_commands(page: Path) -> list[str]:
    """Commands that stand in the text."""
    code = [token.content for token in _tokens(page) if token.type == "code_inline"]
    return [text for text in code if re.match(r"(planner|make|python [a-z/_]+\.py)\b", text)]


@dataclass
class Reader:
    """Who reads a page and does what it says, in the current folder.

    Attributes:
        port: of the service that a page starts or asks.
        export: sets an environment variable, as long as the page is read.
        before: called with each command before it is run.
        names: what the page's Python has named.
    """

    port: int
    export: Callable[[str, str], None]
    before: Callable[[str], None] = lambda command: None
    names: dict[str, Any] = field(default_factory=dict)
    _served: list[subprocess.Popen[str]] = field(default_factory=list)

    def reads(self, page: Path) -> None:
        """All blocks, in order, but files before all else."""
        found = blocks(page)
        for block in found:
            if block.language in _DATA:
                _DATA[block.language](block.text)
                if block.title:
                    Path(block.title).write_text(block.text)
        for block in found:
            self._reads(block)
        self.names.clear()

    def close(self) -> None:
        """End the service that a page has started."""
        for process in self._served:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)
        self._served.clear()

    def _reads(self, block: Block) -> None:
        if block.language == "text":
            self._compares(block)
            return
        if block.language in _DATA:
            return
        assert block.language in ("sh", "python"), f"{block.place}: no rule for a block of {block.language!r}"
        assert block.title is None or block.title in REASONS, f"{block.place}: {block.title!r} is no reason"
        if block.language == "python":
            code = compile(block.text, block.place, "exec")
            check_python(block.text) if block.title else exec(code, self.names)
            return
        for line in block.lines():
            if block.title:
                check_shell(line)
            else:
                self._runs(line, block.place)

    def _compares(self, block: Block) -> None:
        if block.title is None:
            programs = [word for word in map(_program, block.text.splitlines()) if word in _PROGRAMS]
            assert not programs, f"{block.place}: a command in a block of text; make it sh"
            if block.text.startswith("…"):
                parts = [part.strip() for part in block.text.split("…") if part.strip()]
                unsaid = [part for part in parts if not any(part in said for said in _sayings())]
                assert not unsaid, f"{block.place}: nothing says {unsaid}"
            return
        result = CliRunner().invoke(main, _words(self._ported(block.title)))
        said = re.sub(r"\s+", " ", result.output).strip()
        pattern = ".*".join(map(re.escape, re.sub(r"\s+", " ", block.text).strip().split("…")))
        assert re.search(pattern, said), f"{block.place}: it prints\n{result.output}"

    def _ported(self, text: str) -> str:
        return text.replace(PORT, str(self.port))

    def _runs(self, line: str, place: str) -> None:
        line = self._ported(line)
        self.before(line)
        exported = re.fullmatch(r"export (\w+)=(.*)", line)
        if exported:
            self.export(exported[1], _bash(f"printf %s {exported[2]}", place))
        elif line.startswith("planner serve"):
            self._serves(line, place)
        elif line.startswith("planner ") and not re.search(r"[$|<>;&]", line.partition(" #")[0]):
            result = CliRunner().invoke(main, _words(line))
            assert (result.exit_code, result.stderr) == (0, ""), f"{place}: {line}\n{result.output}"
        else:
            said = _bash(line, place)
            assert '{"error"' not in said, f"{place}: {line}\n{said}"

    def _serves(self, line: str, place: str) -> None:
        """Start a service, instead of the one before if there is any; the page's next line waits until it listens."""
        self.close()
        options = _words(line)
        at = [] if {"--unix", "--port"} & set(options) else ["--port", str(self.port)]
        python = [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else [])]
        process = subprocess.Popen(
            [*python, "-m", "perseus_planner", *options, *at],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a background job ignores it
        )
        self._served.append(process)
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("Listening at "), f"{place}: {process.stderr.read()}"


def _bash(line: str, place: str) -> str:
    """What it prints, as a reader with the planner on the path and nobody to ask would see it."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", line],
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, f"{place}: {line}\n{ran.stdout}{ran.stderr}"
    return ran.stdout


@cache
def _sayings() -> list[str]:
    """All constant texts of the sources, and of each f-string what stands between its values."""
    files = [file for folder in ("perseus_planner", "profiler", "runtime") for file in (ROOT / folder).rglob("*.py")]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


_DATA: dict[str, Callable[[str], object]] = {
    "yaml": lambda text: list(yaml.safe_load_all(text)),
    "json": json.loads,
    "csv": lambda text: list(csv.DictReader(text.splitlines(), strict=True)),
    "ini": lambda text: _unit(text),
}


def _unit(text: str) -> None:
    """A unit of systemd: what it executes is a command as any other."""
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign] # its keys keep their case
    unit.read_string(text)
    path, _, rest = unit["Service"]["ExecStart"].partition(" ")
    check_shell(f"{Path(path).name} {rest}")


def _words(line: str) -> list[str]:
    return shlex.split(line, comments=True)[1:]


def _program(line: str) -> str:
    return (line.removeprefix("$ ").split() or [""])[0]


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def starts_service(page: Path) -> bool:
    """Whether it starts a service of its own."""
    run = (block for block in blocks(page) if block.language == "sh" and not block.title)
    return any(line.startswith("planner serve") for block in run for line in block.lines())


def commands_of(pages: list[Path]) -> set[str]:
    """Which subcommands of the planner the pages show."""
    lines = [line for page in pages for block in blocks(page) if block.language == "sh" for line in block.lines()]
    return {found for line in lines for found in re.findall(r"(?:^|\| )planner (\w+)", line)}
