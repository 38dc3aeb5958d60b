"""Lease records: written before a GPU is set, in a folder that all users of the node share.

NVML cannot tell whether a clock is locked, so a process writes a record before it sets a GPU: one
JSON file for each GPU and user, `<uuid>.<uid>.json`, in the state folder. The folder is as volatile
as the settings: $PLANNER_STATE_DIR, by default /dev/shm/perseus-planner. Anybody may create files
in it, and only their owner and root may remove them (mode 1777, as /tmp). The content of a file is
therefore a claim of the user who owns it: it is validated, its GPU is only opened by back-ends
whose settings outlive a process, and its power limit only counts if root or this user wrote it.

The owner of a lease keeps its record's file locked with flock until the lease ends. The kernel
releases that lock when the owner dies, however it dies, and shows it in all containers that share
the folder. So a record is that of a living process exactly if its file is locked; process numbers,
which differ between containers and are used again, only describe the owner in messages.

All records of a GPU change under one lock, `<uuid>.lock`, which the kernel releases in the same
way. Files are written under a temporary name and renamed, so they are whole or absent. The next
process that takes the lock removes temporary files left by killed writers.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn
from urllib.parse import quote, unquote

import msgspec

from perseus_planner.base.errors import GpuError
from perseus_planner.base.files import replacing
from perseus_planner.base.processes import ProcessDescription, state_folder
from perseus_planner.base.wires import Record, decode, encode

LEASED_BACK_ENDS = ("nvml", "zeusd", "command", "amd", "emulated", "memory")
"""Back-ends that may open a record's GPU. Emulated GPUs are separate for each user, in a private
folder.
"""

_LOCK_TIMEOUT_S = 10.0  #: holders of a lock make a few driver calls
_MAX_BYTES = 16384
_INVALID = (ValueError, OSError)  #: errors from reading an invalid record
_FILE = re.compile(r"\.?(?P<uuid>[^.].*)\.(?P<uid>\d+)\.json(\..*\.part)?")


class LeaseRecord(Record, frozen=True):
    """A process that sets a GPU."""

    gpu: str  #: Text that opens the GPU
    uuid: str  #: UUID of the GPU
    name: str  #: Name of the GPU
    lease: str  #: Identifier of the lease; the GPUs that a process takes together share it
    since: str  #: When the lease began, ISO 8601
    sets_clock: bool  #: Whether the clock may be set, and has to be reset
    sets_power_limit: bool  #: Whether the power limit may be set, and has to be restored
    power_limit_w: float | None  #: Power limit to restore, watts; None for the default
    owner: ProcessDescription  #: The process

    def __str__(self) -> str:
        """Describe the lease in a message."""
        return f"GPU {self.gpu} ({self.name}): leased to {self.owner} since {self.since}"


class FoundRecord(LeaseRecord, frozen=True):
    """A record that was read."""

    is_living: bool  #: Whether its owner lives


class LockedRecords:
    """The records of one GPU while no other process can change them; see `lock_records`."""

    def __init__(self, folder: Path, uuid: str) -> None:
        self._folder = folder
        self._uuid = uuid

    def read(self) -> tuple[list[FoundRecord], list[str]]:
        """Return the records, and a description of each invalid file."""
        return _read(self._folder, f"{glob.escape(_stem(self._uuid))}.*.json")

    def write(self, record: LeaseRecord, descriptors: list[int]) -> None:
        """Write this user's record, and lock its file.

        Args:
            record: What to write.
            descriptors: Gets the descriptor that keeps the file locked until it is closed.

        Raises:
            GpuError: If the file cannot be written.
        """
        # One file a user: nobody else's may be replaced in a folder that all may write to.
        path = self._folder / f"{_stem(self._uuid)}.{os.geteuid()}.json"
        try:
            with replacing(path) as file:
                file.write(msgspec.json.format(encode(record), indent=1))
                # A lock belongs to the open file, so a copy of the descriptor keeps it after this
                # one is closed.
                descriptors.append(os.dup(file.fileno()))
                fcntl.flock(file, fcntl.LOCK_EX)  # of a file that nobody else has open yet
            # Whatever the umask is: other users have to see why they cannot set the GPU.
            path.chmod(0o644)
        except OSError as error:
            _refuse(_display(path), error)

    def remove(self, record: LeaseRecord) -> None:
        """Remove the file of `record`, if it exists.

        Raises:
            GpuError: If it belongs to another user.
        """
        for path in self._folder.glob(f"{glob.escape(_stem(self._uuid))}.*.json"):
            # A file that cannot be read is no record of this lease.
            with suppress(*_INVALID):
                if _load(path).lease == record.lease:
                    _unlink(path)

    def remove_temporary_files(self) -> None:
        """Remove files that killed writers left. No writer is active: all of them hold the lock."""
        for path in self._folder.glob(f".{glob.escape(_stem(self._uuid))}.*.part"):
            with suppress(OSError):
                path.unlink()


@contextmanager
def lock_records(uuid: str) -> Iterator[LockedRecords]:
    """Lock the records of a GPU inside the block, which should be short.

    Raises:
        GpuError: If the folder cannot be used, or another process does not release the lock.
    """
    from filelock import FileLock, Timeout

    with open_state_folder(create=True) as folder:
        assert folder is not None  # it has been created
        lock = FileLock(str(folder / f"{_stem(uuid)}.lock"), timeout=_LOCK_TIMEOUT_S, mode=0o666)
        path = _display(Path(lock.lock_file))
        try:
            # Acquired here and not by `with`, so that its errors are told apart from those of the
            # block.
            lock.acquire()
        except Timeout:
            _raise(
                f"{path}: another process has held this lock for {_LOCK_TIMEOUT_S:g} s; end that "
                "process"
            )
        except OSError as error:
            _refuse(path, error)
        try:
            # What a killed writer left is removed by whoever holds the lock next.
            records = LockedRecords(folder, uuid)
            records.remove_temporary_files()
            yield records
        finally:
            lock.release()


def has_records() -> bool:
    """Return quickly whether there are any records; False if the folder cannot be read."""
    try:
        return any(name.endswith(".json") for name in os.listdir(state_folder()))
    except OSError:
        return False


def open_records(lease: str) -> list[tuple[LeaseRecord, BinaryIO]]:
    """Return the records of a lease with their files, which are locked while its owner lives.

    Raises:
        GpuError: If the folder cannot be used.
    """
    opened: list[tuple[LeaseRecord, BinaryIO]] = []
    with open_state_folder(create=False) as folder:
        for path in sorted(folder.glob("*.json")) if folder else ():
            with suppress(*_INVALID):
                # The guardian waits for the lock of these files, so they stay open.
                record, file = _open(path)
                if record.lease == lease:
                    opened.append((record, file))
                else:
                    file.close()
    return opened


def wait_for_owner(file: BinaryIO) -> None:
    """Wait until the owner of a record's file has died or has ended its lease."""
    fcntl.flock(file, fcntl.LOCK_SH)


