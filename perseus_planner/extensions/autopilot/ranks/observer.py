"""What a rank does for the autopilot on its background thread: it tells what it observes of each
iteration, made from its marks and from the messages of its controller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from statistics import median
from typing import TYPE_CHECKING, Protocol

from perseus_planner.base.errors import GpuError
from perseus_planner.base.wires import encode
from perseus_planner.extensions.autopilot.ranks.coordinator import (
    NOTHING,
    Coordinator,
    observed_key,
    rank_key,
)
from perseus_planner.extensions.autopilot.ranks.messages import (
    Frame,
    JobDescription,
    ObservedGpu,
    Places,
    RankTraining,
    noted,
    turns,
)
from perseus_planner.gpu import open_gpu
from perseus_planner.profiles.modes import OWN, shared_by
from perseus_planner.runtime.attachment import power_limits
from perseus_planner.runtime.controller.protocol import SETTLE_NS, ControlChange, GpuSample
from perseus_planner.runtime.samples import GpuSamples
from perseus_planner.runtime.sending import runs_of

if TYPE_CHECKING:
    from torch.distributed import Store

    from perseus_planner.extensions.autopilot.ranks.rank_ledger import Ended, RankLedger
    from perseus_planner.runtime.controller.protocol import AttachReply, Control, ToRank
    from perseus_planner.runtime.decider import Context
    from perseus_planner.runtime.job import JobWarnings
    from perseus_planner.runtime.marks import IterationTimes
    from perseus_planner.schedules import Computation

_CALLS = 16  #: calls that set a clock from which it is known how long they take
_PAUSE_NS = 10**9  #: a longer time between two iterations is a pause
_PATIENCE = 1  #: iterations that may wait for a sample of the GPU


class Source(Protocol):
    """What a rank has run; the training thread writes it."""

    @property
    def ledger(self) -> RankLedger:
        """Its ledger."""

    @property
    def orders(self) -> Mapping[int, tuple[Computation, ...]]:
        """By number, the last orders of computations that it has run, or will run first."""

    @property
    def ended(self) -> deque[Ended]:
        """Iterations that have ended, the oldest first; those that were read are taken out."""


class Observer:
    """Writes what a rank observes into the job's store, for rank 0. All methods are called by the
    background thread.

    Args:
        store: The job's store; through a connection of the background thread.
        rank: Rank in the whole job.
        source: What the rank has run.
        gpu: The rank's GPU; None if no clock can be set.
        every: Only every so many iterations are written, and
        turn: those whose number modulo `every` is this.
        is_written: Whether anything is written; otherwise another rank observes the same.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        source: Source,
        gpu: ObservedGpu | None,
        *,
        every: int = 1,
        turn: int = 0,
        is_written: bool = True,
    ) -> None:
        self._store = store
        self._rank = rank
        self._source = source
        self._gpu = gpu
        self._every = every
        self._turn = turn
        self._is_written = is_written
        # Times, ends and messages come from different threads, so each is kept until the others are
        # there.
        self._samples = GpuSamples()
        self._changes: deque[tuple[int, int]] = deque(
            maxlen=4096
        )  #: since when (ns), and which clock
        self._calls_s: deque[float] = deque(maxlen=_CALLS)
        self._times: deque[IterationTimes] = deque(maxlen=64)
        self._last_ns: int | None = None  #: end of the last computation of the iteration before
        self._metered = 0, 0.0  #: iterations whose energy is known, and their joules
        self._told = 0  #: number of the order that was told last
        # Rank 0 reads keys of all ranks at once, so each is there from the start.
        if is_written:
            self._set(observed_key(rank), NOTHING)
            for number in source.orders:  # that is known before it ran
                self._tell(number)

    def take(self, times: Iterable[IterationTimes], messages: Iterable[ToRank]) -> None:
        """Take in new times and messages, and write the iterations that are known now."""
        for message in messages:
            if isinstance(message, ControlChange):
                # A clock counts from when it has come into force, which is a while after the call.
                self._changes.append((message.ended_ns + SETTLE_NS, message.value))
                self._calls_s.append((message.ended_ns - message.begun_ns) / 1e9)
            elif isinstance(message, GpuSample):
                self._samples.add(message)
        self._times.extend(times)
        # An iteration is finished once it is known how it ended.
        while self._times and (ended := self._ended_of(self._times[0])) is not None:
            # Samples of the GPU come late, so the newest iterations wait for theirs, but not for
            # long.
            if (
                ended.program is not None
                and len(self._times) <= _PATIENCE
                and not self._is_sampled(self._times[0])
            ):
                return
            self._source.ended.popleft()
            self._finish(self._times.popleft(), ended)

    def _ended_of(self, times: IterationTimes) -> Ended | None:
        """Return how an iteration ended, which the training thread says after its times are
        known.
        """
        ended = self._source.ended
        while ended and ended[0].iteration < times.number:
            ended.popleft()
        while (
            ended and self._times and self._times[0].number < ended[0].iteration
        ):  # its end was not kept
            self._times.popleft()
        return (
            ended[0]
            if ended and self._times and self._times[0].number == ended[0].iteration
            else None
        )

    def _is_sampled(self, times: IterationTimes) -> bool:
        return bool(times.spans_ns) and self._samples.first_after(times.spans_ns[-1][1]) is not None

    def _finish(self, times: IterationTimes, ended: Ended) -> None:
        time_s = (times.end_ns - times.begin_ns) / 1e9
        program = ended.program
        # Without computations, the iteration itself bounds the energy.
        last_ns = times.spans_ns[-1][1] if times.spans_ns else times.end_ns
        if times.follows_evaluation:  # its times tell nothing, and so the frame has none
            program = None
        # Energy is of iterations by a program only, as no others are learnt from.
        energy_j = self._energy_j(times, last_ns) if program is not None else None
        if energy_j is not None:
            self._metered = self._metered[0] + 1, self._metered[1] + energy_j
        # The rank's own ledger needs no word from rank 0, so clocks are bounded even if that is
        # gone.
        if program is not None:
            self._source.ledger.add(times.number, time_s, full_clocks=noted(program).decision == 0)
        # Pipelines take turns, so other iterations are counted here and written by nobody.
        if self._is_written and times.number % self._every == self._turn:
            # What the rank runs is told before the frame that refers to it by number.
            if ended.order != self._told and ended.order:
                self._tell(ended.order)
            self._set(observed_key(self._rank), encode(self._frame(times, ended, time_s, energy_j)))
        self._last_ns = last_ns
        # The last change before the next iteration is the clock at its begin, so one is kept.
        while len(self._changes) > 1 and self._changes[1][0] <= times.end_ns:
            self._changes.popleft()

    def _energy_j(self, times: IterationTimes, last_ns: int) -> float | None:
        """Return the energy from the end of the last computation to the next one's: then the GPU
        is sampled, as its request changes. None after a pause.
        """
        before_ns = self._last_ns
        if before_ns is None or times.begin_ns - before_ns > _PAUSE_NS:
            return None
        return self._samples.energy_j(before_ns, last_ns) if self._is_sampled(times) else None

    def _frame(
        self, times: IterationTimes, ended: Ended, time_s: float, energy_j: float | None
    ) -> Frame:
        program = ended.program
        begin_ns = times.begin_ns
        if times.follows_evaluation:
            program = None
        # Nothing is learnt from what did not run as planned, but others wait for the frame.
        if program is None or len(times.spans_ns) != len(program.computations):
            return Frame(self._rank, ended.order, times.number, 0, time_s)
        last_ns = times.spans_ns[-1][1]
        throttled_s = 0.0
        # Throttling is asked for the same interval as the energy.
        if energy_j is not None and self._last_ns is not None:
            throttled = self._samples.throttled_s(self._last_ns, last_ns)
            throttled_s = max(throttled.values(), default=0.0)
        # Only the clock in force at the begin, and changes until the last computation has ended,
        # count.
        before = [clock for at_ns, clock in self._changes if at_ns <= begin_ns]
        inside = [
            ((at_ns - begin_ns) / 1e9, clock)
            for at_ns, clock in self._changes
            if begin_ns < at_ns < last_ns
        ]
        # Seconds from the rank's own begin, as the clocks of nodes need not agree.
        spans_s = tuple((at_ns - begin_ns) / 1e9 for span in times.spans_ns for at_ns in span)
        changes = ((0.0, before[-1] if before else 0), *inside)
        # A median of few calls is no measure, so 0 says that it is not known.
        call_s = median(self._calls_s) if len(self._calls_s) == _CALLS else 0.0
        return Frame(
            rank=self._rank,
            order=ended.order,
            iteration=times.number,
            decision=noted(program).decision,
            time_s=time_s,
            spans_s=spans_s,
            changes=changes,
            energy_j=energy_j,
            throttled_s=throttled_s,
            call_s=call_s,
            metered=self._metered,
            modes=runs_of(program.modes),
        )

    def _tell(self, number: int) -> None:
        """Say what this rank runs."""
        order = self._source.orders.get(number)
        if order is None:
            return
        self._set(rank_key(self._rank), encode(RankTraining(tuple(order), self._gpu)))
        self._told = number

    def _set(self, key: str, value: bytes) -> None:
        with suppress(RuntimeError):  # the store may be gone; then the agreement says so
            self._store.set(key, value)


