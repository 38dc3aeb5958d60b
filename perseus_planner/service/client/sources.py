"""What others say of slow ranks, as reports for the service: pure functions, and the `Feed` that sends what they say.

Each takes what its source says at one moment. None of them remembers anything: where a source does not say by itself
that something has recovered, it takes the ranks that were reported `before`, and says it of those. `Feed` remembers
them. In a callback that gets the reports of NVIDIA's resiliency extension, on rank 0, with or without the service:

    feed = Feed(Client("http://10.0.0.5:8400"), "gpt3", resiliency_reports, ttl_s=3 * interval_s)
    ...
    with suppress(PlannerError): feed(report)

Alerts of Prometheus need no client: its Alertmanager posts them itself, see `perseus_planner.service.alertmanager`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from perseus_planner.errors import UsageError
from perseus_planner.runs.straggler import SLOW, StragglerDetection
from perseus_planner.service.model import Scope
from perseus_planner.service.requests import ReportRequest

if TYPE_CHECKING:
    from perseus_planner.service.client.client import Client
    from perseus_planner.service.outcomes import Answer

MEGATRON, RESILIENCY, RUNTIME = "megatron", "nvidia-resiliency-ext", "perseus-planner runtime"
"""The sources, as reports name them; the runtime's is followed by its rank."""


def straggling_report(
    finding: StragglerDetection,
    rank: int,
    *,
    key: str | None = None,
    observed_s: float | None = None,
    ttl_s: float | None = None,
) -> ReportRequest:
    """What the runtime has found of its own rank `rank`; `key`, `observed_s` and `ttl_s` are as in `ReportRequest`."""
    return ReportRequest(
        source=f"{RUNTIME}, rank {rank}",
        scope=Scope("rank", str(rank)),
        slowdown=max(1.0, finding.slowdown),
        cause="compute",
        key=key,
        observed_s=observed_s,
        ttl_s=ttl_s,
    )


def resiliency_reports(
    report: Any, *, before: Collection[int] = (), slow: float = SLOW, ttl_s: float | None = None
) -> list[ReportRequest]:
    """The ranks whose GPU is slow by a straggler report of NVIDIA's resiliency extension, or has recovered.

    Its scores are shares of what a GPU should reach, weighted over its kernels (nvidia-resiliency-ext,
    attribution/straggler/reporting.py). The relative one, against the best rank, counts; where a rank has none, the
    individual one, against its own best. Scores of sections, which a user names, hold waiting too and are not taken.

    Args:
        report: its `Report`, or the same as a mapping, whose ranks may then be texts, as in JSON.
        before: ranks that were reported as slow before; they are reported once more where they no longer are.
        slow: a slowdown above which a GPU is slow; a score counts as its inverse.
        ttl_s: for how long a report holds if nothing follows, seconds; a few of the extension's intervals.

    Raises:
        UsageError: it is no such report.
    """
    relative, individual = (_scores(report, f"gpu_{kind}_perf_scores") for kind in ("relative", "individual"))
    found = []
    for rank, score in sorted({**individual, **relative}.items()):
        if score * slow < 1.0:
            found.append(_slow(RESILIENCY, rank, score, ttl_s, None))
        elif rank in before:
            found.append(_recovered(RESILIENCY, rank, ttl_s, None))
    return found


