"""Whether a rank's GPU is slow, from how long its computations took; pure, so that it can be asked of any record.

How slow is said as a slowdown: how many times as long as planned its computations take. A profile is never quite what a
job does, so what is usual is learned from the first iterations of the rank, unless the profile is to count; and it is
the profile that counts for as long as the GPU is held back from the start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from perseus_planner.runs import IterationRecord

ENOUGH = 5
"""So many iterations in a row must say so before anything is reported; from as many it is learned what is usual."""
SLOW = 1.05
"""Reported where the slowdown is above this."""
RECOVERED = 1.02
"""And no longer where it is below this."""
_THROTTLED = 0.05  #: share of the time above which a reason is named
_NORMAL = "sw-power-cap"  #: many a GPU is at its power limit whenever it works hard


@dataclass(frozen=True)
class Straggling:
    """What is to be reported of a GPU.

    Attributes:
        slowdown: how many times as long as usual its computations take, 1 or more; 1: it has recovered.
        reason: what holds it back, in words.
    """

    slowdown: float
    reason: str


@dataclass(frozen=True)
class Watch:
    """What is known of one rank so far; never changed, `after` gives the next one.

    Attributes:
        usual: actual over planned time where nothing is wrong: 1 if the profile is to count; None: not known yet.
        recent: the last iterations that ran as planned, `ENOUGH` at most.
        reported: the slowdown that was reported last; 1: none.
    """

    usual: float | None = None
    recent: tuple[IterationRecord, ...] = ()
    reported: float = 1.0

    def after(self, iteration: IterationRecord) -> tuple[Watch, Straggling | None]:
        """What is known after one more iteration, and what is to be reported, if anything is.

        Reported are: that the GPU is slow, that its slowdown has changed by more than `SLOW`, and that it has
        recovered; each once. Iterations that did not run as planned say nothing.
        """
        if not iteration.is_as_planned or not iteration.planned_busy_s or iteration.busy_s <= 0:
            return self, None
        recent = (*self.recent, iteration)[-ENOUGH:]
        watch = replace(self, recent=recent)
        if len(recent) < ENOUGH:
            return watch, None
        if self.usual is not None:
            return watch._judged(self.usual)
        if _is_held_back(recent):  # to learn from that would hide it
            return watch._judged(1.0)
        return replace(watch, usual=median(_ratio(row) for row in recent), recent=()), None

    def _judged(self, usual: float) -> tuple[Watch, Straggling | None]:
        slowdowns = [_ratio(row) / usual for row in self.recent]
        is_slow = min(slowdowns) > SLOW
        has_moved = min(slowdowns) > self.reported * SLOW or max(slowdowns) < self.reported / SLOW
        if is_slow and has_moved:
            slowdown = median(slowdowns)
            return replace(self, reported=slowdown), Straggling(slowdown, _reason(self.recent))
        if self.reported > 1.0 and max(slowdowns) < RECOVERED:
            return replace(self, reported=1.0), Straggling(1.0, "it has recovered")
        return self, None


def _ratio(row: IterationRecord) -> float:
    """Actual over planned time of its computations."""
    return row.busy_s / (row.planned_busy_s or math.nan)


def _shares(rows: Iterable[IterationRecord]) -> dict[str, float]:
    """Reason -> share of the time in which it held the GPU back, the largest first, of those that matter."""
    rows = list(rows)
    time_s = math.fsum(row.time_s for row in rows)
    reasons = dict.fromkeys(reason for row in rows for reason in row.throttled_s)
    seconds = {reason: math.fsum(row.throttled_s.get(reason, 0.0) for row in rows) for reason in reasons}
    shares = {reason: each_s / time_s for reason, each_s in seconds.items() if each_s > _THROTTLED * time_s}
    return dict(sorted(shares.items(), key=lambda each: -each[1]))


def _is_held_back(rows: Iterable[IterationRecord]) -> bool:
    return any(reason != _NORMAL for reason in _shares(rows))


def _reason(rows: Iterable[IterationRecord]) -> str:
    shares = _shares(rows)
    if not shares:
        return "its computations take longer; no throttling was counted"
    return "throttled: " + ", ".join(
        f"{reason} {100 * min(share, 1.0):.0f} % of the time" for reason, share in shares.items()
    )
