"""All changes of the service on one thread: those that came meanwhile in one transaction, and then all answers."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from perseus_planner.errors import UsageError
from perseus_planner.service.model import UnknownJob
from perseus_planner.service.state import JobState
from perseus_planner.service.store.storage import Change, Storage, Stored

if TYPE_CHECKING:
    from types import TracebackType

    from perseus_planner.service.planning.curves import Curve
    from perseus_planner.service.telemetry import JobTelemetry

Result = TypeVar("Result")
Changed = Mapping[str, tuple[JobState | None, JobState | None]]
"""Name -> state before and after; None: it did not, or does not, run."""

_MOST_AT_ONCE = 256  # commands in one transaction

_log = logging.getLogger(__name__)


class Draft:
    """What the service would know after some commands; nothing of it is true before it is written."""

    def __init__(self, jobs: Mapping[str, JobState], power_w: float | None) -> None:
        self.frontiers: dict[str, tuple[bytes, Curve]] = {}
        self.power_w = power_w
        self.telemetry: dict[str, JobTelemetry] = {}
        self._before = jobs
        self._changed: dict[str, JobState | None] = {}

    def state(self, name: str) -> JobState:
        """That of a job.

        Raises:
            UnknownJob: there is none.
        """
        state = self.find(name)
        if state is None:
            raise unknown_job(name)
        return state

    def find(self, name: str) -> JobState | None:
        """That of a job; None: there is none."""
        return self._changed[name] if name in self._changed else self._before.get(name)

    def jobs(self) -> dict[str, JobState]:
        """Those of all jobs, by name."""
        found = dict(self._before)
        for name, state in self._changed.items():
            if state is None:
                found.pop(name, None)
            else:
                found[name] = state
        return found

    def put(self, state: JobState) -> None:
        """The new state of a job."""
        self._changed[state.job.name] = state

    def remove(self, name: str) -> None:
        """The job does not run."""
        self._changed[name] = None
        self.telemetry.pop(name, None)

    def copy(self) -> Draft:
        """One that can be changed without this one."""
        copy = Draft(self._before, self.power_w)
        copy.frontiers, copy._changed = dict(self.frontiers), dict(self._changed)
        copy.telemetry = dict(self.telemetry)
        return copy

    def change(self, power_w: float | None) -> Change:
        """What is to be written where the power budget of all jobs was `power_w`."""
        jobs = {name: (self._before.get(name), after) for name, after in self._changed.items()}
        changed = {name: pair for name, pair in jobs.items() if pair[0] != pair[1]}
        budget = () if power_w == self.power_w else (self.power_w,)
        return Change(changed, self.frontiers, budget, self.telemetry)


class Writer:
    """The one thread that changes what the service knows. A context manager: leaving it finishes what was begun.

    Attributes:
        jobs: name -> state of every job that runs; all of it is on disk. Never changed, but replaced.
        power_w: the power budget of all jobs, watts; None: any.
    """

    def __init__(self, storage: Storage, stored: Stored, committed: Callable[[Changed], None]) -> None:
        """Begin with what is stored; `committed` is told of every change that is on disk."""
        self.jobs: Mapping[str, JobState] = stored.jobs
        self.power_w = stored.power_w
        self._storage = storage
        self._committed = committed
        self._commands: queue.SimpleQueue[tuple[Callable[[Draft], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="planner-writer", daemon=True)
        self._lock = threading.Lock()
        self._open = False

    def __enter__(self) -> Writer:
        """Itself."""
        self._thread.start()
        self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write what was asked for, and end."""
        with self._lock:
            self._open = False
            self._commands.put(None)
        self._thread.join()

    def do(self, command: Callable[[Draft], Result]) -> Result:
        """What `command` gives, once what it does to the draft is on disk; if it raises, it does nothing.

        Raises:
            StorageError: it cannot be written, so nothing was done.
            UsageError: the service does not run.
        """
        return self.doing(command).result()

    def doing(self, command: Callable[[Draft], Result]) -> Future[Result]:
        """The same, without waiting for it; what `do` raises, the result raises."""
        future: Future[Result] = Future()
        with self._lock:
            if self._open:
                self._commands.put((command, future))
            else:
                closed = "the service does not run; use it inside `with Service(...) as service:`"
                future.set_exception(UsageError(closed))
        return future

    def _write(self) -> None:
        running = True
        while running:
            batch = [self._commands.get()]
            while len(batch) < _MOST_AT_ONCE and not self._commands.empty():
                batch.append(self._commands.get())
            running = None not in batch
            self._write_batch([each for each in batch if each is not None])

    def _write_batch(self, batch: list[tuple[Callable[[Draft], Any], Future[Any]]]) -> None:
        draft, answers = Draft(self.jobs, self.power_w), list[Callable[[], None]]()
        for command, future in batch:
            trial = draft.copy()
            try:
                result = command(trial)
            except Exception as error:
                answers.append(lambda future=future, error=error: future.set_exception(error))  # type: ignore[misc]
            else:
                draft = trial
                answers.append(lambda future=future, result=result: future.set_result(result))  # type: ignore[misc]
        change = draft.change(self.power_w)
        try:
            if change != Change():
                self._storage.commit(change)
        except Exception as error:
            for _, future in batch:
                future.set_exception(error)
            return
        self.jobs, self.power_w = draft.jobs(), draft.power_w
        try:
            self._committed(change.jobs)
        except Exception:
            _log.exception("What follows a change that is on disk has failed")
        for answer in answers:
            answer()


def unknown_job(name: str) -> UnknownJob:
    """The error that no job of that name runs."""
    return UnknownJob(f"no job {name!r} runs here; register it, or see which ones do")
