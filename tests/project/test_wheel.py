"""The wheel, in a clean environment, does what `make demo` shows; the tests of the source
distribution run.
"""

from __future__ import annotations

import email
import os
import platform
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from command_options import ROOT
from packaging.metadata import Metadata

from perseus_planner import Plan, Profile, __version__
from perseus_planner.solver import compiling

FOLDERS = ("perseus_planner", "profiler", "runtime")
FILES = ("pyproject.toml", "setup.py", "build_backend.py", "README.md", "LICENSE")
DEMO = {"profile.yaml", "profile.csv", "frontier.npz", "plan.yaml", "report.html"}


def output_of(*command: str | Path, cwd: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [*map(str, command)], cwd=cwd, env=clean, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that holds the wheel, and nothing else but a path to the
    dependencies of this one.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source, environment = folder / "source", folder / "venv"
    for name in FOLDERS:
        shutil.copytree(
            ROOT / name,
            source / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__", "kernels-*.so"),
        )
    for name in FILES:
        shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    output_of(
        *pip,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        folder,
        source,
        cwd=folder,
    )
    (wheel,) = folder.glob("*.whl")
    venv.create(environment, symlinks=True)
    output_of(
        *pip,
        "--python",
        environment / "bin" / "python",
        "install",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=folder,
    )
    (packages,) = environment.glob("lib/python*/site-packages")
    dependencies = [path for path in sys.path if path.endswith("-packages")]
    (packages / "dependencies.pth").write_text("\n".join(dependencies))
    return environment


def test_the_installed_package_is_the_one_of_the_wheel(environment: Path, tmp_path: Path):
    code = (
        "import perseus_planner.profiler, perseus_planner.runtime.hook as hook; "
        "print(hook.__file__)"
    )
    found = Path(output_of(environment / "bin" / "python", "-c", code, cwd=tmp_path).strip())
    assert found.is_relative_to(environment)
    assert output_of(environment / "bin" / "planner", "--version", cwd=tmp_path).startswith(
        "planner"
    )
    run = (environment / "bin" / "planner", "run", environment / "bin" / "python", "-c")
    assert (
        output_of(*run, "import sys; print(type(sys.meta_path[0]).__name__)", cwd=tmp_path)
        == "_EngineFinder\n"
    )


def test_one_wheel_holds_the_kernels_for_every_python(environment: Path):
    (wheel,) = environment.parent.glob("*.whl")
    machine = f"{sys.platform}_{platform.machine()}"
    assert wheel.name == f"perseus_planner-{__version__}-py3-none-{machine}.whl"
    assert wheel.stat().st_size < 2_000_000
    names = zipfile.ZipFile(wheel).namelist()
    libraries = [name for name in names if name.endswith(".so")]
    assert sorted(map(os.path.dirname, libraries)) == [
        str(folder.relative_to(ROOT)) for folder in compiling.folders()
    ]


def test_the_description_is_complete_and_its_links_lead_to_files_at_the_tag(environment: Path):
    (metadata,) = environment.glob("lib/python*/site-packages/perseus_planner-*.dist-info/METADATA")
    Metadata.from_email(
        metadata.read_bytes(), validate=True
    )  # as the index checks it, which `twine check` does not
    about = email.message_from_string(metadata.read_text())
    assert (about["Version"], about["Author"]) == (__version__, "The perseus-planner developers")
    assert about["Description-Content-Type"] == "text/markdown"
    urls = dict(each.split(", ") for each in about.get_all("Project-URL"))
    assert set(urls) == {"Source", "Documentation", "Changelog", "Issues"}
    ours = f"{urls['Source']}/"
    links = re.findall(r"\]\(([^)]+)\)", about.get_payload())
    assert [link for link in links if not link.startswith("https://")] == []
    reference = "main" if ".dev" in __version__ else f"v{__version__}"
    files = [
        re.fullmatch(rf"(?:blob|raw)/{reference}/([^#]+)(?:#.*)?", link.removeprefix(ours))
        for link in links
        if link.startswith(ours)
    ]
    assert len(files) > 10
    assert [found for found in files if found is None or not (ROOT / found[1]).exists()] == []


def test_the_changelog_begins_with_this_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## \[(\d.*)\] - \d{4}-\d\d-\d\d$", text, re.MULTILINE)
    next_version, _, development = __version__.partition(".dev")
    if development:  # what comes after the last release
        assert f"## [Unreleased]\n\n{next_version} " in text
        assert releases[0] != next_version
    else:
        assert releases[0] == __version__
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == releases[0]


def test_a_release_has_at_most_forty_lines_in_the_changelog():
    _, *releases = re.split(r"^## \[", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    long = [each.partition("]")[0] for each in releases if len(each.splitlines()) > 40]
    assert long == []


def test_the_source_distribution_holds_all_and_its_tests_run(tmp_path: Path):
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a checkout, so what belongs to it is not known")
    tracked = output_of("git", "ls-files", cwd=ROOT).splitlines()
    source = tmp_path / "source"
    for name in tracked:
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    output_of(sys.executable, "-c", build, cwd=source)
    shutil.unpack_archive(next(tmp_path.glob("*.tar.gz")), tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    packed = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if not path.is_dir()}
    assert {name for name in tracked if not (ROOT / name).is_dir()} - packed == {".gitignore"}
    tests = (
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/base/test_quantities.py",
        "tests/project/test_layout.py",
        "-k=quantities or generic_folder",  # what all others hold is equal here
    )
    assert " passed" in output_of(sys.executable, *tests, cwd=unpacked)


def test_the_demo_runs_with_the_installed_package(environment: Path, tmp_path: Path):
    options = ("--no-print-directory", "--assume-old=.venv/installed-plot")
    printed = output_of(
        "make", "-f", ROOT / "Makefile", *options, "demo", f"BIN={environment}/bin", cwd=tmp_path
    )
    assert {file.name for file in (tmp_path / "demo").iterdir()} == DEMO
    plan = Plan.load(tmp_path / "demo/plan.yaml")
    assert Profile.load(tmp_path / "demo/profile.yaml").stages == 4
    assert plan.time_s <= 1.001 * plan.baseline_time_s
    saved, look, then = printed.splitlines()[-3:]
    share = 1 - plan.energy_j / plan.baseline_energy_j
    assert share > 0.1
    assert saved.startswith(f"Saved: {100 * share:.1f} % of the energy, at 1.000")
    assert look.startswith("Look:  demo/report.html ")
    assert then.startswith("Next:  source ")
    wide = [line for line in printed.splitlines()[:-3] if len(line) > 80]
    assert [line for line in wide if "  " in line.strip()] == []  # no row of a table