def read_records() -> tuple[list[FoundRecord], list[str]]:
    """Return all records, and a description of each invalid file. Changes nothing.

    Raises:
        GpuError: If the folder cannot be used.
    """
    with open_state_folder(create=False) as folder:
        return _read(folder, "*.json") if folder else ([], [])


def recorded_uuids() -> list[str]:
    """Return the UUIDs of GPUs with a record or a temporary file, sorted.

    Raises:
        GpuError: If the folder cannot be used.
    """
    with open_state_folder(create=False) as folder:
        names = [path.name for path in folder.iterdir()] if folder else []
    return sorted({unquote(match["uuid"]) for name in names if (match := _FILE.fullmatch(name))})


@contextmanager
def open_state_folder(*, create: bool) -> Iterator[Path | None]:
    """Open the state folder, by a path that stays valid if the folder is replaced; None if it does
    not exist.

    Raises:
        GpuError: If the folder cannot be used.
    """
    name = state_folder()
    try:
        if create:
            _make(name)
        # Not through a link: anyone may put one at this path.
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        if create:
            _raise(
                f"{name}: cannot be created: {error.strerror}; name another folder in "
                "PLANNER_STATE_DIR"
            )
        yield None
        return
    except NotADirectoryError:  # also for a symbolic link
        _raise(f"{name}: is not a folder; remove it, or name another in PLANNER_STATE_DIR")
    except OSError as error:
        _raise(
            f"{name}: cannot be used: {error.strerror}; name another folder in PLANNER_STATE_DIR"
        )
    try:
        # By the descriptor: the folder at this path may be replaced meanwhile.
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _make(name: str) -> None:
    """Create the folder if it does not exist, with a mode that lets other users write to it.

    The umask, which may take that away, is not touched: it belongs to all threads.
    """
    with suppress(FileExistsError):
        os.mkdir(name, 0o1777)
        os.chmod(name, 0o1777)


