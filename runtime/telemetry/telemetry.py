"""What a rank measures on the way: one row for each iteration, from its marks and from what the controller says.

An iteration is known once the GPU was read after its end, which is when the next one has come to its end; where no
reading comes it is given up waiting for it after a few. The energy counter of a GPU moves in steps, of some 100 ms on
NVIDIA's. Read once an iteration it is right where iterations are much longer than that; what the mean over many says is
right in any case (`Telemetry.mean`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from perseus_planner.runs.matching import Change, Seen, with_changes
from perseus_planner.runs.records import ComputationRecord, IterationRecord, RanChanges
from perseus_planner.runtime.controller.protocol import Attached, Changed, Reading, ToRank
from perseus_planner.runtime.telemetry.counters import Counting, Counts, is_pause
from perseus_planner.runtime.telemetry.readings import Readings
from perseus_planner.runtime.telemetry.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from perseus_planner.runtime.engines.engine import Seat
    from perseus_planner.runtime.marks import Timed
    from perseus_planner.runtime.program import Program

_PATIENCE = 4  #: iterations that may wait for a reading
_KEPT = 8  #: iterations whose computations are kept
_MOST_CHANGES = 20_000  #: that are remembered, whatever happens
_OPEN = "it ran without its clocks, as the iteration before was not as planned"


@dataclass(frozen=True)
class Mean:
    """The iterations in the ring that ran as planned by the newest plan: how many, and an iteration on average.

    `energy_j` is None where it is not known of any.
    """

    iterations: int
    time_s: float
    energy_j: float | None


def wall_offset_ns() -> int:
    """What to add to a time of the monotonic clock to have it since the epoch, nanoseconds."""
    return time.time_ns() - time.monotonic_ns()


class Telemetry:
    """One rank's record.

    `ended` is for the training thread; all else is for one other thread. Nothing here raises, and nothing grows without
    bound.

    Args:
        rank: of the whole job.
        seat: where it stands in its pipeline.
        folder: that the run is written into; None: nowhere.
        capacity: how many iterations are remembered.
        own_plans: whether pipelines may run by plans of their own, so that each writes down its own.
        say: told once, when the folder can no longer be written.
        offset_ns: what to add to a time of the monotonic clock to have it since the epoch.
    """

    def __init__(
        self,
        rank: int,
        seat: Seat,
        folder: Path | None = None,
        capacity: int = 256,
        *,
        own_plans: bool = False,
        say: Callable[[str], None] | None = None,
        offset_ns: Callable[[], int] = wall_offset_ns,
    ) -> None:
        self._seat, self._capacity, self._offset_ns = seat, capacity, offset_ns
        # Where the engine does not number its pipelines, the first rank of each does.
        self._pipeline = min(seat.peers, default=0) if seat.pipeline is None else seat.pipeline
        self._recorder = None if folder is None else Recorder(folder, rank, seat.rank, own_plans=own_plans, say=say)
        self._iterations: tuple[IterationRecord, ...] = ()
        self._computations: deque[tuple[ComputationRecord, ...]] = deque(maxlen=_KEPT)
        self._ended: deque[tuple[int, Program | None, str | None]] = deque(maxlen=capacity)
        self._timed: deque[Timed] = deque()
        self._readings = Readings()
        self._counting = Counting()
        self._changes: deque[Changed] = deque(maxlen=_MOST_CHANGES)
        self._in_force: int | None = None  #: what was set before the first of the changes
        self._origin: str | None = None
        self._since_epoch_ns = offset_ns()
        # Of the iteration before:
        self._program: Program | None = None
        self._left = False  #: whether the engine left the program
        self._asked_ns = 0  #: when the first clock of the next one was asked for
        self._end_ns: int | None = None

    @property
    def iterations(self) -> tuple[IterationRecord, ...]:
        """The last ones, oldest first."""
        return self._iterations

    @property
    def computations(self) -> tuple[ComputationRecord, ...]:
        """Those of the last iterations whose computations are known."""
        return tuple(each for iteration in self._computations for each in iteration)

    @property
    def counts(self) -> tuple[Counts, ...]:
        """What was counted since training began, at a few iterations of late; for any thread."""
        return self._counting.marks

    def mean(self) -> Mean | None:
        """What an iteration by the newest plan takes on average; None: none ran as planned."""
        rows = [row for row in self._iterations if row.is_as_planned and row.version == self._iterations[-1].version]
        if not rows:
            return None
        energies_j = [row.energy_j for row in rows if row.energy_j is not None]
        return Mean(len(rows), fmean(row.time_s for row in rows), fmean(energies_j) if energies_j else None)

    def ended(self, iteration: int, program: Program | None, deviation: str | None) -> None:
        """An iteration has ended that ran by `program`; `deviation` says what was not in it, if anything."""
        self._ended.append((iteration, program, deviation))

    def update(self, timed: Iterable[Timed], messages: Iterable[ToRank]) -> list[IterationRecord]:
        """Take in what has become known, and give the iterations that are known by it."""
        self._since_epoch_ns = self._offset_ns()  # the clock of the node may have been set meanwhile
        for message in messages:
            self._hear(message)
        self._timed.extend(timed)
        rows = []
        while self._timed and (len(self._timed) > _PATIENCE or self._is_known(self._timed[0])):
            rows.append(self._finish(self._timed.popleft()))
        return rows

    def close(self) -> list[IterationRecord]:
        """Nothing more comes: give the iterations that were still waited for, and write all that is to be written."""
        rows = [self._finish(self._timed.popleft()) for _ in range(len(self._timed))]
        self._counting.close()
        if self._recorder is not None:
            self._recorder.keep(self.computations)
        return rows

    def _hear(self, message: ToRank) -> None:
        if isinstance(message, Changed):
            self._changes.append(message)
        elif isinstance(message, Reading):
            self._readings.add(message)
        elif isinstance(message, Attached):
            self._origin = message.origin

    def _is_known(self, timed: Timed) -> bool:
        is_read = self._readings.first_after(timed.end_ns) is not None
        return is_read and bool(self._ended) and self._ended[-1][0] >= timed.number

    def _finish(self, timed: Timed) -> IterationRecord:
        program, deviation = self._told(timed.number)
        left = deviation is not None
        if program is not None and deviation is None and len(timed.spans_ns) != len(program.computations):
            deviation = f"{len(timed.spans_ns)} computations were timed, and the plan has {len(program.computations)}"
        computations: tuple[ComputationRecord, ...] = ()
        is_open = self._left and program is self._program
        if program is not None and deviation is None:
            computations = self._computed(timed, program, is_open)
        row = self._row(timed, program, deviation or (_OPEN if is_open else None), computations)
        self._count(timed, row)
        self._go_on(timed, program, left, is_open)
        self._iterations = (*self._iterations, row)[-self._capacity :]
        if computations:
            self._computations.append(computations)
        if self._recorder is not None:
            self._recorder.write(row, program, self.computations)
        return row

    def _count(self, timed: Timed, row: IterationRecord) -> None:
        begin_ns = timed.begin_ns
        if self._end_ns is not None and not is_pause((begin_ns - self._end_ns) / 1e9, row.time_s):
            begin_ns = self._end_ns
        self._counting.add(row, (timed.end_ns - begin_ns) / 1e9, self._readings.energy_j(begin_ns, timed.end_ns))

    def _told(self, number: int) -> tuple[Program | None, str | None]:
        """What the iteration of that number ran by, and what was not in it."""
        while self._ended and self._ended[0][0] < number:
            self._ended.popleft()
        if not self._ended or self._ended[0][0] > number:
            return None, None
        _, program, deviation = self._ended.popleft()
        return program, deviation

    def _computed(self, timed: Timed, program: Program, is_open: bool) -> tuple[ComputationRecord, ...]:
        is_asked = not is_open and program.plan.control != "observed"
        return with_changes(
            timed.number,
            program.computations,
            program.clocks if is_asked else None,
            [(self._epoch_s(begin_ns), self._epoch_s(end_ns)) for begin_ns, end_ns in timed.spans_ns],
            [self._change(each) for each in self._changes],
            # The first clock of a new plan is asked for when its first iteration begins.
            asked_s=self._epoch_s(self._asked_ns if program is self._program else timed.begin_ns),
            in_force=self._in_force,
            readings=[Seen(self._epoch_s(each.now_ns), each.clock_mhz) for each in self._readings],
        )

    def _change(self, told: Changed) -> Change:
        seen_s, begun_s, ended_s = map(self._epoch_s, (told.seen_ns, told.begun_ns, told.ended_ns))
        return Change(told.place, told.value, seen_s, begun_s, ended_s, told.before_mhz)

    def _epoch_s(self, at_ns: int) -> float:
        return (at_ns + self._since_epoch_ns) / 1e9

    def _row(
        self,
        timed: Timed,
        program: Program | None,
        deviation: str | None,
        computations: Sequence[ComputationRecord],
    ) -> IterationRecord:
        after = self._readings.first_after(timed.end_ns)
        planned_s = None
        if program is not None and deviation is None:
            planned_s = math.fsum(program.plan.measurement(each.computation).time_s for each in computations)
        return IterationRecord(
            **vars(RanChanges.of(computations)),
            iteration=timed.number,
            version=None if program is None else program.version,
            pipeline=self._pipeline,
            pipeline_rank=self._seat.rank,
            begin_s=self._epoch_s(timed.begin_ns),
            end_s=self._epoch_s(timed.end_ns),
            busy_s=sum(end_ns - begin_ns for begin_ns, end_ns in timed.spans_ns) / 1e9,
            planned_busy_s=planned_s,
            energy_j=self._readings.energy_j(timed.begin_ns, timed.end_ns),
            temperature_c=None if after is None else after.temperature_c,
            throttled_s=self._readings.throttled_s(timed.begin_ns, timed.end_ns),
            deviation=deviation,
            origin=self._origin,
        )

    def _go_on(self, timed: Timed, program: Program | None, left: bool, was_open: bool) -> None:
        """Keep what the next iteration needs, and forget the rest; the rules are those of the hook."""
        spans_ns = timed.spans_ns or ((timed.begin_ns, timed.end_ns),)
        self._program, self._left, self._end_ns = program, left, timed.end_ns
        self._asked_ns = timed.end_ns if was_open else spans_ns[-1][1]
        middle_ns = sum(spans_ns[-1]) // 2
        while self._changes and self._changes[0].seen_ns < middle_ns:
            self._in_force = self._changes.popleft().value
        self._readings.forget_before(timed.end_ns)
