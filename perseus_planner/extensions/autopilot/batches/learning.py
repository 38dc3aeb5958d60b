"""What a rank learns from iterations that have ended: how long its computations take for their
work, and what lies between them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.extensions.autopilot.batches.catching_up import CatchingUp
from perseus_planner.extensions.autopilot.batches.exchange import (
    LawLearner,
    RankLaws,
    RankPlan,
    Seat,
    Slowest,
)
from perseus_planner.extensions.autopilot.batches.leader import Leader, Ran
from perseus_planner.profiles.keys import Key

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.extensions.autopilot.batches.orders import Orders
    from perseus_planner.profiles.profiles import Profile
    from perseus_planner.runtime.marks import IterationTimes
    from perseus_planner.runtime.program import Program
    from perseus_planner.schedules import Computation

    Floats = NDArray[np.float64]

_SETTLING = 2  #: iterations until clocks are locked and the training runs as usual
KEPT = 64
"""Iterations whose end may become known late."""
LOWERED = "lowered"
"""What is noted with a program that has a clock below the highest one."""


@dataclass(frozen=True)
class Known:
    """What this rank was told of an iteration.

    | work  | plan  | full_s | then
    |-------|-------|--------|------------------------------------------------------------------
    | None  | None  | empty  | the batch is not known: full clocks, and no law is learnt from it
    | given | None  | empty  | no clocks were told: full clocks, of which laws are learnt
    | given | given | empty  | this rank has no laws yet: clocks as told, but no catching up
    | given | given | given  | all is known: it is also compared how the computations came
    """

    work: Floats | None  #: of its batch
    slowest: Slowest
    plan: RankPlan | None = None
    full_s: tuple[float, ...] = ()  #: of each computation at full clocks; empty without laws


class _Ended(NamedTuple):
    """An iteration that ran as planned."""

    times: IterationTimes
    program: Program
    known: Known
    before_mhz: int  #: the clock of the last computation before it; 0 if that is not known

    @property
    def time_s(self) -> float:
        """How long it took."""
        return (self.times.end_ns - self.times.begin_ns) / 1e9


class BatchLearner:
    """Learns from the iterations of a rank, as they have ended.

    One thread calls `add_order` and `learn`; others may read `laws`, `lasts_s` and `full_s`.

    Args:
        profile: The cost of clocks.
        orders: What the rank runs.
        seat: Where it sits.
        leader: What decides the clocks of its pipeline; None on all other ranks.
        is_whole: Whether an iteration is one computation.
    """

    def __init__(
        self, profile: Profile, orders: Orders, seat: Seat, leader: Leader | None, *, is_whole: bool
    ) -> None:
        self._orders = orders
        self._seat = seat
        self._leader = leader
        self._is_whole = is_whole
        self._learner = LawLearner()
        self.catching_up = CatchingUp(profile)
        self.laws: RankLaws | None = None  #: the newest, for all ranks; None before they are known
        self.lasts_s = 0.0  #: how long the last iteration took
        self._clock_mhz = 0  #: of the last computation of the iteration before
        self._busy_s: dict[int, float] = {}

    def busy_s(self, iteration: int) -> float | None:
        """Return how long the rank had computed in an iteration, were its GPU as fast as at first,
        at the clocks that it had; None if that is not known.
        """
        return self._busy_s.get(iteration)

    def full_s(self, program: Program, work: Floats) -> tuple[float, ...]:
        """Return the seconds of each computation at full clocks; empty without laws."""
        laws = self._learner.laws
        if laws is None:
            return ()
        rows = work.tolist()
        return tuple(
            laws[Key(c.stage, c.kind)].full_s(rows[c.microbatch]) for c in program.computations
        )

    def add_order(self, order: tuple[Computation, ...]) -> None:
        """Add what the rank runs with another number of microbatches.

        Raises:
            ProfileError: If the profile does not have it all.
            UsageError: If there are orders for as many numbers as can be planned.
        """
        self._orders.add(order)
        # Other ranks plan by the orders told, so a new one is told again with the laws.
        self._renew_laws()

    def learn(self, times: IterationTimes, program: Program | None, known: Known) -> None:
        """Learn from an iteration.

        Args:
            times: When it ran.
            program: By what it ran; None if it deviated.
            known: What was known of it when its clocks were decided.
        """
        # An iteration that is not understood leaves no known clock to the next one's first
        # computation.
        before_mhz = self._clock_mhz
        self._clock_mhz = 0
        if program is None or len(times.spans_ns) != len(program.computations):
            return
        # Beside an evaluation times tell nothing.
        if times.follows_evaluation:
            return
        # The next iteration's first computation begins at this clock.
        self._clock_mhz = program.clocks[-1]
        # The first iterations lock clocks and warm up, so their times tell nothing.
        if times.number < _SETTLING:
            return
        ended = _Ended(times, program, known, before_mhz)
        self.lasts_s = ended.time_s
        self._account(ended)
        # Only one rank of a seat learns, as the others observe the same.
        if known.work is not None and self._seat.is_first:
            samples = self._sample_of_whole(ended) if self._is_whole else _samples(ended)
            if self._learner.add(samples):
                self._renew_laws()

    def _account(self, ended: _Ended) -> None:
        """Compare how an iteration came with what was known, and tell the leader."""
        known = ended.known
        ran = Ran(ended.times.number, ended.time_s, known.slowest)
        if known.full_s and not self._is_whole:
            came_s = self._came_s(ended)
            pairs = tuple(zip(came_s, known.full_s, strict=True))
            ran = replace(ran, work=known.work, at_full_clocks_s=pairs)
        if self._leader is not None:
            self._leader.account(ran)

    def _came_s(self, ended: _Ended) -> list[float]:
        """Return how long the computations of an iteration had taken at full clocks, as they came;
        and learn from that what lies between them, and how long the rank was busy.
        """
        times = ended.times
        known = ended.known
        program = ended.program
        came_s = self.catching_up.at_full_clocks_s(times, program)
        # Only an iteration that began and ran at full clocks tells what lies between its
        # computations.
        is_full = program.note != LOWERED and ended.before_mhz == program.expected.top
        if known.plan is not None and is_full:
            self.catching_up.see_full_clocks(times, known.plan)
        busy_s = sum(end_ns - begin_ns for begin_ns, end_ns in times.spans_ns) / 1e9
        # The ratio takes out how fast the GPU was, so that what the work and the clocks cost is
        # left.
        self._busy_s[times.number] = busy_s * sum(known.full_s) / max(sum(came_s), 1e-9)
        self._busy_s.pop(times.number - KEPT, None)
        return came_s

    def _sample_of_whole(self, ended: _Ended) -> list[tuple[Key, Floats, float]]:
        """Return what an iteration of one computation tells of its law.

        Its end is that of the slowest rank, whose clock is not lower. Its time includes waiting, so
        only full clocks tell the law, of the slowest.
        """
        slowest = ended.known.slowest
        is_full = slowest.pays or not slowest.time_s
        if not is_full or not slowest.work:
            return []
        return [(Key(0, "F"), np.array(slowest.work), ended.time_s)]

    def _renew_laws(self) -> None:
        if self._learner.laws is not None:
            self.laws = RankLaws.of(self._orders.all, self._learner.laws)


def _samples(ended: _Ended) -> list[tuple[Key, Floats, float]]:
    """Return what the computations of an iteration tell of their laws: the key of each, its work
    and its seconds.

    A clock comes into force some time after it is set, so after a lower one nothing is told.
    """
    program = ended.program
    work = ended.known.work
    assert work is not None
    clocks_before = (ended.before_mhz, *program.clocks[:-1])
    return [
        (Key(c.stage, c.kind), work[c.microbatch], (end_ns - begin_ns) / 1e9)
        for c, (begin_ns, end_ns), clock, before in zip(
            program.computations, ended.times.spans_ns, program.clocks, clocks_before, strict=True
        )
        if clock == before == program.expected.top
    ]
