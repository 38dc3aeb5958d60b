"""The service's part in a training job: rank 0 registers the job, follows its plans, and reports
what ranks detect.

Training waits for nothing here. While the service is away, the job continues with the plan it has;
rank 0 tries again, less and less often, and keeps the last detection of each rank. A service that
no longer knows the job is sent everything again.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING

from perseus_planner.base.errors import PlannerError, ServiceAway, ServiceRefusal
from perseus_planner.runtime.agent.outbox import Detections, JobCounts
from perseus_planner.runtime.agent.store import RankLocation, StoreMessages
from perseus_planner.runtime.switching.agreement import Acceptance, Proposal, Rejection
from perseus_planner.service.client import TIMEOUT_S, Client

if TYPE_CHECKING:
    from perseus_planner.plans.plan import Plan
    from perseus_planner.runtime.agent.settings import ServiceSettings
    from perseus_planner.runtime.job import JobWarnings, TrainingJob
    from perseus_planner.runtime.switching.plans import GivenPlan
    from perseus_planner.service.model import PlanSet
    from perseus_planner.service.schemas import Registration

POLL_S = 30.0
"""How long a long poll for newer plans waits at the service."""
LONGEST_PAUSE_S = 4.0
"""The longest pause between two tries while the service is away; within 5 s its return is known."""

_FIRST_PAUSE_S = 0.5
_ROUND_S = 0.25  #: between two looks for detections, and for the outcome of a proposal
_LOCATIONS_S = 30.0  #: how long rank 0 waits for the locations of all ranks
_AGAIN_S = 60.0  #: after which plans that were not taken are proposed again
_COUNTS_S = 5.0  #: between two telemetry messages
_END_S = 2.0  #: for telling the service that the job has ended


class Pauses:
    """The pauses between tries: each twice as long as the one before, with a random part so that
    jobs do not align.

    Args:
        chance: Returns a random number of at least 0 and below 1.
    """

    def __init__(self, chance: Callable[[], float] = random.random) -> None:
        self._chance, self._next_s = chance, _FIRST_PAUSE_S

    def next_s(self) -> float:
        """Return the next pause, seconds."""
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, LONGEST_PAUSE_S)
        return pause_s * (0.5 + 0.5 * self._chance())

    def reset(self) -> None:
        """Start again with the shortest pause, after a success."""
        self._next_s = _FIRST_PAUSE_S


class Agent:
    """Rank 0's agent, with two threads: one follows the plans, one sends detections, counts and
    taken versions.

    Args:
        settings: The service.
        job: All ranks.
        pipelines: Number of data-parallel pipelines.
        plan: The plan that the job starts with.
        switch_to: That of the `Runtime`.
        warnings: The warnings of this rank.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        job: TrainingJob,
        pipelines: int,
        plan: Plan | None,
        switch_to: Callable[[GivenPlan], Proposal],
        warnings: JobWarnings,
    ) -> None:
        self._settings, self._job, self._pipelines, self._plan = settings, job, pipelines, plan
        self._name = settings.name or ""
        self._switch_to, self._warnings = switch_to, warnings
        self._messages, self._detections = StoreMessages(job.own_store), Detections()
        self._stopped = threading.Event()
        self._is_known = threading.Event()  #: the service knows the job
        self._is_new = threading.Event()  #: the service did not know the job before
        self._has_left = threading.Event()  #: the end of the job was told, if the service knew it
        self._lock = threading.Lock()  #: of `_open` and `_away`
        self._registering = threading.Lock()  #: while the job is being registered
        self._away: set[str] = set()  #: for which threads the service is away
        self._registration: Registration | None = None
        self._seen, self._wait_s = (
            0,
            0.0,
        )  #: version of the plans, and how long to wait for a newer one
        self._open: tuple[PlanSet, Proposal, float] | None = (
            None  #: the last proposal, and when it was made
        )
        self._counts = JobCounts(self._messages, job.ranks)
        self._follower, self._sender = (
            threading.Thread(target=run, daemon=True, name=f"perseus-planner service {what}")
            for what, run in (("plans", self._follow), ("reports", self._send))
        )

    def start(self) -> None:
        """Start the threads."""
        self._follower.start()
        self._sender.start()

    def stop(self) -> None:
        """Propose no more plans, and warn no more."""
        self._stopped.set()

    def close(self) -> None:
        """End, and tell the service that the job has ended, without waiting for a service that
        is away.
        """
        self.stop()
        self._sender.join(
            _END_S
        )  # the follower may still wait at the service, and does nothing after that
        if self._registering.acquire(timeout=_END_S):
            self._registering.release()
        self._has_left.set()
        if self._is_known.is_set():
            with suppress(PlannerError), self._client(_END_S) as service:
                with suppress(PlannerError, RuntimeError):
                    self._counts.update()
                    self._send_counts(service)
                service.end(self._name)

    def _client(self, timeout_s: float = TIMEOUT_S) -> Client:
        return Client(self._settings.address, timeout_s=timeout_s)

    # Plans from the service

    def _follow(self) -> None:
        pauses = Pauses()
        try:
            self._prepare()
        except (
            PlannerError,
            OSError,
            RuntimeError,
        ) as error:  # the frontier file, or the job's store
            self._warnings.warn("service", f"the service is not used: {error}", by="rank 0")
            return
        service: Client | None = None
        with ExitStack() as stack:
            while not self._stopped.is_set():
                try:
                    service = service or stack.enter_context(self._client())
                    has_waited = self._ask(service)
                except PlannerError as error:
                    self._failed(error, "plans")
                    self._wait_s = 0.0  # so that a service that is back answers at once
                    self._stopped.wait(pauses.next_s())
                    continue
                pauses.reset()
                self._answered("plans")
                self._wait_s = POLL_S
                if has_waited:
                    self._stopped.wait(_ROUND_S)  # a service that is ending answers at once

    def _prepare(self) -> None:
        """Do what has to be done once, before the service is asked."""
        self._registration = self._settings.registration(
            self._locations(), self._pipelines, self._plan
        )

    def _ask(self, service: Client) -> bool:
        """Ask the service once, and do what it says; return whether it has said nothing new."""
        if not self._is_known.is_set():
            assert self._registration is not None  # prepared
            if self._register(service, self._registration):
                self._seen = 0
        found = service.plans(self._name, after=self._seen, wait_s=self._wait_s)
        if found is not None and not self._stopped.is_set():
            self._seen = found.version
            with self._lock:
                self._propose(found)
        return found is None

    def _locations(self) -> list[RankLocation]:
        """Return the locations of all ranks once they have passed them on, or time is up."""
        until_s = time.monotonic() + _LOCATIONS_S
        found: dict[int, RankLocation] = {}
        while (
            len(found) < self._job.ranks
            and time.monotonic() < until_s
            and not self._stopped.wait(0.01)
        ):
            for rank in set(range(self._job.ranks)) - set(found):
                location = self._messages.location(rank)
                if location is not None:
                    found[rank] = location
        return [found[rank] for rank in sorted(found)]

    def _register(self, service: Client, registration: Registration) -> bool:
        """Register the job, and return whether the service did not know it."""
        with self._registering:
            if self._stopped.is_set():
                return False
            registered = service.register(registration)
            if registered.is_new:
                self._is_new.set()
            self._is_known.set()
            if self._has_left.is_set():
                service.end(self._name)
            return registered.is_new

    def _propose(self, found: PlanSet) -> None:
        """Propose plans to all ranks, in place of an earlier proposal. The caller holds the
        lock.
        """
        self._open = None
        try:
            proposal = self._switch_to(dict(enumerate(found.plans)))
        except PlannerError as error:
            self._warnings.warn(
                "service plan", f"the service's plans cannot be taken: {error}", by="rank 0"
            )
        else:
            self._open = (found, proposal, time.monotonic())

    # Messages to the service

    def _send(self) -> None:
        pauses, pause_s = Pauses(), _ROUND_S
        service: Client | None = None
        with ExitStack() as stack:
            while not self._stopped.wait(pause_s):
                pause_s = _ROUND_S
                try:
                    for detection in self._messages.new_detections():
                        self._detections.add(detection)
                    self._counts.update_if_due(_COUNTS_S)
                except RuntimeError:  # the job's store is gone, and the job with it
                    return
                if not self._is_known.is_set():
                    continue
                try:
                    service = service or stack.enter_context(self._client())
                    if self._send_all(service):
                        self._answered("reports")
                    pauses.reset()
                except PlannerError as error:
                    self._failed(error, "reports")
                    pause_s = pauses.next_s()

    def _send_all(self, service: Client) -> bool:
        """Send what is new, and return whether there was anything that the service has answered."""
        was_answered = False
        if self._is_new.is_set():
            self._is_new.clear()
            self._detections.send_again()
        for request in self._detections.due():
            with self._refusals_reported():
                service.report(self._name, request)
            self._detections.sent(request)
            was_answered = True
        taken = self._taken()
        if taken is not None:
            plans, acceptance = taken
            with self._refusals_reported():
                service.taken(self._name, plans.version, acceptance.iteration)
            with self._lock:
                if self._open is not None and self._open[0] is plans:
                    self._open = None
            was_answered = True
        with self._refusals_reported():
            was_answered |= self._send_counts(service)
        return was_answered

    def _send_counts(self, service: Client) -> bool:
        """Send new counts once, and return whether there were any; if that fails, the next
        counts include them.
        """
        counters = self._counts.take()
        if counters is not None:
            service.telemetry(self._name, counters)
        return counters is not None

    def _taken(self) -> tuple[PlanSet, Acceptance] | None:
        """Return the plans proposed last once all ranks take them; plans that were refused are
        proposed again.
        """
        with self._lock:
            if self._open is None:
                return None
            plans, proposal, since_s = self._open
            outcome = proposal.outcome
            if isinstance(outcome, Rejection) and not self._stopped.is_set():
                self._warnings.warn(
                    "service plan",
                    f"the service's plans were not taken: {outcome.text}",
                    by="rank 0",
                )
                if time.monotonic() - since_s > _AGAIN_S:
                    self._propose(plans)
            return (plans, outcome) if isinstance(outcome, Acceptance) else None

    @contextmanager
    def _refusals_reported(self) -> Iterator[None]:
        """Warn of a refusal and continue. The request is not repeated unless the service does
        not know the job.
        """
        try:
            yield
        except ServiceRefusal as error:
            self._failed(error)

    def _failed(self, error: PlannerError, thread: str = "") -> None:
        if isinstance(error, ServiceRefusal) and error.status == HTTPStatus.NOT_FOUND:
            self._is_known.clear()
        if isinstance(error, ServiceAway):
            with self._lock:
                self._away.add(thread)
        if not self._stopped.is_set():
            key = "service away" if isinstance(error, ServiceAway) else "service"
            self._warnings.warn(key, f"{error}; training continues with its plan", by="rank 0")

    def _answered(self, thread: str) -> None:
        """Say that the service is back once it answers all threads for which it was away."""
        with self._lock:
            self._away.discard(thread)
            if not self._away and not self._stopped.is_set():
                self._warnings.end(
                    "service away", f"the service at {self._settings.address} answers again"
                )
