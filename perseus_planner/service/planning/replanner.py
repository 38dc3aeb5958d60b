"""Making the plans of jobs: a thread for each worker process, one job at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from perseus_planner.base.errors import PlannerError
from perseus_planner.service.planning.cache import Ending, Planning
from perseus_planner.service.transitions import given_up, prepare, reconciled

if TYPE_CHECKING:
    from perseus_planner.service.store.writer import Draft, Writer

_log = logging.getLogger(__name__)


def replan(name: str, writer: Writer, planning: Planning, now_s: Callable[[], float]) -> bool:
    """Solve or plan once for a job, and publish its plans if that was the last of them; takes up to
    minutes.

    Returns:
        Whether more has to be solved or planned.

    Raises:
        StorageError: If they cannot be written.
    """
    state = writer.jobs.get(name)
    if state is None:
        return False
    problem = ""
    try:
        if prepare(state, planning, now_s()):
            return True
    except Ending:
        return False
    except PlannerError as error:
        problem = str(error)
    except Exception as error:
        _log.exception("Planning failed for job %r", name)
        problem = repr(error)

    def command(draft: Draft) -> None:
        state = draft.find(name)
        if state is not None:
            draft.put(
                given_up(state, problem, now_s())
                if problem
                else reconciled(state, planning, now_s())
            )

    writer.do(command)
    return False


class Replanner:
    """Prepares jobs in the order in which they were requested. Use it as a context manager, which
    ends its threads.

    A job that is requested again while it waits keeps its position, and what it needs is determined
    when its turn comes. So jobs whose reports change often do not delay others, and outdated plans
    are not made. A job that needs more than one solution is requested again after each, so that
    others take turns with it.
    """

    def __init__(self, prepare: Callable[[str], None], threads: int) -> None:
        """Call `prepare` with the name of each job."""
        self._prepare = prepare
        self._waiting: dict[str, None] = {}
        self._changed = threading.Condition()
        self._running = True
        self._threads = [
            threading.Thread(target=self._run, name="planner-replanning", daemon=True)
            for _ in range(threads)
        ]

    def __enter__(self) -> Replanner:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._running = False
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def request(self, name: str) -> None:
        """Have the plans of a job made."""
        with self._changed:
            self._waiting.setdefault(name)
            self._changed.notify()

    def _run(self) -> None:
        while (name := self._next()) is not None:
            try:
                self._prepare(name)
            except Exception:
                _log.exception("The plans of job %r could not be made", name)

    def _next(self) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or not self._running)
            if not self._running:
                return None
            name = next(iter(self._waiting))
            del self._waiting[name]
            return name