def _read(folder: Path, pattern: str) -> tuple[list[FoundRecord], list[str]]:
    records = []
    problems = []
    for path in sorted(folder.glob(pattern)):
        try:
            records.append(_load(path))
        except FileNotFoundError:  # removed since it was listed
            pass
        except _INVALID as error:
            reason = error.strerror if isinstance(error, OSError) else error
            problems.append(
                f"{_display(path)}: is not a record of the planner ({reason}); remove it"
            )
    return records, problems


def _load(path: Path) -> FoundRecord:
    """Load and validate a record; raises the same errors as `_open`."""
    record, file = _open(path)
    file.close()
    return record


def _open(path: Path) -> tuple[FoundRecord, BinaryIO]:
    """Load and validate a record, and return it with its file.

    Raises:
        ValueError: If the file does not contain a valid record.
        OSError: If it cannot be read.
    """
    # A plain open would block on a pipe and follow a link.
    file = open(path, "rb", buffering=0, opener=_open_plainly)  # noqa: SIM115
    try:
        return _validate(path, file), file
    except BaseException:
        file.close()
        raise


def _open_plainly(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _validate(path: Path, file: BinaryIO) -> FoundRecord:
    status = os.fstat(file.fileno())
    # A pipe or a device may be put there by any user, and reading it might never end.
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")
    # One byte more than allowed tells whether there is more, without reading all of it.
    text = file.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise ValueError(f"larger than {_MAX_BYTES} bytes")
    record = _parse(text)
    # The kernel tells who owns a file; its text alone could claim to be anybody's.
    if path.name != f"{_stem(record.uuid)}.{status.st_uid}.json":
        raise ValueError("it is not named after its GPU and its owner")
    # Anyone may write here. A limit that another user names is not trusted: the default is
    # restored.
    if status.st_uid not in (0, os.geteuid()):
        record = msgspec.structs.replace(record, power_limit_w=None)
    return FoundRecord(**_fields(record), is_living=not _can_lock(file))


def _can_lock(file: BinaryIO) -> bool:
    """Return whether the owner's lock is gone; others that ask at the same time do not disturb
    each other.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _parse(text: bytes) -> LeaseRecord:
    record = decode(text, LeaseRecord)
    for name, value in (*_fields(record).items(), *_fields(record.owner).items()):
        # These texts are printed by `planner doctor`, also as root: no control characters of a
        # terminal.
        if isinstance(value, str) and not value.isprintable():
            raise ValueError(f"its {name} is not printable")
        if isinstance(value, (int, float)) and value < 0:
            raise ValueError(f"its {name} is below 0")
    # The record may be another user's, and its text is opened: only what leases are for.
    if record.gpu.partition(":")[0] not in LEASED_BACK_ENDS:
        raise ValueError(
            f"its GPU is not one of {', '.join(f'{name}:…' for name in LEASED_BACK_ENDS)}"
        )
    return record


def _fields(record: Record) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except PermissionError:
        _raise(
            f"{_display(path)}: the GPU is reset, but only the owner of this record or root may "
            "remove it"
        )


def _stem(uuid: str) -> str:
    """Return `uuid` as a file name: without a slash, and not hidden."""
    return quote(uuid, safe="").replace(".", "%2E")


def _display(path: Path) -> str:
    """Return the path for messages."""
    return os.path.join(state_folder(), path.name)


def _refuse(path: str, error: OSError) -> NoReturn:
    """Raise the error for a file of the state folder that cannot be written."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    _raise(
        f"{path}: cannot be written: {error.strerror}; {'make room there, or ' * is_full}name "
        "another folder in PLANNER_STATE_DIR"
    )


def _raise(problem: str) -> NoReturn:
    raise GpuError(problem)