class AutopilotRank:
    """The part of one rank.

    Args:
        observer: Tells what the rank has observed.
        coordinator: Rank 0's part; None on all others.
    """

    def __init__(self, observer: Observer, coordinator: Coordinator | None) -> None:
        self._observer = observer
        self._coordinator = coordinator

    @classmethod
    def begin(cls, context: Context, source: Source) -> AutopilotRank:
        """Begin the part of this rank."""
        seat = context.seat
        job = seat.job
        options = seat.options
        every = turns(seat.part.pipelines, seat.part.positions)
        observer = Observer(
            job.own_store,
            job.rank,
            source,
            _observed(seat.gpu, seat.control, seat.warnings),
            every=every,
            turn=seat.own.pipeline % every,
            is_written=seat.own.is_first,
        )
        if job.rank != 0:
            return cls(observer, None)
        coordinator = Coordinator(
            job.own_store,
            JobDescription(
                settings=options.autopilot,
                places=Places.among(context.positions),
                sets_clocks=not options.dry_run,
                state=None if options.state_file is None else str(options.state_file),
                gpus_per_node=len(seat.part.ranks),
                is_shared=context.service is not None,
                modes=tuple(dict.fromkeys((OWN, *options.modes))),
                shares_microbatch=shared_by(options.modes) == "microbatch",
            ),
            context.agreement,
            seat.warnings,
            context.service,
        )
        coordinator.on_status = context.on_status
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


def _observed(
    gpu: AttachReply | None, control: Control, warnings: JobWarnings
) -> ObservedGpu | None:
    if gpu is None:
        return None
    try:
        with open_gpu(gpu.gpu) as opened:
            values = opened.supported_clocks_mhz if control == "clock" else power_limits(opened)
            return ObservedGpu(gpu.name, gpu.origin, values, control)
    except GpuError as error:
        warnings.warn("autopilot clocks", f"the autopilot has no clocks to choose from: {error}")
        return None
