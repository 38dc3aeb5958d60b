"""Fixtures and order of all tests."""

from __future__ import annotations

import math
import os
import signal
import subprocess
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import nvml as nvml
from fake_nvml import nvml_library as nvml_library
from hypothesis import HealthCheck, settings

from perseus_planner.cli import console

# A shell makes background jobs ignore Ctrl-C, and then all processes that the tests start would
# too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The machine is busy, so the time of an example is no measure, nor is that to draw it. In CI every
# run draws the same examples.
ANY_TIME: Any = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("planner", **ANY_TIME)
settings.register_profile("ci", **ANY_TIME, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "planner")


#: The slowest files, which run first after those of changed rooms, so that all workers end
#: together; files that compute are beside files that wait.
FIRST = (
    "lab/test_acceptance",
    "project/test_documents",
    "autopilot/test_autopilot_ranks",
    "profiler/test_sweep",
    "plans/test_plan",
    "autopilot/test_autopilot",
    "service/test_server",
    "service/test_e2e",
    "runtime/test_guard",
    "runtime/test_kills",
    "autopilot/test_batches",
    "explore/test_explore",
    "project/test_examples",
    "runtime/test_faults",
    "cli/test_cli",
    "service/test_dashboard",
    "solver/test_on_time",
    "project/test_wheel",
    "solver/test_budget",
    "service/test_postgresql",
    "service/test_core",
    "autopilot/test_autopilot_noise",
    "project/test_site",
)


@pytest.fixture(autouse=True, scope="session")
def no_lines_of_progress() -> None:
    """Say nothing of progress within commands that tests call: how long they take is the machine's
    business. Tests of these lines set the time between two of them.
    """
    console._LINE_S = math.inf


CHANGED = "PLANNER_TESTS_CHANGED"
"""The variable that names the rooms of changed files to the workers, who must all sort alike."""


def pytest_configure() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ[CHANGED] = " ".join(sorted(changed_rooms(Path(__file__).resolve().parents[1])))


def changed_rooms(root: Path) -> set[str]:
    """Return the folders below tests/ of what differs from the last commit of a checkout: a change
    is likeliest found wrong by the tests of its room. Without git there are none.
    """
    command = ["git", "-C", str(root), "--no-optional-locks", "status", "--porcelain"]
    try:
        listed = subprocess.run(
            [*command, "--untracked-files=all"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return set()
    rooms = set()
    for line in listed.splitlines():
        parts = Path(line[3:].rpartition(" -> ")[2]).parts[:-1]
        if parts and parts[0] in ("perseus_planner", "tests"):
            parts = parts[1:]
        if parts:
            rooms.add("/".join(parts[: 1 + (parts[0] == "extensions")]))
    return rooms


@cache
def installed_names() -> set[str]:
    """Return the names of the extensions of this distribution that are there."""
    import perseus_planner

    folder = Path(perseus_planner.__file__).parent / "extensions"
    return {file.parent.name for file in folder.glob("*/__init__.py")}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, obj: object
) -> Generator[None, Any, Any]:
    """Make no items of a function that is a soak as a whole, where soaks are not asked for: to
    make them takes seconds, in each worker.
    """
    made = yield
    is_soak = any(mark.name == "soak" for mark in getattr(obj, "pytestmark", ()))
    return [] if is_soak and collector.config.option.markexpr == "not soak" else made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: number for number, name in enumerate(FIRST)}
    for item in items:
        needed = {name for marker in item.iter_markers("needs") for name in marker.args}
        missing = sorted(needed - installed_names())
        if missing:
            item.add_marker(pytest.mark.skip(f"without the extension {', '.join(missing)}"))
    changed = {Path(__file__).parent / room for room in os.environ.get(CHANGED, "").split()}

    def place(item: pytest.Item) -> tuple[bool, int]:
        slow = order.get(f"{item.path.parent.name}/{item.path.stem}", len(order))
        return item.path.parent not in changed, slow

    items.sort(key=place)


@pytest.fixture(scope="session")
def measured_data() -> Path:
    """The folder of measured profiles: $PLANNER_DATA, or shared/data beside the clone."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("PLANNER_DATA", beside))
    if not folder.is_dir():
        pytest.skip(
            f"no measured profiles: {folder} is not there; name their folder in PLANNER_DATA"
        )
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, so that messages name files without their folder; state is kept
    in it too.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


@pytest.fixture(scope="module", autouse=True)
def less_effort() -> Iterator[None]:
    """Plans are searched for a short time in all tests but those of how good plans are, which use
    one of the two fixtures below.
    """
    from effort import LESS

    with pytest.MonkeyPatch.context() as patch:
        for limit in LESS:
            patch.setattr(*limit)
        yield


@pytest.fixture(scope="module")
def full_effort(less_effort: None) -> Iterator[None]:
    """Plans are searched for as long as users' are."""
    from effort import FULL

    with pytest.MonkeyPatch.context() as patch:
        for limit in FULL:
            patch.setattr(*limit)
        yield


@pytest.fixture(scope="module")
def little_effort(full_effort: None) -> Iterator[None]:
    """Plans of few clock changes are searched for a short time, and all others as users' are."""
    from perseus_planner.solver import budget

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "_EFFORT", budget.Tries(3_000_000, 300, 8_000))
        yield
