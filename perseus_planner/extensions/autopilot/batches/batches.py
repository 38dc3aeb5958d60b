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
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from perseus_planner.base.errors import PlannerError, ProfileError, UsageError
from perseus_planner.base.loops import Loop
from perseus_planner.extensions.autopilot.batches.exchange import (
    Batch,
    Exchange,
    OwnTime,
    RankLaws,
    Seat,
    Slowest,
)
from perseus_planner.extensions.autopilot.batches.leader import Leader
from perseus_planner.extensions.autopilot.batches.learning import KEPT, BatchLearner, Known
from perseus_planner.extensions.autopilot.batches.orders import Orders
from perseus_planner.extensions.autopilot.batches.programs import Programs
from perseus_planner.extensions.autopilot.batches.work import work_of
from perseus_planner.extensions.autopilot.ranks.messages import order_of
from perseus_planner.schedules import WHOLE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.engines.guard import Microbatches
    from perseus_planner.extensions.autopilot.status import AutopilotStatus
    from perseus_planner.profiles.profiles import Profile
    from perseus_planner.runtime.controller.protocol import LatestStarts, ToRank
    from perseus_planner.runtime.decider import ServiceExchange
    from perseus_planner.runtime.marks import IterationTimes
    from perseus_planner.runtime.options import AutopilotSettings, WorkFunction
    from perseus_planner.runtime.program import Order, Program
    from perseus_planner.schedules import Computation

    Floats = NDArray[np.float64]

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


# The way of one iteration through the three threads:
#
# | value              | written by          | read by    | meaning
# |--------------------|---------------------|------------|---------------------------------------
# | `_asked`: `_Asked` | training: `show`,   | exchange:  | the newest iteration to be decided; one
# |                    | `give`, else        | `_round`   | that no round came for is replaced
# |                    | `program_for`       |            |
# | `_handled`         | exchange: `_round`  | exchange   | the `_Asked` that a round was for
# | `_decided`         | exchange: `_decide` | training   | its program, at the clocks told
# | `_known`: `Known`  | exchange: `_decide` | background | what was known of it then
# | `_ended`           | training: `on_end`  | background | its program; None if it deviated
# | `_learner.laws`    | background:         | exchange   | what computations take at full clocks,
# |                    | `observe`           |            | for the other ranks
#
# `_Asked`:
#
# | batch | function | problem | then
# |-------|----------|---------|----------------------------------------------------------------
# | given | given    | None    | the engine's microbatches; the function says the work of each
# | given | None     | None    | the work itself, as the user gave it
# | None  | None     | None    | a rank that follows; for one that leads, the engine shows nothing
# | None  | None     | given   | reading the microbatches failed; full clocks


class _Asked(NamedTuple):
    """An iteration that has begun on the training thread, or whose work is given."""

    iteration: int
    #: Its microbatches, or the work of each, unread; None if that is not known, or elsewhere.
    batch: Iterable[Any] | None = None
    function: WorkFunction | None = None  #: returns the work of a microbatch; None if it is given
    runs: int | None = None  #: microbatches in the engine; None if that is not known
    problem: str | None = None  #: why the batch is not known


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
        self._service: ServiceExchange | None = None
        self._leader: Leader | None = None
        if seat.leads:
            self._leader = Leader(profile, settings, is_whole=self._is_whole)
        # The background thread changes orders and what is learnt; that of the exchange reads them.
        self._orders = Orders(profile)
        self._learner = BatchLearner(
            profile, self._orders, seat, self._leader, is_whole=self._is_whole
        )
        # The thread of the exchange makes programs.
        self._programs = Programs(profile, seat.rank, self._learner, is_whole=self._is_whole)
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
        self._known: dict[int, Known] = {}
        self._sent: RankLaws | None = None  #: those that the other ranks have
        # Written by the background thread:
        #: of iterations whose end is not known yet
        self._times: deque[IterationTimes] = deque(maxlen=KEPT)
        self._loop = Loop(self._round, "perseus-planner batches")
        self._is_stopped = False
        if order is not None:
            self._learner.add_order(order)

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
        self._programs.latest = latest
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
        self._microbatches = count
        asked = self._asked
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
            lasts_s = self._learner.lasts_s
            if self._is_whole and lasts_s:
                self._is_decided.clear()
                if iteration not in self._decided:
                    self._is_decided.wait(min(_WAIT * lasts_s, _MOST_WAIT_S))
        count = self._microbatches
        decided = self._decided.get(iteration)
        if decided is not None and count in (None, decided.microbatches):
            return decided
        return self._orders.of(count)

    def on_end(
        self, iteration: int, program: Program | None, deviation: str | None, order: Order | None
    ) -> None:
        """Note how an iteration has ended; arguments are those of `ProgramSource.on_end`."""
        if order and program is None:
            self._ran.append(order)
        self._ended[iteration] = None if deviation else program
        self._ended.pop(iteration - KEPT, None)

    def planned_busy_s(self, iteration: int) -> float | None:
        """Return how long the rank had computed in an iteration that was observed, were its GPU as
        fast as at first, at the clocks that it had; None if that is not known.
        """
        return self._learner.busy_s(iteration)

    def observe(self, times: Iterable[IterationTimes], messages: Iterable[ToRank] = ()) -> None:
        """Learn from the times of iterations, and what the controller says of clocks."""
        self._learner.catching_up.take(messages)
        # The background thread adds orders, as the training thread must not wait for what that
        # takes.
        while self._ran:
            try:
                self._learner.add_order(order_of(self._ran.popleft()))
            except ProfileError as error:
                self._say("profile", str(error))
            except UsageError as error:
                self._say("numbers", str(error))
        self._times.extend(times)
        while self._times:
            # Iterations end in order, so an end that is missing may still come, unless a later one
            # is there.
            number = self._times[0].number
            if number not in self._ended and number >= max(self._ended, default=-1):
                return  # the training thread has yet to say how it ended
            known = self._known.get(number, Known(None, Slowest()))
            self._learner.learn(self._times.popleft(), self._ended.get(number), known)

    def _round(self) -> None:
        """Do what is to be done for the iteration that is asked for."""
        asked = self._asked
        # A round may come without a new iteration.
        if asked is self._handled or self._is_stopped:
            return
        self._handled = asked
        try:
            # Read once, as the background thread may put newer ones there meanwhile.
            laws = self._learner.laws
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
        timeout_s = min(max(_TIMEOUT * self._learner.lasts_s, _LEAST_TIMEOUT_S), _MOST_TIMEOUT_S)
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
        full = self._orders.of(count) if count else self._orders.newest
        known = Known(work, slowest)
        if full is not None:
            program, known = self._programs.made(
                iteration, full, batch, known, has_begun=lambda: self._iteration >= iteration
            )
            # Computed here and cached, because the training thread would spend time on it.
            _ = program.requests
            self._decided[iteration] = program
        self._known[iteration] = known
        self._known.pop(iteration - KEPT, None)
        self._decided.pop(iteration - KEPT, None)
        # Set last, so that whoever waits finds the program.
        self._is_decided.set()
