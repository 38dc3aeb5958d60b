"""The service's part in a training job: rank 0 registers the job, follows its plans, and passes on what ranks find.

Training waits for nothing here. While the service is away the job goes on by the plan it has; rank 0 tries again, ever
less often, and keeps the last finding of each rank. A service that does not know the job any more is told of it again.
"""

from __future__ import annotations

import random
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from http.client import CONFLICT, NOT_FOUND
from typing import TYPE_CHECKING

from perseus_planner.errors import PlannerError, ServiceRefusal
from perseus_planner.runtime.agent.embedded import EmbeddedService, Embedding
from perseus_planner.runtime.agent.findings import Findings
from perseus_planner.runtime.agent.store import Card, Mailbox
from perseus_planner.runtime.agent.summing import Summing
from perseus_planner.runtime.switching.agreement import Acceptance, Proposal, Rejection
from perseus_planner.service.client.client import TIMEOUT_S, Client

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from perseus_planner.plans.plan import Plan
    from perseus_planner.runtime.agent.settings import ServedJob
    from perseus_planner.runtime.job import JobWarnings, TrainingJob
    from perseus_planner.runtime.switching.plans import GivenPlan
    from perseus_planner.service.answers import PlanVersion
    from perseus_planner.service.requests import Registration

POLL_S = 30.0
"""How long one question for newer plans waits at the service."""
LONGEST_PAUSE_S = 30.0
"""Between two tries while the service is away, at most."""

_FIRST_PAUSE_S = 0.5
_ROUND_S = 0.25  #: between two looks for findings, and for what became of a plan
_PLACES_S = 30.0  #: for all ranks to say where they are
_AGAIN_S = 60.0  #: after which plans that were not taken are proposed again
_COUNTS_S = 5.0  #: between two times that the service is told what was counted
_END_S = 2.0  #: for the service to hear of the end


class Pauses:
    """How long to wait before the next try: twice as long each time, and not exactly as long as others do.

    Args:
        chance: a random number of 0 or more and below 1.
    """

    def __init__(self, chance: Callable[[], float] = random.random) -> None:
        self._chance, self._next_s = chance, _FIRST_PAUSE_S

    def next_s(self) -> float:
        """Seconds."""
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, LONGEST_PAUSE_S)
        return pause_s * (0.5 + 0.5 * self._chance())

    def over(self) -> None:
        """It went well."""
        self._next_s = _FIRST_PAUSE_S


