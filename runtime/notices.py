"""What the runtime tells the user while it trains on: once, and from one rank of those that would all say the same."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from perseus_planner.runtime.job import Job

_LOG = logging.getLogger("perseus_planner.runtime")


class Notices:
    """Warnings of one rank, through the logger `perseus_planner.runtime`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._said: set[str] = set()

    def say(self, key: str, text: str, *, by: Literal["one", "rank 0"] = "one") -> None:
        """Warn, unless a notice of that `key` was given before.

        It reaches for the job's store, so it is not for the training thread.

        Args:
            key: what it is about.
            text: one sentence.
            by: the one that is first to say it; or rank 0, of what all ranks meet.
        """
        if key in self._said:
            return
        self._said.add(key)
        if self._job.rank == 0 if by == "rank 0" else self._is_first(key):
            _LOG.warning("planner, rank %d: %s", self._job.rank, text)

    def _is_first(self, key: str) -> bool:
        mine = str(self._job.rank)
        with suppress(RuntimeError):  # the store may be gone: better twice than never
            return bool(self._job.store.compare_set(f"said/{key}", "", mine).decode() == mine)
        return True
