"""Straggler reports of NVIDIA's resiliency extension, in which GPUs that were planned slow look
slow.

The extension scores a rank by the medians of its kernels: their least median of all ranks over that
of the rank (relative), or the least that the rank ever had over its last one (individual). So a
rank that is planned at 900 of 1410 MHz scores .64. The scores are corrected by the clocks: kernels
that wait for memory are slowed less than their clock, so that a corrected score is at most too
good, by no more than the clocks differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

RELATIVE = "gpu_relative_perf_scores"
INDIVIDUAL = "gpu_individual_perf_scores"


def corrected_report(
    report: Any, clocks_mhz: Mapping[int, float], highest_mhz: Mapping[int, float]
) -> Any:
    """Return a report with the scores that its GPUs would have if all had one clock, at most 1.

    Args:
        report: The extension's `Report` with the scores of all ranks, or an equal mapping with
            ranks as numbers. Scores of sections, which include waiting, stay as they are.
        clocks_mhz: Rank -> the clock at which it is planned to compute; scores of others stay.
        highest_mhz: Rank -> the highest such clock so far.
    """
    fastest_mhz = max(clocks_mhz.values(), default=0.0)
    references = {RELATIVE: dict.fromkeys(clocks_mhz, fastest_mhz), INDIVIDUAL: highest_mhz}
    scores = report if isinstance(report, Mapping) else vars(report)
    corrected = {
        name: {
            # NaN, the score of a rank without common kernels, comes first so that it stays.
            rank: min(score * reference_mhz[rank] / clocks_mhz[rank], 1.0)
            if rank in clocks_mhz
            else score
            for rank, score in scores[name].items()
        }
        for name, reference_mhz in references.items()
    }
    if isinstance(report, Mapping):
        return {**report, **corrected}
    return replace(report, **corrected)