class Agent:
    """Rank 0's part, in two threads of its own: one follows the plans, one tells of findings, counts and plans taken.

    Args:
        served: what the service is to know.
        job: all ranks.
        pipelines: how many there are.
        plan: what is run by at first.
        switch_to: of the `Runtime`.
        warnings: of this rank.
    """

    def __init__(
        self,
        served: ServedJob,
        job: TrainingJob,
        pipelines: int,
        plan: Plan | None,
        switch_to: Callable[[GivenPlan], Proposal],
        warnings: JobWarnings,
    ) -> None:
        self._served, self._job, self._pipelines, self._plan = served, job, pipelines, plan
        self._name = served.name or ""
        embedding = Embedding.parse(served.address)
        self._own = None if embedding is None else EmbeddedService(embedding, self._name)
        self._address = served.address
        self._switch_to, self._warnings = switch_to, warnings
        self._mailbox, self._findings = Mailbox(job.store), Findings()
        self._stopped = threading.Event()
        self._is_known = threading.Event()  #: the service knows the job
        self._is_new = threading.Event()  #: it did not know it before
        self._lock = threading.Lock()  #: of what was proposed last
        self._open: tuple[PlanVersion, Proposal, float] | None = None
        self._summing = Summing(self._mailbox, job.ranks)
        self._follows, self._tells = (
            threading.Thread(target=run, daemon=True, name=f"perseus-planner service {what}")
            for what, run in (("plans", self._follow), ("findings", self._tell))
        )

    def start(self) -> None:
        """Begin."""
        self._follows.start()
        self._tells.start()

    def stop(self) -> None:
        """Begin nothing more, and say nothing more."""
        self._stopped.set()

    def close(self) -> None:
        """End, and tell the service that the job has ended; does not wait for a service that is away."""
        self.stop()
        self._tells.join(_END_S)  # the other one may be waiting at the service, and does nothing after that
        if self._is_known.is_set():
            with suppress(PlannerError), self._client(_END_S) as service:
                with suppress(PlannerError, RuntimeError):
                    self._summing.look()
                    self._tell_counts(service)
                service.end(self._name)
        if self._own is not None:
            self._own.close()

    def _client(self, timeout_s: float = TIMEOUT_S) -> Client:
        return Client(self._address, None if self._own is None else self._own.token, timeout_s=timeout_s)

    def _start_own(self) -> None:
        """The service of the job's own, if it is to have one and that does not run."""
        if self._own is not None:
            self._address = self._own.running()
            text = f"the service of job {self._name} listens at {self._address}"
            self._warnings.warn("embedded", text, by="rank 0")

    # What the service wants.

    def _follow(self) -> None:
        pauses, seen = Pauses(), 0
        try:
            registration = self._registration()
        except (PlannerError, OSError, RuntimeError) as error:  # the frontier's file; the job's store
            self._warnings.warn("service", f"the service is not asked for plans: {error}", by="rank 0")
            return
        service: Client | None = None
        with ExitStack() as stack:
            while not self._stopped.is_set():
                try:
                    self._start_own()
                    service = service or stack.enter_context(self._client())
                    if not self._is_known.is_set():
                        seen = self._registered(service, registration, seen)
                    found = service.plans(self._name, after=seen, wait_s=POLL_S)
                except PlannerError as error:
                    self._failed(error)
                    self._stopped.wait(pauses.next_s())
                    continue
                pauses.over()
                if found is None:
                    self._stopped.wait(_ROUND_S)  # a service that is ending answers at once
                elif not self._stopped.is_set():
                    seen = found.version
                    with self._lock:
                        self._propose(found)

    def _registration(self) -> Registration:
        """Once all ranks have said where they are, or time is up."""
        until_s = time.monotonic() + _PLACES_S
        cards: dict[int, Card] = {}
        while len(cards) < self._job.ranks and time.monotonic() < until_s and not self._stopped.wait(0.01):
            for rank in set(range(self._job.ranks)) - set(cards):
                card = self._mailbox.place(rank)
                if card is not None:
                    cards[rank] = card
        return self._served.registration([cards[rank] for rank in sorted(cards)], self._pipelines, self._plan)

    def _registered(self, service: Client, registration: Registration, seen: int) -> int:
        """Which version of the service's plans this job has seen."""
        try:
            registered = service.register(registration)
        except ServiceRefusal as error:
            if self._own is None or error.status != CONFLICT:
                raise
            service.end(self._name)  # it was killed, and is another one now: on other GPUs, with another frontier
            registered = service.register(registration)
        if registered.is_new:
            self._is_new.set()
        self._is_known.set()
        return 0 if registered.is_new else seen

    def _propose(self, found: PlanVersion) -> None:
        """To all ranks; what was proposed before does not count any more. With the lock."""
        self._open = None
        try:
            proposal = self._switch_to(dict(enumerate(found.plans)))
        except PlannerError as error:
            self._warnings.warn("service plan", f"the service's plans cannot be taken: {error}", by="rank 0")
        else:
            self._open = (found, proposal, time.monotonic())

    # What the service is told.

    def _tell(self) -> None:
        pauses, pause_s = Pauses(), _ROUND_S
        service: Client | None = None
        with ExitStack() as stack:
            while not self._stopped.wait(pause_s):
                pause_s = _ROUND_S
                try:
                    for finding in self._mailbox.findings():
                        self._findings.add(finding)
                    self._summing.look_if_due(_COUNTS_S)
                except RuntimeError:  # the job's store is gone, and the job with it
                    return
                if not self._is_known.is_set():
                    continue
                try:
                    service = service or stack.enter_context(self._client())
                    self._tell_all(service)
                    pauses.over()
                except PlannerError as error:
                    self._failed(error)
                    pause_s = pauses.next_s()

    def _tell_all(self, service: Client) -> None:
        if self._is_new.is_set():
            self._is_new.clear()
            self._findings.tell_again()
        for request in self._findings.due():
            with self._refusals_said():
                service.report(self._name, request)
            self._findings.told(request)
        found = self._taken()
        if found is not None:
            with self._refusals_said():
                service.taken(self._name, found[0].version, found[1].iteration)
            with self._lock:
                if self._open is not None and self._open[0] is found[0]:
                    self._open = None
        with self._refusals_said():
            self._tell_counts(service)

    def _tell_counts(self, service: Client) -> None:
        """Once: what it does not hear, it hears with what is counted next."""
        counters = self._summing.taken()
        if counters is not None:
            service.telemetry(self._name, counters)

    def _taken(self) -> tuple[PlanVersion, Acceptance] | None:
        """The plans that were proposed last, once all ranks take them; what they do not take is proposed again."""
        with self._lock:
            if self._open is None:
                return None
            plans, proposal, since_s = self._open
            outcome = proposal.outcome
            if isinstance(outcome, Rejection) and not self._stopped.is_set():
                self._warnings.warn("service plan", f"the service's plans were not taken: {outcome.text}", by="rank 0")
                if time.monotonic() - since_s > _AGAIN_S:
                    self._propose(plans)
            return (plans, outcome) if isinstance(outcome, Acceptance) else None

    @contextmanager
    def _refusals_said(self) -> Iterator[None]:
        """What the service refuses is not asked again, unless it turns out not to know the job."""
        try:
            yield
        except ServiceRefusal as error:
            self._failed(error)

    def _failed(self, error: PlannerError) -> None:
        if isinstance(error, ServiceRefusal) and error.status == NOT_FOUND:
            self._is_known.clear()
        if not self._stopped.is_set():
            self._warnings.warn("service", f"{error}; training goes on by the plan it has", by="rank 0")
