"""Clocks that catch up: when each computation of a rank may start latest at each clock, so that the
iteration still takes no longer than planned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from perseus_planner.profiles.keys import Key
from perseus_planner.runtime.controller.protocol import SETTLE_NS, ControlChange

if TYPE_CHECKING:
    from perseus_planner.extensions.autopilot.batches.exchange import RankPlan
    from perseus_planner.profiles.profiles import Profile
    from perseus_planner.runtime.controller.protocol import ToRank
    from perseus_planner.runtime.marks import IterationTimes
    from perseus_planner.runtime.program import Program

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
                ratios = self._ratios[Key(c.stage, c.kind)]
                ratio = ratios[max(ratios)]
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
