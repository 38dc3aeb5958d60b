"""What is written down before a GPU is set, in a folder that all users of the node share.

NVML has no getter for a locked clock. So who sets a GPU writes a record first: one JSON file for each GPU and user,
`<uuid>.<uid>.json`. The folder is as volatile as the settings are: `$PLANNER_STATE_DIR`, else /dev/shm/perseus-planner.
Anybody may make files in it, only their owner and root may remove them (mode 1777, as /tmp). Hence what stands in a
file is a claim of the user who owns it: it is checked, never evaluated, its GPU is opened only by a back-end whose
settings outlive a process, and a watt figure counts only if it comes from root or from oneself.

All of a GPU's records change under one lock, `<uuid>.lock`, which the kernel gives back when its holder dies. A file is
whole or absent: it is written beside its name and renamed. What a writer that was killed left beside is removed by the
next who takes the lock.
"""

from __future__ import annotations

import glob
import json
import math
import os
import re
import stat
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import quote

from perseus_planner.errors import GpuError
from perseus_planner.files import replacing
from perseus_planner.gpu.lease.folder import state_folder
from perseus_planner.gpu.lease.owner import Owner

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

BACK_ENDS = ("nvml", "zeusd", "command", "emulated")
"""The back-ends that a record's GPU is opened by; an emulated one has its own private folder for each user."""

_LOCK_S = 10.0  #: to wait for a GPU's lock; who holds one makes a few calls of the driver
_MAX_BYTES = 16384
_UNREADABLE = (ValueError, OSError, RecursionError)  #: what reading a file that is no record may raise
_FILE = re.compile(r"\.?(?P<uuid>[^.].*)\.(?P<uid>\d+)\.json(\..*\.part)?")


@dataclass(frozen=True)
class Record:
    """That a process sets a GPU.

    Attributes:
        gpu: what `open_gpu` opens.
        uuid, name: the GPU's.
        hold: what tells one taking of a GPU from all others.
        since: when it was taken, ISO 8601.
        sets_clock, sets_power_limit: what may be set, and so must be set back.
        power_limit_w: the power limit that was in force before, watts; None: not known, so it goes back to the default.
        owner: the process.
    """

    gpu: str
    uuid: str
    name: str
    hold: str
    since: str
    sets_clock: bool
    sets_power_limit: bool
    power_limit_w: float | None
    owner: Owner


class Page:
    """The records of one GPU, while no other process can change them."""

    def __init__(self, folder: Path, uuid: str) -> None:
        self._folder, self._uuid = folder, uuid

    def read(self) -> tuple[list[Record], list[str]]:
        """The records, and for each file that is not one what is wrong with it."""
        return _read(self._folder, f"{glob.escape(_stem(self._uuid))}.*.json")

    def write(self, record: Record) -> None:
        """Put it in the place of this user's record.

        Raises:
            GpuError: the file cannot be written.
        """
        path = self._path()
        try:
            with replacing(path) as file:
                file.write(json.dumps(asdict(record), indent=1).encode())
            path.chmod(0o644)  # whatever this process' umask: who may not set this GPU must be told why
        except OSError as error:
            _refuse(f"{_named(path)}: cannot be written: {error.strerror}")

    def remove(self, record: Record) -> None:
        """Remove the file that holds `record`, if one does, when the GPU has been reset.

        Raises:
            GpuError: it belongs to another user.
        """
        for path in self._folder.glob(f"{glob.escape(_stem(self._uuid))}.*.json"):
            with suppress(*_UNREADABLE):
                if _load(path).hold == record.hold:
                    _unlink(path)

    def discard_remains(self) -> None:
        """Remove what writers that were killed left; all writers hold the lock, so none is at work."""
        for path in self._folder.glob(f".{glob.escape(_stem(self._uuid))}.*.part"):
            with suppress(OSError):
                path.unlink()

    def _path(self) -> Path:
        return self._folder / f"{_stem(self._uuid)}.{os.geteuid()}.json"


@contextmanager
def page(uuid: str) -> Iterator[Page]:
    """The records of the GPU `uuid`, under their lock, for the length of the block: keep that short.

    Raises:
        GpuError: the folder cannot be used, or the lock is not given back by who has it.
    """
    from filelock import FileLock, Timeout

    with open_folder(create=True) as folder:
        assert folder is not None  # it was made where there was none
        lock = FileLock(str(folder / f"{_stem(uuid)}.lock"), timeout=_LOCK_S, mode=0o666)
        try:
            lock.acquire()
        except Timeout:
            _refuse(f"{_named(Path(lock.lock_file))}: another process has held this lock for {_LOCK_S:g} s; end it")
        except OSError as error:
            _refuse(f"{_named(Path(lock.lock_file))}: cannot be locked: {error.strerror}")
        try:
            opened = Page(folder, uuid)
            opened.discard_remains()
            yield opened
        finally:
            lock.release()


