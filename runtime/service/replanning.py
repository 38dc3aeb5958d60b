"""Jobs whose plans are being made: a thread for each process that makes them, one job at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType

_log = logging.getLogger(__name__)


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
