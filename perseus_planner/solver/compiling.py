"""Compile the kernels: what is in each folder `c` of the package becomes a shared library there.

    python -m perseus_planner.solver.compiling

A library has the digest of its sources in its name, so one that was compiled from other sources is
never loaded. Only the standard library is used here, as `setup.py` compiles before anything is
installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_CORE = Path(__file__).resolve().with_name("c")
_OWN_MACHINE = f"{sys.platform}-{platform.machine()}"
#: Sums must be the same on every machine, so nothing may be contracted, reordered, or made for the
#: processor that compiles.
_FLAGS = (
    "-std=c99",
    "-O2",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fwrapv",
    "-Wall",
    "-Wextra",
)
_TRIAL = "#include <math.h>\n#include <stdint.h>\ndouble trial(double x) { return exp(x); }\n"
ZIG = "ziglang"
"""A C compiler that pip can install."""


class CompileError(Exception):
    """Kernels cannot be compiled."""


def folders() -> list[Path]:
    """Return the folders of C sources of the package; an extension that is deleted has none."""
    return sorted({source.parent for source in _PACKAGE.glob("**/c/*.c")})


def library(folder: Path) -> Path:
    """Return where the library of a folder stands if it is compiled from what is there now."""
    return folder / f"kernels-{_digest(folder)}.{_OWN_MACHINE}.so"


def _digest(folder: Path) -> str:
    """Return a digest of all that the library of a folder is made of."""
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for file in _sources(folder):
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _sources(folder: Path) -> list[Path]:
    """Return the sources of a folder, and the headers of the core, which all may include."""
    return [*sorted(folder.glob("*.c")), *sorted({*_CORE.glob("*.h"), *folder.glob("*.h")})]


def compile_into(folder: Path, target: Path, *options: str) -> Path:
    """Compile the library of a folder of sources into the folder `target`, with more options of
    the compiler; return where it is.

    It appears whole or not at all, so several processes may do this at once.

    Raises:
        CompileError: If there is no compiler, or it fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise CompileError(
            "there is no C compiler that works (looked for $CC, cc, gcc, clang and the Python "
            f"package {ZIG}); install one, e.g. `apt install gcc libc6-dev` or "
            f"`pip install {ZIG}`"
        )
    path = target / library(folder).name
    target.mkdir(parents=True, exist_ok=True)
    descriptor, made = tempfile.mkstemp(dir=target, prefix=".kernels-", suffix=".so")
    os.close(descriptor)
    try:
        sources = [str(source) for source in _sources(folder) if source.suffix == ".c"]
        _run([*compiler, *_FLAGS, *options, f"-I{_CORE}", *sources, "-o", made, "-lm"])
        # As any file that a compiler makes; mkstemp lets only its owner read.
        mask = os.umask(0)
        os.umask(mask)
        Path(made).chmod(0o777 & ~mask)
        os.replace(made, path)
    finally:
        Path(made).unlink(missing_ok=True)
    # What was made of other sources is of no use.
    for old in target.glob(f"kernels-*.{_OWN_MACHINE}.so"):
        if old != path:
            old.unlink(missing_ok=True)
    return path


@cache
def find_compiler() -> list[str] | None:
    """Return the command of a C compiler that works: `$CC` and no other if that is set, one of the
    system, or that of the Python package ziglang.

    Raises:
        CompileError: If `$CC` is set and does not work.
    """
    named = shlex.split(os.environ.get("CC", ""))
    if named:
        problem = _problem(named)
        if problem is not None:
            raise CompileError(
                f"CC={' '.join(named)}: cannot compile C: {problem}; mend or unset it"
            )
        return named
    return next((command for command in _candidates() if _problem(command) is None), None)


def _candidates() -> Iterator[list[str]]:
    yield from ([name] for name in ("cc", "gcc", "clang") if shutil.which(name))
    spec = importlib.util.find_spec(ZIG)
    if spec is not None and spec.origin is not None:
        # Else it compiles for the processor of this machine.
        yield [str(Path(spec.origin).with_name("zig")), "cc", "-mcpu=baseline"]


def _problem(compiler: list[str]) -> str | None:
    """Return why a compiler does not work, such as headers that are not installed; None if it
    does.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "trial.c")
        source.write_text(_TRIAL)
        try:
            _run([*compiler, "-fPIC", "-shared", str(source), "-o", f"{folder}/trial.so", "-lm"])
        except CompileError as error:
            return str(error)
    return None


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise CompileError(f"{command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        raise CompileError(f"{shlex.join(command)}\n{done.stderr.strip()}")


def main() -> int:
    """Compile what is not compiled yet, or from other sources; return the exit status."""
    stale = [source_folder for source_folder in folders() if not library(source_folder).exists()]
    try:
        for folder in stale:
            print(f"Compiled {compile_into(folder, folder).relative_to(_PACKAGE.parent)}.")
    except CompileError as error:
        print(f"kernels: {error}", file=sys.stderr)
        return 1
    if not stale:
        print("Everything is compiled already.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
