"""The service's part in a training job: every rank tells rank 0 what the service is to hear; rank 0
registers the job, follows its plans, and reports what ranks detect.

Training waits for nothing here. While the service is away, the job continues with the plan it has;
rank 0 tries again, less and less often, and keeps the last detection of each rank. A service that
no longer knows the job is sent everything again.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

from perseus_planner.base.errors import PlannerError, ServiceAway, ServiceRefusal
from perseus_planner.base.loops import Backoff, Loop, in_background
from perseus_planner.extensions.service.agent.outbox import (
    Detection,
    Detections,
    JobCounts,
    RankLocation,
    ServiceSettings,
    StoreMessages,
)
from perseus_planner.extensions.service.client import TIMEOUT_S, Client
from perseus_planner.plans.plan import Plan
from perseus_planner.runtime.switching import Acceptance, Proposal, Rejection

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from concurrent.futures import Future

    from perseus_planner.extensions.service.models import PipelineStatus, PlanSet, Registration
    from perseus_planner.runs.status import DeciderStatus
    from perseus_planner.runs.verdict import StragglerDetection
    from perseus_planner.runtime.context import RankContext
    from perseus_planner.runtime.decider import Learnt, ServiceExchange
    from perseus_planner.runtime.job import JobWarnings, TrainingJob
    from perseus_planner.runtime.options import Options
    from perseus_planner.runtime.sending import GivenPlan
    from perseus_planner.runtime.switching import SwitchTo
    from perseus_planner.runtime.telemetry import Checkpoint


POLL_S = 30.0
"""How long a long poll for newer plans waits at the service."""
LONGEST_PAUSE_S = 4.0
"""The longest pause between two tries while the service is away; within 5 s its return is known."""

_FIRST_PAUSE_S = 0.5
_ROUND_S = 0.25  #: between two looks for detections, and for the outcome of a proposal
_LOCATIONS_S = 30.0  #: how long rank 0 waits for the locations of all ranks
_LOCATIONS_PAUSE_S = 0.02  #: the first between two looks for them; each is twice as long
_AGAIN_S = 60.0  #: after which plans that were not taken are proposed again
_LEAST_WAIT_S = 1.0  #: at the service, while plans wait for a straggler that ends soon
_COUNTS_S = 5.0  #: between two telemetry messages
_END_S = 2.0  #: for telling the service that the job has ended


def new_pauses() -> Backoff:
    """Return the pauses between tries while the service is away."""
    return Backoff(_FIRST_PAUSE_S, LONGEST_PAUSE_S, random.random)


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
        switch_to: SwitchTo,
        warnings: JobWarnings,
    ) -> None:
        self._settings = settings
        self._job = job
        self._pipelines = pipelines
        self._plan = plan
        self._name = settings.name or ""
        self._switch_to = switch_to
        self._warnings = warnings
        self._messages = StoreMessages(job.own_store)
        self._detections = Detections()
        self._stopped = threading.Event()
        self._is_known = threading.Event()  #: the service knows the job
        self._is_new = threading.Event()  #: the service did not know the job before
        self._has_left = threading.Event()  #: the end of the job was told, if the service knew it
        self._lock = threading.Lock()  #: of `_open` and `_away`
        self._registering = threading.Lock()  #: while the job is being registered
        self._away: set[str] = set()  #: for which threads the service is away
        self._registration: Registration | None = None
        # Version of the plans; how long to wait for a newer one
        self._seen = 0
        self._wait_s = 0.0
        self._open: tuple[PlanSet, Proposal, float] | None = (
            None  #: the last proposal, and when it was made
        )
        self._proposed: PlanSet | None = None  #: the plans of it
        self._own: Plan | None = None  #: what the last plans say to run when they end
        self._ends_s: float | None = None  #: when they end, on the monotonic clock
        self._has_lapsed = False  #: they have ended, and the service has said nothing since
        self._counts = JobCounts(self._messages, job.ranks)
        self._follower = Loop(self._follow(), "perseus-planner service plans")
        self._sender = Loop(self._send(), "perseus-planner service reports")
        self._keeper = Loop(self._keep, "perseus-planner service lease")

    def start(self) -> None:
        """Start the threads."""
        self._follower.start()
        self._keeper.start()
        self._sender.start()

    def stop(self) -> None:
        """Propose no more plans, and warn no more."""
        self._stopped.set()
        self._keeper.stop(0.0)
        self._follower.stop(0.0)  # it may still wait at the service, and does nothing after that
        self._sender.stop(0.0)

    def close(self) -> None:
        """End, and tell the service that the job has ended, without waiting for a service that
        is away.
        """
        self.stop()
        self._sender.stop(_END_S)
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

    def _asking(self, thread: str, ask: Callable[[Client], float]) -> Generator[float]:
        """Ask the service again and again, less and less often while it is away."""
        pauses = new_pauses()
        with self._client() as service:
            while True:
                try:
                    pause_s = ask(service)
                    pauses.reset()
                except PlannerError as error:
                    self._failed(error, thread)
                    pause_s = pauses.next_s()
                yield pause_s

    def _follow(self) -> Generator[float]:
        try:
            self._prepare()
        except (
            PlannerError,
            OSError,
            RuntimeError,
        ) as error:  # the frontier file, or the job's store
            self._warnings.warn("service", f"the service is not used: {error}", by="rank 0")
            return
        yield from self._asking("plans", self._ask_for_plans)

    def _ask_for_plans(self, service: Client) -> float:
        # So that a service that is back answers at once
        wait_s = self._wait_s
        self._wait_s = 0.0
        has_waited = self._ask(service, wait_s)
        self._answered("plans")
        self._wait_s = 0.0 if self._has_lapsed else self._longest_wait_s(service)
        return _ROUND_S if has_waited else 0.0  # a service that is ending answers at once

    def _prepare(self) -> None:
        """Do what has to be done once, before the service is asked."""
        self._registration = self._settings.registration(
            self._locations(), self._pipelines, self._plan
        )

    def _ask(self, service: Client, wait_s: float) -> bool:
        """Ask the service once, and do what it says; return whether it has said nothing new."""
        if not self._is_known.is_set():
            assert self._registration is not None  # prepared
            if self._register(service, self._registration):
                self._seen = 0
        plans = self._newer(service, wait_s)
        if plans is not None and not self._stopped.is_set():
            with self._lock:
                if plans != self._proposed:  # it was started again, and says the same
                    self._propose(plans)
        return plans is None

    def _newer(self, service: Client, wait_s: float) -> PlanSet | None:
        """Ask for newer plans, or for the same again if theirs have ended; renews their lease."""
        plans = service.plans(self._name, after=self._seen, wait_s=wait_s)
        with self._lock:
            if plans is None and self._has_lapsed:
                self._seen = 0
            elif plans is not None:
                self._seen = plans.version
                if self._has_lapsed:  # so that the next lapse is said again
                    self._warnings.forget("service lease")
                self._has_lapsed = False
                self._own = None if plans.own is None else Plan.loads(plans.texts[plans.own])
            lease_s = None if self._has_lapsed else service.lease_s
            self._ends_s = None if lease_s is None else time.monotonic() + lease_s
        self._keeper.wake()
        return plans

    def _longest_wait_s(self, service: Client) -> float:
        """Return how long to wait for newer plans: the lease is renewed before it ends."""
        lease_s = service.lease_s
        return POLL_S if lease_s is None else min(POLL_S, max(lease_s / 2.0, _LEAST_WAIT_S))

    def _keep(self) -> float | None:
        """End plans that wait for a straggler when their lease ends; returns when to look again."""
        with self._lock:
            if self._ends_s is None or self._stopped.is_set():
                return None
            left_s = self._ends_s - time.monotonic()
            if left_s > 0.0:
                return left_s
            self._ends_s = None
            self._has_lapsed = True
            self._warnings.warn(
                "service lease",
                "the service was silent while plans waited for a straggler; the job runs its own "
                "plan until the service answers",
                by="rank 0",
            )
            self._lapse()
        return None

    def _lapse(self) -> None:
        """Propose the job's own plan to all ranks. The caller holds the lock."""
        if self._own is not None:
            self._open = self._proposed = None
            with suppress(PlannerError):  # it was of this schedule when the service made it
                self._switch_to(dict.fromkeys(range(self._pipelines), self._own))

    def _locations(self) -> list[RankLocation]:
        """Return the locations of all ranks once they have passed them on, or time is up."""
        locations = self._messages.locations(self._job.ranks)
        pause_s = _LOCATIONS_PAUSE_S
        while (
            len(locations) < self._job.ranks
            and pause_s < _LOCATIONS_S
            and not self._stopped.wait(pause_s)
        ):
            locations = self._messages.locations(self._job.ranks)
            pause_s = 2 * pause_s
        return locations

    def _register(self, service: Client, registration: Registration) -> bool:
        """Register the job, and return whether the service did not know it."""
        with self._registering:
            if self._stopped.is_set():
                return False
            registered = service.register(registration)
            if registered.is_new:
                self._is_new.set()
            self._is_known.set()
            # The training has ended while the service took the registration.
            if self._has_left.is_set():
                service.end(self._name)
            return registered.is_new

    def _propose(self, plans: PlanSet) -> None:
        """Propose plans to all ranks, in place of an earlier proposal. The caller holds the
        lock.
        """
        self._open = None
        self._proposed = plans
        try:
            proposal = self._switch_to(dict(enumerate(plans.plans)), number=plans.version)
        except PlannerError as error:
            self._warnings.warn(
                "service plan", f"the service's plans cannot be taken: {error}", by="rank 0"
            )
        else:
            self._open = (plans, proposal, time.monotonic())

    # Messages to the service

    def _send(self) -> Generator[float]:
        with suppress(RuntimeError):  # the job's store is gone, and the job with it
            yield from self._asking("reports", self._report)

    def _report(self, service: Client) -> float:
        for detection in self._messages.new_detections():
            self._detections.add(detection)
        self._counts.update_if_due(_COUNTS_S)
        if self._is_known.is_set() and self._send_all(service):
            self._answered("reports")
        return _ROUND_S

    def _send_all(self, service: Client) -> bool:
        """Send what is new, and return whether there was anything that the service has answered."""
        was_answered = False
        # A service that did not know the job has none of its reports.
        if self._is_new.is_set():
            self._is_new.clear()
            self._detections.send_again()
        for request in self._detections.due():
            with self._refusals_reported():
                service.report(self._name, request)
            # Also after a refusal, which the same report would get again.
            self._detections.sent(request)
            was_answered = True
        taken = self._taken()
        if taken is not None:
            plans, acceptance = taken
            with self._refusals_reported():
                service.taken(self._name, plans.version, acceptance.iteration)
            # Only if no other plans were proposed while the service was told.
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
            service.telemetry(self._name, replace(counters, autopilot=self._autopilot()))
        return counters is not None

    def _autopilot(self) -> DeciderStatus | None:
        return None

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


