"""A plan is followed by time where only the begin and the end of an iteration are seen: one that is
replayed as one CUDA graph, a compiled loop, or whatever `Runtime.iteration` surrounds.

An iteration runs at full clocks until enough were measured; at one clock, the highest of the
rank's, while iterations are too short for more; else at clocks by time (`by_time.py`). The
controller itself leaves an iteration at full clocks whose begin it does not see, or sees at an
unusual time; the hook does, if it has another number of microbatches, and in the one after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from statistics import fmean
from typing import TYPE_CHECKING

from perseus_planner.base.errors import PlanError
from perseus_planner.runs.savings import Cost, RankCosts, plan_costs, profile_costs
from perseus_planner.runtime.by_time import (
    LEAST_GUARDS,
    MAX_CHANGES,
    MEASURED,
    EdgeTimes,
    Guard,
    Segment,
    Timing,
    guarded,
    segments_of,
)
from perseus_planner.runtime.controller.protocol import (
    SETTLE_NS,
    ControlChange,
    GpuSample,
    LatestStarts,
    Overload,
)
from perseus_planner.runtime.controller.scheduler import RESET
from perseus_planner.runtime.fixed_plan import FixedPlan
from perseus_planner.runtime.program import Inside, Table
from perseus_planner.schedules import WHOLE

if TYPE_CHECKING:
    from perseus_planner.plans.plan import Plan
    from perseus_planner.runtime.controller.protocol import ToRank
    from perseus_planner.runtime.decider import Context, Seat
    from perseus_planner.runtime.job import JobWarnings
    from perseus_planner.runtime.marks import IterationTimes
    from perseus_planner.runtime.program import Order, Program
    from perseus_planner.runtime.sending import Plans

_UNLIKE = 0.05  #: share by which iterations may take longer than replayed before that is said
_STATED = 1.5  #: guards within which is stated what is saved, so that it is not anew each time
_KEPT_SAMPLES = 8  #: of the begins that the controller has seen last


@dataclass(frozen=True)
class _Ways:
    """How a rank may run an iteration of its plan."""

    segments: tuple[Segment, ...]  #: What it runs, in order
    full: Program  #: At full clocks
    single: Program  #: At one clock
    timed: Program | None  #: At clocks by time; None if one clock is all that the plan has
    planned: Program  #: What the rank runs by the plan itself
    rank: int  #: Of the plan's pipeline

    def timed_within(self, guard: Guard) -> Program | None:
        """Return the program at clocks by time, with what it saves as long as the guard is not
        longer, in times of the plan's replay.
        """
        if self.timed is None:
            return None
        clocks = _clocks_by_time(self.planned, self.rank, guard)
        costs = whole_costs(self.planned, self.rank, clocks)
        return replace(self.timed, expected=replace(self.timed.expected, costs=costs))


class TimedPlan(FixedPlan):
    """Follows the plan that all ranks agree on, by time."""

    def __init__(self) -> None:
        super().__init__()
        self._edges = EdgeTimes()
        self._latest: LatestStarts | None = None
        self._warnings: JobWarnings | None = None
        self._ways: _Ways | None = None  #: of the newest plan
        #: what the next iterations run by at clocks by time; None while they do not
        self._timed: tuple[_Ways, Program | None] | None = None
        self._stated_s = 0.0  #: guard within which is known what that saves
        self._is_single = False  #: or at one clock
        self._is_overloaded = False  #: the controller cannot make so many changes
        self._ran: deque[tuple[int, Program | None, str | None]] = deque(maxlen=256)
        #: the first iterations: their times, and what they are compared with
        self._first: list[tuple[float, float, float]] = []
        self._ends_with_all: bool | None = None  #: whether an iteration ends when all ranks have
        self._last: IterationTimes | None = None  #: the iteration that was read last
        self._samples_ns: deque[int] = deque(maxlen=_KEPT_SAMPLES)  #: when begins were seen

    def join(self, seat: Seat) -> None:
        """See `Decider.join`."""
        super().join(seat)
        self._warnings = seat.warnings

    def begin(self, context: Context) -> None:
        """See `Decider.begin`."""
        self._latest = context.latest

    def program_of_plans(self, version: int, plans: Plans) -> Program:
        """See `Decider.program_of_plans`."""
        return self.followed(super().program_of_plans(version, plans))

    def followed(self, program: Program) -> Program:
        """Return a program of a plan as it is followed: an iteration is one computation.

        Raises:
            PlanError: If its clock changes too often, or it has modes.
        """
        plan = program.expected.plan
        assert plan is not None
        if program.changes > MAX_CHANGES:
            raise PlanError(
                f"the plan changes the clock of a rank {program.changes} times in an iteration, "
                f"and where only its begin and end are seen at most {MAX_CHANGES} changes can be "
                f"made, by time; plan again with `planner plan --max-changes {MAX_CHANGES}`"
            )
        if any(program.modes):
            raise PlanError(
                "the plan has modes, which cannot be entered where only the begin and the end of "
                "an iteration are seen; plan without modes"
            )
        rank = plan.schedule.ranks.index(program.computations)
        segments = segments_of(plan, rank)
        top = top_clock(plan, program)
        highest = max(program.clocks)
        # To the engine an iteration is one computation.
        whole = replace(
            program,
            computations=WHOLE.ranks[0],
            inside=Inside(program.microbatches, program.shown),
            expected=replace(program.expected, top=top),
        )
        count = len(program.clocks)
        # At full clocks until enough is measured to time changes; at the highest clock of the plan
        # where they cannot be timed.
        full = whole.at((top,), costs=whole_costs(program, rank, (top,) * count))
        single = whole.at((highest,), costs=whole_costs(program, rank, (highest,) * count))
        timed = None
        if len(segments) > 1:
            # Each version has its own table, as the device may still run iterations of the last.
            timed = replace(
                whole,
                clocks=(segments[0].clock,),
                table=Table(LatestStarts.number_of(program.version), by_time=True),
            )
        return replace(single, note=_Ways(segments, full, single, timed, program, rank))

    def program_for(self, iteration: int, agreed: Program | None) -> Program | None:
        """See `Decider.program_for`."""
        ways = None if agreed is None else agreed.note
        if not isinstance(ways, _Ways):
            return agreed
        self._ways = ways
        if ways.timed is None or self._is_single:
            return ways.single
        timed = self._timed
        if timed is None or timed[0] is not ways:  # too little is known, or the plan is new
            return ways.full
        return timed[1]

    def on_end(
        self,
        iteration: int,
        program: Program | None,
        deviation: str | None,
        order: Order | None,
    ) -> None:
        """See `Decider.on_end`."""
        self._ran.append((iteration, program, deviation))

    def look(self, times: Sequence[IterationTimes], messages: Sequence[ToRank]) -> None:
        """See `Decider.look`."""
        for message in messages:
            if isinstance(message, GpuSample):
                self._samples_ns.append(message.seen_ns)
            elif isinstance(message, ControlChange) and message.value != RESET:
                set_ns = message.ended_ns + SETTLE_NS - message.seen_ns
                self._edges.add_setting(set_ns / 1e9)
            elif isinstance(message, Overload):
                self._is_overloaded = True
        for iteration_times in times:
            self._take(iteration_times)
        ways = self._ways
        # A new plan is timed at once, by what is known of the iterations before it.
        is_new = ways is not None and (self._timed is None or self._timed[0] is not ways)
        if ways is not None and (times or is_new):
            self._time_clocks(ways)

    def busy_s(self, iteration: int, program: Program) -> float | None:
        """See `Decider.busy_s`; an iteration does not show when its rank computes."""
        return None

    @property
    def timing(self) -> Timing:
        """What is known of the iterations so far."""
        return self._edges.timing

    def _take(self, times: IterationTimes) -> None:
        """Take the times of an iteration."""
        before = self._last
        self._last = times
        program = None
        deviation: str | None = None
        # Iterations may have run of which the device took no times.
        while self._ran and self._ran[0][0] <= times.number:
            number, program, deviation = self._ran.popleft()
            if number != times.number:
                program = None
        if program is None or deviation is not None or len(times.spans_ns) != 1:
            self._last = None
            return
        begin_ns, end_ns = times.spans_ns[0]
        # The pause before it was the evaluation, and it is itself unlike others.
        if times.follows_evaluation:
            return
        if before is not None and before.number + 1 == times.number:
            self._edges.add_pause((begin_ns - before.spans_ns[0][1]) / 1e9)
        time_s = (end_ns - begin_ns) / 1e9
        ways = self._ways
        plan = program.expected.plan
        assert plan is not None
        assert ways is not None  # an iteration has ended that ran by it
        by_time = program.table is not None
        is_full = not by_time and program.clocks == (program.expected.top,)
        # The replay of what it ran by, as full clocks and the plan differ in time.
        whole_s = plan.baseline_time_s if is_full else plan.time_s
        self._measure(time_s, whole_s, segments_of(plan, ways.rank)[-1].end_s / plan.time_s)
        if by_time:
            # The sample nearest to the begin tells when it was seen. One that is a quarter of an
            # iteration away belongs to something else.
            near_ns = [seen - begin_ns for seen in self._samples_ns]
            delay_ns = min(near_ns, key=abs, default=None)
            if delay_ns is not None and abs(delay_ns) < (end_ns - begin_ns) // 4:
                self._edges.add_begin(delay_ns / 1e9)

    def _measure(self, time_s: float, whole_s: float, own_share: float) -> None:
        """Take the time of an iteration that ran as planned.

        Args:
            time_s: Seconds.
            whole_s: Seconds of the whole pipeline's iteration, by the replay of what it ran by.
            own_share: The share of them after which this rank has ended its own part.
        """
        if self._ends_with_all is None:
            # Whether the ranks wait for each other before an iteration ends shows in its time.
            self._first.append((time_s, whole_s, own_share))
            if len(self._first) < MEASURED:
                return
            of_all = fmean(abs(log(taken_s / all_s)) for taken_s, all_s, _ in self._first)
            of_own = fmean(
                abs(log(taken_s / all_s / share)) for taken_s, all_s, share in self._first
            )
            self._ends_with_all = of_all <= of_own
            for first in self._first:
                self._edges.add(*self._expected(*first))
        else:
            self._edges.add(*self._expected(time_s, whole_s, own_share))

    def _expected(self, time_s: float, whole_s: float, own_share: float) -> tuple[float, float]:
        return time_s, whole_s if self._ends_with_all else own_share * whole_s

    def _time_clocks(self, ways: _Ways) -> None:
        """Decide how the next iterations run, and write the offsets of their clocks."""
        latest = self._latest
        timing = self._edges.timing
        if ways.timed is None or latest is None:
            return
        if not timing.is_measured:
            return
        self._say_unlike(timing)
        self._is_single = self._is_overloaded or timing.is_too_short
        if self._is_single:
            self._say_single(timing)
        # Under the same number: the controller takes what is there when the iteration begins.
        latest.write(ways.timed.version, [timing.row(ways.segments)])
        guard_s = timing.guard_s / timing.scale
        if self._timed is None or self._timed[0] is not ways or guard_s > self._stated_s:
            self._stated_s = _STATED * guard_s
            guard = timing.guard.at_scale(timing.scale).widened(_STATED)
            self._timed = ways, ways.timed_within(guard)

    def _say_single(self, timing: Timing) -> None:
        reason = (
            "clock changes cannot keep up"
            if self._is_overloaded
            else f"an iteration of {timing.iteration_s:.3g} s is shorter than {LEAST_GUARDS:g} "
            f"guards of {1e3 * timing.guard_s:.3g} ms"
        )
        text = (
            f"{reason}, so each rank runs at one clock; `planner plan --max-changes 0` saves more"
        )
        self._warn("one clock", text)

    def _say_unlike(self, timing: Timing) -> None:
        if timing.scale > 1.0 + _UNLIKE:
            self._warn(
                "unlike",
                f"iterations take {timing.scale:.3g} times as long as the plan's replay, and its "
                "clocks are timed by that: show the pipeline's forwards and backwards alone, not "
                "the optimizer, or calibrate the plan (`planner calibrate`)",
            )

    def _warn(self, key: str, text: str) -> None:
        if self._warnings is not None:
            self._warnings.warn(key, text)


def top_clock(plan: Plan, program: Program) -> int:
    """Return the highest clock of a rank's rows."""
    keys = {plan.key(computation) for computation in program.computations}
    clocks = [clock for key in keys for clock in plan.measurements[key]]
    clocks += [row.clock_mhz for key, row in (plan.full_clocks or {}).items() if key in keys]
    return max(clocks)


def _clocks_by_time(program: Program, rank: int, guard: Guard) -> tuple[int, ...]:
    """Return for each computation of a rank the highest clock that it has by time, of which is
    stated what it saves: no more than it does.
    """
    plan = program.expected.plan
    assert plan is not None
    clocks = guarded(segments_of(plan, rank), guard)
    highest = []
    for computation in program.computations:
        span = plan.timeline.spans[str(computation)]
        since_s = float("-inf")
        in_force = []
        for clock, until_s in clocks:
            if since_s < span.end_s and span.start_s < until_s:
                in_force.append(clock)
            since_s = until_s
        highest.append(max(in_force))
    return tuple(highest)


def whole_costs(program: Program, rank: int, clocks: Sequence[int]) -> RankCosts:
    """Return what the rows say of an iteration of a rank at some clocks, as one computation."""
    plan = program.expected.plan
    assert plan is not None
    costs = plan_costs(plan, program.computations, clocks, rank)
    sums = map(sum, zip(*costs.each, strict=True))
    whole = Cost(*sums)
    return profile_costs((whole,), costs.waiting_w, costs.time_s, costs.error_j)
