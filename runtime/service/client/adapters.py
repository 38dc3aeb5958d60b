"""What others say of slow ranks, as reports for the service: pure functions, which send nothing.

Each takes what its source says at one moment. None of them remembers anything: where a source does not say by itself
that something has recovered, it takes the ranks that were reported `before`, and says it of those.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, cast, get_args

from perseus_planner.errors import UsageError
from perseus_planner.files import sha256
from perseus_planner.quantities import DEGREE
from perseus_planner.runtime.service.client.requests import ReportRequest
from perseus_planner.runtime.service.model import Cause, Scope
from perseus_planner.runtime.straggling import SLOW, Straggling

MEGATRON, RESILIENCY, RUNTIME = "megatron", "nvidia-resiliency-ext", "perseus-planner runtime"
"""The sources, as reports name them; the runtime's is followed by its rank."""


def straggling_report(
    finding: Straggling,
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
        degree=max(1.0, finding.degree),
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
        slow: a degree above which a GPU is slow; a score counts as its inverse.
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


def alertmanager_reports(body: Any) -> list[ReportRequest]:
    """What a webhook of Prometheus' Alertmanager says, one report for each alert; one that is resolved has recovered.

    What is slow is read from an alert's labels: the first there is of `UUID` (a GPU, as DCGM's exporter names it),
    `Hostname`, `node`, `nodename`, `instance` without its port (a node). How slow is the label or annotation `degree`,
    which the rule must give, as in `degree: '{{ $value }}'`, or `score`; `cause` may stand there too.

    Args:
        body: the JSON of Alertmanager's version 4.

    Raises:
        UsageError: it is no such body, or an alert names nothing, or not how slow it is.
    """
    alerts = body.get("alerts") if isinstance(body, Mapping) else None
    if not isinstance(alerts, list) or not all(isinstance(alert, Mapping) for alert in alerts):
        raise UsageError("alerts: is missing or no list, so this is no webhook of Alertmanager; see its webhook_config")
    return [_alerted(alert, f"alerts[{place}]") for place, alert in enumerate(alerts)]


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
        source, Scope("rank", str(rank)), degree=1.0, cause="compute", ttl_s=ttl_s, observed_s=observed_s
    )


def _local_s(text: str) -> float | None:
    """Seconds since the epoch of a time of this machine's zone; None where it is none."""
    try:
        return datetime.strptime(text, "%Y-%m-%d %H:%M:%S").astimezone().timestamp()
    except (ValueError, OverflowError):
        return None


def _alerted(alert: Mapping[str, Any], place: str) -> ReportRequest:
    labels = _texts(alert, "labels")
    said = {**_texts(alert, "annotations"), **labels}
    name = f"{place} ({said.get('alertname', 'without a name')})"
    cause = said.get("cause", "unknown")
    if cause not in get_args(Cause):
        raise UsageError(f"{name}: cause {cause!r} is none; write one of: {', '.join(get_args(Cause))}")
    degree, score = _alerted_degree(alert.get("status"), said, name)
    # One alert is one source, told by its labels, so that two about one GPU stand beside each other.
    fingerprint = str(alert.get("fingerprint") or sha256(json.dumps(labels, sort_keys=True).encode())[:16])
    return ReportRequest(
        source=f"alertmanager, {fingerprint}",
        scope=_alerted_scope(said, name),
        degree=degree,
        score=score,
        cause=cast(Cause, cause),
    )


def _alerted_degree(status: object, said: Mapping[str, str], name: str) -> tuple[float | None, float | None]:
    """Degree or score."""
    if status == "resolved":
        return 1.0, None
    if status != "firing":
        raise UsageError(f"{name}: its status is {status!r}; it must be firing or resolved")
    kind = next((kind for kind in ("degree", "score") if kind in said), None)
    if kind is None:
        raise UsageError(
            f"{name}: does not say how slow; give its rule an annotation degree: how many times as long it takes"
        )
    number = DEGREE.parse(said[kind])
    if number is None:
        raise UsageError(f"{name}: {kind} {said[kind]!r} is no number above 0")
    return (max(1.0, number), None) if kind == "degree" else (None, min(1.0, number))


def _alerted_scope(said: Mapping[str, str], name: str) -> Scope:
    if said.get("UUID"):
        return Scope("gpu", said["UUID"])
    for label in ("Hostname", "node", "nodename", "instance"):
        value = said.get(label, "")
        if label == "instance":  # host:port or [address]:port
            value = re.sub(r":[0-9]+$", "", value).strip("[]")
        if value:
            return Scope("node", value)
    raise UsageError(f"{name}: names no GPU and no node; keep the label UUID, Hostname, node or instance in its rule")


def _texts(alert: Mapping[str, Any], name: str) -> dict[str, str]:
    values = alert.get(name, {})
    if not isinstance(values, Mapping):
        return {}
    return {str(key): str(value) for key, value in values.items()}
