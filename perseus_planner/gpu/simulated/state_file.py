"""The state of an emulated GPU, in a small file that the processes of one user share.

The files are in the folder `emulated.<uid>` of the state folder, which only that user may open: a
lease record may name any GPU, and root may open it, but then it opens root's file, never one that
another user has made.

A file has two slots, each with a number and a checksum; the newest valid one counts. A writer fills
the other slot, so readers need no lock, and a writer that dies has written nothing. Writers share
one lock for all GPUs of the folder, that of the file `node`, and hold it for microseconds. The same
file contains the time until which driver calls are reserved: a process appends its call, and then
waits without a lock. So a process that is stopped or killed in a call delays no other.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import quote
from zlib import crc32

from perseus_planner.base.errors import GpuError
from perseus_planner.gpu.lease.records import open_state_folder

State = dict[str, Any]
"""The state of a GPU, as JSON values."""

_SLOT, _SLOTS = 2048, 2
_HEAD = struct.Struct("<QII")  # number, length and checksum of what follows
_RESERVED = struct.Struct("<d")
_MAX_QUEUE_S = 60.0  # of calls; a later time was written before the node was rebooted


class StateFile:
    """The open file of one GPU.

    Args:
        name: Name of the GPU, any text.
        first: Returns the state to begin with if no other process has the file open; its argument
            is the last state, or None.

    Raises:
        GpuError: If the file or its folder cannot be used.
    """

    def __init__(self, name: str, first: Callable[[State | None], State]) -> None:
        try:
            with _user_folder() as folder:
                self._node = _open(os.path.join(folder, "node"))
                self._file = _open(os.path.join(folder, f"{quote(name, safe='')}.state"))
            for file in (self._node, self._file):  # a full memory would kill who writes to it
                os.posix_fallocate(file, 0, _SLOT * _SLOTS)
            self._memory = mmap.mmap(self._file, _SLOT * _SLOTS)
            self._begin(first)
        except OSError as error:
            raise GpuError(
                f"the state of {name} cannot be shared: {error.strerror}; check PLANNER_STATE_DIR"
            ) from error

    def read(self) -> tuple[int, State]:
        """Return the number of the state, which changes with it, and the state."""
        while True:  # while one slot is being written, the other is valid
            newest = self._newest()
            if newest is not None:
                return newest

    def number(self) -> int:
        """Return the number alone; during a change, it may already be that of the next state."""
        return max(int(_HEAD.unpack_from(self._memory, place)[0]) for place in (0, _SLOT))

    def change(self, function: Callable[[State], State]) -> None:
        """Replace the state by what `function` returns for it; other changes wait meanwhile."""
        with self._locked():
            number, state = self.read()
            self._write(number + 1, function(state))

    def reserve(self, duration_s: float) -> float:
        """Reserve a driver call; calls for all GPUs of the folder run one after another.

        Returns:
            When the call ends, seconds of the monotonic clock.
        """
        with self._locked():
            now_s, written = time.monotonic(), os.pread(self._node, _RESERVED.size, 0)
            until_s = _RESERVED.unpack(written)[0] if len(written) == _RESERVED.size else now_s
            start_s = until_s if now_s < until_s < now_s + _MAX_QUEUE_S else now_s
            os.pwrite(self._node, _RESERVED.pack(start_s + duration_s), 0)
        return float(start_s + duration_s)

    def close(self) -> None:
        """Close the file; harmless if repeated."""
        self._memory.close()
        for descriptor in (self._file, self._node):
            with suppress(OSError):
                os.close(descriptor)
        self._file = self._node = -1

    def _begin(self, first: Callable[[State | None], State]) -> None:
        """Write the first state if no other process has the file open: all that have share its
        lock.
        """
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(self._file, fcntl.LOCK_SH)
            if self._newest() is not None:
                return
        with self._locked():
            number, state = self._newest() or (0, None)
            self._write(number + 1, first(state))
        fcntl.flock(self._file, fcntl.LOCK_SH)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder's lock; opened again each time, because threads and forked children
        share open files.
        """
        lock = os.open(f"/proc/self/fd/{self._node}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _newest(self) -> tuple[int, State] | None:
        valid = [slot for place in (0, _SLOT) if (slot := self._valid(place)) is not None]
        if not valid:
            return None
        number, text = max(valid)
        return number, json.loads(text)

    def _valid(self, place: int) -> tuple[int, bytes] | None:
        """Return number and text of a slot; None if it was never written, or not completely."""
        slot = self._memory[place : place + _SLOT]
        number, length, checksum = _HEAD.unpack_from(slot)
        text = slot[_HEAD.size : _HEAD.size + length]
        return (number, text) if number and checksum == _checksum(number, text) else None

    def _write(self, number: int, state: State) -> None:
        text = json.dumps(state, separators=(",", ":")).encode()
        assert _HEAD.size + len(text) <= _SLOT  # its fields are fixed and much shorter
        slot = _HEAD.pack(number, len(text), _checksum(number, text)) + text
        place = number % _SLOTS * _SLOT
        self._memory[place : place + len(slot)] = slot


def _checksum(number: int, text: bytes) -> int:
    return crc32(text, number & 0xFFFFFFFF)


@contextmanager
def _user_folder() -> Iterator[str]:
    """Open this user's folder, by a path that stays valid if the folder is replaced.

    Raises:
        GpuError: If it belongs to another user, or is not a folder.
    """
    user = os.geteuid()
    with open_state_folder(create=True) as folder:
        assert folder is not None  # it has been created
        path = folder / f"emulated.{user}"
        with suppress(FileExistsError):
            path.mkdir(0o700)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != user or status.st_mode & 0o077:
            raise GpuError(
                f"{path.name} in the planner's state folder is open to other users; remove it"
            )
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _open(path: str) -> int:
    """Open a file, and create it if it does not exist.

    Raises:
        GpuError: If it is not a regular file of this user.
    """
    descriptor = os.open(
        path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600
    )
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise GpuError(
            f"{os.path.basename(path)} in the planner's state folder is not a file of this user; "
            "remove it"
        )
    return descriptor
