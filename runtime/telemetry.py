"""Measures the iterations of a rank: one record for each, from its marks and from the messages of
the controller.

An iteration is complete once the next one has ended and the GPU was sampled after its begin, so
that the window of the first one is known; without a sample it is given up after a few iterations.
The energy counter of a GPU moves in steps, of about 100 ms on NVIDIA's. The energy of one iteration
is accurate if iterations are much longer than that; the mean over many always is.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import PlannerError
from perseus_planner.gpu import is_dry_run
from perseus_planner.profiles.modes import OWN
from perseus_planner.runs.account import Account
from perseus_planner.runs.records import (
    ClockSample,
    ComputationRecord,
    IterationRecord,
    SetCall,
    change_statistics,
    followed_clocks,
    match_changes,
)
from perseus_planner.runs.savings import NOTHING, Saved, Savings, plan_costs
from perseus_planner.runtime.controller.protocol import (
    AttachReply,
    ControlChange,
    GpuSample,
    ToRank,
)
from perseus_planner.runtime.controller.scheduler import RESET
from perseus_planner.runtime.program import Expected
from perseus_planner.runtime.samples import GpuSamples

if TYPE_CHECKING:
    from perseus_planner.engines.engine import PipelineRank
    from perseus_planner.runs.recording import RankFiles
    from perseus_planner.runs.savings import RankCosts
    from perseus_planner.runs.status import DeciderStatus
    from perseus_planner.runtime.marks import IterationTimes
    from perseus_planner.runtime.program import Program

CHECKPOINT_S = 2.0
"""Longest time between two checkpoints, in seconds, unless a single iteration is longer."""
CHECKPOINTS = 8
"""How many checkpoints are kept, because ranks are not all equally far."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The account of a rank from its first iteration to the end of one, and how it is then."""

    account: Account = field(default_factory=Account)
    #: Seconds from a clock request to the return of the call that sets it: the median, over the
    #: iterations since the previous checkpoint, of their medians. None if no clock was set.
    set_p50_s: float | None = None
    #: The same for the 99th percentiles, of which the greatest is taken.
    set_p99_s: float | None = None
    #: Since when the rank has not followed its plan, in seconds since the epoch; None if its last
    #: iteration ran as planned.
    off_plan_since_s: float | None = None
    #: Power limit of the GPU in watts if something else has set it below the default; None if not.
    site_limit_w: float | None = None
    gpu: str | None = None  #: Name of the GPU
    planned_gpu: str | None = None  #: Name of that which the plan is of
    is_dry_run: bool = False  #: Whether no clock is set

    @property
    def iteration(self) -> int:
        """Number of the last iteration; -1 if there was none."""
        last = self.account.last_iteration
        return -1 if last is None else last


class Checkpoints:
    """Adds up the iterations of one rank.

    Args:
        is_first: Whether it is the first rank of the job.

    Attributes:
        kept: The last checkpoints, the newest last. A new tuple replaces it; it is never changed.
        site_limit_w: As in `Checkpoint`, to be kept with the next of them.
    """

    def __init__(self, *, is_first: bool) -> None:
        self.kept: tuple[Checkpoint, ...] = ()
        self.site_limit_w: float | None = None
        self._is_first = is_first
        self._account = Account()
        self._recent: list[IterationRecord] = []  #: since the last checkpoint
        self._off_plan_since_s: float | None = None
        self._planned_gpu: str | None = None

    def add(self, record: IterationRecord, planned_gpu: str | None = None) -> None:
        """Add an iteration; `planned_gpu` is the name of the GPU that its plan is of."""
        self._account += Account.of(record, is_first=self._is_first)
        self._recent.append(record)
        self._planned_gpu = planned_gpu
        self._off_plan_since_s = (
            None if record.is_as_planned else self._off_plan_since_s or record.begin_s
        )
        window_s = self._account.gpu_s / max(1, self._account.windows)
        if (record.iteration + 1) % _stride(window_s) == 0:
            self.keep()

    def keep(self) -> None:
        """Keep a checkpoint, unless nothing was added since the last one."""
        if not self._recent:
            return
        p50_s = [row.latency_p50_s for row in self._recent if row.latency_p50_s is not None]
        p99_s = [row.latency_p99_s for row in self._recent if row.latency_p99_s is not None]
        checkpoint = Checkpoint(
            account=self._account,
            set_p50_s=median(p50_s) if p50_s else None,
            set_p99_s=max(p99_s, default=None),
            off_plan_since_s=self._off_plan_since_s,
            site_limit_w=self.site_limit_w,
            gpu=self._recent[-1].gpu,
            planned_gpu=self._planned_gpu,
            is_dry_run=bool(self._recent[-1].is_dry_run),
        )
        self.kept = (*self.kept, checkpoint)[-CHECKPOINTS:]
        self._recent = []


