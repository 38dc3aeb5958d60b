"""The layout of the repository and of the installed package is what the documents say."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("perseus_planner", "profiler", "runtime")
HEAVY = ("deepspeed", "matplotlib", "pynvml", "torch")


def sources(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def imported(node: ast.AST) -> Iterator[str]:
    """Every module that an import in `node` may load: `from a import b` may load a and a.b."""
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            yield from (name.name for name in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (f"{child.module}", *(f"{child.module}.{name.name}" for name in child.names))


def python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new interpreter, which finds `cwd` first and then what is installed."""
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=60)


def printed(code: str, cwd: Path) -> object:
    result = python(code, cwd)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_every_package_folder_is_named_in_pyproject():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    renamed = {folder: package for package, folder in setuptools["package-dir"].items()}
    folders = [file.parent.relative_to(ROOT) for folder in FOLDERS for file in (ROOT / folder).rglob("__init__.py")]
    packages = {".".join((renamed.get(folder.parts[0], folder.parts[0]), *folder.parts[1:])) for folder in folders}
    assert packages == set(setuptools["packages"])
    stray = {file.parent.name for file in ROOT.glob("*/__init__.py")} - set(FOLDERS)
    assert stray == set()


@pytest.mark.parametrize("name", ["profiler", "runtime"])
def test_a_generic_folder_is_refused_under_its_bare_name(name: str):
    result = python(f"import {name}", cwd=ROOT)
    assert result.returncode == 1
    expected = f"'{name}' is not a package of its own; install perseus-planner, import perseus_planner.{name}"
    assert result.stderr.splitlines()[-1] == f"ImportError: {expected}"


@pytest.mark.parametrize("name", ["profiler", "runtime"])
def test_a_generic_folder_is_installed_inside_the_package(name: str, tmp_path: Path):
    assert python(f"import perseus_planner.{name}", cwd=tmp_path).returncode == 0


def test_the_import_loads_nothing_heavy(tmp_path: Path):
    code = f"import json, sys, perseus_planner; print(json.dumps(sorted(set({HEAVY}) & set(sys.modules))))"
    assert printed(code, tmp_path) == []


def test_the_public_names_are_the_listed_ones_in_order(tmp_path: Path):
    code = """
import json
import perseus_planner as package
public = [name for name in dir(package) if not name.startswith("_")]
[getattr(package, name) for name in public]
print(json.dumps([package.__all__, sorted(public)]))
"""
    listed, public = printed(code, tmp_path)
    assert listed == public


@pytest.mark.parametrize("file", sources("perseus_planner"), ids=lambda file: str(file.relative_to(ROOT)))
def test_the_core_imports_neither_profiler_nor_runtime(file: Path):
    body = ast.parse(file.read_text())
    if file.parent.name == "cli":
        # A command may, when it runs.
        body.body = [node for node in body.body if not isinstance(node, ast.FunctionDef)]
    reached = [
        name for name in imported(body) if name.startswith(("perseus_planner.profiler", "perseus_planner.runtime"))
    ]
    assert reached == []


@pytest.mark.parametrize(("folder", "other"), [("profiler", "runtime"), ("runtime", "profiler")])
def test_profiler_and_runtime_do_not_import_each_other(folder: str, other: str):
    names = [name for file in sources(folder) for name in imported(ast.parse(file.read_text()))]
    assert names != []
    assert [name for name in names if name.startswith(f"perseus_planner.{other}")] == []


def test_no_file_hides_a_module_that_cprofile_needs():
    assert [file for file in sources(*FOLDERS, "tests", "benchmarks") if file.name == "profile.py"] == []


def test_the_tests_are_flat():
    assert [file for file in sources("tests") if file.parent != ROOT / "tests"] == []
    assert not (ROOT / "tests" / "__init__.py").exists()
