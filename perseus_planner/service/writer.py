"""The one thread that changes what the service knows.

Commands that arrive while a transaction is being written go into the next one together, and are
answered after it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from perseus_planner.base.errors import UsageError
from perseus_planner.base.loops import Loop
from perseus_planner.service.model import UnknownJob
from perseus_planner.service.state import JobState
from perseus_planner.service.status import with_events
from perseus_planner.service.store import Change, Storage, Stored

if TYPE_CHECKING:
    from perseus_planner.service.answers import JobTotals, PowerBudget
    from perseus_planner.service.curves import Curve
    from perseus_planner.service.telemetry import Tally

Result = TypeVar("Result")
Changed = Mapping[str, tuple[JobState | None, JobState | None]]
"""Job name -> state before and after; None if the job did not run before, or has ended."""

CHECKED_AFTER_S, SHARED_CHECKED_AFTER_S = 30.0, 2.0
"""How long nothing may be written before it is checked that something can be: a file, and a
database of which another service stands by."""
_ROOM = 65536  # characters beyond what failed, with which it is tried again
_MOST_AT_ONCE = 256  # commands in one transaction

_log = logging.getLogger(__name__)


class Draft:
    """The state of the service after some commands, before it is written."""

    def __init__(self, jobs: Mapping[str, JobState], budget: PowerBudget) -> None:
        self.frontiers: dict[str, tuple[bytes, Curve]] = {}
        self.budget = budget
        self.telemetry: dict[str, Tally] = {}
        self.ended: list[JobTotals] = []
        self._before = jobs
        self._changed: dict[str, JobState | None] = {}

    def state(self, name: str) -> JobState:
        """Return the state of a job.

        Raises:
            UnknownJob: If no such job runs.
        """
        state = self.find(name)
        if state is None:
            raise unknown_job(name)
        return state

    def find(self, name: str) -> JobState | None:
        """Return the state of a job; None if no such job runs."""
        return self._changed[name] if name in self._changed else self._before.get(name)

    def jobs(self) -> dict[str, JobState]:
        """Return the states of all jobs by name."""
        states = {**self._before, **self._changed}
        return {name: state for name, state in states.items() if state is not None}

    def put(self, state: JobState) -> None:
        """Add a job, or replace its state."""
        self._changed[state.job.name] = state

    def remove(self, name: str) -> None:
        """Remove a job."""
        self._changed[name] = None
        self.telemetry.pop(name, None)

    def note(self, earlier: Draft, now_s: float) -> None:
        """Add events for what differs from an earlier draft."""
        for name, after in self._changed.items():
            before = earlier.find(name)
            if after is not None and after is not before:
                self._changed[name] = with_events(before, after, now_s)

    def copy(self) -> Draft:
        """Return an independent copy."""
        copy = Draft(self._before, self.budget)
        copy.frontiers, copy._changed = dict(self.frontiers), dict(self._changed)
        copy.telemetry, copy.ended = dict(self.telemetry), list(self.ended)
        return copy

    def change(self, budget: PowerBudget) -> Change:
        """Return what differs from the stored state, in which `budget` was that of all jobs."""
        jobs = {name: (self._before.get(name), after) for name, after in self._changed.items()}
        return Change(
            jobs={name: pair for name, pair in jobs.items() if pair[0] != pair[1]},
            frontiers=self.frontiers,
            budget=None if self.budget == budget else self.budget,
            telemetry=self.telemetry,
            ended=self.ended,
        )


_Given = tuple[Callable[[Draft], Any], Future[Any]]  # a command, and its result


class Writer:
    """The writing thread, as a context manager; leaving it finishes the commands that were given.

    Attributes:
        jobs: Name -> state of every running job. All of it is on disk. It is replaced, never
            changed.
        budget: The power budget of all jobs.
        problem: Why the last transaction could not be written; None if it was.
    """

    def __init__(
        self,
        storage: Storage,
        stored: Stored,
        committed: Callable[[Changed], None],
        now_s: Callable[[], float],
    ) -> None:
        """Start from what is stored; `committed` is called with every change once it is on disk."""
        self.jobs: Mapping[str, JobState] = stored.jobs
        self.budget = stored.budget
        self.problem: str | None = None
        self._written_s, self._failed_size = time.monotonic(), 0
        self._storage = storage
        self._committed = committed
        self._now_s = now_s
        self._commands: queue.SimpleQueue[_Given] = queue.SimpleQueue()
        self._loop = Loop(self._write, "planner-writer")
        self._lock = threading.Lock()
        self._open = False

    def __enter__(self) -> Writer:
        self._loop.start()
        self._open = True
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._open = False
        self._loop.stop()
        self._write()  # what came while the thread ended

    def do(self, command: Callable[[Draft], Result]) -> Result:
        """Run `command` and return its result once its changes are on disk. If it raises, nothing
        changes.

        Raises:
            StorageError: If the changes cannot be written; nothing was changed.
            UsageError: If the service is not running.
        """
        return self.submit(command).result()

    def check(self) -> None:
        """Check that the database can be written, unless that was seen to work a moment ago. After
        a fault, as much must be written as what failed.

        Raises:
            StorageError: If it cannot.
        """
        failed = self._failed_size
        after_s = SHARED_CHECKED_AFTER_S if self._storage.is_shared else CHECKED_AFTER_S
        if self.problem is None and time.monotonic() - self._written_s < after_s:
            return
        try:
            self._storage.probe(2 * failed + _ROOM if failed else 1)
        except Exception as error:
            self.problem = str(error)
            raise
        self._written_s = time.monotonic()
        if self._failed_size == failed:
            self.problem, self._failed_size = None, 0

    def submit(self, command: Callable[[Draft], Result]) -> Future[Result]:
        """Run `command` as `do` does, without waiting; its result or error is in the future."""
        future: Future[Result] = Future()
        with self._lock:
            if self._open:
                self._commands.put((command, future))
                self._loop.wake()
            else:
                closed = "the service does not run; use it inside `with Service(...) as service:`"
                future.set_exception(UsageError(closed))
        return future

    def _write(self) -> None:
        """Write all commands that wait."""
        while not self._commands.empty():
            most = min(self._commands.qsize(), _MOST_AT_ONCE)
            self._write_batch([self._commands.get() for _ in range(most)])

    def _write_batch(self, batch: list[_Given]) -> None:
        draft, answers = Draft(self.jobs, self.budget), list[Callable[[], None]]()
        for command, future in batch:
            trial = draft.copy()
            try:
                result = command(trial)
                trial.note(draft, self._now_s())
            except Exception as error:
                answers.append(lambda future=future, error=error: future.set_exception(error))  # type: ignore[misc]
            else:
                draft = trial
                answers.append(lambda future=future, result=result: future.set_result(result))  # type: ignore[misc]
        change = draft.change(self.budget)
        try:
            if change != Change():
                self._storage.commit(change)
                self._written_s = time.monotonic()
        except Exception as error:
            self.problem = str(error)
            self._failed_size = max(self._failed_size, self._storage.size, 1)
            for _, future in batch:
                future.set_exception(error)
            return
        self.jobs, self.budget = draft.jobs(), draft.budget
        try:
            self._committed(change.jobs)
        except Exception:
            _log.exception("An action after a committed change has failed")
        for answer in answers:
            answer()


def unknown_job(name: str) -> UnknownJob:
    """Return the error for a job that does not run."""
    return UnknownJob(f"no job {name!r} runs here; register it, or list the running ones")
