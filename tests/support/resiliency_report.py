"""A stand-in for the report of nvidia-resiliency-ext 0.6 (attribution/straggler/reporting.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Scores = Mapping[int, float]  #: rank -> score


@dataclass(frozen=True)
class Report:
    gpu_relative_perf_scores: Scores
    gpu_individual_perf_scores: Scores = field(default_factory=dict)
    section_relative_perf_scores: Mapping[str, Scores] = field(default_factory=dict)
    section_individual_perf_scores: Mapping[str, Scores] = field(default_factory=dict)
    rank_to_node: Mapping[int, str] = field(default_factory=dict)
    local_section_summaries: Mapping[str, Any] = field(default_factory=dict)
    local_kernel_summaries: Mapping[str, Any] = field(default_factory=dict)
    generate_report_elapsed_time: float = 1.0
    gather_on_rank0: bool = True
    rank: int | None = None

    def identify_stragglers(
        self, gpu_rel_threshold: float = 0.75, gpu_indiv_threshold: float = 0.75
    ) -> dict[str, set[int]]:
        scores = {
            "straggler_gpus_relative": (self.gpu_relative_perf_scores, gpu_rel_threshold),
            "straggler_gpus_individual": (self.gpu_individual_perf_scores, gpu_indiv_threshold),
        }
        return {
            name: {rank for rank, score in of_rank.items() if score < threshold}
            for name, (of_rank, threshold) in scores.items()
        }
