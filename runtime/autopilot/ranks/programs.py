"""The programs of the autopilot, as they are sent to all ranks, and as each rank runs its own: the
newest program, or full clocks while its ledger is overdrawn.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import PlanError
from perseus_planner.base.wires import Message, decode
from perseus_planner.profiles.measurement import changes_per_rank, with_fewer_changes
from perseus_planner.runs.autopilot import AutopilotStatus
from perseus_planner.runtime.autopilot.job import Ledger
from perseus_planner.schedules import Computation

if TYPE_CHECKING:
    from perseus_planner.runtime.hook import Order, RankProgram
    from perseus_planner.runtime.switching.plans import PlanFollower

Clocks = tuple[tuple[int, ...], ...]
"""The clock of each computation, for each rank of a pipeline."""

PHASE = 0.02
"""Share of an iteration by which that of a rank may seem longer than that of its pipeline."""

_KEPT_ORDERS = 8
_KEPT_ENDS = 64  #: iterations whose times may become known late


def order_number(order: Iterable[tuple[int, str, int]]) -> int:
    """Return a number that tells orders of computations apart."""
    return zlib.crc32(
        " ".join(f"{stage}{kind}{microbatch}" for stage, kind, microbatch in order).encode()
    )


class Programs(Message, frozen=True):
    """What all ranks run in an iteration, as the autopilot sends it."""

    decision: int  #: `Decision.version`: 0 for full clocks
    orders: tuple[int, ...]  #: For each rank of a pipeline, the number of its order of computations
    #: For each kind of pipeline and each of its ranks, clocks, and how often each comes in a row.
    clocks: tuple[tuple[tuple[tuple[int, int], ...], ...], ...]
    pipelines: tuple[int, ...]  #: The kind of each pipeline
    top_mhz: int  #: The clock that counts as full
    time_s: float  #: Expected time of an iteration, seconds
    #: The reference and the limits for the ledger of each rank; None before the reference is known.
    ledger: Ledger | None
    status: AutopilotStatus  #: What the autopilot knew
    #: For each pipeline, the seconds that its ranks compute, as `Autopilot.busy_s`; empty if not
    #: known.
    busy_s: tuple[tuple[float, ...], ...] = ()

    @staticmethod
    def program_of(
        data: bytes,
        version: int,
        pipeline: int,
        rank: int,
        orders: Mapping[int, tuple[Computation, ...]],
    ) -> AutopilotProgram:
        """Return the program of one rank.

        Args:
            data: The programs, as they were sent.
            version: Number of the program in this job.
            pipeline: The rank's pipeline.
            rank: The rank in its pipeline.
            orders: By number, the orders that the rank has run.

        Raises:
            PlanError: If it is not for what this rank runs.
        """
        try:
            sent = decode(data, Programs)
            number = sent.orders[rank]
            runs = sent.clocks[sent.pipelines[pipeline]][rank]
            busy_s = sent.busy_s[pipeline][rank] if sent.busy_s else None
        except (ValueError, IndexError) as error:
            raise PlanError(
                f"the autopilot's program cannot be read: {error}; use the same version of the "
                "planner on all ranks"
            ) from error
        clocks = tuple(clock for clock, count in runs for _ in range(count))
        order = orders.get(number)
        if order is None or len(order) != len(clocks):
            raise PlanError("the autopilot's program is for another order of computations")
        return AutopilotProgram(
            version=version,
            decision=sent.decision,
            order=number,
            computations=order,
            clocks=clocks,
            time_s=sent.time_s,
            top_mhz=sent.top_mhz,
            ledger=sent.ledger,
            status=sent.status,
            busy_s=busy_s,
        )


def clock_runs(clocks: Sequence[Clocks]) -> tuple[Any, tuple[int, ...]]:
    """Return `Programs.clocks` and `Programs.pipelines` of the clocks of each pipeline."""
    kinds = list(dict.fromkeys(clocks))
    runs = tuple(
        tuple(
            tuple((clock, len(list(group))) for clock, group in groupby(rank)) for rank in pipeline
        )
        for pipeline in kinds
    )
    return runs, tuple(map(kinds.index, clocks))


@dataclass(frozen=True)
class AutopilotProgram:
    """What one rank runs in an iteration by the autopilot; see `RankProgram`."""

    version: int  #: Number of the program in this job
    decision: int  #: `Decision.version`: 0 for full clocks
    order: int  #: Number of the order of computations
    computations: tuple[Computation, ...] = field(repr=False)  #: What the rank runs, in order
    clocks: tuple[int, ...] = field(repr=False)  #: The clock of each, MHz
    time_s: float  #: Expected time of an iteration, seconds
    top_mhz: int  #: The clock that counts as full, MHz
    #: Reference and limits for the rank's ledger; None before the reference is known.
    ledger: Ledger | None
    status: AutopilotStatus  #: What the autopilot knew
    #: Seconds that the rank computes, were its GPU as fast as at first; None if that is not known.
    busy_s: float | None = None
    plan: None = None
    control: str = "clock"

    @cached_property
    def changes(self) -> int:
        """How often the clock changes in an iteration, including the change back to the first
        one.
        """
        return changes_per_rank(self.clocks)

    @cached_property
    def microbatches(self) -> int:
        """Number of microbatches of an iteration."""
        return 1 + max(computation.microbatch for computation in self.computations)

    @cached_property
    def at_full_clocks(self) -> AutopilotProgram:
        """The same with the highest clock for each computation.

        It is locked, not only left to the GPU: so an iteration at full clocks runs at a clock that
        is known, and its times are those of a row of the profile.
        """
        if self.decision == 0:
            return self
        return replace(self, decision=0, clocks=(self.top_mhz,) * len(self.clocks), busy_s=None)

    def with_changes(self, most: int) -> AutopilotProgram:
        """Return the program with at most so many changes in an iteration."""
        return replace(self, clocks=with_fewer_changes(self.clocks, most), busy_s=None)


def order_of(noted: Iterable[Any]) -> tuple[Computation, ...]:
    """Return an order of computations that was noted or sent as (stage, kind, microbatch)."""
    return tuple(
        Computation(int(stage), str(kind), int(microbatch)) for stage, kind, microbatch in noted
    )


@dataclass(frozen=True)
class Ended:
    """An iteration that has ended on the training thread."""

    iteration: int  #: Its number
    #: The program that it ran as planned; None if it ran without one or deviated.
    program: AutopilotProgram | None
    order: int  #: Number of the order of what it ran; 0 if that is not known


class RankLedger:
    """The ledger of this rank: times are added as soon as they are known, in the order in which
    iterations ended.

    The first rank of a pipeline begins an iteration first and ends it last, so its ledger is that
    of the pipeline. Other ranks begin early and wait, and when programs change, their iterations
    seem longer or shorter for once than those of the pipeline. So they overlook `PHASE` of an
    iteration until the autopilot's ledger, which comes with its programs, says what is really owed.

    The training thread calls `renew` and `is_overdrawn`, any thread `add`.

    Args:
        is_first: Whether this is the first rank of a pipeline.
    """

    def __init__(self, *, is_first: bool = True) -> None:
        self._overlooked = 0.0 if is_first else PHASE
        self._lock = threading.Lock()
        self._ledger: Ledger | None = None
        self._terms: Ledger | None = None  #: taken last
        self._last = -1  #: iteration that was added last

    @property
    def ledger(self) -> Ledger | None:
        """The ledger; None before the reference is known."""
        return self._ledger

    @property
    def is_overdrawn(self) -> bool:
        """Whether the next iteration has to run at full clocks."""
        ledger = self._ledger
        return (
            ledger is not None
            and ledger.owed_s > ledger.burst_s + self._overlooked * ledger.reference_s
        )

    def renew(self, ledger: Ledger | None) -> None:
        """Take reference, limits, and what is owed at the autopilot; what this rank has run
        since is added.
        """
        if ledger is not None and ledger is not self._terms:
            with self._lock:
                self._terms = ledger
                self._ledger = ledger if self._ledger is None else self._ledger.renewed(ledger)

    def add(self, iteration: int, time_s: float, *, full_clocks: bool) -> None:
        """Add an iteration that ran by a program, unless it was added before."""
        with self._lock:
            if self._ledger is not None and iteration > self._last:
                self._last = iteration
                self._ledger = self._ledger.add(
                    time_s, full_clocks=full_clocks, iteration=iteration
                )


class ProgramFollower:
    """The `ProgramSource` of a rank whose clocks the autopilot decides; see `PlanFollower`.

    Args:
        is_first: Whether this is the first rank of a pipeline.

    Attributes:
        ledger: The rank's ledger.
        orders: By number, the last orders of computations that the rank has run; replaced, never
            changed.
        ended: Iterations that have ended, for the `Observer`.
    """

    def __init__(self, *, is_first: bool = True) -> None:
        self.ledger = RankLedger(is_first=is_first)
        self.orders: dict[int, tuple[Computation, ...]] = {}
        self.ended: deque[Ended] = deque(maxlen=_KEPT_ENDS)
        self._time_s: Callable[[], float | None] = lambda: None
        self._follower: PlanFollower | None = None
        self._noted: Order = ()  #: the order that ran last without being a program's
        self._number = 0  #: of the order that ran last

    def follow(self, follower: PlanFollower, time_s: Callable[[], float | None]) -> None:
        """Begin with the rank's follower, and `Marks.ended_s` of its marks."""
        self._follower, self._time_s = follower, time_s

    def program_for(self, iteration: int) -> RankProgram | None:
        """See `ProgramSource.program_for`."""
        assert self._follower is not None  # set before training
        program = self._follower.program_for(iteration)
        if isinstance(program, AutopilotProgram):
            self.ledger.renew(program.ledger)
            return program.at_full_clocks if self.ledger.is_overdrawn else program
        return program

    def on_end(
        self,
        iteration: int,
        program: RankProgram | None,
        deviation: str | None,
        order: Order | None = None,
    ) -> None:
        """See `ProgramSource.on_end`."""
        assert self._follower is not None  # set before training
        if order:
            self._note(order)
        followed = program if isinstance(program, AutopilotProgram) and deviation is None else None
        if followed is not None:
            self._number = followed.order
            if (time_s := self._time_s()) is not None:
                self.ledger.add(iteration, time_s, full_clocks=followed.decision == 0)
        self.ended.append(Ended(iteration, followed, self._number))
        self._follower.on_end(iteration, program, deviation)

    def _note(self, order: Order) -> None:
        if order != self._noted:
            self._noted = order
            self._number = order_number(order)
            kept = {
                number: kept_order
                for number, kept_order in self.orders.items()
                if number != self._number
            }
            newest = list(kept.items())[1 - _KEPT_ORDERS :]
            self.orders = {**dict(newest), self._number: order_of(order)}
