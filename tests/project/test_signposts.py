"""What docstrings, comments, pages and settings name is there: files by their path, modules by
their dotted name.
"""

from __future__ import annotations

import importlib.util
import io
import re
import subprocess
import tokenize
from functools import cache
from pathlib import Path

import pytest
from house import FOLDERS, ROOT

_PATH = re.compile(
    r"(?<![\w./:<-])((?:perseus_planner|profiler|runtime|tests|benchmarks|docs|examples|findings|deploy"
    r"|extensions|base|profiles|schedules|plans|solver|gpu|engines|runs|views|cli|controller)"
    r"/[\w./-]*\w\.(?:py|yaml|md|css|j2|js|txt|toml|sh))(?![\w*<])"
)
_DOTTED = re.compile(r"(?<![\w.])(perseus_planner(?:\.[a-z]\w*)+)")
_PAGES = (
    "*.md",
    "docs/**/*.md",
    "pyproject.toml",
    "Makefile",
    ".github/workflows/*",
    "deploy/**/*",
)
_LEFT_OUT = ("CHANGELOG.md", "0.2.md", "0.3.md", "0.4.md")  # they tell of what was
#: of other projects, and what the reader makes
_MADE = ("docs/zeusd/api.md", "deploy/tokens.txt")


def sources() -> list[Path]:
    """Return the files of the product, tests, benchmarks and examples."""
    folders = (*FOLDERS, "tests", "benchmarks", "examples")
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def pages() -> list[Path]:
    """Return pages and settings."""
    found = {file for pattern in _PAGES for file in ROOT.glob(pattern) if file.is_file()}
    return sorted(file for file in found if file.name not in _LEFT_OUT)


def texts_of(file: Path) -> str:
    """Return the comments and the strings over several lines of a file of Python, else all."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        return text
    kept = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and token.string.startswith('"""')
        if token.type == tokenize.COMMENT or is_docstring:
            kept.append(token.string)
    return "\n".join(kept)


@cache
def tracked() -> frozenset[str]:
    """Return the paths of all files of the repository, also below the folder of the package."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
    return frozenset(listed)


def is_there(path: str) -> bool:
    """Whether a path names a file, from the top, from the package or from one of its folders."""
    if path in _MADE or (ROOT / path).exists() or (ROOT / FOLDERS[0] / path).exists():
        return True
    return any(name.endswith(f"/{path}") for name in tracked())


@cache
def is_importable(name: str) -> bool:
    """Whether a dotted name is a module, or a name in one."""
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        try:
            found = importlib.util.find_spec(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        if found is not None:
            return end >= len(parts) - 2  # a name in it, and an attribute of that
    return False


def folders() -> dict[str, list[Path]]:
    """Return the files by their first folder: each by itself would be hundreds of tests."""
    found: dict[str, list[Path]] = {}
    for file in (*sources(), *pages()):
        first, *rest = file.relative_to(ROOT).parts
        found.setdefault(first if rest else ".", []).append(file)
    return found


@pytest.mark.parametrize("folder", folders())
def test_files_and_modules_that_are_named_are_there(folder: str):
    missing = {}
    for file in folders()[folder]:
        text = texts_of(file)
        paths = [path for path in _PATH.findall(text) if not is_there(path)]
        modules = [name for name in _DOTTED.findall(text) if not is_importable(name)]
        if paths or modules:
            missing[str(file.relative_to(ROOT))] = paths + modules
    assert missing == {}
