"""Compile the solver's kernels, keep the compiled code where this process may write, and tell
when code is compiled.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

F = TypeVar("F", bound="Callable[..., object]")
_told: list[Callable[[], None]] = []
_started: list[object] = []


@contextmanager
def when_compiling(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` before each compilation of a kernel in the block; kernels that are in the
    cache are not compiled.
    """
    _told.append(tell)
    try:
        yield
    finally:
        _told.remove(tell)


def kernel(function: F) -> F:
    """Compile `function` when it is first called, and keep the result on disk for the next process.

    Numba keeps it in `NUMBA_CACHE_DIR`, beside the package, or in the home folder. Where it may
    write to none of them, as in a container that runs under an arbitrary user, the temporary folder
    takes their place. What an image has in the first two is read also where it cannot be written.

    It may not allocate: it changes arrays that its caller made, and returns numbers. So Numba need
    not count the references to arrays, code that took a fifth of the compilation.

    What makes compiling slow, so avoid it: a large NamedTuple as an argument, which counts as all
    its arrays at each call, so that kernels have many parameters instead; a second call of a
    function where a loop or a variable would do; NumPy functions and `array[:] = other`. What is
    not in a loop can be Python.
    """
    return _compiled(function, _nrt=False)


def inner_kernel(function: F) -> F:
    """Do as `kernel` does for a function that kernels alone call, of whose code it becomes a
    part; it is not kept.
    """
    return _compiled(function, _nrt=False, no_cpython_wrapper=True, cache=False)


def _compiled(function: F, **options: Any) -> F:
    from numba import njit
    from numba.core import config

    options = {"cache": True, "nogil": True, "no_cfunc_wrapper": True} | options
    _listen()
    try:
        compiled = njit(**options)(function)
    except RuntimeError:  # Numba found no folder for its cache
        setattr(config, "CACHE_DIR", str(_temporary_cache()))  # noqa: B010  # its module has no types
        compiled = njit(**options)(function)
    if (used := compiled.stats.cache_path) is not None:
        _copy_what_is_kept(Path(function.__code__.co_filename).with_name("__pycache__"), Path(used))
    return cast("F", compiled)


@cache
def _copy_what_is_kept(beside: Path, used: Path) -> None:
    """Copy to the folder `used`, where Numba may write, what is in those where it may not: the one
    beside the source, and the one that the environment names.
    """
    named = Path(os.environ.get("NUMBA_CACHE_DIR", os.devnull)) / used.name
    for folder in {beside, named} - {used}:
        for file in sorted(folder.glob("*.nb[ci]")):  # the code before the index that names it
            if not (used / file.name).exists():
                part = used / f"{file.name}.{os.getpid()}"
                shutil.copyfile(file, part)
                part.replace(used / file.name)


def _listen() -> None:
    """Have Numba call those that are to be told; once."""
    from numba.core import event

    class Listener(event.Listener):
        collects: ClassVar[list[bool]] = []  # of each compilation that goes on, the outermost first

        def on_start(self, _: object) -> None:
            self.collects.append(gc.isenabled())
            # a compilation makes millions of objects; to look for garbage among them takes a sixth
            # of it
            gc.disable()
            for tell in _told:
                tell()

        def on_end(self, _: object) -> None:
            if self.collects.pop():
                gc.enable()

    if not _started:
        _started.append(Listener())
        event.register("numba:compile", _started[0])  # type: ignore[no-untyped-call]  # untyped in Numba


def _temporary_cache() -> Path:
    """Return a folder that only this user can write, since Numba runs what it finds there."""
    folder = Path(tempfile.gettempdir()) / f"perseus-planner-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if folder.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        return Path(tempfile.mkdtemp(prefix="perseus-planner-"))
    return folder
