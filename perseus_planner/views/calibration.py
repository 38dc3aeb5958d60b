"""Calibrations: what `planner calibrate` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from perseus_planner.base.prefixes import si
from perseus_planner.profiles.csv_file import word_of

if TYPE_CHECKING:
    from perseus_planner.plans.calibration import Calibration
    from perseus_planner.profiles.jitter import Jitter

_LARGE_OVERHEAD = 0.1  #: of the measured iteration time


def jitter_text(jitter: Jitter) -> str:
    """Return the sentence that says the three parts of jitter."""
    parts = [f"{100 * jitter.own:.2f} % each by itself"]
    parts.append(f"{100 * jitter.common:.2f} % that a GPU's have in common in an iteration")
    if jitter.tail is not None:
        longer = 100 * (jitter.tail.factor - 1)
        parts.append(f"and {100 * jitter.tail.share:.2f} % of them take {longer:.0f} % longer")
    return f"Jitter of computations: {', '.join(parts)}."


def calibration_text(result: Calibration) -> str:
    """Return the text that `planner calibrate` prints: the overhead and the predicted time,
    before and now.
    """
    return "".join(f"{sentence}\n" for sentence in _sentences(result))


def _sentences(result: Calibration) -> Iterator[str]:
    count = len(result.plans)
    measured = "Iteration time" if count == 1 else f"Iteration time, mean of {count} plans"
    yield (
        f"{measured}: {si(result.measured_s, 's', 6)} measured, "
        f"{si(result.replayed_s, 's', 6)} replayed."
    )
    yield _before_and_now("Overhead", result.overhead_before_s, result.overhead_s)
    if result.jitter is not None:
        yield jitter_text(result.jitter)
    if result.hop_latency_s:
        yield f"Latency of each transfer between stages: {si(result.hop_latency_s, 's', 6)}."
    if result.time_factors:
        yield _factors_sentence(result.time_factors)
    plans = "this plan" if count == 1 else "these plans"
    yield _before_and_now(
        f"Predicted iteration time of {plans}", result.predicted_before_s, result.predicted_s
    )
    # A plan that was not fitted is the only test of a prediction.
    if result.left_out_error is not None:
        yield (
            "From the other plans, the time of a plan is predicted within "
            f"{100 * result.left_out_error:.2f} %, mean."
        )
    # An overhead is added to all plans alike, which is wrong if computations really take longer.
    if result.overhead_share > _LARGE_OVERHEAD:
        yield (
            f"Warning: {100 * result.overhead_share:.0f} % of the iteration is overhead, which "
            "counts as equal for all plans. If computations really take longer, slower plans are "
            "later than predicted; calibrate a job file by three plans or more, of different "
            "times, to see it."
        )
    yield (
        "Existing frontiers and plans do not include it; make them again with `planner solve` and "
        "`planner plan`."
    )


def _before_and_now(name: str, before_s: float, now_s: float) -> str:
    return f"{name}: {si(before_s, 's', 6)} before, {si(now_s, 's', 6)} now."


def _factors_sentence(factors: Mapping[str, float]) -> str:
    words = ", ".join(f"{word_of(kind)}s {factor:.4g}x" for kind, factor in factors.items())
    return f"Computations take longer than profiled: {words}."
