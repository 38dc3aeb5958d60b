"""Which blocks a script has opened in this process to plan or to profile its own training.

`planner run` asks before it attaches to a training call, and gives way to a block that is opened
later.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

Purpose = Literal["runtime", "profile"]

_open: list[tuple[int, Purpose]] = []  #: process and purpose of each open block
_giving_way: list[Callable[[], None]] = []  #: called before a runtime's block opens


@contextmanager
def opened(purpose: Purpose) -> Iterator[None]:
    """Count a block as open. Before one for a runtime opens, others give way; see `give_way_by`."""
    if purpose == "runtime":
        for give_way in tuple(_giving_way):
            give_way()
    entry = (os.getpid(), purpose)
    _open.append(entry)
    try:
        yield
    finally:
        _open.remove(entry)


def is_open(purpose: Purpose) -> bool:
    """Return whether this process is inside such a block; a forked child is not."""
    return (os.getpid(), purpose) in _open


def give_way_by(give_way: Callable[[], None]) -> None:
    """Have `give_way` called whenever a block for a runtime is about to open, until `forget`."""
    _giving_way.append(give_way)


def forget(give_way: Callable[[], None]) -> None:
    """Undo `give_way_by`."""
    if give_way in _giving_way:
        _giving_way.remove(give_way)
