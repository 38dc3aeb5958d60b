"""Detects whether a rank's GPU is slow, from how long its computations took.

The slowdown is how many times as long as normal the computations take. Normal is learned from the
rank's first iterations, because a profile never matches a job exactly. If the GPU is throttled from
the start, the profile counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from perseus_planner.runs.account import Account

if TYPE_CHECKING:
    from perseus_planner.runs import IterationRecord

ENOUGH = 5
"""Number of successive iterations that have to agree before anything is reported or learned."""
SLOW = 1.05
"""A GPU is reported as slow if its slowdown is above this."""
RECOVERED = 1.02
"""A GPU that was slow is reported as recovered if its slowdown is below this."""
_THROTTLED = 0.05  #: share of the time above which a throttle reason is named
_NORMAL = "sw-power-cap"  #: many GPUs are at their power limit whenever they work hard


@dataclass(frozen=True)
class StragglerDetection:
    """What to report of a GPU."""

    #: How many times as long as normal its computations take, at least 1; 1 if it has recovered.
    slowdown: float
    reason: str  #: What slows it down, in words


@dataclass(frozen=True)
class StragglerDetector:
    """What is known of one rank so far; immutable, `after` returns the next state."""

    #: Actual over planned time while nothing is wrong; 1 if the profile counts, None if it is not
    #: known yet.
    normal_ratio: float | None = None
    #: The last iterations that ran as planned, at most `ENOUGH`.
    recent: tuple[IterationRecord, ...] = ()
    reported: float = 1.0  #: The slowdown that was reported last; 1 if none was

    def after(
        self, iteration: IterationRecord
    ) -> tuple[StragglerDetector, StragglerDetection | None]:
        """Return the state after one more iteration, and what to report, if anything.

        Reported once each: that the GPU is slow, that its slowdown has changed by more than `SLOW`,
        and that it has recovered. Iterations that did not run as planned are ignored.
        """
        if iteration.deviation is not None or not iteration.planned_busy_s or iteration.busy_s <= 0:
            return self, None
        recent = (*self.recent, iteration)[-ENOUGH:]
        detector = replace(self, recent=recent)
        if len(recent) < ENOUGH:
            return detector, None
        if self.normal_ratio is not None:
            return detector._judge(self.normal_ratio)
        if _is_throttled(recent):  # learning from these iterations would hide it
            return detector._judge(1.0)
        return replace(
            detector, normal_ratio=median(_ratio(row) for row in recent), recent=()
        ), None

    def _judge(self, normal_ratio: float) -> tuple[StragglerDetector, StragglerDetection | None]:
        slowdowns = [_ratio(row) / normal_ratio for row in self.recent]
        is_slow = min(slowdowns) > SLOW
        has_moved = min(slowdowns) > self.reported * SLOW or max(slowdowns) < self.reported / SLOW
        if is_slow and has_moved:
            slowdown = median(slowdowns)
            return replace(self, reported=slowdown), StragglerDetection(
                slowdown, _reason(self.recent)
            )
        if self.reported > 1.0 and max(slowdowns) < RECOVERED:
            return replace(self, reported=1.0), StragglerDetection(1.0, "it has recovered")
        return self, None


def _ratio(row: IterationRecord) -> float:
    """Return actual over planned time of the computations."""
    return row.busy_s / (row.planned_busy_s or math.nan)


def _throttled_shares(rows: Iterable[IterationRecord]) -> dict[str, float]:
    """Return throttle reason -> share of the time, the largest first, for shares above
    `_THROTTLED`.
    """
    whole = sum((Account.of(row, is_first=False) for row in rows), Account())
    shares = {reason: held_s / whole.inside_s for reason, held_s in whole.throttled_s.items()}
    largest_first = sorted(shares.items(), key=lambda item: -item[1])
    return {reason: share for reason, share in largest_first if share > _THROTTLED}


def _is_throttled(rows: Iterable[IterationRecord]) -> bool:
    return any(reason != _NORMAL for reason in _throttled_shares(rows))


def _reason(rows: Iterable[IterationRecord]) -> str:
    shares = _throttled_shares(rows)
    if not shares:
        return "its computations take longer; no throttling was counted"
    return "throttled: " + ", ".join(
        f"{reason} {100 * min(share, 1.0):.0f} % of the time" for reason, share in shares.items()
    )