def read_records() -> tuple[list[Record], list[str]]:
    """All records, and for each file that is not one what is wrong with it. Changes nothing.

    Raises:
        GpuError: the folder cannot be used.
    """
    with open_folder(create=False) as folder:
        return _read(folder, "*.json") if folder else ([], [])


def recorded_uuids() -> list[str]:
    """The GPUs of which there is a record, or the remains of one, in order.

    Raises:
        GpuError: the folder cannot be used.
    """
    from urllib.parse import unquote

    with open_folder(create=False) as folder:
        names = [path.name for path in folder.iterdir()] if folder else []
    return sorted({unquote(match["uuid"]) for name in names if (match := _FILE.fullmatch(name))})


@contextmanager
def open_folder(*, create: bool) -> Iterator[Path | None]:
    """The folder, by a path that goes on to mean it whatever is put in its place; None: there is none.

    Raises:
        GpuError: it cannot be used.
    """
    name = state_folder()
    try:
        if create:
            _make(name)
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        if create:
            _refuse(f"{name}: cannot be made: {error.strerror}; name another folder in PLANNER_STATE_DIR")
        yield None
        return
    except NotADirectoryError:  # also where a symbolic link is met
        _refuse(f"{name}: is not a folder; remove it, or name another in PLANNER_STATE_DIR")
    except OSError as error:
        _refuse(f"{name}: cannot be used: {error.strerror}; name another folder in PLANNER_STATE_DIR")
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _make(name: str) -> None:
    """Make the folder if there is none, at once with the mode that lets others use it."""
    umask = os.umask(0)
    try:
        with suppress(FileExistsError):
            os.mkdir(name, 0o1777)
    finally:
        os.umask(umask)


def _read(folder: Path, pattern: str) -> tuple[list[Record], list[str]]:
    records, problems = [], []
    for path in sorted(folder.glob(pattern)):
        try:
            records.append(_load(path))
        except FileNotFoundError:  # removed since it was listed
            pass
        except _UNREADABLE as error:
            said = error.strerror if isinstance(error, OSError) else error
            problems.append(f"{_named(path)}: is not a record of the planner ({said}); remove it")
    return records, problems


def _load(path: Path) -> Record:
    """The record in a file.

    Raises:
        ValueError: there is none in it.
        OSError: it cannot be read.
    """
    # A pipe would make a plain open wait; a link would read something else.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        text = file.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise ValueError(f"larger than {_MAX_BYTES} bytes")
    record = _parsed(json.loads(text))
    if path.name != f"{_stem(record.uuid)}.{status.st_uid}.json":
        raise ValueError("it is not named after its GPU and its owner")
    if status.st_uid not in (0, os.geteuid()):
        record = replace(record, power_limit_w=None)
    return record


def _parsed(content: Any) -> Record:
    values = _checked(content, Record)
    record = Record(**{**values, "owner": Owner(**_checked(values["owner"], Owner))})
    if record.gpu.partition(":")[0] not in BACK_ENDS:
        raise ValueError(f"its GPU is not one of {', '.join(f'{name}:…' for name in BACK_ENDS)}")
    if record.power_limit_w is not None and not math.isfinite(record.power_limit_w):
        raise ValueError("its power limit is not finite")
    return record


_TYPES: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float | None": (float, type(None)),
    "Owner": (dict,),
}


def _checked(content: Any, of: type[Record] | type[Owner]) -> dict[str, Any]:
    """`content`, if it has the fields of that class, each of its type; text must be printable, numbers not below 0."""
    types = {field.name: _TYPES[str(field.type)] for field in fields(of)}
    if not isinstance(content, dict) or content.keys() != types.keys():
        raise ValueError(f"its fields are not {', '.join(types)}")
    for name, value in content.items():
        if type(value) not in types[name] or (isinstance(value, str) and not value.isprintable()):
            raise ValueError(f"its {name} is of another type")
        if isinstance(value, (int, float)) and value < 0:
            raise ValueError(f"its {name} is below 0")
    return content


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except PermissionError:
        _refuse(f"{_named(path)}: the GPU is reset, but only the user who owns this record, or root, may remove it")


def _stem(uuid: str) -> str:
    """`uuid` as a file name: without a slash, and not hidden."""
    return quote(uuid, safe="").replace(".", "%2E")


def _named(path: Path) -> str:
    """The file as users know it."""
    return os.path.join(state_folder(), path.name)


def _refuse(problem: str) -> NoReturn:
    raise GpuError(problem)
