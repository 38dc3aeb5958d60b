"""Kernels are compiled for any user, also one who may write neither to the package nor to a home
folder.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import perseus_planner

PROGRAM = """
import gc

import perseus_planner.solver.kernels as kernels
import numba.core.config as config

@kernels.inner_kernel
def sum_of(number, other):
    return number + other

@kernels.kernel
def doubled(number):
    return sum_of(number, number)

compiled = []
with kernels.when_compiling(lambda: compiled.append(1)):
    with kernels.when_compiling(lambda: compiled.append(gc.isenabled())):
        assert doubled(21) == 42
assert True not in compiled[1::2]  # no search for garbage while Numba compiles
assert gc.isenabled()
compiled = compiled[::2]
print(kernels.__file__)
print(len(compiled))
print(config.CACHE_DIR)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package in whose solver no cache can be made, as files stand where the
    folders would.
    """
    source = Path(perseus_planner.__file__).parent
    ignored = shutil.ignore_patterns(
        "__pycache__", "profiler", "runtime", "views", "service", "*.js"
    )
    shutil.copytree(source, tmp_path / "package" / "perseus_planner", ignore=ignored)
    (tmp_path / "package" / "perseus_planner" / "solver" / "__pycache__").write_text("")
    return tmp_path / "package"


def cache_of(
    package: Path, temporary: Path, named: Mapping[str, str] = {}, writes_all: bool = True
) -> tuple[Path, int]:
    """Where a process without a home folder keeps what it compiles, and how much it has
    compiled; unless it `writes_all`, it respects modes of folders although it is root's.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")
    }
    environment |= {
        **named,
        "PYTHONPATH": str(package),
        "HOME": os.devnull,
        "TMPDIR": str(temporary),
    }
    program = package / "program.py"
    program.write_text(PROGRAM)
    (package / "__pycache__").touch()
    command = [sys.executable, str(program)]
    if os.geteuid() == 0 and not writes_all:
        command = ["setpriv", "--bounding-set=-dac_override", *command]
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    loaded, compiled, cache = ran.stdout.splitlines()
    assert Path(loaded).is_relative_to(package)
    return Path(cache), int(compiled)


def test_without_a_folder_to_write_to_the_cache_is_temporary_and_private(
    package: Path, tmp_path: Path
):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    cache, compiled = cache_of(package, temporary)
    assert cache == temporary / f"perseus-planner-{os.getuid()}"
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert [each.name.partition("-")[0] for each in cache.rglob("*.nbi")] == [
        "program.doubled"
    ]  # which holds the other
    assert compiled == 2
    assert cache_of(package, temporary) == (cache, 0)


def test_a_folder_that_others_can_write_to_is_not_trusted(package: Path, tmp_path: Path):
    temporary = tmp_path / "tmp"
    planted = temporary / f"perseus-planner-{os.getuid()}"
    planted.mkdir(parents=True)
    planted.chmod(0o777)
    assert cache_of(package, temporary)[0] != planted
    assert [*planted.iterdir()] == []


@pytest.mark.parametrize("place", ["beside the package", "in the folder that is named"])
def test_what_an_image_has_compiled_is_read_where_it_cannot_be_written(
    package: Path, tmp_path: Path, place: str
):
    """The image is built by one user; its containers run as another one, or cannot write at all."""
    temporary, named = tmp_path / "tmp", tmp_path / "image"
    temporary.mkdir()
    if place == "beside the package":
        environment, kept = {}, package / "__pycache__"
        kept.mkdir()
    else:
        environment, kept = {"NUMBA_CACHE_DIR": str(named)}, named
    assert cache_of(package, temporary, environment)[1] == 2
    assert [*temporary.iterdir()] == []
    for folder in (kept, *kept.rglob("*/")):
        folder.chmod(0o555)
    used = temporary / f"perseus-planner-{os.getuid()}"
    assert cache_of(package, temporary, environment, writes_all=False) == (used, 0)
