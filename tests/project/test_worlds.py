"""The tests with other releases say when they cannot run, and their rows name tests that exist."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORLDS = ROOT / "tests" / "worlds"
PAGE = ROOT / "docs" / "integrations" / "engines.md"
WHAT = yaml.safe_load((WORLDS / "engines.yaml").read_text())


def absent(world: str, copy: Path, *options: str, path: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of the repository's script that makes an environment, with another PATH."""
    (copy / "tests" / "worlds").mkdir(parents=True, exist_ok=True)
    for file in ("pyproject.toml", "tests/worlds/environment.py", "tests/worlds/newest.txt"):
        (copy / file).write_text((ROOT / file).read_text())
    script = str(copy / "tests" / "worlds" / "environment.py")
    environment = {"PATH": path, "HOME": str(copy)}
    environment |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run(
        [sys.executable, script, *options, world, "true"],
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(("options", "status"), [((), 0), (("--required",), 1)])
def test_without_its_python_a_world_is_not_tested_and_says_so(
    options: tuple[str, ...], status: int, tmp_path: Path
) -> None:
    result = absent("newest", tmp_path, *options, path=str(tmp_path))
    said = "no Python 3.12 or 3.13 or 3.14 with venv is on this machine"
    assert result.stdout == f"The newest world was not tested: {said}.\n"
    assert (result.returncode, result.stderr) == (status, "")


def test_without_its_releases_a_world_is_not_tested_and_says_so(tmp_path: Path) -> None:
    # The Python of this process stands in for the one that is wanted.
    python = tmp_path / "bin" / "python3.12"
    python.parent.mkdir()
    script = f"""#!/bin/sh
    case "$1" in
        -c) echo 3.12 ;;
        *) exec {sys.executable} "$@" ;;
    esac
    """
    python.write_text("\n".join(line.strip() for line in script.splitlines()))
    python.chmod(0o755)
    path = f"{python.parent}:/usr/bin:/bin"
    torch = (WORLDS / "newest.txt").read_text().splitlines()[1]
    said = (
        f"Installing {torch} ...\n"
        f"The newest world was not tested: pip cannot install {torch} (Could not find a version "
        f"that satisfies the requirement {torch} (from versions: none)).\n"
    )
    # The second time, the environment is there already.
    for options, status in ((), 0), (("--required",), 1):
        result = absent("newest", tmp_path / "copy", *options, path=path)
        assert (result.returncode, result.stdout) == (status, said)


def test_the_oldest_world_has_the_lowest_release_of_each_dependency(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(WORLDS)
    import environment

    (requirements,) = environment.oldest().requirements
    assert "numpy==1.24" in requirements
    assert requirements[-2:] == ("-e", str(ROOT))


def functions(file: str) -> set[str]:
    """Return the functions of a file of tests."""
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", WHAT["rows"], ids=lambda row: f"{row['component']} {row['what']}")
def test_a_row_names_a_component_and_tests_that_exist(row: dict[str, object]) -> None:
    assert row["component"] in WHAT["releases"]
    tests = row.get("tests", [])
    assert isinstance(tests, list)
    assert tests or str(row["does"]).startswith("read, not run")
    for test in tests:
        file, _, rest = test.partition("::")
        name = re.escape(rest.partition("[")[0]).replace(r"\*", ".*")
        assert any(re.fullmatch(name, each) for each in functions(file)), test


def test_the_page_has_the_table_of_the_committed_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(WORLDS)
    import engines

    (result,) = (ROOT / "benchmarks" / "results").glob("engines_*.json")
    table = engines.markdown(json.loads(result.read_text()))
    page = PAGE.read_text()
    assert engines.with_table(page, table) == page
    assert "FAILED" not in table
    listed = {row["what"] for row in json.loads(result.read_text())["rows"]}
    assert listed == {row["what"] for row in WHAT["rows"]}, "run make test-newest again"
