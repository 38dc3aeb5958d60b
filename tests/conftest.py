"""Fixtures and order of all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_nvml import nvml as nvml
from fake_nvml import nvml_library as nvml_library
from hypothesis import settings

# A shell makes background jobs ignore Ctrl-C, and then all processes that the tests start would
# too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The first example of a property may compile, so its time is no measure. In CI every run draws the
# same examples.
settings.register_profile("planner", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "planner")


#: The slowest files, which run first so that all workers end together; files that compute are
#: beside files that wait.
FIRST = (
    "service/test_server",
    "runtime/test_kills",
    "profiler/test_doubt",
    "runtime/test_service_e2e",
    "estimate/test_explore",
    "project/test_wheel",
    "service/test_core",
    "runs/test_attempts",
    "solver/test_frontier",
    "solver/test_planning",
    "runtime/test_restarts",
    "project/test_documents",
    "project/test_load_fit",
    "service/test_kills",
    "cli/test_cli",
    "solver/test_on_time",
    "runtime/test_faults",
    "solver/test_budget",
    "service/test_policy",
    "project/test_benchmarks",
    "project/test_site",
    "solver/test_point_bound",
    "estimate/test_kernels",
    "cli/test_rehearsal",
    "runtime/test_unmodified",
    "runtime/test_engines",
    "schedules/test_engines",
    "profiler/test_every_schedule",
    "project/test_examples",
    "cli/test_warm_up",
    "runtime/test_autopilot_ranks",
    "cli/test_bad_files",
    "solver/test_frontier_check",
    "profiler/test_killed_sweeps",
    "estimate/test_estimate",
    "cli/test_plans",
    "solver/test_kernels",
    "service/test_api",
    "plans/test_plan",
    "solver/test_coarse",
    "service/test_dashboard",
    "cluster/test_policies",
    "solver/test_rounding",
    "runtime/test_ending",
    "runtime/test_megatron",
    "runtime/test_autopilot",
    "runtime/test_runtime",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(f"{item.path.parent.name}/{item.path.stem}", len(order)))


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


@pytest.fixture(scope="module")
def less_effort() -> Iterator[None]:
    """Plans are searched for a short time, as what is tested is not how good they are."""
    from effort import LESS

    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in LESS:
            patch.setattr(module, name, value)
        yield


@pytest.fixture(scope="module")
def little_effort() -> Iterator[None]:
    """Plans of few clock changes are searched for a short time, and all others as ever."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("perseus_planner.solver.budget._EFFORT", (3_000_000, 300, 8_000))
        yield
