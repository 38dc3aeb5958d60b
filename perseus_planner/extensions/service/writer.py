"""The one thread that writes the service's database: what waits is written together, and answered
once it is on disk.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.service.draft import Draft
from perseus_planner.extensions.service.models import StorageError

if TYPE_CHECKING:
    from perseus_planner.extensions.service.jobs import JobState
    from perseus_planner.extensions.service.store import Storage, Stored
    from perseus_planner.extensions.service.watch import Watchdog

Result = TypeVar("Result")

_ROOM = 65536  # characters beyond what failed, with which it is tried again
_MOST_AT_ONCE = 256  # commands in one transaction

_log = logging.getLogger(__name__)


_ENDED = "the thread that writes has ended, so nothing is taken; start the service again"
_Given = tuple[Callable[[Draft], Any], Future[Any]]  # a command, and its result


@dataclass(frozen=True)
class Writing:
    """How a writer does."""

    commits: int  #: Transactions that were written
    committing_s: float  #: The time that they took, seconds
    failed: int  #: Transactions that could not be written
    waiting: int  #: Commands that are not written
    lag_s: float  #: For how long the oldest of them has waited, seconds; 0 if none waits


class Writer:
    """The writing thread, as a context manager; leaving it finishes the commands that were given.

    Attributes:
        jobs: Name -> state of every running job. All of it is on disk. It is replaced, never
            changed.
        budget: The power budget of all jobs.
        problem: Why a transaction, or the probe of `check`, could not be written; None if none
            failed. A smaller transaction may be written meanwhile: `check` alone clears it, once as
            much can be written as what failed.
    """

    def __init__(
        self,
        storage: Storage,
        stored: Stored,
        reconciled: Callable[[JobState], JobState],
        committed: Callable[[Draft], None],
        now_s: Callable[[], float],
        watchdog: Watchdog,
    ) -> None:
        """Start from what is stored; `reconciled` is that of drafts, and `committed` is called with
        every change once it is on disk. The thread is watched.
        """
        self._watchdog = watchdog
        self.jobs: Mapping[str, JobState] = stored.jobs
        self.budget = stored.budget
        self.problem: str | None = None
        self._written_s = time.monotonic()
        self._failed_size = 0
        self._commits = 0
        self._committing_s = 0.0
        self._failed = 0
        # When each command came that is not answered, and its result: also of one that the thread
        # has taken, as nothing else knows of it if the thread ends at that moment.
        self._waiting: deque[tuple[float, Future[Any]]] = deque()
        self._storage = storage
        self._reconciled = reconciled
        self._committed = committed
        self._now_s = now_s
        self._commands: queue.SimpleQueue[_Given | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="planner-writer", daemon=True)
        self._lock = threading.Lock()
        self._open = False
        self._closed = False

    def __enter__(self) -> Writer:
        # Under the lock that `_end` takes: a thread that ends at once closes what is open by then.
        with self._lock:
            self._thread.start()
            self._open = True
        self._watchdog.watch(self._thread)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._open = False
            self._closed = True
            self._commands.put(None)
        self._thread.join()

    def check(self) -> None:
        """Check that the database can be written, unless that was seen to work a moment ago. After
        a fault, as much must be written as what failed.

        Raises:
            StorageError: If it cannot.
        """
        # A disk may have room for a few bytes and not for what failed, so the probe is larger than
        # that.
        failed = self._failed_size
        quiet_s = time.monotonic() - self._written_s
        if self.problem is None and quiet_s < self._storage.checked_after_s:
            return
        try:
            self._storage.probe(2 * failed + _ROOM if failed else 1)
        except Exception as error:
            self._failed += 1
            self.problem = str(error)
            raise
        self._written_s = time.monotonic()
        # Unless another transaction has failed meanwhile, on the writing thread.
        if self._failed_size == failed:
            self.problem = None
            self._failed_size = 0

    def figures(self) -> Writing:
        """Return how it does."""
        now_s = came_s = time.monotonic()
        with suppress(IndexError):  # nothing waits
            came_s, _ = self._waiting[0]
        waiting = len(self._waiting)
        return Writing(
            self._commits, self._committing_s, self._failed, waiting, max(now_s - came_s, 0.0)
        )

    def submit(self, command: Callable[[Draft], Result]) -> Future[Result]:
        """Run `command` without waiting: its result is in the future once its changes are on disk.
        If it raises, nothing changes, and its error is in the future; as is `StorageError` if the
        changes cannot be written, and `UsageError` if the service is not running.
        """
        future: Future[Result] = Future()
        # Under the lock that closing takes: no command comes behind the None that ends the thread.
        with self._lock:
            if self._open:
                self._waiting.append((time.monotonic(), future))
                self._commands.put((command, future))
            else:
                closed = "the service does not run; use it inside `with Service(...) as service:`"
                has_died = self._thread.ident is not None and not self._closed
                future.set_exception(StorageError(_ENDED) if has_died else UsageError(closed))
        return future

    def _write(self) -> None:
        """Write the commands that wait, together, until None comes, after which nothing does."""
        batch: list[_Given | None] = []
        try:
            while None not in batch:
                batch = [self._commands.get()]
                # What has come meanwhile shares one transaction, as a disk takes as long to sync
                # one change as many.
                waiting = min(self._commands.qsize(), _MOST_AT_ONCE - 1)
                batch += [self._commands.get() for _ in range(waiting)]
                with self._watchdog.working():
                    self._write_batch(
                        [
                            given
                            for given in batch
                            if given and given[1].set_running_or_notify_cancel()
                        ]
                    )
                # After the answers, so that the lag has the time of the commit in it.
                for _ in filter(None, batch):
                    self._waiting.popleft()
        finally:
            self._end()

    def _end(self) -> None:
        """Take nothing more, and refuse what waits: nobody would ever answer it."""
        with self._lock:
            self._open = False
        for _, future in self._waiting:
            # Those that are answered stay as they are, and those that were cancelled.
            with suppress(InvalidStateError):
                future.set_exception(StorageError(_ENDED))

    def _write_batch(self, batch: list[_Given]) -> None:
        answers = list[Callable[[], None]]()
        draft = Draft(
            self.jobs,
            stored_budget=self.budget,
            budget=self.budget,
            reconciled=self._reconciled,
        )
        for command, future in batch:
            # A command that raises leaves the changes of those before it as they are.
            trial = draft.copy()
            try:
                result = command(trial)
                trial.note(draft, self._now_s())
            except Exception as error:
                # The answers are given once all is on disk; the defaults bind the values of this
                # turn of the loop.
                answers.append(lambda future=future, error=error: future.set_exception(error))  # type: ignore[misc]
            else:
                draft = trial
                answers.append(lambda future=future, result=result: future.set_result(result))  # type: ignore[misc]
        try:
            if draft.is_written:
                began_s = time.monotonic()
                self._storage.commit(draft)
                self._written_s = time.monotonic()
                self._commits += 1
                self._committing_s += self._written_s - began_s
        except Exception as error:
            self._failed += 1
            self.problem = str(error)
            # At least 1, as 0 says that nothing has failed.
            self._failed_size = max(self._failed_size, self._storage.size, 1)
            # Nothing of the batch is on disk, so every command failed, whatever its own result.
            for _, future in batch:
                future.set_exception(error)
            return
        # Readers on other threads get the new states only now that they are on disk.
        self.jobs = draft.jobs()
        self.budget = draft.budget
        try:
            self._committed(draft)
        except Exception:
            _log.exception("An action after a committed change has failed")
        # Last: who is answered may ask at once, and finds the timers set and the plans requested.
        for answer in answers:
            answer()
