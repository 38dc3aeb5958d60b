"""Make an environment for a world other than the one of `make test`, and run a command in it.

    python tests/worlds/environment.py newest python tests/worlds/engines.py

The newest world has the newest releases of the engines, which need a newer Python than the tests
do otherwise: pip hides a release that its Python is too old for. The oldest world has the oldest
releases that `pyproject.toml` allows.

Where the Python or the releases cannot be had, the command is not run, one sentence says so, and
the exit status is 0; with `--required` it is 1. Only the standard library is used here, as this
runs before anything is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEWEST = Path(__file__).with_name("newest.txt")


class AbsentError(Exception):
    """What a world needs is not to be had on this machine."""


@dataclass(frozen=True)
class World:
    """An environment of other releases.

    Attributes:
        name: Its name, which the folder of its environment ends in.
        pythons: The versions of Python that it may have, the preferred one first.
        requirements: What pip installs in one go each, in this order.
    """

    name: str
    pythons: tuple[str, ...]
    requirements: tuple[tuple[str, ...], ...]

    @property
    def folder(self) -> Path:
        """The folder of its environment."""
        return ROOT / f".venv-{self.name}"

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return self.folder / "bin" / "python"

    @property
    def digest(self) -> str:
        """A digest of all that is installed, which changes when the environment must be updated."""
        text = repr(self.requirements) + (ROOT / "pyproject.toml").read_text()
        return hashlib.sha256(text.encode()).hexdigest()


def main() -> int:
    """Make the environment, and run the command in it; return the exit status."""
    options = _options()
    world = newest() if options.world == "newest" else oldest()
    try:
        make(world)
    except AbsentError as error:
        print(f"The {world.name} world was not tested: {error}.")
        return 1 if options.required else 0
    path = f"{world.python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path, "VIRTUAL_ENV": str(world.folder)}
    return subprocess.run(options.command, cwd=ROOT, env=environment).returncode


def newest() -> World:
    """The newest releases of the engines, as `newest.txt` pins them."""
    pins = [line for line in NEWEST.read_text().splitlines() if line and not line.startswith("#")]
    # torch comes first and alone, so that a build without CUDA is taken if there is one, and what
    # is built from source finds it.
    torch = tuple(pin for pin in pins if pin.startswith("torch=="))
    others = tuple(pin for pin in pins if not pin.startswith("torch=="))
    return World("newest", ("3.12", "3.13", "3.14"), (torch, others, ("-e", f"{ROOT}[test]")))


def oldest() -> World:
    """The oldest releases of the dependencies that `pyproject.toml` allows, and no extra."""
    project = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert listed is not None
    bounds = re.findall(r'"([\w-]+)>=([\w.]+)"', listed[1])
    assert len(bounds) == listed[1].count('"') // 2, "a dependency has no lowest release"
    pins = tuple(f"{name}=={release}" for name, release in bounds)
    return World("oldest", ("3.10",), ((*pins, "-e", str(ROOT)),))


def make(world: World) -> None:
    """Make the environment of a world, unless it is there as it should be.

    Raises:
        AbsentError: If its Python or its releases are not to be had.
    """
    stamp = world.folder / "installed"
    if stamp.exists() and stamp.read_text() == world.digest:
        return
    if not world.python.exists():
        interpreter = find_python(world)
        subprocess.run([interpreter, "-m", "venv", "--clear", world.folder], check=True)
    for requirements in world.requirements:
        _install(world, requirements)
    stamp.write_text(world.digest)


def find_python(world: World) -> Path:
    """Return an interpreter of a version that a world may have.

    Raises:
        AbsentError: If there is none.
    """
    for version in world.pythons:
        for candidate in _candidates(version):
            if _is_usable(candidate, version):
                return candidate
    wanted = " or ".join(world.pythons)
    raise AbsentError(f"no Python {wanted} with venv is on this machine")


def _candidates(version: str) -> Iterator[Path]:
    """Yield where an interpreter of a version may be: on PATH, or kept by pyenv or uv."""
    if found := shutil.which(f"python{version}"):
        yield Path(found)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"))
    if uv := shutil.which("uv"):
        command = [uv, "python", "find", "--no-python-downloads", version]
        answer = subprocess.run(command, capture_output=True, text=True)
        if answer.returncode == 0:
            yield Path(answer.stdout.strip())


def _is_usable(interpreter: Path, version: str) -> bool:
    """Whether an interpreter runs, is of a version, and can make environments."""
    code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    try:
        answer = subprocess.run([interpreter, "-c", code], capture_output=True, text=True)
    except OSError:
        return False
    return answer.returncode == 0 and answer.stdout.strip() == version


def _install(world: World, requirements: tuple[str, ...]) -> None:
    """Have pip install requirements.

    Raises:
        AbsentError: If pip fails; says why.
    """
    command = [world.python, "-m", "pip", "install", "--disable-pip-version-check"]
    # DeepSpeed would compile its operators for CUDA.
    environment = {**os.environ, "DS_BUILD_OPS": "0"}
    print(f"Installing {' '.join(requirements)} ...", flush=True)
    answer = subprocess.run(
        [*command, *requirements],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if answer.returncode == 0:
        return
    named = ", ".join(each for each in requirements if "==" in each) or "the package"
    raise AbsentError(f"pip cannot install {named} ({_reason(answer.stdout)})")


def _reason(output: str) -> str:
    """Return why pip failed: the constraint that a machine has set, or else pip's first error."""
    lines = [line.strip() for line in output.splitlines()]
    constraints = [line for line in lines if "(constraint)" in line]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return next(iter(constraints + errors), "pip failed").rstrip(".")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("world", choices=("newest", "oldest"))
    parser.add_argument(
        "--required", action="store_true", help="fail where the world is not to be had"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="and its arguments")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
