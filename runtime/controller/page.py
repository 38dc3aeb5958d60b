"""The memory that a rank and the controller share: one word, and a sign of life.

    byte 0    what the rank wants now, as runtime/marks.py writes it; by the rank or by its GPU
    byte 64   when the controller was last alive, nanoseconds of the monotonic clock; by the controller

They lie in different cache lines, so that neither writer disturbs the other. The rank makes the memory and passes it
through the socket; it has no name, so whoever dies leaves nothing behind.
"""

from __future__ import annotations

import fcntl
import mmap
import os

SIZE = mmap.PAGESIZE
"""Bytes of a page."""

_WORD, _ALIVE = slice(0, 8), slice(64, 72)


class Page:
    """A mapped page; it is unmapped when nothing refers to it or to its words any more.

    Attributes:
        memory: all of it.
        word: what the rank wants now, one unsigned 64-bit number.
        alive_ns: when the controller was last alive, the same.

    Args:
        descriptor: of the memory; the caller may close it.
    """

    def __init__(self, descriptor: int) -> None:
        self.memory = mmap.mmap(descriptor, SIZE)
        self.word = memoryview(self.memory)[_WORD].cast("Q")
        self.alive_ns = memoryview(self.memory)[_ALIVE].cast("Q")


def made() -> int:
    """A descriptor of new memory for a page, all zeros, which nobody can make smaller; the caller must close it."""
    descriptor = os.memfd_create("perseus-planner", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, SIZE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def received(descriptor: int) -> Page:
    """The page behind a descriptor that came from a rank, which is closed.

    Raises:
        ValueError: it is no page, or one that might shrink, at which whoever looks at it would be killed.
    """
    try:
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("its page can be made smaller")
        return Page(descriptor)
    except OSError as error:
        raise ValueError(f"its page cannot be used: {error.strerror}") from None
    finally:
        os.close(descriptor)
