"""Reports from other tools that detect slow ranks: functions that make them, and `Feed`, which
sends them.

Each function takes the output of its tool at one moment and remembers nothing. If the tool itself
does not say that a rank has recovered, the function takes the ranks that were reported `before` and
reports their recovery. `Feed` remembers them. For example, in a callback that gets the reports of
NVIDIA's resiliency extension on rank 0, with or without the service:

    feed = Feed(Client("http://10.0.0.5:8400"), "gpt3", resiliency_reports, ttl_s=3 * interval_s)
    ...
    with suppress(PlannerError): feed(runtime.corrected_report(report))

`Runtime.corrected_report` takes out what planned clocks do to the scores.

Prometheus needs no client: its Alertmanager posts alerts to the service, see
`perseus_planner.service.alertmanager`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import UsageError
from perseus_planner.runs.straggler import SLOW, StragglerDetection
from perseus_planner.service.model import Scope
from perseus_planner.service.schemas import ReportRequest

if TYPE_CHECKING:
    from perseus_planner.service.answers import Answer
    from perseus_planner.service.client import Client

RESILIENCY, RUNTIME = "nvidia-resiliency-ext", "perseus-planner runtime"
"""The sources, as reports name them. That of the runtime is followed by its rank."""


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


def resiliency_reports(
    report: Any, *, before: Collection[int] = (), slow: float = SLOW, ttl_s: float | None = None
) -> list[ReportRequest]:
    """Report the ranks whose GPU is slow, or has recovered, by a straggler report of NVIDIA's
    resiliency extension.

    Its scores are shares of the expected performance of a GPU, weighted over its kernels
    (nvidia-resiliency-ext, attribution/straggler/reporting.py). The score relative to the best rank
    counts; for a rank without one, the score relative to its own best. Scores of sections that a
    user names include waiting and are ignored.

    Args:
        report: The extension's `Report`, or an equal mapping. Ranks in a mapping may be texts, as
            in JSON.
        before: Ranks that were reported as slow before; the function reports those that have
            recovered.
        slow: Slowdown above which a GPU is slow; a score is an inverse slowdown.
        ttl_s: How long a report holds unless another follows, seconds; a few of the extension's
            intervals.

    Raises:
        UsageError: If it is not such a report.
    """
    relative, individual = (
        _scores(report, f"gpu_{kind}_perf_scores") for kind in ("relative", "individual")
    )
    reports = []
    for rank, score in sorted({**individual, **relative}.items()):
        if score * slow < 1.0:
            reports.append(_report(rank, ttl_s, score))
        elif rank in before:
            reports.append(_report(rank, ttl_s))
    return reports


class Feed:
    """Sends the service what one tool repeatedly detects, and what has recovered since.

    A report that could not be sent is made again from the tool's next output.

    Args:
        client: A client of the service. Its timeout bounds how long a call takes.
        job: Name of the job.
        reports_of: `resiliency_reports` or a function with the same parameters.
        ttl_s: How long a report holds unless another follows, seconds; None until it is cleared.
    """

    def __init__(
        self,
        client: Client,
        job: str,
        reports_of: Callable[..., list[ReportRequest]],
        *,
        ttl_s: float | None = None,
    ) -> None:
        self._client, self._job, self._reports_of, self._ttl_s = client, job, reports_of, ttl_s
        self._slow: set[int] = set()

    def __call__(self, output: Any) -> list[Answer]:
        """Send the reports of the tool's output, and return the service's answers.

        Raises:
            UsageError: If it is not output of that tool.
            ServiceAway, ServiceRefusal: As for `Client.report`.
        """
        answers = []
        for request in self._reports_of(output, before=frozenset(self._slow), ttl_s=self._ttl_s):
            answers.append(self._client.report(self._job, request))
            change = self._slow.discard if request.slowdown == 1.0 else self._slow.add
            change(int(request.scope.value))
        return answers


def _scores(report: Any, name: str) -> dict[int, float]:
    """Return the known scores by rank."""
    scores: Any = (
        report.get(name, {}) if isinstance(report, Mapping) else getattr(report, name, None)
    )
    try:
        rank_scores = {int(rank): float(score) for rank, score in dict(scores).items()}
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{name}: is not a mapping of ranks to scores ({error}); give the report of "
            "generate_report"
        ) from error
    # A rank without kernels in common with all others has the score NaN.
    return {rank: score for rank, score in rank_scores.items() if 0.0 < score < math.inf}


def _report(rank: int, ttl_s: float | None, score: float | None = None) -> ReportRequest:
    """Return the report of a slow rank with that score, or of a rank that has recovered without
    one.
    """
    scope, slowdown = Scope("rank", str(rank)), 1.0 if score is None else None
    return ReportRequest(RESILIENCY, scope, slowdown, None, score, cause="compute", ttl_s=ttl_s)
