"""What a rank knows of its clocks while it runs: when its computations must start at the latest,
which it writes for its controller, and what they had taken at full clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from perseus_planner.runtime.controller.protocol import SETTLE_NS, ControlChange

if TYPE_CHECKING:
    from perseus_planner.profiles.profiles import Profile
    from perseus_planner.runtime.batches.exchange import RankPlan
    from perseus_planner.runtime.controller.protocol import ToRank
    from perseus_planner.runtime.hook import Program
    from perseus_planner.runtime.marks import IterationTimes

_REMEMBERED, _NEEDED = 20, 3  #: iterations at full clocks that tell how long ranks wait beside
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
            key: {row.clock_mhz: row.time_s / rows[0].time_s for row in reversed(rows)}
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
        if len(self._longer_s) < _NEEDED or not plan.latest_us:
            return []
        first_us = plan.full_us[0] if has_begun else plan.first_us
        longer_us = 1e6 * median(self._longer_s) * len(full_s)
        stretch = 1.0 + longer_us / max(plan.latest_us[-1] - first_us, 1)
        found = []
        for c, clock, each_s, latest_us in zip(
            program.computations, program.clocks, full_s, plan.latest_us, strict=True
        ):
            end_ns, row = round(1e3 * stretch * (latest_us - first_us)), list[tuple[int, int]]()
            for faster, ratio in self._ratios[c.stage, c.kind].items():
                start_ns = end_ns - round(1e9 * each_s * ratio) + _LATE_NS
                if faster >= clock and (not row or start_ns > row[-1][1]):
                    row.append((faster, start_ns))
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
        changes = list(self._changes)
        while len(self._changes) > 1 and self._changes[1][0] <= times.begin_ns:
            self._changes.popleft()
        found = []
        for c, clock, (begin_ns, end_ns) in zip(
            program.computations, program.clocks, times.spans_ns, strict=True
        ):
            ratios, since = self._ratios[c.stage, c.kind], [(begin_ns, clock)]
            for at_ns, value in changes:
                if at_ns <= begin_ns:
                    since = [(begin_ns, value)]
                elif at_ns < end_ns:
                    since.append((at_ns, value))
            parts = pairwise([*since, (end_ns, 0)])
            found.append(sum((b - a) / ratios.get(each, 1.0) for (a, each), (b, _) in parts) / 1e9)
        return found
