"""Clocks that follow the batch, as a decider: the first rank of each pipeline knows the work of its
microbatches, and what it decides reaches the others through an exchange of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.autopilot.batches.work import load_work
from perseus_planner.runtime.decider import Context, Decider, Seat
from perseus_planner.runtime.options import check_work

if TYPE_CHECKING:
    from perseus_planner.engines.guard import Microbatches
    from perseus_planner.extensions.autopilot.batches.batches import Batches
    from perseus_planner.extensions.autopilot.status import AutopilotStatus
    from perseus_planner.runtime.controller.protocol import ToRank
    from perseus_planner.runtime.job import TrainingJob
    from perseus_planner.runtime.marks import IterationTimes
    from perseus_planner.runtime.options import Options
    from perseus_planner.runtime.program import Order, Program


class BatchesDecider(Decider):
    """Decides by the batch of each iteration.

    Args:
        batches: This rank's part; None to make it once all ranks have met.
    """

    name = "clocks of each batch"
    wants_batches = True
    no_switch = (
        "the clocks of this training follow each batch; begin it without work= to switch plans"
    )

    def __init__(self, batches: Batches | None = None) -> None:
        self._batches = batches
        self._context: Context | None = None
        self._recorded: AutopilotStatus | None = None  #: that was recorded last

    def check(self, options: Options, job: TrainingJob) -> None:
        """See `Decider.check`.

        Raises:
            UsageError: If the options exclude it, or there is no such function.
            ProfileError: If the profile cannot be read.
        """
        if isinstance(options.work, str):
            load_work(options.work, "work")
        check_work(
            plan=options.plan,
            learn=options.autopilot.learn,
            state=options.state_file,
        )
        if job.rank == 0 and options.state_file is not None:
            from perseus_planner.extensions.autopilot.batches.exchange import send_profile

            send_profile(job.store, options.state_file)

    def join(self, seat: Seat) -> None:
        """See `Decider.join`.

        Raises:
            UsageError: If ranks cannot tell each other, or a service cannot be told.
            ProfileError: If the profile does not fit what it runs, or its GPU.
            RankError: If rank 0 has no function for the work.
        """
        from perseus_planner.extensions.autopilot.batches import exchange  # they load numpy
        from perseus_planner.extensions.autopilot.batches.batches import Batches

        job = seat.job
        options = seat.options
        work = options.work
        assert work is not None
        position = seat.engine.pipeline_rank
        # The exchange waits on a thread of its own, and would hold up all others on a shared
        # connection.
        clone = getattr(job.store, "clone", None)
        if clone is None and job.ranks > 1:
            raise UsageError(
                "work=: the store of this torch takes no second connection; use torch 2.6"
            )
        place = exchange.Seat(
            seat.own.pipeline,
            position.rank,
            position.ranks,
            seat.part.pipelines,
            is_first=seat.own.is_first,
            has_followers=seat.part.present > seat.part.pipelines,
        )
        store = job.store if clone is None else clone()
        self._batches = Batches(
            exchange.Exchange(store, place),
            place,
            seat.engine.order(),
            exchange.sent_profile(store),
            options.autopilot,
            load_work(work, "work") if isinstance(work, str) else work,
            seat.warnings.warn,
        )
        # Rank 0 speaks to the service, so what the job's leader knows must be there.
        if options.service is not None and job.rank == 0 and not self._batches.leads_job:
            raise UsageError(
                "service: with work=, rank 0 of the job must be the first rank of pipeline 0; "
                "leave service out, or place the ranks of a pipeline one after the other"
            )
        # A rank without a GPU to set has nothing that the profile could fail to fit.
        if seat.gpu is not None:
            self._batches.check_gpu(seat.gpu.name, seat.control)

    @property
    def batches(self) -> Batches:
        """The rank's part, after `join`."""
        assert self._batches is not None
        return self._batches

    def begin(self, context: Context) -> None:
        """See `Decider.begin`."""
        self._context = context
        self.batches.start(context.latest, context.service)

    def show(self, count: int | None, microbatches: Microbatches | None) -> None:
        """See `Decider.show`."""
        self.batches.show(count, microbatches)

    def take_work(self, work: Sequence[Any], *, order: bool) -> tuple[int, ...]:
        """See `Decider.take_work`."""
        return self.batches.give(work, order=order)

    def program_for(self, iteration: int, agreed: Program | None) -> Program | None:
        """See `Decider.program_for`; nothing is agreed on."""
        return self.batches.program_for(iteration)

    def on_end(
        self,
        iteration: int,
        program: Program | None,
        deviation: str | None,
        order: Order | None,
    ) -> None:
        """See `Decider.on_end`."""
        self.batches.on_end(iteration, program, deviation, order)

    def look(self, times: Sequence[IterationTimes], messages: Sequence[ToRank]) -> None:
        """See `Decider.look`."""
        self.batches.observe(times, messages)
        status = self.batches.status
        if status is not None and status != self._recorded and self._context is not None:
            self._recorded = status
            self._context.on_status(status.shown)

    def busy_s(self, iteration: int, program: Program) -> float | None:
        """See `Decider.busy_s`; by the work of the batch."""
        return self.batches.planned_busy_s(iteration)

    def stop(self, limit_s: float) -> None:
        """See `Decider.stop`."""
        if self._batches is not None:
            self._batches.stop(limit_s)
