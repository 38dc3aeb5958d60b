"""Jobs whose plans are being made: a thread for each process that makes them, one job at a time."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from perseus_planner.errors import PlannerError
from perseus_planner.service.planning.cache import Ending, Planning
from perseus_planner.service.transitions import given_up, prepare, settled

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from perseus_planner.service.store.writer import Draft, Writer

_log = logging.getLogger(__name__)


def replan(name: str, writer: Writer, planning: Planning, now_s: Callable[[], float]) -> None:
    """Make what a job's plans need, and publish them; takes up to minutes.

    Raises:
        StorageError: what was made cannot be written.
    """
    state = writer.jobs.get(name)
    if state is None:
        return
    problem = ""
    try:
        prepare(state, planning, now_s())
    except Ending:
        return
    except PlannerError as error:
        problem = str(error)
    except Exception as error:
        _log.exception("Planning for job %r has failed", name)
        problem = repr(error)

    def command(draft: Draft) -> None:
        state = draft.find(name)
        if state is not None:
            draft.put(given_up(state, problem, now_s()) if problem else settled(state, planning, now_s()))

    writer.do(command)


class Replanning:
    """Prepares jobs in the order in which they were asked for. A context manager: leaving it ends its threads.

    A job that is asked for again while it waits keeps its place; what it needs is found out when its turn comes. So
    those whose reports change often hold up no other, and nothing is planned that has been overtaken meanwhile.
    """

    def __init__(self, prepare: Callable[[str], None], threads: int) -> None:
        """Call `prepare` with the name of each job."""
        self._prepare = prepare
        self._waiting: dict[str, None] = {}
        self._changed = threading.Condition()
        self._running = True
        self._threads = [
            threading.Thread(target=self._run, name="planner-replanning", daemon=True) for _ in range(threads)
        ]

    def __enter__(self) -> Replanning:
        """Itself."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for what is being prepared; the jobs that wait are left as they are."""
        with self._changed:
            self._running = False
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def want(self, name: str) -> None:
        """The job's plans are to be made."""
        with self._changed:
            self._waiting.setdefault(name)
            self._changed.notify()

    def _run(self) -> None:
        while (name := self._next()) is not None:
            try:
                self._prepare(name)
            except Exception:
                _log.exception("The plans of job %r were not made", name)

    def _next(self) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or not self._running)
            if not self._running:
                return None
            name = next(iter(self._waiting))
            del self._waiting[name]
            return name
