"""Run the tests of the engines in the environment that runs this, and tell component by component
what each release did.

    python tests/worlds/engines.py                              # print the table
    python tests/worlds/engines.py --output benchmarks/results  # write it too, and on the page

`engines.yaml` has the rows of the table, and the tests that prove each. The exit status is that of
pytest, or 1 if a row has no test that ran.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "integrations" / "engines.md"
#: What stands around the table on the page.
BEGIN, END = "<!-- engines: begin -->\n", "<!-- engines: end -->\n"

_FAILED, _PASSED, _SKIPPED = "failed", "passed", "skipped"


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        component: The distribution that does it, as pip names it.
        what: What was tried.
        does: What the planner does with it if its tests pass, such as "followed".
        tests: The tests that prove it, below `tests/`, where * stands for any text; empty for what
            was read and not run.
    """

    component: str
    what: str
    does: str
    tests: tuple[str, ...] = ()

    def outcome(self, outcomes: Mapping[str, tuple[str, str]]) -> str:
        """Return what was seen, from the outcome and the reason of each test."""
        if not self.tests:
            return self.does
        found = [outcome for test, outcome in outcomes.items() if self._has(test)]
        results = {result for result, _ in found}
        if not found:
            return "no such test"
        if _FAILED in results:
            return "FAILED"
        if _PASSED in results:
            return self.does
        return f"not here: {found[0][1]}"

    def _has(self, test: str) -> bool:
        """Whether a test, by its pytest name, is one of this row."""
        return any(
            re.fullmatch(re.escape(f"tests/{pattern}").replace(r"\*", ".*"), test)
            for pattern in self.tests
        )


class Outcomes:
    """A plugin of pytest: notes how each test ended, and why it was skipped."""

    def __init__(self) -> None:
        self.tests: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a phase of a test; a failure of its setup or teardown counts as well."""
        before, _ = self.tests.get(report.nodeid, ("", ""))
        if report.when != "call" and report.passed:
            return
        if before == _FAILED:
            return
        self.tests[report.nodeid] = (report.outcome, _reason(report))


def _reason(report: pytest.TestReport) -> str:
    if not report.skipped or not isinstance(report.longrepr, tuple):
        return ""
    return str(report.longrepr[2]).removeprefix("Skipped: ")


def main() -> int:
    """Return the exit status."""
    options = _options()
    what = yaml.safe_load((HERE / "engines.yaml").read_text())
    rows = [Row(**{**row, "tests": tuple(row.get("tests", ()))}) for row in what["rows"]]
    outcomes = Outcomes()
    arguments = [*what["run"], "-m", "not soak or newest"]
    arguments += [f"--numprocesses={(os.cpu_count() or 1) + 1}"]
    arguments += ["--dist=loadfile", "--no-loadscope-reorder", *options.pytest]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    status = int(pytest.main(arguments, plugins=[outcomes]))

    result = {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "releases": {name: _release(name) for name in what["releases"]},
        "tests": {
            each: sum(result == each for result, _ in outcomes.tests.values())
            for each in (_PASSED, _FAILED, _SKIPPED)
        },
        "rows": [{**asdict(row), "seen": row.outcome(outcomes.tests)} for row in rows],
    }
    print(markdown(result))
    missing = [row["what"] for row in result["rows"] if row["seen"] == "no such test"]
    for each in missing:
        print(f"{each}: no test of this row ran; mend engines.yaml", file=sys.stderr)
    if options.output:
        write(result, options.output)
    return status or int(bool(missing))


def markdown(result: Mapping[str, Any]) -> str:
    """Return the table of a result, with the releases above it."""
    releases = ", ".join(f"{name} {release}" for name, release in result["releases"].items())
    tests = result["tests"]
    head = (
        f"Run on {result['date']} with Python {result['python']}, {releases}: "
        f"{tests[_PASSED]} tests passed, {tests[_FAILED]} failed, {tests[_SKIPPED]} were skipped."
    )
    if note := result.get("note"):  # of whoever ran it, such as on what was run again
        head = f"{head} {note}"
    lines = ["| component | what was run | what the planner did |", "|---|---|---|"]
    for row in result["rows"]:
        release = result["releases"].get(row["component"], "")
        what = row["what"].replace("|", "\\|")  # layouts have bars
        lines.append(f"| {row['component']} {release} | {what} | {row['seen']} |")
    return "\n".join([head, "", *lines, ""])


def write(result: Mapping[str, Any], folder: Path) -> None:
    """Write a result in place of the former one of the same Python, and show it on the page."""
    python = "-".join(result["python"].split(".")[:2])
    for former in folder.glob(f"engines_python-{python}_*"):
        former.unlink()
    path = folder / f"engines_python-{python}_{result['date']}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(f"# Engines\n\n{markdown(result)}")
    PAGE.write_text(with_table(PAGE.read_text(), markdown(result)))
    print(f"wrote {path}.md and .json, and {PAGE}")


def with_table(page: str, table: str) -> str:
    """Return a page with another table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table}{END}{after}"


def _release(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write the result there")
    parser.add_argument("pytest", nargs="*", help="further arguments of pytest, after --")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