def megatron_reports(
    line: str, *, before: Collection[int] = (), slow: float = SLOW, ttl_s: float | None = None
) -> list[ReportRequest]:
    """The ranks that are slow by one line of Megatron's StragglerDetector, or have recovered; none for other lines.

    It logs, in every interval, the ranks with the least and with the most throughput (megatron/core/utils.py):
    "[2026-05-04 12:00:10] | MnRtt/Rnk: 101.20ms/3 | … | MnEtpt/Rnk: 210.11TF/7 | MxEtpt/Rnk: 246.05TF/3". Their ratio
    is the score of the slower. It compares all ranks, so it means a slow GPU only where all stages have the same work;
    and it names no second slow one.

    Args:
        line: of the log of rank 0, with whatever stands before.
        before: as in `resiliency_reports`.
        slow: as in `resiliency_reports`.
        ttl_s: for how long a report holds if nothing follows, seconds; a few logging intervals.
    """
    ends = [re.search(rf"\b{name}/Rnk: ([0-9]+\.[0-9]+)TF/([0-9]+)", line) for name in ("MnEtpt", "MxEtpt")]
    if ends[0] is None or ends[1] is None:
        return []
    (least, slowest), (most, fastest) = ((float(each[1]), int(each[2])) for each in ends if each is not None)
    if not 0.0 < least <= most:
        return []
    when = re.search(r"\[([0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2})\] \| MnRtt", line)
    observed_s = None if when is None else _local_s(when[1])
    score = least / most
    # The slowest is not slow, so nobody is; else that is known of the fastest alone.
    recovered = set(before) if score * slow >= 1.0 else {fastest} & set(before)
    found = [_recovered(MEGATRON, rank, ttl_s, observed_s) for rank in sorted(recovered)]
    if score * slow < 1.0:
        found.append(_slow(MEGATRON, slowest, score, ttl_s, observed_s))
    return found


class Feed:
    """Reports to the service what one source says again and again, and what has recovered since.

    A report that could not be sent is made again from what the source says next.

    Args:
        client: of the service; its timeout is how long a call may take.
        job: the name of the job whose ranks these are.
        reports_of: `resiliency_reports` or `megatron_reports`, or what takes the same.
        ttl_s: for how long a report holds if nothing follows, seconds; None: until it is cleared.
    """

    def __init__(
        self, client: Client, job: str, reports_of: Callable[..., list[ReportRequest]], *, ttl_s: float | None = None
    ) -> None:
        self._client, self._job, self._reports_of, self._ttl_s = client, job, reports_of, ttl_s
        self._slow: set[int] = set()

    def __call__(self, said: Any) -> list[Answer]:
        """Send what follows from `said`; what the service answers.

        Raises:
            UsageError: it is not what the source says.
            ServiceAway, ServiceRefusal: as `Client.report`.
        """
        answers = []
        for request in self._reports_of(said, before=frozenset(self._slow), ttl_s=self._ttl_s):
            answers.append(self._client.report(self._job, request))
            change = self._slow.discard if request.slowdown == 1.0 else self._slow.add
            change(int(request.scope.value))
        return answers


def _scores(report: Any, name: str) -> dict[int, float]:
    """Rank -> score, of those that are known."""
    scores: Any = report.get(name, {}) if isinstance(report, Mapping) else getattr(report, name, None)
    try:
        found = {int(rank): float(score) for rank, score in dict(scores).items()}
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{name}: is no mapping of ranks to scores ({error}); give the report of generate_report"
        ) from error
    # NaN stands for a rank that ran no kernel which all others ran.
    return {rank: score for rank, score in found.items() if 0.0 < score < math.inf}


def _slow(source: str, rank: int, score: float, ttl_s: float | None, observed_s: float | None) -> ReportRequest:
    return ReportRequest(
        source, Scope("rank", str(rank)), score=score, cause="compute", ttl_s=ttl_s, observed_s=observed_s
    )


def _recovered(source: str, rank: int, ttl_s: float | None, observed_s: float | None) -> ReportRequest:
    return ReportRequest(
        source, Scope("rank", str(rank)), slowdown=1.0, cause="compute", ttl_s=ttl_s, observed_s=observed_s
    )


def _local_s(text: str) -> float | None:
    """Seconds since the epoch of a time of this machine's zone; None where it is none."""
    try:
        return datetime.strptime(text, "%Y-%m-%d %H:%M:%S").astimezone().timestamp()
    except (ValueError, OverflowError):
        return None
