"""What processes of one user know of an emulated GPU: a small file that they share.

The files are in a folder of their own beside the records of set GPUs, `emulated.<uid>`, that only its user may open: a
record may name any GPU and root may open it, and then meets root's own files, never those that another user has made.

A file has two slots, each with a number and a checksum; the newest whole one counts. A writer fills the other one, so
that readers need no lock, and who dies while it writes has written nothing. Writers have one lock for all GPUs of the
folder, that of the file `node`, and hold it for microseconds. The same file says until when calls of the driver are
made: who makes one puts it behind them, and then waits without a lock. So whoever is stopped or killed in a call holds
up no other.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import stat
import struct
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from zlib import crc32

from perseus_planner.errors import GpuError
from perseus_planner.gpu.lease.records import open_state_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

State = dict[str, Any]
"""What is known, as JSON has it."""

_SLOT, _SLOTS = 2048, 2
_HEAD = struct.Struct("<QII")  # number, length and checksum of what follows
_UNTIL = struct.Struct("<d")
_LONGEST_QUEUE_S = 60.0  # of calls; what is beyond was written before the node was booted last


class SharedState:
    """One GPU's file, opened.

    Args:
        name: the GPU's, any text.
        begun: gives the state where no process has the file open, from what it was, or from None where it was nothing.

    Raises:
        GpuError: the file, or its folder, cannot be used.
    """

    def __init__(self, name: str, begun: Callable[[State | None], State]) -> None:
        try:
            with _own_folder() as folder:
                self._node = _opened(os.path.join(folder, "node"))
                self._file = _opened(os.path.join(folder, f"{quote(name, safe='')}.state"))
            os.ftruncate(self._file, _SLOT * _SLOTS)
            self._memory = mmap.mmap(self._file, _SLOT * _SLOTS)
            self._begin(begun)
        except OSError as error:
            raise GpuError(
                f"the state of {name} cannot be shared: {error.strerror}; check PLANNER_STATE_DIR"
            ) from error

    def read(self) -> tuple[int, State]:
        """The state, and its number, which every change makes another."""
        while True:  # a slot that is being written is not whole, and then the other one is
            found = self._newest()
            if found is not None:
                return found

    def number(self) -> int:
        """The number alone; while a change is made, it may be that of the next state already."""
        return max(int(_HEAD.unpack_from(self._memory, place)[0]) for place in (0, _SLOT))

    def change(self, function: Callable[[State], State]) -> None:
        """Put what `function` makes of the state in its place; all other changes wait meanwhile."""
        with self._alone():
            number, state = self.read()
            self._write(number + 1, function(state))

    def reserve(self, duration_s: float) -> float:
        """When a call of the driver ends that is made now and takes so long, seconds of the monotonic clock.

        The calls for all GPUs of the folder are made one after another.
        """
        with self._alone():
            now_s, written = time.monotonic(), os.pread(self._node, _UNTIL.size, 0)
            until_s = _UNTIL.unpack(written)[0] if len(written) == _UNTIL.size else now_s
            start_s = until_s if now_s < until_s < now_s + _LONGEST_QUEUE_S else now_s
            os.pwrite(self._node, _UNTIL.pack(start_s + duration_s), 0)
        return float(start_s + duration_s)

    def close(self) -> None:
        """Give the file back; harmless when done again."""
        self._memory.close()
        for descriptor in (self._file, self._node):
            with suppress(OSError):
                os.close(descriptor)
        self._file = self._node = -1

    def _begin(self, begun: Callable[[State | None], State]) -> None:
        """Whoever has the file open holds its lock with others; who gets it alone is the first."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(self._file, fcntl.LOCK_SH)
            if self._newest() is not None:
                return
        with self._alone():
            number, state = self._newest() or (0, None)
            self._write(number + 1, begun(state))
        fcntl.flock(self._file, fcntl.LOCK_SH)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the folder's lock; opened anew each time, as threads and forked children share what is open."""
        lock = os.open(f"/proc/self/fd/{self._node}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _newest(self) -> tuple[int, State] | None:
        whole = [found for place in (0, _SLOT) if (found := self._whole(place)) is not None]
        if not whole:
            return None
        number, text = max(whole)
        return number, json.loads(text)

    def _whole(self, place: int) -> tuple[int, bytes] | None:
        """Number and text of a slot; None where it was never written, or not to its end."""
        slot = self._memory[place : place + _SLOT]
        number, length, checksum = _HEAD.unpack_from(slot)
        text = slot[_HEAD.size : _HEAD.size + length]
        return (number, text) if number and checksum == _checksum(number, text) else None

    def _write(self, number: int, state: State) -> None:
        text = json.dumps(state, separators=(",", ":")).encode()
        assert _HEAD.size + len(text) <= _SLOT  # its fields are fixed, and far shorter
        slot = _HEAD.pack(number, len(text), _checksum(number, text)) + text
        place = number % _SLOTS * _SLOT
        self._memory[place : place + len(slot)] = slot


def _checksum(number: int, text: bytes) -> int:
    return crc32(text, number & 0xFFFFFFFF)


@contextmanager
def _own_folder() -> Iterator[str]:
    """This user's folder, by a path that goes on to mean it.

    Raises:
        GpuError: it is somebody else's, or no folder.
    """
    user = os.geteuid()
    with open_state_folder(create=True) as folder:
        assert folder is not None  # it was made where there was none
        path = folder / f"emulated.{user}"
        with suppress(FileExistsError):
            path.mkdir(0o700)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != user or status.st_mode & 0o077:
            raise GpuError(f"{path.name} in the planner's folder is not this user's alone; remove it")
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _opened(path: str) -> int:
    """The file, made where there is none.

    Raises:
        GpuError: it is not a regular file of this user.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise GpuError(f"{os.path.basename(path)} in the planner's folder is not a file of this user; remove it")
    return descriptor
