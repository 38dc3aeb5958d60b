"""What each iteration of this rank runs by: the plan that all ranks agreed on, or, if anything fails, no clocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from perseus_planner.errors import PlannerError
from perseus_planner.runtime.program import Program
from perseus_planner.runtime.switching.agreement import Agreement
from perseus_planner.runtime.switching.plans import Plans

if TYPE_CHECKING:
    from perseus_planner.runtime.job import Job

PATIENCE_S = 0.5
"""For how long an iteration's begin may wait, once, for this rank to hear from the others."""

_AHEAD_S = 0.05  #: for so long ahead this rank asks what it may begin


Accepts = Callable[[int, Plans], Program]
Record = Callable[[int, Program | None, str | None], None]


class JobPilot:
    """The `Pilot` of a rank whose job agrees on plans through its store.

    The training thread calls the methods of `Pilot`; all others belong to the background thread.

    Args:
        job: all ranks.
        accepts: the program of a version for this rank, from all pipelines' plans; raises a PlannerError where the plan
            does not fit.
        record: told of every iteration that has ended, as `Pilot.ended` is.
        wake: called on the training thread when the background thread has something to do; must not wait.
    """

    def __init__(self, job: Job, accepts: Accepts, record: Record, wake: Callable[[], None]) -> None:
        self.agreement = Agreement(job.store, job.rank, job.ranks, self._accepted)
        self.problem: str | None = None  #: why there are no clocks any more; never taken back
        self.out_of_step: str | None = None  #: why there were none for an iteration or more
        self.deviation: str | None = None  #: what an engine did that was not in the plan
        self._accepts, self._record, self._wake = accepts, record, wake
        self._programs: dict[int, Program] = {}
        self._current: Program | None = None
        self._looked = threading.Condition()
        self._patient = True
        self._through = 0
        self._begun_s = (0.0, 0.0)  #: the last two iterations

    @property
    def program(self) -> Program | None:
        """What was run by last."""
        return self._current

    def start(self, first: Program | None) -> None:
        """Before training: `first` is version 1."""
        if first is not None:
            self._programs[1] = first
        self._current = first
        self.look()

    def program_for(self, iteration: int) -> Program | None:
        """See `Pilot.program_for`."""
        self._begun_s = (self._begun_s[1], time.monotonic())
        if self.problem is not None:
            return None
        version = self._version_of(iteration)
        if not version:
            self.out_of_step = f"iteration {iteration} began before this rank had heard which plan it runs by"
            return None
        self._current = self._programs.get(version)
        return self._current

    def three_quarters(self, iteration: int) -> None:
        """See `Pilot.three_quarters`."""
        lasts_s = max(self._begun_s[1] - self._begun_s[0], 1e-3)
        self._through = iteration + 1 + int(_AHEAD_S / lasts_s)
        self._wake()

    def ended(self, iteration: int, program: Program | None, deviation: str | None) -> None:
        """See `Pilot.ended`."""
        if deviation is not None:
            self.deviation = f"iteration {iteration} ran {deviation}"
        self._record(iteration, program, deviation)

    def look(self) -> None:
        """Take part in the agreement, once round."""
        self.agreement.look(self._through)
        if self._current is not None:
            for version in [each for each in self._programs if each < self._current.version]:
                del self._programs[version]
        with self._looked:
            self._looked.notify_all()

    def _version_of(self, iteration: int) -> int:
        """Of the plan; 0 if that is not known. Waits where it must, but not again before this rank is in step."""
        version = self.agreement.version_at(iteration)
        if not version and self._patient and self.agreement.lost is None:
            self._through = max(self._through, iteration)
            self._wake()
            with self._looked:
                self._looked.wait_for(lambda: self.agreement.may_begin(iteration), PATIENCE_S)
            version = self.agreement.version_at(iteration)
        self._patient = version > 0
        return version

    def _accepted(self, version: int, data: bytes) -> str | None:
        try:
            self._programs[version] = self._accepts(version, Plans.loads(data))
        except PlannerError as error:
            return str(error)
        return None
