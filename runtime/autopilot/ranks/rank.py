"""What a rank does for the autopilot on its background thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from perseus_planner.base.errors import GpuError
from perseus_planner.base.files import sha256
from perseus_planner.gpu import open_gpu
from perseus_planner.runtime.autopilot.ranks.coordinator import Coordinator, Places
from perseus_planner.runtime.autopilot.ranks.observer import ObservedGpu, Observer

if TYPE_CHECKING:
    from perseus_planner.engines.engine import Engine
    from perseus_planner.runtime.autopilot.ranks.exchange import ServiceExchange
    from perseus_planner.runtime.autopilot.ranks.follower import ProgramFollower
    from perseus_planner.runtime.controller.protocol import AttachReply, ToRank
    from perseus_planner.runtime.job import JobWarnings, TrainingJob
    from perseus_planner.runtime.marks import IterationTimes
    from perseus_planner.runtime.rendezvous import RankContext, RuntimeOptions
    from perseus_planner.runtime.switching.agreement import Agreement


class AutopilotRank:
    """The part of one rank.

    Args:
        observer: Tells what the rank has observed.
        coordinator: Rank 0's part; None on all others.
    """

    def __init__(self, observer: Observer, coordinator: Coordinator | None) -> None:
        self._observer, self._coordinator = observer, coordinator

    @classmethod
    def begin(
        cls,
        context: RankContext,
        job: TrainingJob,
        source: ProgramFollower,
        agreement: Agreement,
        warnings: JobWarnings,
        options: RuntimeOptions,
        exchange: ServiceExchange | None,
    ) -> AutopilotRank:
        """Begin the part of this rank, before training."""
        places = Places.among(context.places)
        place = places.of.get(job.rank)
        observer = Observer(
            job.own_store,
            job.rank,
            source,
            _observed(context.attachment.gpu, warnings),
            model=_model(context.engine),
            every=places.every,
            turn=0 if place is None else place[0] % places.every,
            is_written=place is not None,
        )
        if job.rank != 0:
            return cls(observer, None)
        coordinator = Coordinator(
            job.own_store,
            places,
            asdict(options.autopilot),
            agreement,
            warnings,
            sets_clocks=not options.dry_run,
            state=None if options.state_file is None else str(options.state_file),
            exchange=exchange,
            gpus_per_node=context.neighbours,
        )
        return cls(observer, coordinator)

    @property
    def coordinator(self) -> Coordinator | None:
        """Rank 0's part; None on other ranks."""
        return self._coordinator

    def descriptors(self) -> list[int]:
        """Return the descriptors that wake the thread."""
        return [] if self._coordinator is None else self._coordinator.descriptors()

    def look(self, times: Sequence[IterationTimes], messages: Sequence[ToRank]) -> None:
        """Do one round, with the times and the messages of the controller that are new in it."""
        self._observer.take(times, messages)
        if self._coordinator is not None:
            self._coordinator.look()

    def close(self) -> None:
        """End the rank's part."""
        if self._coordinator is not None:
            self._coordinator.close()


def _model(engine: Engine) -> str:
    """Return a digest of the shapes and types of the rank's parameters."""
    return sha256(*(f"{tuple(each.shape)} {each.dtype};".encode() for each in engine.parameters()))


def _observed(gpu: AttachReply | None, warnings: JobWarnings) -> ObservedGpu | None:
    if gpu is None:
        return None
    try:
        with open_gpu(gpu.gpu) as opened:
            return ObservedGpu(gpu.name, gpu.origin, opened.supported_clocks_mhz)
    except GpuError as error:
        warnings.warn("autopilot clocks", f"the autopilot has no clocks to choose from: {error}")
        return None
