"""Every rank's part in what the service hears of a training job: it tells rank 0, whose agent
talks to the service.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from perseus_planner.runtime.agent.agent import Agent, LearningAgent
from perseus_planner.runtime.agent.outbox import Detection, RankLocation, StoreMessages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from perseus_planner.plans.plan import Plan
    from perseus_planner.runs.straggler import StragglerDetection
    from perseus_planner.runtime.agent.settings import ServiceSettings
    from perseus_planner.runtime.autopilot.ranks.messages import ServiceExchange
    from perseus_planner.runtime.job import JobWarnings, TrainingJob
    from perseus_planner.runtime.rendezvous import RankContext
    from perseus_planner.runtime.switching.agreement import Proposal
    from perseus_planner.runtime.switching.plans import GivenPlan
    from perseus_planner.runtime.telemetry.counters import Checkpoint


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
        self._job, self._warnings = job, warnings
        self._messages = StoreMessages(job.own_store)
        self._agent: Agent | None = None

    def begin(
        self,
        context: RankContext,
        plan: Plan | None,
        switch_to: Callable[[GivenPlan], Proposal],
        exchange: ServiceExchange | None = None,
    ) -> None:
        """Start the agent on rank 0, and pass on the location of this rank.

        Args:
            context: What this rank knows of itself.
            plan: The plan that its pipeline starts with.
            switch_to: That of its `Runtime`.
            exchange: Of an autopilot; None with a plan.
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
