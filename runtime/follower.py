"""What decides what each iteration of a rank runs by: the program that all ranks agreed on or, if
anything fails, no clocks.

A rank whose clocks the autopilot decides carries a ledger, and runs at full clocks while that is
overdrawn.

Where a GPU's clock changes cannot keep up, its rank runs the program with fewer of them: neighbours
at the higher of their clocks, so that it is no later. The plan as it is gets tried again after a
pause (`backoff`), and so does every new one, but for those of the autopilot, which come one after
the other.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perseus_planner.base.errors import PlannerError
from perseus_planner.base.loops import Backoff
from perseus_planner.runtime.autopilot.ranks.messages import order_number, order_of
from perseus_planner.runtime.hook import RAISED
from perseus_planner.runtime.switching import Agreement

if TYPE_CHECKING:
    from perseus_planner.runtime.batches.batches import Batches
    from perseus_planner.runtime.guarantee import Ledger
    from perseus_planner.runtime.hook import Order, Program
    from perseus_planner.runtime.job import TrainingJob
    from perseus_planner.runtime.switching import NodeShare
    from perseus_planner.schedules import Computation

MakeProgram = Callable[[int, bytes], "Program"]
OnIterationEnd = Callable[[int, "Program | None", "str | None"], None]

PHASE = 0.02
"""Share of an iteration by which that of a rank may seem longer than that of its pipeline."""

_KEPT_ORDERS = 8
_KEPT_ENDS = 64  #: iterations whose times may become known late


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


@dataclass(frozen=True)
class Ended:
    """An iteration that has ended on the training thread."""

    iteration: int  #: Its number
    program: Program | None  #: What it ran as planned; None if it ran without one or deviated
    order: int  #: Number of the order of what it ran; 0 if that is not known


class Follower:
    """The `ProgramSource` of a rank whose job agrees on programs through its store.

    The training thread calls the methods of `ProgramSource`; the background thread calls all
    others.

    Attributes:
        agreement: This rank's part in the agreement.
        ledger: As below.
        problem: Why no clocks are set now; None while they are.
        misfit: The newest plan that this rank cannot run, and why.
        deviation: What an engine ran that was not in the plan.
        unfollowed: Why the engine is not followed any more; None while it is.
        orders: With a ledger: by number, the last orders of computations that the rank has run, or
            will run first; replaced, never changed.
        is_at_full_clocks: With a ledger: whether this rank stays at full clocks, as a mode failed.
        ended: With a ledger: iterations that have ended, for the `Observer`.

    Args:
        job: The job.
        share: This rank's part in the looks of its node.
        make_program: Returns this rank's program of a version, given what was proposed; raises a
            PlannerError if that does not fit.
        on_iteration_end: Called for every iteration that has ended, with the arguments of
            `ProgramSource.on_end`.
        ledger: That of a rank whose clocks the autopilot decides; None by a plan. What does not fit
            is no problem with one: the next program will.
        ended_s: `Marks.ended_s` of the rank's marks.
        now_s: A clock, in seconds.
        batches: Decides by the batch of each iteration, instead of what is agreed on; None without.
    """

    def __init__(
        self,
        job: TrainingJob,
        share: NodeShare,
        make_program: MakeProgram,
        on_iteration_end: OnIterationEnd,
        ledger: RankLedger | None = None,
        *,
        ended_s: Callable[[], float | None] = lambda: None,
        now_s: Callable[[], float] = time.monotonic,
        batches: Batches | None = None,
    ) -> None:
        self.ledger, self._batches = ledger, batches
        self.agreement = Agreement(
            job.own_store, self._prepare, share, is_prompt=ledger is not None
        )
        self.problem: str | None = None
        self.misfit: str | None = None
        self.deviation: str | None = None
        self.unfollowed: str | None = None
        self.is_at_full_clocks = False
        self.orders: dict[int, tuple[Computation, ...]] = {}
        self.ended: deque[Ended] = deque(maxlen=_KEPT_ENDS)
        self._make_program, self._on_iteration_end = make_program, on_iteration_end
        self._ended_s, self._now_s = ended_s, now_s
        self._programs: dict[int, Program] = {}
        self._fewer: Program | None = None  #: replaces the program of its version
        self._backoff = Backoff()  #: of the program that it replaces
        self._current: Program | None = None
        self._noted: Order = ()  #: the order that ran last without being a program's
        self._number = 0  #: of the order that ran last

    def expect(self, order: tuple[Computation, ...]) -> None:
        """Take what the rank will run, before it has run it."""
        self.orders = {order_number(order): order}

    @property
    def program(self) -> Program | None:
        """The program of the last iteration that was to have clocks; None if this rank cannot
        run its plan.
        """
        return self._current

    @property
    def planned(self) -> Program | None:
        """The program of the last iteration with all its changes, also if it ran with fewer."""
        return self._programs.get(self.agreement.version)

    def start(self, first: Program | None) -> None:
        """Begin with a program of version 1; called before training."""
        if first is not None:
            self._programs[1] = first
        self._current = first

    def program_for(self, iteration: int) -> Program | None:
        """See `ProgramSource.program_for`."""
        if self._batches is not None:
            self._current = self._batches.program_for(iteration)
            return self._current if self.problem is None else None
        version = self.agreement.version_at(iteration)
        if self.problem is not None:
            return None
        fewer = self._fewer
        program = (
            fewer if fewer is not None and fewer.version == version else self._programs.get(version)
        )
        self._current = program
        if self.ledger is not None and program is not None:
            self.ledger.renew(program.ledger)
            at_full = self.ledger.is_overdrawn or self.is_at_full_clocks
            return program.at_full_clocks if at_full else program
        return program

    def on_end(
        self,
        iteration: int,
        program: Program | None,
        deviation: str | None,
        order: Order | None = None,
    ) -> None:
        """See `ProgramSource.on_end`."""
        if self._batches is not None:
            self._batches.on_end(iteration, program, deviation, order)
        if self.ledger is not None:
            self._account(self.ledger, iteration, None if deviation else program, order)
        elif deviation not in (None, RAISED):
            self.deviation = f"iteration {iteration} ran {deviation}"
        self._on_iteration_end(iteration, program, deviation)

    def on_unfollowed(self, problem: str) -> None:
        """See `ProgramSource.on_unfollowed`."""
        self.unfollowed = problem

    def _account(
        self, ledger: RankLedger, iteration: int, followed: Program | None, order: Order | None
    ) -> None:
        if order:
            self._note(order)
        if followed is not None:
            self._number = followed.order
            if (time_s := self._ended_s()) is not None:
                ledger.add(iteration, time_s, full_clocks=followed.decision == 0)
        self.ended.append(Ended(iteration, followed, self._number))

    def _note(self, order: Order) -> None:
        if order != self._noted:
            self._noted = order
            self._number = number = order_number(order)
            kept = [(other, known) for other, known in self.orders.items() if other != number]
            self.orders = {**dict(kept[1 - _KEPT_ORDERS :]), number: order_of(order)}

    def keep_changes(self, most: int) -> Program | None:
        """Run the plan with half its changes from the next iteration on, or with half of those,
        until at most `most`.

        Returns:
            The program with fewer changes; None if there are no more than so many already.
        """
        program = self._current
        if program is None:
            return None
        if self._fewer is not None and self._fewer.version == program.version:
            program = self._fewer
        changes = program.changes
        while changes > most:
            changes //= 2
        fewer = (self._programs.get(program.version) or program).with_changes(changes)
        if fewer.changes == program.changes:  # the message is older than the program
            return None
        self._backoff.fail(self._now_s())
        self._fewer = fewer
        return fewer

    def look(self) -> None:
        """Take part in the agreement once, and go back to all changes of the plan when their
        pause is over.
        """
        self.agreement.look()
        if self._fewer is not None and self._backoff.is_due(self._now_s()):
            self._fewer = None
        for version in [version for version in self._programs if version < self.agreement.version]:
            del self._programs[version]

    def _prepare(self, version: int, data: bytes) -> None:
        try:
            program, fewer = self._make_program(version, data), self._fewer
            if self.ledger is not None and fewer is not None:
                program = program.with_changes(fewer.changes)
            _ = program.requests  # not on the training thread
            self._programs[version] = program
        except PlannerError as error:
            if self.ledger is None:
                self.misfit = f"plan {version} is not for this rank: {error}"
