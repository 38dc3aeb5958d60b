"""What is to be told the service of a job's ranks: the last finding of each, and again in time while it stands."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING
from uuid import uuid4

from perseus_planner.service.client.sources import straggling_report

if TYPE_CHECKING:
    from collections.abc import Callable

    from perseus_planner.runtime.agent.store import Finding
    from perseus_planner.service.requests import ReportRequest

TTL_S = 900.0
"""For how long a finding holds at the service, so that it does not outlive a job that was killed."""


@dataclass(frozen=True)
class _Kept:
    """A finding, the number of its report, when it was observed, and when it was told; None: not yet."""

    finding: Finding
    number: int
    observed_s: float
    told_s: float | None = None


class Findings:
    """Kept by rank 0, whose clock says when each was observed, so that they are in order whatever other clocks say.

    Args:
        now_s: seconds since the epoch.
    """

    def __init__(self, now_s: Callable[[], float] = time.time) -> None:
        self._now_s = now_s
        self._run, self._numbers = uuid4().hex, count(1)
        self._kept: dict[int, _Kept] = {}

    def add(self, finding: Finding) -> None:
        """What has been found of a rank, which takes the place of what was before."""
        self._kept[finding.rank] = _Kept(finding, next(self._numbers), self._now_s())

    def due(self) -> list[ReportRequest]:
        """What is to be told now."""
        now_s = self._now_s()
        for rank, kept in self._kept.items():
            if kept.told_s is not None and now_s - kept.told_s > TTL_S / 3:
                self._kept[rank] = _Kept(kept.finding, next(self._numbers), now_s)
        return [self._request(kept) for kept in self._kept.values() if kept.told_s is None]

    def told(self, request: ReportRequest) -> None:
        """The service has taken it, or never will; what has recovered need not be said again."""
        for rank, kept in list(self._kept.items()):
            if self._key(kept) == request.key:
                self._kept[rank] = replace(kept, told_s=self._now_s())
                if kept.finding.straggling.slowdown <= 1.0:
                    del self._kept[rank]

    def tell_again(self) -> None:
        """The service has forgotten all."""
        self._kept = {rank: replace(kept, told_s=None) for rank, kept in self._kept.items()}

    def _key(self, kept: _Kept) -> str:
        return f"{self._run}-{kept.number}"

    def _request(self, kept: _Kept) -> ReportRequest:
        return straggling_report(
            kept.finding.straggling,
            kept.finding.rank,
            key=self._key(kept),
            observed_s=kept.observed_s,
            ttl_s=TTL_S,
        )