GROWTH = 1.5
"""How many times as many rows must be known before the service plans on them."""

_POLL_S = 2.0  #: that a long poll waits at the service: a straggler may change while no plan does
_LONGER = 1e-6  #: by how much a pipeline must be allowed to take longer


class LearningAgent(Agent):
    """An agent that registers the job with the profile that it has learnt, or was given, again
    whenever that has grown.

    The plans of the service are not run: it says how long pipelines may take beside a slower one or
    within a budget, and the training makes its own plans for that.

    Args:
        settings: The service.
        job: All ranks.
        pipelines: Number of data-parallel pipelines.
        exchange: What the training gives and is given.
        warnings: The warnings of this rank.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        job: TrainingJob,
        pipelines: int,
        exchange: ServiceExchange,
        warnings: JobWarnings,
    ) -> None:
        super().__init__(settings, job, pipelines, None, _never, warnings)
        self._exchange = exchange
        self._places: Sequence[RankLocation] = ()
        self._asked: Learnt | None = None  #: with which the job is being registered
        self._registered: Learnt | None = None  #: that the service plans on
        #: registers the job again, while this one is followed; None before
        self._growing: Future[None] | None = None

    def _prepare(self) -> None:
        self._places = self._locations()

    def _ask(self, service: Client, wait_s: float) -> bool:
        exchange = self._exchange
        learnt = exchange.learnt
        if learnt is None:
            return True
        # First of all the job is registered; a service that has lost it gets it again.
        if self._registered is None or not self._is_known.is_set():
            self._register_learnt(service, learnt)
        elif learnt.rows >= GROWTH * self._registered.rows and (
            self._growing is None or self._growing.done()
        ):
            # On a thread of its own, as the service solves the grown profile for minutes while this
            # one is followed.
            self._growing = in_background(partial(self._grow, learnt), "planner growth")
        # A short poll: stragglers come and go without new plans here.
        plans = self._newer(service, min(wait_s, _POLL_S))
        pipelines = service.pipelines(self._name)
        with self._lock:
            exchange.calm_s = self._waits_s(pipelines, of_stragglers=False)
            exchange.waits_s = self._waits_s(pipelines)
        if plans is not None:
            service.taken(self._name, plans.version, max(0, exchange.status.iteration))
        return plans is None

    def _register_learnt(self, service: Client, learnt: Learnt) -> None:
        """Register the job with what was learnt; after a try without an answer, with the same as
        then.
        """
        asked = self._asked or learnt
        self._asked = asked
        try:
            if self._register(
                service, self._settings.learnt_registration(self._places, self._pipelines, asked)
            ):
                self._seen = 0
        except ServiceRefusal:
            self._asked = None
            raise
        self._asked = None
        self._registered = asked

    def _grow(self, learnt: Learnt) -> None:
        try:
            with self._client() as service:
                self._register_learnt(service, learnt)
            self._answered("growth")
        except PlannerError as error:
            self._failed(error, "growth")

    def _lapse(self) -> None:
        self._exchange.waits_s = self._exchange.calm_s

    def _waits_s(
        self, pipelines: Sequence[PipelineStatus], *, of_stragglers: bool = True
    ) -> tuple[float, ...]:
        """Return how long pipelines may take that wait, for stragglers or only for budgets; one
        that is slow itself is to be as fast as agreed.
        """
        assert self._registered is not None
        own_s = self._settings.slowdown * self._registered.time_s
        allowed_s = [
            0.0
            if pipeline.report is not None or (pipeline.reason == "straggler" and not of_stragglers)
            else max(pipeline.target_s, pipeline.time_s)
            for pipeline in pipelines
        ]
        waits_s = tuple(wait_s if wait_s > own_s * (1 + _LONGER) else 0.0 for wait_s in allowed_s)
        return waits_s if any(waits_s) else ()

    def _autopilot(self) -> DeciderStatus:
        return self._exchange.status


def _never(plan: GivenPlan, *, number: int | None = None) -> Proposal:
    raise AssertionError("the training makes its own plans")


class ServiceLink:
    """What every rank does for the service: it passes its location, detections and accounts to rank
    0.

    Args:
        settings: The service, of which rank 0's settings count.
        job: All ranks.
        warnings: The warnings of this rank.
    """

    def __init__(self, settings: ServiceSettings, job: TrainingJob, warnings: JobWarnings) -> None:
        self.settings = settings
        self._job = job
        self._warnings = warnings
        self._messages = StoreMessages(job.own_store)
        self._agent: Agent | None = None

    def check(self) -> None:
        """Refuse a job that the service cannot be told of; see `ServiceSettings.check`."""
        self.settings.check()

    def begin(
        self,
        context: RankContext,
        plan: Plan | None,
        switch_to: SwitchTo,
        exchange: ServiceExchange | None = None,
    ) -> None:
        """Start the agent on rank 0, and pass on the location of this rank.

        Args:
            context: What this rank knows of itself.
            plan: The plan that its pipeline starts with.
            switch_to: That of its `Runtime`.
            exchange: Of training that makes its own plans; None with a plan.
        """
        gpu = "" if context.attachment.gpu is None else context.attachment.gpu.uuid
        location = RankLocation(
            self._job.rank,
            context.own.pipeline,
            context.engine.pipeline_rank.rank,
            socket.gethostname(),
            gpu,
        )
        with suppress(RuntimeError):  # the job's store is gone, which training itself will report
            self._messages.write_location(location)
        if self._job.rank == 0:
            if exchange is None:
                self._agent = Agent(
                    self.settings,
                    self._job,
                    context.part.pipelines,
                    plan,
                    switch_to,
                    self._warnings,
                )
            else:
                self._agent = LearningAgent(
                    self.settings, self._job, context.part.pipelines, exchange, self._warnings
                )
            self._agent.start()

    def on_straggling(
        self, then: Callable[[StragglerDetection], None] | None
    ) -> Callable[[StragglerDetection], None]:
        """Return a callback for detections of this rank that informs the service and then calls
        `then`.

        It takes two operations of the job's store.
        """

        def detected(straggling: StragglerDetection) -> None:
            with suppress(RuntimeError):  # the store is gone
                self._messages.write_detection(Detection(self._job.rank, straggling))
            if then is not None:
                then(straggling)

        return detected

    def counted(self, kept: Sequence[Checkpoint]) -> None:
        """Pass on the checkpoints of this rank; one operation of the job's store."""
        with suppress(RuntimeError):  # the store is gone
            self._messages.write_checkpoints(self._job.rank, kept)

    def stop(self) -> None:
        """Take no more plans, as training is ending; returns at once."""
        if self._agent is not None:
            self._agent.stop()

    def close(self) -> None:
        """Tell the service that training has ended."""
        if self._agent is not None:
            self._agent.close()


def begin_link(options: Options, job: TrainingJob, warnings: JobWarnings) -> ServiceLink:
    """Return a rank's part in the service of its options; the offer "service link".

    Raises:
        UsageError: If the options do not name the job.
    """
    assert options.service is not None
    is_learning = options.plan is None
    settings = ServiceSettings(
        address=options.service,
        name=options.job,
        frontier=options.frontier,
        max_changes=options.autopilot.max_changes if is_learning else options.max_changes,
        is_learning=is_learning,
        slowdown=options.autopilot.slowdown,
    )
    return ServiceLink(settings, job, warnings)
