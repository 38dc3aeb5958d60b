"""The wheel, installed into a clean environment, does what `make demo` shows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from command_options import ROOT

from perseus_planner import Frontier, Plan, Profile

FOLDERS = ("perseus_planner", "profiler", "runtime")
FILES = ("pyproject.toml", "README.md", "LICENSE")
DEMO = {
    *("profile.yaml", "profile.csv", "frontier.npz", "frontier.json", "frontier.png"),
    *("explored.png", "plan-1.00x.yaml", "plan-1.10x.yaml", "plan-1.10x-8-changes.yaml", "plan-1.00x.png"),
    "report.html",
}


def output_of(*command: str | Path, cwd: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run([*map(str, command)], cwd=cwd, env=clean, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that holds the wheel, and nothing else but a path to the dependencies of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    source, environment = folder / "source", folder / "venv"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    output_of(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    venv.create(environment, symlinks=True)
    output_of(*pip, "--python", environment / "bin" / "python", "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (packages,) = environment.glob("lib/python*/site-packages")
    dependencies = [path for path in sys.path if path.endswith("-packages")]
    (packages / "dependencies.pth").write_text("\n".join(dependencies))
    return environment


def test_the_installed_package_is_the_one_of_the_wheel(environment: Path, tmp_path: Path):
    code = "import perseus_planner.profiler, perseus_planner.runtime.hook as hook; print(hook.__file__)"
    found = Path(output_of(environment / "bin" / "python", "-c", code, cwd=tmp_path).strip())
    assert found.is_relative_to(environment)
    assert output_of(environment / "bin" / "planner", "--version", cwd=tmp_path).startswith("planner")
    run = (environment / "bin" / "planner", "run", environment / "bin" / "python", "-c")
    assert output_of(*run, "import sys; print(type(sys.meta_path[0]).__name__)", cwd=tmp_path) == "_EngineFinder\n"


@pytest.mark.timeout(300)
def test_the_demo_runs_with_the_installed_package(environment: Path, tmp_path: Path):
    installed = "--assume-old=.venv/installed-plot"
    output_of("make", "-f", ROOT / "Makefile", installed, "demo", f"BIN={environment}/bin", cwd=tmp_path)
    assert {file.name for file in (tmp_path / "demo").iterdir()} == DEMO
    plan, frontier = Plan.load(tmp_path / "demo/plan-1.00x.yaml"), Frontier.load(tmp_path / "demo/frontier.npz")
    assert Profile.load(tmp_path / "demo/profile.yaml").stages == 4
    assert plan.time_s <= frontier.baseline_time_s
    assert plan.energy_j < plan.baseline_energy_j
