"""Fits the constants of the A100 in `perseus_planner/estimate/system.py` to measured iteration times; needs scipy.

    python benchmarks/time_fit.py

Errors are those of the logarithm of time; small ones count by their squares and larger ones linearly. Every third row
of the 1,440 on 2 to 8 GPUs is fitted, with the weight of three, and all of the 73 on 64 and 512 GPUs: those of 3.6B
with 16 times and those of 39.1B with 10 times the weight, but 0.3 of it where the tensor degree is 2 (39.1B) or the
microbatch 64, which are slow for no known reason. What is not fitted stays as it is; the catalogue has rounded values.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from statistics import fmean

import numpy as np
from data import MissingError
from iteration_times import A100, Measured, TimeEstimates, measured
from numpy.typing import NDArray
from scipy.optimize import least_squares

from perseus_planner.estimate.system import System

FITTED = (
    "product_flops_per_cycle",
    "unaligned_share",
    "score_passes",
    "loss_passes",
    "exchange_s",
    "exchange_per_gpu_s",
    "node_bytes_per_s",
    "iteration_s",
    "host_forward_s",
    "host_backward_s",
    "host_exchange_s",
    "reduction_bytes",
)
_PRIOR = 0.02  #: how little the constants are held near their present values
_SMALL = 0.15  #: errors of the logarithm that count by their squares


def main() -> int:
    """Fit, and print the constants and the errors."""
    try:
        small, large = measured("gpt_2_to_8_gpus.csv"), measured("gpt_64_to_512_gpus.csv")
    except MissingError as error:
        print(f"skipped: {error}")
        return 0
    rows = [*small[::3], *large]
    weights = np.array([3**0.5] * len(small[::3]) + [_weight(row) for row in large])

    def residuals(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        times = TimeEstimates(_system(logs))
        errors = np.log([times(row.job) / row.time_s for row in rows])
        return np.concatenate([weights * errors, _PRIOR * logs])

    found = _system(least_squares(residuals, np.zeros(len(FITTED)), loss="soft_l1", f_scale=_SMALL, max_nfev=15).x)
    for name in FITTED:
        print(f"{name:24} {getattr(found, name):.4g}  (now {getattr(A100, name):.4g})")
    for what, some in (
        ("2-8 GPUs", small),
        ("3.6B", [row for row in large if row.job.shape.layers == 30]),
        ("39.1B", [row for row in large if row.job.shape.layers == 48]),
    ):
        times = TimeEstimates(found)
        print(f"{what}: {100 * fmean(abs(times(row.job) / row.time_s - 1) for row in some):.2f} % off in the mean")
    return 0


def _system(logs: NDArray[np.float64]) -> System:
    factors = np.exp(logs).tolist()
    return replace(A100, **{name: getattr(A100, name) * by for name, by in zip(FITTED, factors, strict=True)})


def _weight(row: Measured) -> float:
    shape = row.job.shape
    slow = (shape.layers == 48 and shape.tensor_degree == 2) or shape.microbatch == 64
    return (16.0 if shape.layers == 30 else 10.0) * (0.3 if slow else 1.0)


if __name__ == "__main__":
    sys.exit(main())
