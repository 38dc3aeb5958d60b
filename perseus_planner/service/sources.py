"""The report of what the runtime itself detects. `docs/api.md` shows how other tools report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perseus_planner.service.model import Scope
from perseus_planner.service.schemas import ReportRequest

if TYPE_CHECKING:
    from perseus_planner.runs.straggler import StragglerDetection

RUNTIME = "perseus-planner runtime"
"""The source, as reports name it, followed by its rank."""


def straggling_report(
    detection: StragglerDetection,
    rank: int,
    *,
    key: str | None = None,
    observed_s: float | None = None,
    ttl_s: float | None = None,
) -> ReportRequest:
    """Report what the runtime detected about its rank `rank`; `key`, `observed_s`, `ttl_s` as in
    `ReportRequest`.
    """
    return ReportRequest(
        source=f"{RUNTIME}, rank {rank}",
        scope=Scope("rank", str(rank)),
        slowdown=max(1.0, detection.slowdown),
        cause="compute",
        key=key,
        observed_s=observed_s,
        ttl_s=ttl_s,
    )
