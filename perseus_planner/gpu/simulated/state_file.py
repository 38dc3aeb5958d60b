"""The state of an emulated GPU, in a small file that the processes of one user share.

The files are in the folder `emulated.<uid>` of the state folder, which only that user may open: a
lease record may name any GPU, and root may open it, but then it opens root's file, never one that
another user has made.

A file is replaced by a new one and never changed, so readers need no lock, and a writer that dies
has written nothing. Writers share one lock for all GPUs of the folder, and hold it for
microseconds. The locked file says until when driver calls are reserved: a process adds its call,
and then waits without a lock. So a process that is stopped or killed in a call delays no other.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import quote

from perseus_planner.base.errors import GpuError
from perseus_planner.gpu.lease.records import open_state_folder

_TIME_BYTES = 32
_MAX_QUEUE_S = 60.0  # of calls; a later time was written before the node was rebooted
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class StateFile:
    """The file of one GPU, which this process has open.

    Args:
        name: Name of the GPU, any text.
        first: Returns the state to begin with if no other process has the file open; its argument
            is the last state, empty if there is none.

    Raises:
        GpuError: If the file or its folder cannot be used; so do the methods.
    """

    def __init__(self, name: str, first: Callable[[bytes], bytes]) -> None:
        self._name, self._file = name, quote(name, safe="")
        self._folder = self._owners = -1
        with self._explained():
            self._folder = _open_user_folder()
            self._owners = self._open(f"{self._file}.open", _CREATE)
            try:
                fcntl.flock(self._owners, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # all processes that have it open share its lock
                fcntl.flock(self._owners, fcntl.LOCK_SH)
                if self.read():
                    return
            self.change(first)
            fcntl.flock(self._owners, fcntl.LOCK_SH)

    def read(self) -> bytes:
        """Return the state."""
        with self._explained():
            return self._read(self._file)

    def version(self) -> object:
        """Return what differs for another state, without reading it."""
        with self._explained():
            status = os.stat(self._file, dir_fd=self._folder)
        return status.st_ino, status.st_mtime_ns

    def change(self, function: Callable[[bytes], bytes]) -> None:
        """Replace the state by what `function` returns for it; other changes wait meanwhile."""
        with self._locked():
            self._write(self._file, function(self._read(self._file)))

    def call_end_s(self, now_s: float, duration_s: float) -> float:
        """Reserve a driver call; calls for all GPUs of the folder run one after another.

        Returns:
            When the call ends, seconds of the monotonic clock, as `now_s` is.
        """
        with self._locked() as lock:
            until_s = _time_s(os.pread(lock, _TIME_BYTES, 0))
            start_s = until_s if now_s < until_s < now_s + _MAX_QUEUE_S else now_s
            os.pwrite(lock, repr(start_s + duration_s).ljust(_TIME_BYTES).encode(), 0)
        return start_s + duration_s

    def close(self) -> None:
        """Close the file; harmless if repeated."""
        for descriptor in (self._owners, self._folder):
            with suppress(OSError):
                os.close(descriptor)
        self._owners = self._folder = -1

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise GpuError(
                f"the state of {self._name} cannot be shared: {error.strerror}; check "
                "PLANNER_STATE_DIR"
            ) from error

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the folder's lock; opened again each time, because threads and forked children
        share open files.
        """
        with self._explained():
            lock = self._open("node", _CREATE)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield lock
            finally:
                os.close(lock)

    def _open(self, file: str, flags: int) -> int:
        return os.open(file, flags, 0o600, dir_fd=self._folder)

    def _read(self, file: str) -> bytes:
        try:
            with os.fdopen(self._open(file, _READ), "rb") as opened:
                return opened.read()
        except FileNotFoundError:
            return b""

    def _write(self, file: str, content: bytes) -> None:
        with os.fdopen(self._open("next", _CREATE | os.O_TRUNC), "wb") as opened:
            opened.write(content)
        os.replace("next", file, src_dir_fd=self._folder, dst_dir_fd=self._folder)


def _time_s(content: bytes) -> float:
    """Return the time in a lock file; 0 if another version of the planner has written there."""
    try:
        return float(content or 0)
    except ValueError:
        return 0.0


def _open_user_folder() -> int:
    """Open this user's folder.

    Raises:
        GpuError: If it belongs to another user, or is not a folder.
    """
    user = os.geteuid()
    with open_state_folder(create=True) as folder:
        assert folder is not None  # it has been created
        path = folder / f"emulated.{user}"
        with suppress(FileExistsError):
            path.mkdir(0o700)
        descriptor = os.open(path, _READ | os.O_DIRECTORY)
    status = os.fstat(descriptor)
    if status.st_uid != user or status.st_mode & 0o077:
        os.close(descriptor)
        raise GpuError(
            f"{path.name} in the planner's state folder is open to other users; remove it"
        )
    return descriptor
