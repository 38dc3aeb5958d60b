"""Rank 0's agent while the autopilot plans: the service plans from what is learnt, and its
stragglers come back.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from perseus_planner.base.errors import PlannerError, ServiceRefusal
from perseus_planner.runtime.agent.agent import Agent

if TYPE_CHECKING:
    from perseus_planner.runtime.agent.settings import ServiceSettings
    from perseus_planner.runtime.agent.store import RankLocation
    from perseus_planner.runtime.autopilot.ranks.exchange import Learnt, ServiceExchange
    from perseus_planner.runtime.job import JobWarnings, TrainingJob
    from perseus_planner.runtime.switching.agreement import Proposal
    from perseus_planner.runtime.switching.plans import GivenPlan
    from perseus_planner.service.answers import PipelineStatus
    from perseus_planner.service.client import Client

GROWTH = 1.5
"""How many times as many rows must be known before the service plans on them."""

_POLL_S = 2.0  #: that a long poll waits at the service: a straggler may change while no plan does
_LONGER = 1e-6  #: by how much a pipeline must be allowed to take longer


class LearningAgent(Agent):
    """An agent that registers the job with the frontier that it has learnt, again whenever that has
    grown.

    The plans of the service are not run: it says how long pipelines may take beside a slower one,
    and the autopilot plans for that.

    Args:
        settings: The service.
        job: All ranks.
        pipelines: Number of data-parallel pipelines.
        exchange: What the autopilot gives and is given.
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
        self._growing = threading.Thread()  #: registers the job again, while this one is followed

    def _prepare(self) -> None:
        self._places = self._locations()

    def _ask(self, service: Client) -> bool:
        exchange = self._exchange
        learnt = exchange.learnt
        if learnt is None:
            return True
        if self._registered is None or not self._is_known.is_set():
            self._register_learnt(service, learnt)
        elif learnt.rows >= GROWTH * self._registered.rows and not self._growing.is_alive():
            self._growing = threading.Thread(target=self._grow, args=(learnt,), daemon=True)
            self._growing.start()
        found = service.plans(self._name, after=self._seen, wait_s=min(self._wait_s, _POLL_S))
        exchange.waits_s = self._waits_s(service.pipelines(self._name))
        if found is not None:
            self._seen = found.version
            service.taken(self._name, found.version, max(0, exchange.status.iteration))
        return found is None

    def _register_learnt(self, service: Client, learnt: Learnt) -> None:
        """Register the job with what was learnt; after a try without an answer, with the same as
        then.
        """
        self._asked = asked = self._asked or learnt
        try:
            if self._register(
                service, self._settings.learnt_registration(self._places, self._pipelines, asked)
            ):
                self._seen = 0
        except ServiceRefusal:
            self._asked = None
            raise
        self._asked, self._registered = None, asked

    def _grow(self, learnt: Learnt) -> None:
        try:
            with self._client() as service:
                self._register_learnt(service, learnt)
            self._answered("growth")
        except PlannerError as error:
            self._failed(error, "growth")

    def _waits_s(self, pipelines: Sequence[PipelineStatus]) -> tuple[float, ...]:
        """Return how long pipelines may take that wait; one that is slow itself is to be as fast
        as agreed.
        """
        assert self._registered is not None
        own_s = self._settings.slowdown * self._registered.time_s
        allowed_s = [
            0.0 if each.report is not None else max(each.target_s, each.time_s)
            for each in pipelines
        ]
        waits_s = tuple(each if each > own_s * (1 + _LONGER) else 0.0 for each in allowed_s)
        return waits_s if any(waits_s) else ()

    def _send_counts(self, service: Client) -> bool:
        counters = self._counts.take()
        if counters is not None:
            service.telemetry(self._name, replace(counters, autopilot=self._exchange.status))
        return counters is not None


def _never(_: GivenPlan) -> Proposal:
    raise AssertionError("the autopilot makes its own plans")
