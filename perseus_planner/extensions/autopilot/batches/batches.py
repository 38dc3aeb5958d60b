"""One rank's part in clocks that follow the batch: the first rank of a pipeline knows the work of
its microbatches and decides, and all ranks of the pipeline run by it.

The clocks of an iteration come while it runs: it begins at full clocks, and goes on by its program
from the computation after that came. So nothing waits for it; only an iteration that is one
computation waits a moment, as it would go on without.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from perseus_planner.base.errors import PlannerError, ProfileError, UsageError
from perseus_planner.base.loops import Loop
from perseus_planner.extensions.autopilot.batches.exchange import (
    Batch,
    Exchange,
    LawLearner,
    OwnTime,
    RankLaws,
    RankPlan,
    Seat,
    Slowest,
)
from perseus_planner.extensions.autopilot.batches.leader import MOST_COUNTS, Leader, Ran
from perseus_planner.extensions.autopilot.batches.work import work_of
from perseus_planner.extensions.autopilot.ranks.messages import order_of
from perseus_planner.profiles.keys import Key
from perseus_planner.profiles.measurement import nearest_clock
from perseus_planner.runs.savings import Cost, RankCosts, profile_costs
from perseus_planner.runtime.controller.protocol import SETTLE_NS, ControlChange
from perseus_planner.runtime.program import Expected, Program, Table
from perseus_planner.runtime.sending import values_of
from perseus_planner.schedules import WHOLE, cell_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.engines.guard import Microbatches
    from perseus_planner.extensions.autopilot.status import AutopilotStatus
    from perseus_planner.profiles.profiles import Profile
    from perseus_planner.runtime.controller.protocol import LatestStarts, ToRank
    from perseus_planner.runtime.decider import ServiceExchange
    from perseus_planner.runtime.marks import IterationTimes
    from perseus_planner.runtime.options import AutopilotSettings, WorkFunction
    from perseus_planner.runtime.program import Order
    from perseus_planner.schedules import Computation

    Floats = NDArray[np.float64]

#: the last iterations at full clocks that tell how much longer one is than its plan; by hand
_REMEMBERED = 20
#: how many of them are needed, before a rank catches up; by hand
_NEEDED = 3
_LATE_NS = 1_000_000  #: by which a controller may see a request late
_CHANGES = 4096  #: that are remembered


class CatchingUp:
    """The latest starts of one rank, in its own time.

    The plan knows computations only. What comes between them, such as transfers, is the time from
    the begin of the first to the end of the last one at full clocks, less that of the plan, for
    each computation; it is taken to be spread evenly over the time of an iteration.

    Args:
        profile: The cost of clocks.
    """

    def __init__(self, profile: Profile) -> None:
        self._ratios = {
            key: {
                row.clock_mhz: row.time_s / rows[0].time_s if row.has_work else 1.0
                for row in reversed(rows)
            }
            for key, rows in profile.measurements.items()
        }
        self._longer_s: tuple[float, ...] = ()
        self._changes: deque[tuple[int, int]] = deque(maxlen=_CHANGES)  #: since when, which clock

    def see_full_clocks(self, times: IterationTimes, plan: RankPlan) -> None:
        """Learn from an iteration at full clocks how much longer it is than its plan."""
        ran_ns = times.spans_ns[-1][1] - times.spans_ns[0][0]
        longer_s = ran_ns / 1e9 - (plan.full_us[1] - plan.full_us[0]) / 1e6
        self._longer_s = (*self._longer_s, longer_s / len(times.spans_ns))[-_REMEMBERED:]

    def rows(
        self, program: Program, full_s: Sequence[float], plan: RankPlan, *, has_begun: bool
    ) -> list[list[tuple[int, int]]]:
        """Return the rows of `LatestStarts`; none before enough iterations ran at full clocks.

        Args:
            program: What the rank runs, at planned clocks.
            full_s: Seconds of each computation at full clocks.
            plan: What the rank was told.
            has_begun: Whether the iteration has begun already, at full clocks.
        """
        # Without a few iterations at full clocks it is not known how much longer than its plan one
        # is.
        if len(self._longer_s) < _NEEDED or not plan.latest_us:
            return []
        # Before the begin the first computation is still ahead; after it, it runs at full clocks
        # already.
        first_us = plan.full_us[0] if has_begun else plan.first_us
        # What lies between computations, such as transfers, is not in the plan, so its times are
        # stretched.
        longer_us = 1e6 * median(self._longer_s) * len(full_s)
        stretch = 1.0 + longer_us / max(plan.latest_us[-1] - first_us, 1)
        found = []
        for c, clock, each_s, latest_us in zip(
            program.computations, program.clocks, full_s, plan.latest_us, strict=True
        ):
            # Latest ends count from the rank's first computation, as ranks share no clock.
            end_ns = round(1e3 * stretch * (latest_us - first_us))
            row = list[tuple[int, int]]()
            for faster, ratio in self._ratios[Key(c.stage, c.kind)].items():
                start_ns = end_ns - round(1e9 * each_s * ratio) + _LATE_NS
                # A faster clock is of use only if it may start later than the one before it.
                if faster >= clock and (not row or start_ns > row[-1][1]):
                    row.append((faster, start_ns))
            # Where no clock that was measured is as fast as the planned one, the fastest runs.
            if not row:
                ratio = self._ratios[c.stage, c.kind][max(self._ratios[c.stage, c.kind])]
                row.append((clock, end_ns - round(1e9 * each_s * ratio) + _LATE_NS))
            found.append(row)
        return found

    def take(self, messages: Iterable[ToRank]) -> None:
        """Take in the changes that the controller has made."""
        for message in messages:
            if isinstance(message, ControlChange):
                self._changes.append((message.ended_ns + SETTLE_NS, message.value))

    def at_full_clocks_s(self, times: IterationTimes, program: Program) -> list[float]:
        """Return how long the computations of an iteration had taken at full clocks, as they came.

        Args:
            times: When they ran.
            program: By what, whose clocks count where nothing was set.
        """
        # Changes that are older than this iteration are dropped, but for the one still in force.
        changes = list(self._changes)
        while len(self._changes) > 1 and self._changes[1][0] <= times.begin_ns:
            self._changes.popleft()
        found = []
        for c, clock, (begin_ns, end_ns) in zip(
            program.computations, program.clocks, times.spans_ns, strict=True
        ):
            ratios = self._ratios[Key(c.stage, c.kind)]
            # The clock at the begin is the last one set before it, or the planned one if none was.
            since = [(begin_ns, clock)]
            for at_ns, value in changes:
                if at_ns <= begin_ns:
                    since = [(begin_ns, value)]
                elif at_ns < end_ns:
                    since.append((at_ns, value))
            # Each part of a computation counts by the ratio of the clock that it ran at.
            parts = pairwise([*since, (end_ns, 0)])
            found.append(sum((b - a) / ratios.get(each, 1.0) for (a, each), (b, _) in parts) / 1e9)
        return found


_SETTLING = 2  #: iterations until clocks are locked and the training runs as usual
_AGAIN = 8  #: iterations between two looks at what the ranks have learnt
_SLICE_S = 0.2  #: the longest wait at a time, so that the end of training is seen
#: how long other pipelines are waited for, as a share of the iteration; by hand
_TIMEOUT = 0.05
#: how long they are waited for at least, seconds; by hand
_LEAST_TIMEOUT_S = 0.02
#: how long they are waited for at most, seconds; by hand
_MOST_TIMEOUT_S = 1.0
#: how long an iteration of one computation waits for its clock, as a share of it; by hand
_WAIT = 0.01
#: how long it waits for it at most, seconds; by hand
_MOST_WAIT_S = 0.02
_KEPT = 64  #: iterations whose end may become known late
_LOWERED = "lowered"  #: noted with a program that has a clock below the highest one


# The way of one iteration through the three threads. "Told" has two senses: `_told_of` is what the
# leader told this rank of an iteration ahead; `_told` is what one that ended tells of the laws.
#
# | value              | written by          | read by    | meaning
# |--------------------|---------------------|------------|---------------------------------------
# | `_asked`: `_Asked` | training: `show`,   | exchange:  | the newest iteration to be decided; one
# |                    | `give`, else        | `_round`   | that no round came for is replaced
# |                    | `program_for`       |            |
# | `_handled`         | exchange: `_round`  | exchange   | the `_Asked` that a round was for
# | `_decided`         | exchange: `_decide` | training   | its program, at the clocks told
# | `_known`: `_Known` | exchange: `_decide` | background | what was known of it then; `plan` and
# |                    |                     |            | `full_s` come from `_told_of`
# | `_ended`           | training: `on_end`  | background | its program; None if it deviated
# | from `_told`       | background: `_learn`| background | times at full clocks, for the learner
#
# `_Asked`:
#
# | batch | function | problem | then
# |-------|----------|---------|----------------------------------------------------------------
# | given | given    | None    | the engine's microbatches; the function says the work of each
# | given | None     | None    | the work itself, as the user gave it
# | None  | None     | None    | a rank that follows; for one that leads, the engine shows nothing
# | None  | None     | given   | reading the microbatches failed; full clocks
#
# `_Known`:
#
# | work  | plan  | full_s | then
# |-------|-------|--------|------------------------------------------------------------------
# | None  | None  | empty  | the batch is not known: full clocks, and no law is learnt from it
# | given | None  | empty  | no clocks were told: full clocks, of which laws are learnt
# | given | given | empty  | this rank has no laws yet: clocks as told, but no catching up
# | given | given | given  | all is known: it is also compared how the computations came


class _Asked(NamedTuple):
    """An iteration that has begun on the training thread, or whose work is given."""

    iteration: int
    #: Its microbatches, or the work of each, unread; None if that is not known, or elsewhere.
    batch: Iterable[Any] | None = None
    function: WorkFunction | None = None  #: returns the work of a microbatch; None if it is given
    runs: int | None = None  #: microbatches in the engine; None if that is not known
    problem: str | None = None  #: why the batch is not known


@dataclass(frozen=True)
class _Known:
    """What this rank was told of an iteration."""

    work: Floats | None  #: of its batch
    slowest: Slowest
    plan: RankPlan | None = None
    full_s: tuple[float, ...] = ()  #: of each computation at full clocks; empty without laws


class Batches:
    """Decides what each iteration of this rank runs by.

    The training thread calls `show`, `give`, `program_for` and `on_end`; the background thread
    calls `observe`. The thread of the exchange counts work, plans, and tells others.

    Args:
        exchange: This rank's part in the exchange.
        seat: Where this rank sits.
        order: What it runs; None if that is only known when it has run. With another number of
            microbatches it runs without clocks once, and what it ran is its order from then on.
        profile: The cost of clocks.
        settings: What may be done.
        function: Returns the work of a microbatch; not called on the training thread.
        warn: Called with what a user should know, and with a key to tell it once; not on the
            training thread.
    """

    def __init__(
        self,
        exchange: Exchange,
        seat: Seat,
        order: tuple[Computation, ...] | None,
        profile: Profile,
        settings: AutopilotSettings,
        function: WorkFunction,
        warn: Callable[[str, str], None],
    ) -> None:
        self._profile = profile
        self._exchange = exchange
        self._seat = seat
        self._warn = warn
        self._function = function
        self._is_whole = order == WHOLE.ranks[0]
        #: for each number of microbatches, what is run until more is known; replaced, never changed
        self._first: dict[int, Program] = {}
        self._leader: Leader | None = None
        if seat.leads:
            self._leader = Leader(profile, settings, is_whole=self._is_whole)
        self._learner = LawLearner()
        self._catching_up = CatchingUp(profile)
        self._latest: LatestStarts | None = None
        self._service: ServiceExchange | None = None
        # Written by the training thread:
        self._iteration = -1  #: that has begun last
        self._asked = _Asked(-1)
        self._microbatches: int | None = None  #: of that iteration, if the engine knows
        self._ran: deque[Order] = deque()  #: what iterations without a program have run
        self._ended: dict[int, Program | None] = {}  #: what iterations ran as planned
        # Written by the thread of the exchange:
        self._decided: dict[int, Program] = {}
        self._is_decided = threading.Event()
        self._handled = self._asked
        self._known: dict[int, _Known] = {}
        # Written by the background thread:
        self._times: deque[IterationTimes] = deque(maxlen=_KEPT)
        self._clock = 0  #: of the last computation of the iteration before
        self._lasts_s = 0.0
        self._laws: RankLaws | None = None  #: the newest; the background thread writes it
        self._sent: RankLaws | None = None  #: those that the other ranks have
        self._busy_s: dict[int, float] = {}
        self._loop = Loop(self._round, "perseus-planner batches")
        self._is_stopped = False
        if order is not None:
            self._add(order)

    def check_gpu(self, name: str, control: str) -> None:
        """Refuse a profile of another kind of GPU, or of another control.

        Raises:
            ProfileError: If it is; names the difference.
        """
        profile = self._profile
        if profile.gpu is not None and profile.gpu != name:
            raise ProfileError(
                f"the profile is for the GPU {profile.gpu!r}, and this rank has {name!r}; profile "
                "that kind of GPU"
            )
        if profile.control != control:
            raise ProfileError(
                f"the profile's control is {profile.control!r}, and this training sets "
                f"{control!r}; profile what is set"
            )

    @property
    def leads(self) -> bool:
        """Whether this rank has the batch of its pipeline, and decides its clocks."""
        return self._leader is not None

    @property
    def leads_job(self) -> bool:
        """Whether this rank decides for pipeline 0, which speaks for the job."""
        return self.leads and self._seat.pipeline == 0

    @property
    def status(self) -> AutopilotStatus | None:
        """What is known, for the record of the run; None unless this rank leads the job."""
        return self._leader.status if self._leader is not None and self.leads_job else None

    def start(
        self, latest: LatestStarts | None = None, service: ServiceExchange | None = None
    ) -> None:
        """Start the thread of the exchange; write latest starts, if there is a controller, and
        tell a service, if there is one.
        """
        self._latest = latest
        self._service = service
        self._loop.start()

    def stop(self, limit_s: float) -> None:
        """End the thread, within so many seconds."""
        self._is_stopped = True
        self._loop.stop(limit_s)

    def show(self, count: int | None, microbatches: Microbatches | None) -> None:
        """Take the microbatches of the iteration that begins, unless their work is given.

        Args:
            count: How many there are; None if the engine does not know.
            microbatches: Returns them; None if it does not show them.
        """
        self._microbatches, asked = count, self._asked
        count = None if self._is_whole else count
        if not self.leads:
            return
        if asked.iteration <= self._iteration:
            if microbatches is not None:
                self._ask(self._read(microbatches, count))
        elif isinstance(asked.batch, list) and count not in (None, len(asked.batch)):
            self._ask(asked._replace(runs=count))

    def give(self, work: Sequence[Any], *, order: bool = False) -> tuple[int, ...]:
        """Take the work of each microbatch of the next iteration; what is given first counts.

        Returns:
            The order in which they are to run: with `order` the one in which the iteration is
            shortest, which takes about a millisecond; as they are, if that is not known, or their
            work is not as it should be.
        """
        places = tuple(range(len(work)))
        if self._leader is not None and order:
            with suppress(UsageError):  # which is told below
                places = self._leader.order_of(work_of(work, None))
        if self.leads and self._asked.iteration <= self._iteration:
            self._ask(_Asked(self._iteration + 1, [work[place] for place in places]))
        return places

    def _read(self, microbatches: Microbatches, count: int | None) -> _Asked:
        number = self._iteration + 1
        try:  # an iterator keeps nothing once it is read
            return _Asked(number, iter(microbatches()), self._function, count)
        except UsageError as error:
            return _Asked(number, problem=str(error))
        except Exception as error:  # of where the batch comes from, which training meets again
            text = f"reading the batch raised {type(error).__name__}: {error}"
            return _Asked(number, problem=text)

    def _ask(self, asked: _Asked) -> None:
        self._asked = asked
        self._loop.wake()

    def program_for(self, iteration: int) -> Program | None:
        """Return what an iteration runs by, None if it is not known what it will run; may be called
        again while it runs.
        """
        # The first call of an iteration asks for its program; later calls only look again.
        if iteration != self._iteration:
            self._iteration = iteration
            # Nothing was shown or given, so the leader is asked with an unknown batch.
            if self._asked.iteration != iteration:
                self._ask(_Asked(iteration))
            # One computation cannot take its clock up while it runs, so a moment's wait is worth
            # it.
            if self._is_whole and self._lasts_s:
                self._is_decided.clear()
                if iteration not in self._decided:
                    self._is_decided.wait(min(_WAIT * self._lasts_s, _MOST_WAIT_S))
        count = self._microbatches
        decided = self._decided.get(iteration)
        if decided is not None and count in (None, decided.microbatches):
            return decided
        # If only one order is known, it is what runs, whatever the engine tells.
        if count is None and len(self._first) == 1:
            return next(iter(self._first.values()))
        return None if count is None else self._first.get(count)

    def on_end(
        self, iteration: int, program: Program | None, deviation: str | None, order: Order | None
    ) -> None:
        """Note how an iteration has ended; arguments are those of `ProgramSource.on_end`."""
        if order and program is None:
            self._ran.append(order)
        self._ended[iteration] = None if deviation else program
        self._ended.pop(iteration - _KEPT, None)

    def planned_busy_s(self, iteration: int) -> float | None:
        """Return how long the rank had computed in an iteration that was observed, were its GPU as
        fast as at first, at the clocks that it had; None if that is not known.
        """
        return self._busy_s.get(iteration)

    def observe(self, times: Iterable[IterationTimes], messages: Iterable[ToRank] = ()) -> None:
        """Learn from the times of iterations, and what the controller says of clocks."""
        self._catching_up.take(messages)
        # The background thread adds orders, as the training thread must not wait for what that
        # takes.
        while self._ran:
            try:
                self._add(order_of(self._ran.popleft()))
            except ProfileError as error:
                self._say("profile", str(error))
        self._times.extend(times)
        while self._times:
            # Iterations end in order, so an end that is missing may still come, unless a later one
            # is there.
            number = self._times[0].number
            if number not in self._ended and number >= max(self._ended, default=-1):
                return  # the training thread has yet to say how it ended
            seen = self._times.popleft()
            self._learn(seen, self._ended.get(number))

    def _add(self, order: tuple[Computation, ...]) -> None:
        """Add what the rank runs with another number of microbatches.

        Raises:
            ProfileError: If the profile does not have it all.
        """
        # The profile must cover the order, because clocks are chosen by its rows.
        rows = self._profile.measurements
        pair = next((each for each in order if len(cell_of(each)) > 1), None)
        if pair is not None:
            raise ProfileError(
                f"{pair} is a pair of two microbatches, and what a pair needs is not known from "
                "the work of each; leave work= out"
            )
        missing = next((c for c in order if Key(c.stage, c.kind) not in rows), None)
        if missing is not None:
            raise ProfileError(
                f"the profile has no {missing.kind} of stage {missing.stage}, which this training "
                "runs; profile the stages that you train"
            )
        # The highest clock that was measured counts as full clocks.
        top = max(each[0].clock_mhz for each in rows.values())
        clocks = (top,) * len(order)
        program = Program(1, order, clocks, awaits=True, expected=Expected(top=top))
        if len(self._first) < MOST_COUNTS:
            # Replaced and not changed, as the training thread reads it meanwhile.
            self._first = {program.microbatches: program, **self._first}
        # Other ranks plan by the orders told, so a new one is told again with the laws.
        if self._learner.laws is not None:
            self._laws = RankLaws.of(self._orders, self._learner.laws)

    @property
    def _orders(self) -> list[tuple[Computation, ...]]:
        return [program.computations for program in self._first.values()]

    def _learn(self, seen: IterationTimes, program: Program | None) -> None:
        known = self._known.get(seen.number, _Known(None, Slowest()))
        work = known.work
        slowest = known.slowest
        # An iteration that is not understood leaves no known clock to the next one's first
        # computation.
        before = self._clock
        self._clock = 0
        if program is None or len(seen.spans_ns) != len(program.computations):
            return
        if seen.follows_evaluation:  # its times tell nothing
            return
        # The next iteration's first computation begins at this clock.
        self._clock = program.clocks[-1]
        time_s = (seen.end_ns - seen.begin_ns) / 1e9
        # The first iterations lock clocks and warm up, so their times tell nothing.
        if seen.number < _SETTLING:
            return
        self._lasts_s = time_s
        ran = Ran(seen.number, time_s, slowest)
        if known.full_s and not self._is_whole:
            ran = self._compared(ran, seen, program, known, before)
        if self._leader is not None:
            self._leader.account(ran)
        # Only one rank of a seat learns, as the others observe the same.
        if work is None or not self._seat.is_first:
            return
        told = self._told(seen, program, work, before)
        if self._is_whole:  # its end is that of the slowest rank, whose clock is not lower
            # Without a pipeline the time includes waiting, so only full clocks tell the law, of the
            # slowest.
            is_full = slowest.pays or not slowest.time_s
            told = []
            if is_full and slowest.work:
                told = [(Key(0, "F"), np.array(slowest.work), time_s)]
        if self._learner.add(told) and self._learner.laws is not None:
            self._laws = RankLaws.of(self._orders, self._learner.laws)

    def _compared(
        self, ran: Ran, seen: IterationTimes, program: Program, known: _Known, before: int
    ) -> Ran:
        """Return with it how its computations came."""
        top = program.expected.top
        came_s = self._catching_up.at_full_clocks_s(seen, program)
        # Only an iteration that began and ran at full clocks tells what lies between its
        # computations.
        if known.plan is not None and program.note != _LOWERED and before == top:
            self._catching_up.see_full_clocks(seen, known.plan)
        busy_s = sum(end_ns - begin_ns for begin_ns, end_ns in seen.spans_ns) / 1e9
        # The ratio takes out how fast the GPU was, so that what the work and the clocks cost is
        # left.
        self._busy_s[seen.number] = busy_s * sum(known.full_s) / max(sum(came_s), 1e-9)
        self._busy_s.pop(seen.number - _KEPT, None)
        pairs = tuple(zip(came_s, known.full_s, strict=True))
        return replace(ran, work=known.work, at_full_clocks_s=pairs)

    def _told(
        self, seen: IterationTimes, program: Program, work: Floats, before: int
    ) -> list[tuple[Key, Floats, float]]:
        """Return what the computations of an iteration tell of their laws.

        A clock comes into force some time after it is set, so after a lower one nothing is told.
        """
        return [
            (Key(c.stage, c.kind), work[c.microbatch], (end_ns - begin_ns) / 1e9)
            for c, (begin_ns, end_ns), clock, last in zip(
                program.computations,
                seen.spans_ns,
                program.clocks,
                (before, *program.clocks[:-1]),
                strict=True,
            )
            if clock == last == program.expected.top
        ]

    def _round(self) -> None:
        """Do what is to be done for the iteration that is asked for."""
        asked = self._asked
        # A round may come without a new iteration.
        if asked is self._handled or self._is_stopped:
            return
        self._handled = asked
        try:
            # Read once, as the background thread may put newer ones there meanwhile.
            laws = self._laws
            if laws is not None and laws is not self._sent:
                self._exchange.tell_laws(laws)
                # Only now: if the store has failed, they are sent in the next round.
                self._sent = laws
            if self._leader is not None:
                self._lead(asked, self._leader)
            else:
                self._follow(asked.iteration)
        # A batch that cannot be planned runs at full clocks; training never stops for it.
        except PlannerError as error:
            self._say("batch", str(error))
        # At the end the store may be gone, and its error tells the user nothing then.
        except (RuntimeError, ValueError) as error:
            if not self._is_stopped:
                reason = str(error).partition("\n")[0] or type(error).__name__
                self._say("batches", f"ranks cannot tell each other of batches ({reason})")

    def _say(self, key: str, text: str) -> None:
        self._warn(key, f"{text}; such iterations run at full clocks")

    def _lead(self, asked: _Asked, leader: Leader) -> None:
        iteration = asked.iteration
        problem = asked.problem
        work = None
        own = OwnTime()
        # No batch shown and no problem told: the engine has no way to show it.
        if asked.batch is None and problem is None:
            problem = (
                "the engine does not show the batch of an iteration; say its work before each, by "
                "runtime.batch(work=...)"
            )
        try:
            work = self._work_of(asked)
            own = leader.own(iteration, work)
        # An unknown work still has to be exchanged, as the other pipelines wait for this one's
        # word.
        except PlannerError as error:
            work = None
            problem = str(error)
        # The wait is a share of the iteration, so that most of it still runs by the decision.
        timeout_s = min(max(_TIMEOUT * self._lasts_s, _LEAST_TIMEOUT_S), _MOST_TIMEOUT_S)
        slowest = self._exchange.slowest(iteration, own, timeout_s, self._slowdown())
        if not own.time_s:  # it does not know how it compares
            slowest = msgspec.structs.replace(slowest, time_s=0.0)
        batch = leader.decide(work, slowest)
        # Sent at once, as ranks run at full clocks until it comes; all else can wait.
        self._exchange.send(iteration, batch)
        self._decide(iteration, batch, work, slowest)
        if problem is not None:
            self._say("work", problem)
        # Reading laws costs one look at each rank, so it is done at times only once all are known.
        if not leader.is_ready or leader.lacks(work) or iteration % _AGAIN == 0:
            laws = self._exchange.laws()
            if laws is not None:
                leader.learn(laws)
        # Laying out a planner takes up to a second, so it is done when nobody waits for this
        # iteration.
        leader.prepare(work)

    def _slowdown(self) -> float:
        """Return how long iterations may take within the service's budgets and deadlines, as a
        multiple of their time at full clocks; tell it what is known.
        """
        service = self._service
        leader = self._leader
        if service is None or leader is None or not self.leads_job:
            return 1.0
        service.status = leader.status.shown
        service.learnt = service.learnt or leader.learnt
        if service.learnt is None:
            return 1.0
        return max(1.0, max(service.calm_s, default=0.0) / service.learnt.time_s)

    def _work_of(self, asked: _Asked) -> Floats | None:
        if asked.batch is None:
            return None
        work: Floats = work_of(asked.batch, asked.function)
        if self._is_whole:
            return np.asarray(work.sum(axis=0, keepdims=True))
        if asked.runs not in (None, len(work)):
            raise UsageError(
                f"the work of {len(work)} microbatches is given, and the iteration has {asked.runs}"
            )
        return work

    def _follow(self, iteration: int) -> None:
        while not self._is_stopped and self._asked.iteration == iteration:
            batch = self._exchange.batch(iteration, _SLICE_S)
            if batch is not None:
                work = np.array(batch.work) if batch.work else None
                self._decide(iteration, batch, work, Slowest())
                return

    def _decide(self, iteration: int, batch: Batch, work: Floats | None, slowest: Slowest) -> None:
        # Without work, the engine's own number of microbatches says which order runs.
        count = self._microbatches if work is None else len(work)
        first = self._first.get(count) if count else next(iter(self._first.values()), None)
        known = _Known(work, slowest)
        if first is not None:
            expected = replace(first.expected, time_s=batch.time_s)
            program = replace(first, awaits=False, expected=expected)
            if batch.ranks and work is not None:
                known = self._told_of(batch.ranks[self._seat.rank], program, known)
                program = self._planned(iteration, program, known)
            # Computed here and cached, because the training thread would spend time on it.
            _ = program.requests  # not on the training thread
            self._decided[iteration] = program
        self._known[iteration] = known
        self._known.pop(iteration - _KEPT, None)
        self._decided.pop(iteration - _KEPT, None)
        # Set last, so that whoever waits finds the program.
        self._is_decided.set()

    def _told_of(self, plan: RankPlan, program: Program, known: _Known) -> _Known:
        laws = self._learner.laws
        if known.work is None or laws is None:
            return replace(known, plan=plan)
        rows = known.work.tolist()
        order = program.computations
        full_s = tuple(laws[Key(c.stage, c.kind)].full_s(rows[c.microbatch]) for c in order)
        return replace(known, plan=plan, full_s=full_s)

    def _costs(
        self, program: Program, clocks: tuple[int, ...], full_s: tuple[float, ...]
    ) -> RankCosts | None:
        """Return what the profile says of computations that take `full_s` at full clocks."""
        if not full_s:
            return None
        profile = self._profile
        each = []
        # Rows are of a stage, and an account is of one GPU.
        gpus = profile.gpus_per_stage
        for c, clock, seconds in zip(program.computations, clocks, full_s, strict=True):
            # A planned clock that was not measured takes the nearest measured one, as the planner
            # did.
            rows = {row.clock_mhz: row for row in profile.measurements[Key(c.stage, c.kind)]}
            top = rows[max(rows)]
            row = rows[nearest_clock(rows, clock)]
            # Time and energy of a row scale alike with work, as the plan assumes.
            work = seconds / top.time_s
            row_j = work * row.energy_j / gpus
            top_j = work * top.energy_j / gpus
            each.append(Cost(work * row.time_s, row_j, seconds, top_j))
        waiting_w = fmean(profile.blocking_w(c.stage) for c in program.computations) / gpus
        return profile_costs(tuple(each), waiting_w, program.expected.time_s)

    def _planned(self, iteration: int, program: Program, known: _Known) -> Program:
        """Return the program at the clocks that this rank was told, and write its latest starts."""
        plan = known.plan
        assert plan is not None
        # Clocks of another number of computations are for another order, and full clocks need no
        # program.
        clocks = values_of(plan.clocks)
        top = program.expected.top
        if len(clocks) != len(program.clocks) or min(clocks) == top:
            return program
        costs = self._costs(program, clocks, known.full_s)
        program = replace(program.at(clocks, costs=costs), then=top, note=_LOWERED)
        # Without a controller, laws or a pipeline, nothing can catch up within the iteration.
        if self._latest is None or not known.full_s or self._is_whole:
            return program
        # Begun iterations run at full clocks until now, so their latest starts count from
        # elsewhere.
        has_begun = self._iteration >= iteration
        rows = self._catching_up.rows(program, known.full_s, plan, has_begun=has_begun)
        if not rows:
            return program
        return replace(program, table=Table(self._latest.write(iteration, rows)))