def common_checkpoint(of_ranks: Sequence[Sequence[Checkpoint]]) -> list[Checkpoint] | None:
    """Return the checkpoint of each rank at the newest iteration that all have one of; None if
    there is none.
    """
    by_iteration = [{kept.iteration: kept for kept in of_rank} for of_rank in of_ranks]
    shared = set(by_iteration[0]).intersection(*by_iteration[1:]) if by_iteration else set()
    return [kept[max(shared)] for kept in by_iteration] if shared else None


def _stride(iteration_s: float) -> int:
    """Return the greatest power of two, up to 1024, of which that many iterations take at most
    `CHECKPOINT_S`.
    """
    return (
        1
        if iteration_s >= CHECKPOINT_S
        else 1 << min(10, int(math.log2(CHECKPOINT_S / max(iteration_s, 1e-9))))
    )


WRITTEN_AFTER_S = 5.0
"""How long rows may wait in memory; a killed rank loses them."""
_PERIOD_S = 30
"""How often the computations are replaced. All ranks do it at the same time by the clock of their
node, so that their files hold the same iterations even when iterations are short."""


class RunRecorder:
    """Writes the `RankFiles` of one rank and never raises: if the folder cannot be written, it
    warns once and stops.

    Args:
        files: The files of the rank.
        writes_plans: Whether this rank writes the plans: those of its pipeline, or those of all.
        own_plans: Whether each pipeline has its own plans.
        warn: Called with the reason when writing stops.
        now_s: Returns seconds by a clock that is never set.
    """

    def __init__(
        self,
        files: RankFiles,
        *,
        writes_plans: bool,
        own_plans: bool,
        warn: Callable[[str], None] | None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files: RankFiles | None = files
        self._folder = files.folder
        self._warn = warn
        self._now_s = now_s
        self._writes_plans = writes_plans
        self._own_plans = own_plans
        self._version = 0  #: of the plan that was written last
        self._period: int | None = None
        self._status: DeciderStatus | None = None  #: not written yet
        self._write_s = now_s()  #: when rows are written next; the first one at once

    def add(
        self,
        record: IterationRecord,
        program: Program | None,
        computations: Sequence[ComputationRecord],
    ) -> None:
        """Take an iteration that has ended; `computations` are those of the last iterations."""
        plan = None if program is None else program.expected.plan
        if (
            program is not None
            and plan is not None
            and program.version != self._version
            and self._writes_plans
        ):
            self._version = program.version
            pipeline = record.pipeline if self._own_plans else None
            self._do(lambda files: files.save_plan(plan, program.version, pipeline))
        if self._files is not None:
            self._files.add_iteration(record)
        # Computations of the last iterations only, all ranks at the same time, so that a report can
        # lay them beside each other.
        period = int(record.end_s // _PERIOD_S)
        if period != self._period and self._period is not None:
            self._replace_computations(computations)
        self._period = period

    def take_status(self, status: DeciderStatus) -> None:
        """Take what the decider knows, which is written with the next rows."""
        self._status = status

    def write_if_due(self) -> None:
        """Write the rows that wait, every few seconds."""
        if self._now_s() >= self._write_s and self._files is not None and self._files.has_rows:
            self._do(lambda files: files.write())
            self._write_status()
            self._write_s = self._now_s() + WRITTEN_AFTER_S

    def close(self, computations: Sequence[ComputationRecord]) -> None:
        """Write everything that is left."""
        self._do(lambda files: files.write())
        self._write_status()
        self._replace_computations(computations)
        self._do(lambda files: files.close())

    def _write_status(self) -> None:
        status = self._status
        self._status = None
        if status is not None:
            self._do(lambda files: files.save_status(status))

    def _replace_computations(self, computations: Sequence[ComputationRecord]) -> None:
        if computations:
            self._do(lambda files: files.replace_computations(computations))

    def _do(self, write: Callable[[RankFiles], None]) -> None:
        if self._files is None:
            return
        try:
            write(self._files)
        except (OSError, PlannerError) as error:
            self._files.close()
            self._files = None
            if self._warn is not None:
                reason = error.strerror if isinstance(error, OSError) else error
                self._warn(
                    f"{self._folder}: recording stops: {reason}; training goes on without recording"
                )


_PATIENCE = 4  #: iterations that may wait for a sample
_KEPT = 8  #: iterations whose computations are kept
_MAX_CHANGES = 20_000  #: clock changes that are kept
_NOTHING_SET: dict[str, Any] = {
    "changes_set": 0,
    "changes_late": 0,
    "changes_overtaken": 0,
    "off_clock_s": 0.0,
    "latency_p50_s": None,
    "latency_p99_s": None,
}
"""What is known of the clock changes of a dry run, whose controller only checks them."""
_UNCLOCKED = "it ran without clocks, because the iteration before was not as planned"


def wall_offset_ns() -> int:
    """Return what to add to a time of the monotonic clock to get nanoseconds since the epoch."""
    return time.time_ns() - time.monotonic_ns()


class Telemetry:
    """The measurements of one rank.

    The training thread calls `on_end`; one other thread calls everything else. No method raises,
    and what is kept is bounded.

    Args:
        rank: Rank in the whole job.
        pipeline_rank: Rank in the pipeline.
        files: The files in which the run is recorded; None to record none.
        capacity: How many iterations are kept.
        own_plans: Whether each pipeline may have its own plan, and writes it.
        warn: Called once if the folder can no longer be written.
        offset_ns: Returns what to add to a time of the monotonic clock to get nanoseconds since the
            epoch.
        now_s: Returns seconds by the monotonic clock, by which rows are written.
        planned_busy_s: `Decider.busy_s`; None for what programs say.
        sharded_torch: Version of torch, if it shards this rank's stages.
        control: What clocks are, as `Profile.control`.
    """

    def __init__(
        self,
        rank: int,
        pipeline_rank: PipelineRank,
        files: RankFiles | None = None,
        capacity: int = 256,
        *,
        own_plans: bool = False,
        warn: Callable[[str], None] | None = None,
        offset_ns: Callable[[], int] = wall_offset_ns,
        now_s: Callable[[], float] = time.monotonic,
        planned_busy_s: Callable[[int, Program], float | None] | None = None,
        sharded_torch: str | None = None,
        control: str = "clock",
    ) -> None:
        self._planned_busy_s = planned_busy_s
        self._sharded_torch = sharded_torch
        self._control = control
        self._pipeline_rank = pipeline_rank.rank
        self._capacity = capacity
        self._offset_ns = offset_ns
        # If the engine does not number its pipelines, the first rank of each serves as its number.
        first_peer = min(pipeline_rank.peers, default=0)
        self._pipeline = first_peer if pipeline_rank.pipeline is None else pipeline_rank.pipeline
        self._recorder = None
        if files is not None:
            writes_plans = (pipeline_rank.rank if own_plans else rank) == 0
            self._recorder = RunRecorder(
                files, writes_plans=writes_plans, own_plans=own_plans, warn=warn, now_s=now_s
            )
        self._iterations: tuple[IterationRecord, ...] = ()
        self._computations: deque[tuple[ComputationRecord, ...]] = deque(maxlen=_KEPT)
        self._ended: deque[tuple[int, Program | None, str | None]] = deque(maxlen=capacity)
        self._times: deque[IterationTimes] = deque()
        self._samples = GpuSamples()
        self._checkpoints = Checkpoints(is_first=rank == 0)
        self._changes: deque[ControlChange] = deque(maxlen=_MAX_CHANGES)
        self._in_force: int | None = None  #: value that was set before the first of the changes
        self._gpu: AttachReply | None = None
        self._since_epoch_ns = offset_ns()
        # Of the previous iteration:
        self._program: Program | None = None
        self._savings = Savings()
        self._costs: tuple[Program, RankCosts | None] | None = None  #: of the last program
        self._has_deviated = False  #: whether the engine ran something that is not in the program
        self._requested_ns = 0  #: when the first clock of the next iteration was requested

    @property
    def iterations(self) -> tuple[IterationRecord, ...]:
        """The last iterations, oldest first."""
        return self._iterations

    @property
    def computations(self) -> tuple[ComputationRecord, ...]:
        """The computations of the last iterations whose computations are known."""
        return tuple(computation for iteration in self._computations for computation in iteration)

    @property
    def site_limit_w(self) -> float | None:
        """Power limit of the GPU, watts, if something else than the planner has set it below the
        default.
        """
        return self._checkpoints.site_limit_w

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """The accounts since training began, at a few of the last iterations; may be read by any
        thread.
        """
        return self._checkpoints.kept

    def on_status(self, status: DeciderStatus) -> None:
        """Record what the decider knows; called on rank 0."""
        if self._recorder is not None:
            self._recorder.take_status(status)

    def on_end(self, iteration: int, program: Program | None, deviation: str | None) -> None:
        """See `ProgramSource.on_end`."""
        self._ended.append((iteration, program, deviation))

    def update(
        self, times: Iterable[IterationTimes], messages: Iterable[ToRank]
    ) -> list[IterationRecord]:
        """Take in new times and messages, and return the iterations that are complete now."""
        # The clock of the node may have been set meanwhile.
        self._since_epoch_ns = self._offset_ns()
        for message in messages:
            self._take(message)
        self._times.extend(times)
        records = []
        while len(self._times) > 1 and (len(self._times) > _PATIENCE or self._is_complete()):
            records.append(self._finish(self._times.popleft()))
        if self._recorder is not None:
            self._recorder.write_if_due()
        return records

    def close(self) -> list[IterationRecord]:
        """Return the iterations that were still waiting for the next one or for a sample, and
        write everything that is left to write.
        """
        records = [self._finish(self._times.popleft()) for _ in range(len(self._times))]
        self._checkpoints.keep()
        if self._recorder is not None:
            self._recorder.close(self.computations)
        return records

    def _take(self, message: ToRank) -> None:
        if isinstance(message, ControlChange):
            self._changes.append(message)
        elif isinstance(message, GpuSample):
            self._samples.add(message)
            self._checkpoints.site_limit_w = message.site_limit_w
        elif isinstance(message, AttachReply):
            self._gpu = message

    def _is_complete(self) -> bool:
        times = self._times[0]
        following = self._times[1]
        is_sampled = self._samples.first_after(following.begin_ns) is not None
        return is_sampled and bool(self._ended) and self._ended[-1][0] >= times.number

    def _finish(self, times: IterationTimes) -> IterationRecord:
        program, deviation = self._take_ended(times.number)
        # Only what the engine ran is held against the next iteration, not that a mark is missing.
        has_deviated = deviation is not None
        if (
            program is not None
            and deviation is None
            and len(times.spans_ns) != len(program.computations)
        ):
            deviation = (
                f"{len(times.spans_ns)} computations were timed, and the plan has "
                f"{len(program.computations)}"
            )
        computations: tuple[ComputationRecord, ...] = ()
        # After a deviation, the hook requests no clock until an iteration has run as planned.
        is_unclocked = self._has_deviated and program is self._program
        if program is not None and deviation is None:
            computations = self._match_computations(times, program, is_unclocked=is_unclocked)
        record = self._record(
            times, program, deviation or (_UNCLOCKED if is_unclocked else None), computations
        )
        plan = None if program is None else program.expected.plan
        self._checkpoints.add(record, None if plan is None else plan.gpu)
        # After the record, which still needs what the iteration before has left.
        self._prepare_next(times, program, has_deviated=has_deviated)
        self._iterations = (*self._iterations, record)[-self._capacity :]
        if computations:
            self._computations.append(computations)
        if self._recorder is not None:
            self._recorder.add(record, program, self.computations)
        return record

    def _take_ended(self, number: int) -> tuple[Program | None, str | None]:
        """Return the program and the deviation of an iteration, and forget those before it."""
        while self._ended and self._ended[0][0] < number:
            self._ended.popleft()
        if not self._ended or self._ended[0][0] > number:
            return None, None
        _, program, deviation = self._ended.popleft()
        return program, deviation

    def _match_computations(
        self, times: IterationTimes, program: Program, *, is_unclocked: bool
    ) -> tuple[ComputationRecord, ...]:
        plan = program.expected.plan
        is_observed = plan is not None and plan.control == "observed"
        is_requested = not is_unclocked and not is_observed
        changes = list(self._changes)
        # The clock of the first computation was requested when the iteration before had ended its
        # last.
        requested_ns = self._requested_ns if program is self._program else times.begin_ns
        for index, change in enumerate(self._changes):
            if change.value == RESET and change.seen_ns <= times.begin_ns:
                # Outside of iterations. The clock is requested again when the next one begins.
                changes = changes[index - len(self._changes) :]
                requested_ns = times.begin_ns
        return match_changes(
            times.number,
            program.computations,
            program.clocks if is_requested else None,
            [
                (self._epoch_s(begin_ns), self._epoch_s(end_ns))
                for begin_ns, end_ns in times.spans_ns
            ],
            [self._set_call(change) for change in changes],
            # The first clock of a new plan is requested when its first iteration begins.
            first_asked_s=self._epoch_s(requested_ns),
            in_force=self._in_force,
            samples=[
                ClockSample(self._epoch_s(sample.now_ns), sample.clock_mhz)
                for sample in self._samples
            ],
        )

    def _set_call(self, change: ControlChange) -> SetCall:
        seen_s, begun_s, ended_s = map(
            self._epoch_s, (change.seen_ns, change.begun_ns, change.ended_ns)
        )
        return SetCall(change.position, change.value, seen_s, begun_s, ended_s, change.before_mhz)

    def _epoch_s(self, at_ns: int) -> float:
        return (at_ns + self._since_epoch_ns) / 1e9

    def _record(
        self,
        times: IterationTimes,
        program: Program | None,
        deviation: str | None,
        computations: Sequence[ComputationRecord],
    ) -> IterationRecord:
        samples = self._samples
        gpu = self._gpu
        after = samples.first_after(times.end_ns)
        energy_j = samples.energy_j(times.begin_ns, times.end_ns)
        # From one begin to the next, so that also what lies between two iterations is counted once.
        next_ns = self._next_ns(times)
        between_j = None if next_ns is None else samples.energy_j(times.end_ns, next_ns)
        expected = Expected() if program is None else program.expected
        plan = expected.plan
        # Where it ran something else, there is nothing to hold its time against.
        planned_busy_s = None
        if program is not None and deviation is None:
            planned_busy_s = self._planned_busy_s_of(times, program, computations)
        lowered, saved = self._lowered_and_saved(times, program, deviation, computations)
        return IterationRecord(
            **(change_statistics(computations) | (_NOTHING_SET if self._is_dry else {})),
            iteration=times.number,
            version=None if program is None or plan is None else program.version,
            service_version=None if expected.sent is None else expected.sent.number,
            pipeline=self._pipeline,
            pipeline_rank=self._pipeline_rank,
            begin_s=self._epoch_s(times.begin_ns),
            end_s=self._epoch_s(times.end_ns),
            busy_s=sum(end_ns - begin_ns for begin_ns, end_ns in times.spans_ns) / 1e9,
            planned_s=None if plan is None or deviation is not None else plan.time_s,
            planned_busy_s=planned_busy_s,
            energy_j=energy_j,
            temperature_c=None if after is None else after.temperature_c,
            throttled_s=samples.throttled_s(times.begin_ns, times.end_ns),
            deviation=deviation,
            origin=None if gpu is None else gpu.origin,
            next_s=None if next_ns is None else self._epoch_s(next_ns),
            between_j=between_j,
            # a host that is too busy makes iterations longer at any clock
            host_load=os.getloadavg()[0] / (os.cpu_count() or 1),
            gpu=None if gpu is None else gpu.name or None,
            sharded_torch=self._sharded_torch,
            sensor_j=samples.sensor_j(times.begin_ns, times.end_ns),
            follows_evaluation=int(times.follows_evaluation),
            # the pause behind it is the evaluation
            precedes_evaluation=int(next_ns is not None and self._times[0].follows_evaluation),
            lowered=lowered,
            saved_j=None if saved is None or energy_j is None else saved.saved_j,
            saved_error_j=0.0 if saved is None else saved.error_j,
            saved_noise_j=0.0 if saved is None else saved.noise_j,
            is_dry_run=int(self._is_dry),
        )

    def _lowered_and_saved(
        self,
        times: IterationTimes,
        program: Program | None,
        deviation: str | None,
        computations: Sequence[ComputationRecord],
    ) -> tuple[int, Saved | None]:
        """Return how many computations ran at lower clocks, and what that has saved; None if it is
        not known.
        """
        # A GPU without clocks of the iteration runs as without the planner.
        has_clocks = deviation != _UNCLOCKED and not self._is_dry
        lowered = self._lowered(program) if has_clocks and program is not None else 0
        if times.follows_evaluation or (lowered and deviation is not None):
            return lowered, None
        if program is None or not lowered:
            return lowered, NOTHING
        energy_j = self._samples.energy_j(times.begin_ns, times.end_ns)
        return lowered, self._saved(times, self._costs_of(program), computations, energy_j)

    def _planned_busy_s_of(
        self, times: IterationTimes, program: Program, computations: Sequence[ComputationRecord]
    ) -> float | None:
        """Return the seconds of the computations as planned."""
        plan = program.expected.plan
        if plan is not None and program.inside is None:
            return math.fsum(plan.measurement(record.computation).time_s for record in computations)
        if self._planned_busy_s is not None:
            return self._planned_busy_s(times.number, program)
        return program.expected.busy_s

    def _lowered(self, program: Program) -> int:
        """Return how many computations have a clock below the highest, or another mode."""
        plan = program.expected.plan
        if plan is None:
            modes = program.modes or (OWN,) * len(program.clocks)
            pairs = zip(program.clocks, modes, strict=True)
            return sum(clock < program.expected.top or mode != OWN for clock, mode in pairs)
        costs = self._costs_of(program)
        if plan.control == "observed" or costs is None or not costs.is_lowered:
            return 0
        if len(costs.each) == len(program.clocks):
            return sum(cost.is_lowered for cost in costs.each)
        return len(program.clocks)  # a plan of 0.3 does not say which

    def _costs_of(self, program: Program) -> RankCosts | None:
        """Return what rows say of a program; None if they are not known."""
        if self._costs is None or self._costs[0] is not program:
            plan = program.expected.plan
            costs = program.expected.costs
            if plan is not None and costs is None:
                costs = plan_costs(plan, program.computations, program.clocks, self._pipeline_rank)
            self._costs = program, costs
        return self._costs[1]

    def _saved(
        self,
        times: IterationTimes,
        costs: RankCosts | None,
        computations: Sequence[ComputationRecord],
        energy_j: float | None,
    ) -> Saved | None:
        """Return what an iteration has saved in which clocks were lowered; None if it is not
        known.
        """
        if costs is None or energy_j is None or not computations:
            return None
        are_lowered = followed_clocks(computations, is_clock=self._control == "clock")
        ran_s = [computation.duration_s for computation in computations]
        busy_s = math.fsum(ran_s)
        lowered_s = math.fsum(
            each_s for each_s, is_low in zip(ran_s, are_lowered, strict=True) if is_low
        )
        # An iteration that is shown as one computation has lowered clocks for a part of it alone.
        share = lowered_s / busy_s if len(costs.each) == 1 and busy_s > 0.0 else 1.0
        time_s = (times.end_ns - times.begin_ns) / 1e9
        return self._savings.add(costs.lowered_where(are_lowered), ran_s, time_s, energy_j, share)

    @property
    def _is_dry(self) -> bool:
        """Whether the controller sets nothing."""
        return self._gpu is not None and is_dry_run(self._gpu.gpu)

    def _next_ns(self, times: IterationTimes) -> int | None:
        """Return when the next iteration began; None for the last one, and if the next was not
        kept.
        """
        if not self._times or self._times[0].number != times.number + 1:
            return None
        return max(self._times[0].begin_ns, times.end_ns)

    def _prepare_next(
        self, times: IterationTimes, program: Program | None, *, has_deviated: bool
    ) -> None:
        """Keep what the next iteration needs, by the rules of the hook, and forget the rest."""
        spans_ns = times.spans_ns or ((times.begin_ns, times.end_ns),)
        self._program = program
        self._has_deviated = has_deviated
        self._requested_ns = spans_ns[-1][1]
        # A change that was seen before the middle of the last computation was for this iteration;
        # what comes later is for the next one.
        middle_ns = sum(spans_ns[-1]) // 2
        while self._changes and self._changes[0].seen_ns < middle_ns:
            self._in_force = self._changes.popleft().value
