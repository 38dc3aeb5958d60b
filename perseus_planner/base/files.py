"""Read and write files: text read strictly, files replaced whole, and digests of what they hold.

Functions that take `error` raise that type when the system refuses, with one text for one cause.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from perseus_planner.base.errors import PlannerError

STATE_FILE = "autopilot.yaml"
"""What was learnt in training, a profile: in the folder of a run, or where rank 0 was started."""

_MAX_BYTES = 64 * 2**20


@contextmanager
def reading(path: Path, error: type[PlannerError]) -> Iterator[None]:
    """Raise `error` instead of an `OSError` that reading `path` causes in the block.

    Raises:
        PlannerError: If the file cannot be read; of the type `error`.
    """
    try:
        yield
    except FileNotFoundError as reason:
        raise error(f"{path}: no such file; check the path") from reason
    except IsADirectoryError as reason:
        raise error(f"{path}: is a folder; name the file in it") from reason
    except OSError as reason:
        raise error(
            f"{path}: cannot be read: {reason.strerror}; check the path and its permissions"
        ) from reason


def read_text(
    path: Path, error: type[PlannerError], expected: str = "a file that the planner wrote"
) -> str:
    """Return the text of the file at `path`, which must be UTF-8 and at most 64 MiB.

    Args:
        path: the file.
        error: the type of error to raise.
        expected: the kind of file to name instead of one that is too large.

    Raises:
        PlannerError: If the file cannot be read, is too large or is not UTF-8; of the type `error`.
    """
    try:
        with reading(path, error), path.open("rb") as file:
            # One byte more than allowed tells that the file is larger, without reading all of it.
            data = file.read(_MAX_BYTES + 1)
    except ValueError as reason:  # a NUL in the path
        raise error(f"{str(path)!r}: is not a path; check it") from reason
    if len(data) > _MAX_BYTES:
        raise error(f"{path}: is larger than {_MAX_BYTES // 2**20} MiB; name {expected}")
    try:
        # Editors of Windows put a byte order mark at the beginning.
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as reason:
        # The line is counted from the bytes: the text before the fault is fine.
        line = data.count(b"\n", 0, reason.start) + 1
        raise error(f"{path}, line {line}: is not UTF-8 text; save the file as UTF-8") from reason


@contextmanager
def replacing(
    path: str | os.PathLike[str], error: type[PlannerError] | None = None
) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path` for writing; rename it onto `path` when the block ends
    well.

    If the block raises, `path` is unchanged and the temporary file is removed. The file gets the
    permissions that a plain `open` would have given it.

    Args:
        path: the file to replace.
        error: the type of error to raise instead of an `OSError`; None leaves it as it is.

    Raises:
        PlannerError: If the file cannot be written; of the type `error`.
    """
    try:
        with _replacing(Path(path)) as file:
            yield file
    except OSError as reason:
        if error is None:
            raise
        raise error(f"{path}: cannot be written: {reason.strerror}; check the folder") from reason


@contextmanager
def _replacing(target: Path) -> Iterator[BinaryIO]:
    # In the same folder: renaming is atomic within a file system only.
    descriptor, name = tempfile.mkstemp(
        dir=target.parent, prefix=f".{target.name}.", suffix=".part"
    )
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            # On the disk before it is renamed, or a crash could leave an empty file under the name.
            os.fsync(file.fileno())
        # Temporary files are private; the one that replaces is as public as any other.
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def _umask() -> int:
    """Return the umask of this process without changing it, which would loosen files that other
    threads create.
    """
    # The system call that tells the umask sets it, too.
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        return next(
            (int(line.split()[1], 8) for line in status if line.startswith("Umask:")), 0o077
        )


def write_file(
    path: str | os.PathLike[str], content: bytes | str, error: type[PlannerError]
) -> None:
    """Replace the file at `path` by one that holds `content`; text is written as UTF-8.

    Raises:
        PlannerError: If the file cannot be written; of the type `error`.
    """
    with replacing(path, error) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def sha256(*parts: bytes) -> str:
    """Return the digest of `parts`, each with its length, so that no two lists of parts share
    one.
    """
    digest = hashlib.sha256()
    for part in parts:
        # With its length, "ab" and "c" differ from "a" and "bc".
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
