"""A management library of GPUs in this process: initialised while it is in use, and again in a
forked child.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from contextlib import suppress

from perseus_planner.base.errors import GpuError


class Library(ABC):
    """A library that all GPUs of a back-end share.

    Attributes:
        generation: Changes whenever it is initialised; a device handle is valid for one generation.

    Args:
        name: Its name, which begins error messages.
    """

    def __init__(self, name: str) -> None:
        self.generation = 0
        self._name = name
        self._users, self._is_initialised = 0, False
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._after_fork)

    def acquire(self) -> None:
        """Initialise it unless it is already; call `release` afterwards.

        Raises:
            GpuError: If its binding, the library or the driver is missing, or they do not fit each
                other.
        """
        with self._lock:
            self._initialise()
            self._users += 1

    def release(self) -> None:
        """Undo one `acquire`; the last release shuts it down."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._is_initialised:
                self._is_initialised = False
                with suppress(GpuError):  # the process ends its use of the library anyway
                    self._shut_down()

    def ensure_initialised(self) -> None:
        """Initialise it again in a child that was forked while it was in use, or after `forget`.

        Raises:
            GpuError: If it is not in use in this process, or cannot be initialised.
        """
        if self._is_initialised:
            return
        with self._lock:
            if self._users == 0:
                raise GpuError(f"{self._name}: this GPU was closed; open it again with open_gpu")
            self._initialise()

    def forget(self) -> None:
        """Have it initialised again by the next call, as it says that it is not."""
        self._is_initialised = False

    @abstractmethod
    def _start(self) -> None:
        """Initialise the library."""

    @abstractmethod
    def _shut_down(self) -> None:
        """Shut the library down."""

    def _initialise(self) -> None:
        if not self._is_initialised:
            self._start()
            self._is_initialised = True
            self.generation += 1

    def _after_fork(self) -> None:
        # The child has to initialise the library itself, and another thread may have held the lock.
        self._is_initialised = False
        self._lock = threading.RLock()
