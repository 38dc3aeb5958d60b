"""What every rank of a job does for the service: says where it is, and what it finds out and counts."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from perseus_planner.runtime.agent.agent import Agent
from perseus_planner.runtime.agent.store import Card, Finding, Mailbox

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from perseus_planner.plans.plan import Plan
    from perseus_planner.runs.straggler import StragglerDetection
    from perseus_planner.runtime.agent.settings import ServedJob
    from perseus_planner.runtime.job import JobWarnings, TrainingJob
    from perseus_planner.runtime.rendezvous import RankContext
    from perseus_planner.runtime.switching.agreement import Proposal
    from perseus_planner.runtime.switching.plans import GivenPlan
    from perseus_planner.runtime.telemetry.counters import Counts


class ServiceLink:
    """One rank's part.

    Args:
        served: what the service is to know; rank 0's counts.
        job: all ranks.
        warnings: of this rank.
    """

    def __init__(self, served: ServedJob, job: TrainingJob, warnings: JobWarnings) -> None:
        self.served = served
        self._job, self._warnings = job, warnings
        self._mailbox = Mailbox(job.store)
        self._agent: Agent | None = None

    def begin(self, context: RankContext, plan: Plan | None, switch_to: Callable[[GivenPlan], Proposal]) -> None:
        """Training begins.

        Args:
            context: what this rank knows.
            plan: what its pipeline runs by at first.
            switch_to: of its `Runtime`.
        """
        gpu = "" if context.gpu is None else context.gpu.uuid
        card = Card(self._job.rank, context.pipeline, context.engine.pipeline_rank.rank, socket.gethostname(), gpu)
        with suppress(RuntimeError):  # the job's store is gone: training itself will say that
            self._mailbox.say_place(card)
        if self._job.rank == 0:
            self._agent = Agent(self.served, self._job, context.pipelines, plan, switch_to, self._warnings)
            self._agent.start()

    def told(self, then: Callable[[StragglerDetection], None] | None) -> Callable[[StragglerDetection], None]:
        """What is to be told what this rank finds out of itself, so that the service and then `then` hear of it.

        It costs two operations of the job's store.
        """

        def found(straggling: StragglerDetection) -> None:
            with suppress(RuntimeError):  # the store is gone
                self._mailbox.say(Finding(self._job.rank, straggling))
            if then is not None:
                then(straggling)

        return found

    def counted(self, counts: Sequence[Counts]) -> None:
        """What this rank has counted is for the service to know; one operation of the job's store."""
        with suppress(RuntimeError):  # the store is gone
            self._mailbox.say_counts(self._job.rank, counts)

    def stop(self) -> None:
        """Training is ending: nothing more is taken; returns at once."""
        if self._agent is not None:
            self._agent.stop()

    def close(self) -> None:
        """Training has ended: the service is told."""
        if self._agent is not None:
            self._agent.close()
