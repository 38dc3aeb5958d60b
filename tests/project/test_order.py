"""What a change can reach is tested first."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def conftest(request: pytest.FixtureRequest) -> Any:
    """The module that orders all tests."""
    file = str(Path(__file__).parents[1] / "conftest.py")
    plugins = request.config.pluginmanager.get_plugins()
    return next(each for each in plugins if getattr(each, "__file__", None) == file)


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def test_the_rooms_of_changed_files_are_found(tmp_path: Path, conftest: Any):
    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    assert conftest.changed_rooms(tmp_path / "none") == set()
    git("init")
    write(tmp_path, "README.md", "runtime/hook.py", "perseus_planner/plans/plan.py")
    git("add", ".")
    git("commit", "-m", "a")
    assert conftest.changed_rooms(tmp_path) == set()
    write(tmp_path, "README.md")
    (tmp_path / "runtime/hook.py").write_text("changed")
    assert conftest.changed_rooms(tmp_path) == {"runtime"}
    write(tmp_path, "perseus_planner/extensions/service/agent/new.py", "tests/cli/test_new.py")
    git("mv", "perseus_planner/plans/plan.py", "perseus_planner/plans/moved.py")
    found = conftest.changed_rooms(tmp_path)
    assert found == {"runtime", "extensions/service", "cli", "plans"}


def test_tests_of_changed_rooms_come_first_and_slow_files_before_others(
    conftest: Any, monkeypatch: pytest.MonkeyPatch
):
    class Item:
        def __init__(self, name: str) -> None:
            self.path = Path(conftest.__file__).parent / name

        def iter_markers(self, name: str) -> list[Any]:
            return []

    names = ["base/test_files.py", "runtime/test_hook.py", "profiler/test_sweep.py"]
    for changed, order in (
        ("", ["profiler", "base", "runtime"]),
        ("runtime plans", ["runtime", "profiler", "base"]),
    ):
        monkeypatch.setenv(conftest.CHANGED, changed)
        items: list[Any] = [Item(name) for name in names]
        conftest.pytest_collection_modifyitems(items)
        assert [each.path.parent.name for each in items] == order
