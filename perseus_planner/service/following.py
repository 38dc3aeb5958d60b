"""What follows when a change is on disk: who waits for versions is told, and clocks and planners are set to work."""

from __future__ import annotations

import logging
import math
import threading
from typing import TYPE_CHECKING

from perseus_planner.service.agenda import Agenda
from perseus_planner.service.transitions import next_look_s

if TYPE_CHECKING:
    from collections.abc import Callable

    from perseus_planner.service.state import JobState
    from perseus_planner.service.store.writer import Changed

_log = logging.getLogger(__name__)


class Following:
    """Hears of every change; from any thread.

    Attributes:
        agenda: when to look at which job again.
    """

    def __init__(self, now_s: Callable[[], float], replan: Callable[[str], None]) -> None:
        """Call `replan` with the name of each job that was promised a version."""
        self.agenda = Agenda()
        self._now_s = now_s
        self._replan = replan
        self._lock = threading.Lock()
        self._subscribers: dict[object, Callable[[str, int], None]] = {}

    def subscribe(self, callback: Callable[[str, int], None]) -> Callable[[], None]:
        """Have `callback` told of versions, and of jobs that end, until what is returned is called."""
        token = object()
        with self._lock:
            self._subscribers = {**self._subscribers, token: callback}

        def unsubscribe() -> None:
            with self._lock:
                self._subscribers = {each: of for each, of in self._subscribers.items() if each is not token}

        return unsubscribe

    def remember(self, name: str, state: JobState | None) -> None:
        """Put down when time alone may change what is decided; a job that is being planned is looked at after that."""
        look_s = math.inf
        if state is not None:
            look_s = next_look_s(state, now_s := self._now_s())
            if not state.is_planned and look_s <= now_s:
                look_s = math.inf
        self.agenda.plan(name, look_s)

    def committed(self, changed: Changed) -> None:
        """Do what follows from changes that are on disk."""
        for name, (before, after) in changed.items():
            self.remember(name, after)
            if after is not None and not after.is_planned:
                self._replan(name)
            if after is None and before is not None:
                self._tell(name, before.published.version)
            elif after is not None and (before is None or after.published.version > before.published.version):
                self._tell(name, after.published.version)

    def _tell(self, name: str, version: int) -> None:
        for callback in self._subscribers.values():
            try:
                callback(name, version)
            except Exception:
                _log.exception("Who was to be told of version %d of job %r has failed", version, name)
