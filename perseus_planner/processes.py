"""Another process, until its end."""

from __future__ import annotations

import os
import select


class Watched:
    """Tells when a process has ended; a zombie has.

    Attributes:
        pid: its number.
        descriptor: becomes readable when it ends; None where the kernel cannot tell of it, and `has_ended` must be
            asked from time to time.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.descriptor: int | None = None
        self._is_gone = False
        try:
            self.descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._is_gone = True
        except OSError:  # no such function in this kernel, or not allowed in this container
            self._look_for()

    def has_ended(self) -> bool:
        """Whether it has; never waits."""
        import psutil

        if self._is_gone:
            return True
        if self.descriptor is not None:
            return bool(select.select([self.descriptor], [], [], 0)[0])
        try:
            return not self._process.is_running() or self._process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def close(self) -> None:
        """Watch it no more."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
            self._is_gone = True

    def _look_for(self) -> None:
        import psutil

        try:
            self._process = psutil.Process(self.pid)
        except psutil.NoSuchProcess:
            self._is_gone = True
