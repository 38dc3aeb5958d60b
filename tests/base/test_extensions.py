"""What others add: an extension in a folder of its own, found by its entry point, is used like one
of this distribution.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from perseus_planner.base import extensions
from perseus_planner.base.errors import UsageError

SITE = '''
"""An extension of a site: a schedule, a GPU, a decider and a command."""

import click

from perseus_planner.base.extensions import Extension
from perseus_planner.schedules import one_f_one_b
from perseus_planner.schedules.generators import Generator

EXTENSION = Extension(
    commands={"Site": {"greet": "site_planner:greet"}},
    schedules={"site-1f1b": "site_planner:SCHEDULE"},
    gpus={"site": "site_planner:open_site"},
)
SCHEDULE = Generator(lambda ranks, microbatches: one_f_one_b(ranks, microbatches), 1)


@click.command()
def greet():
    """Greet the site."""
    click.echo("Greetings.")


def open_site(which):
    """Open a simulated GPU."""
    from perseus_planner.gpu import open_gpu

    return open_gpu(f"simulated:{which}")
'''


def install(folder: Path, source: str = SITE) -> dict[str, str]:
    """Install a package of one module into a folder; return the environment that finds it."""
    folder.mkdir(exist_ok=True)
    (folder / "site_planner.py").write_text(source)
    about = folder / "site_planner-1.0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: site-planner\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[perseus_planner.extensions]\nsite = site_planner:EXTENSION\n"
    )
    return {**os.environ, "PYTHONPATH": str(folder)}


def planner(
    *words: str, environment: dict[str, str], cwd: Path
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "perseus_planner", *words],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_an_extension_of_others_brings_a_command_a_schedule_and_a_gpu(tmp_path: Path):
    environment = install(tmp_path / "site")
    assert "greet" in planner("--help", environment=environment, cwd=tmp_path).stdout
    assert planner("greet", environment=environment, cwd=tmp_path).stdout == "Greetings.\n"
    words = ("profile", "--gpu", "simulated:a100-sxm", "--stages", "2", "-o", "profile.yaml")
    done = planner(*words, cwd=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    words = ("solve", "profile.yaml", "--schedule", "site-1f1b", "--microbatches", "4")
    done = planner(*words, "-o", "frontier.npz", "--json", cwd=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    read = "from perseus_planner.gpu import open_gpu\nprint(open_gpu('site:a100-sxm').name)"
    done = subprocess.run(
        [sys.executable, "-c", read], env=environment, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "simulated a100-sxm\n"


def test_an_extension_that_cannot_be_loaded_is_named_and_stops_nothing_else(tmp_path: Path):
    environment = install(tmp_path / "site", "import nothing_of_that_name\n")
    done = planner("--help", environment=environment, cwd=tmp_path)
    assert (done.returncode, "greet" in done.stdout, "solve" in done.stdout) == (0, False, True)
    problem = (
        "the extension 'site' of site-planner cannot be loaded: ModuleNotFoundError: No module "
        "named 'nothing_of_that_name'; mend it, or uninstall its package\n"
    )
    assert done.stderr == f"planner: {problem}"
    words = ("profile", "--gpu", "simulated:a100-sxm", "--stages", "2", "-o", "profile.yaml")
    done = planner(*words, environment=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    words = ("solve", "profile.yaml", "--microbatches", "4", "-o", "frontier.npz")
    # What it may have had is not there, and that says why.
    done = planner(*words, "--schedule", "site-1f1b", environment=environment, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.endswith(problem)
    assert "there is no schedule 'site-1f1b'" in done.stderr


def test_a_command_that_cannot_be_loaded_is_named_and_stops_nothing_else(tmp_path: Path):
    source = SITE.replace("site_planner:greet", "site_planner:nothing")
    environment = install(tmp_path / "site", source)
    done = planner("--help", environment=environment, cwd=tmp_path)
    assert (done.returncode, "solve" in done.stdout) == (0, True)
    assert done.stderr.startswith("planner: the command 'greet' of 'site' cannot be loaded: ")


@pytest.mark.needs("explore")
def test_an_extension_does_not_replace_what_is_there(tmp_path: Path):
    source = SITE.replace('"greet"', '"explore"')
    environment = install(tmp_path / "site", source)
    done = planner("explore", "--help", environment=environment, cwd=tmp_path)
    assert done.returncode == 0
    assert "Greet the site." not in done.stdout
    assert done.stderr == (
        "planner: the extensions 'site' and 'explore' both have commands 'explore', so 'site' is "
        "left out; uninstall one\n"
    )


def test_an_extension_does_not_replace_a_command_of_the_core(tmp_path: Path):
    source = SITE.replace('"greet"', '"solve"')
    environment = install(tmp_path / "site", source)
    done = planner("solve", "--help", environment=environment, cwd=tmp_path)
    assert done.returncode == 0
    assert "Greet the site." not in done.stdout
    assert done.stderr == (
        "planner: the extension 'site' has a command 'solve', which the planner has already, so "
        "that command is left out; have its package call it otherwise\n"
    )


def test_what_is_offered_by_a_missing_extension_says_which(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(extensions, "extensions", lambda: {})
    with pytest.raises(UsageError) as refused:
        extensions.offer("acceptance")
    assert str(refused.value) == (
        "the extension 'lab' runs `planner doctor --acceptance`, and it is not installed here; "
        "install the whole of perseus-planner"
    )


def test_help_is_as_fast_with_extensions(tmp_path: Path):
    assert shutil.which("python3")  # the time is a benchmark's; here, nothing heavy is loaded
    code = (
        "import sys\nfrom perseus_planner.cli import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "print(sorted({'numpy', 'torch', 'pydantic', 'fastapi'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stdout
