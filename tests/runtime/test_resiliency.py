"""A GPU that is slow because it was planned slow is no straggler to NVIDIA's resiliency extension.

Scores are computed as it computes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from resiliency_report import Report

from perseus_planner.runtime import Runtime
from perseus_planner.runtime.decider import Decider
from perseus_planner.runtime.program import Expected, Program

TOP_MHZ = 1410
CLOCKS_MHZ = (900, 1410, 1200, 1305)  #: of two pipelines of two ranks


class Extension:
    """Times kernels that take `work / clock`, and half as much of it for memory in the second."""

    def __init__(self) -> None:
        self._least_s = [[math.inf, math.inf] for _ in CLOCKS_MHZ]

    def report(self, clocks_mhz: Sequence[int], slower: Mapping[int, float] = {}) -> Report:
        """Return the report of an interval in which GPUs ran at these clocks, some of them slower
        than that for another reason.
        """
        medians_s = [
            [slower.get(rank, 1.0) * 1.2 / mhz, slower.get(rank, 1.0) * (0.5 / mhz + 0.5 / TOP_MHZ)]
            for rank, mhz in enumerate(clocks_mhz)
        ]
        self._least_s = [
            [min(pair) for pair in zip(*both, strict=True)]
            for both in zip(self._least_s, medians_s, strict=True)
        ]
        least_s = [min(kernel) for kernel in zip(*medians_s, strict=True)]

        def scores(references_s: Sequence[Sequence[float]]) -> dict[int, float]:
            return {
                rank: sum(reference_s) / sum(own_s)  # each ratio weighted with its kernel's time
                for rank, (reference_s, own_s) in enumerate(
                    zip(references_s, medians_s, strict=True)
                )
            }

        sections = {"step": dict.fromkeys(range(4), 1.0)}
        relative = scores([least_s] * 4)
        return Report(relative, scores(self._least_s), sections, sections)


def runtime_at(clocks_mhz: Sequence[int], control: str = "clock", top: int = 0) -> Runtime:
    """Return the runtime of rank 0 in a job that was sent these clocks."""
    sent = SimpleNamespace(rank_clocks=lambda pipeline: clocks_mhz[2 * pipeline :][:2])
    program = Program(1, (), (), expected=Expected(1.0, top, sent=sent))
    positions = [(0, 0), (0, 1), (1, 0), (1, 1)]
    context: Any = SimpleNamespace(control=control, positions=positions, decider=Decider())
    follower: Any = SimpleNamespace(program=program, problem=None)
    nothing: Any = None
    return Runtime(context, follower, nothing, nothing, nothing, nothing)


def test_planned_clocks_make_no_stragglers_and_hide_none():
    runtime, extension = runtime_at(CLOCKS_MHZ), Extension()
    report = extension.report(CLOCKS_MHZ)
    assert report.gpu_relative_perf_scores[0] == pytest.approx(0.7, abs=0.02)
    assert report.identify_stragglers()["straggler_gpus_relative"] == {0}
    corrected = runtime.corrected_report(report)
    assert not any(corrected.identify_stragglers(0.95, 0.95).values())
    assert corrected.section_relative_perf_scores == report.section_relative_perf_scores

    slow = runtime.corrected_report(extension.report(CLOCKS_MHZ, {0: 1.6, 3: 1.6}))
    assert slow.identify_stragglers() == {
        "straggler_gpus_relative": {0, 3},
        "straggler_gpus_individual": {0, 3},
    }


def test_a_kernel_that_only_computes_is_corrected_exactly():
    mapping = {
        "gpu_relative_perf_scores": {0: 900 / 1410, 1: 1.0, 2: math.nan, 7: 0.5},
        "gpu_individual_perf_scores": {},
    }
    corrected = runtime_at(CLOCKS_MHZ).corrected_report(mapping)["gpu_relative_perf_scores"]
    assert corrected == pytest.approx({0: 1.0, 1: 1.0, 2: math.nan, 7: 0.5}, nan_ok=True)


def test_a_rank_is_compared_with_itself_at_the_highest_clock_that_it_had():
    extension = Extension()
    by_autopilot = runtime_at(CLOCKS_MHZ, top=TOP_MHZ)
    extension.report([TOP_MHZ] * 4)  # its first iterations
    report = extension.report(CLOCKS_MHZ)
    assert report.identify_stragglers()["straggler_gpus_individual"] == {0}
    assert not any(by_autopilot.corrected_report(report).identify_stragglers(0.95, 0.95).values())


@pytest.mark.parametrize("control", ["power-limit", "observed"])
def test_without_planned_clocks_a_report_stays_as_it_is(control: str):
    report = Extension().report(CLOCKS_MHZ)
    runtime = runtime_at(CLOCKS_MHZ, control)
    assert (runtime.planned_clocks, runtime.corrected_report(report)) == ({}, report)
    assert runtime.corrected_report(None) is None  # on other ranks
