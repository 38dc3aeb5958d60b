"""Fits the speeds in `perseus_planner/gpu/simulated/gpus.yaml` to measured iteration times of
A100s, and to published throughputs of H100, B200 and GB200; needs scipy.

    python benchmarks/time_fit.py

Three tables count alike, whatever their number of rows: every ninth of the 1,440 rows on 2 to 8
GPUs, 3.6B, and 39.1B with a tensor degree of 8; at lower degrees 39.1B is slow for no known reason.
Errors are those of the logarithm of time; small ones count by their squares and larger ones
linearly. What is not fitted stays as it is; the catalogue has rounded values. Number 24 fits
without some of the rows, and tests on those.

On later GPUs four constants are fitted: the speed of products on Hopper and on Blackwell, and of
the experts' products and all-to-alls. Which configuration had a throughput, where that is not
published, is kept as the estimate has it now.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
from data import MissingError
from fast_replay import iteration_s
from measured_iterations import A100, Measured, TimeEstimates, measured
from modern_iterations import Published, published
from numpy.typing import NDArray
from scipy.optimize import least_squares

from perseus_planner.extensions.explore.configuration import Configuration
from perseus_planner.extensions.explore.memory import memory
from perseus_planner.extensions.explore.operations import System, layer_times

FITTED = (
    "product_flops_per_cycle",
    "unaligned_share",
    "passes",
    "host_exchange_s",
    "host_forward_s",
    "host_backward_s",
)
_LIKELY: dict[str, Configuration] = {}
_MODERN_PRIOR = 0.05  #: the same, of later GPUs
_PRIOR = 0.001  #: how little the constants are held near their present values
_SMALL = 0.1  #: errors of the logarithm that count by their squares, times the weight
_WEIGHT = 10.0  #: of a table


def main() -> int:
    """Fit, and print the constants and the errors."""
    try:
        rows = tables()
    except MissingError as error:
        print(f"skipped: {error}")
        return 0
    found = fit(tuple(rows.values()))
    for name in FITTED:
        print(f"{name:24} {getattr(found, name):.4g}  (now {getattr(A100, name):.4g})")
    for what, some in rows.items():
        times = TimeEstimates(found)
        print(
            f"{what}: {100 * fmean(abs(times(row.job) / row.time_s - 1) for row in some):.2f} % "
            "off in the mean"
        )
    for name, factor in fit_modern(published()).items():
        print(f"{name:24} x {factor:.3f}")
    return 0


def tables() -> Mapping[str, Sequence[Measured]]:
    """Return the rows that are fitted.

    Raises:
        MissingError: If there is no data.
    """
    small, large = measured("gpt_2_to_8_gpus.csv"), measured("gpt_64_to_512_gpus.csv")
    return {
        "2-8 GPUs": small[::9],
        "3.6B": [row for row in large if row.job.shape.layers == 30],
        "39.1B": [
            row for row in large if row.job.shape.layers == 48 and row.job.shape.tensor_degree == 8
        ],
    }


def fit(some: Sequence[Sequence[Measured]]) -> System:
    """Return the A100 with constants fitted to tables of rows, each with the same weight."""
    rows = [row for table in some for row in table]
    weights = np.array([_WEIGHT / len(table) ** 0.5 for table in some for _ in table])

    def residuals(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        times = TimeEstimates(_system(logs))
        errors = np.log([times(row.job) / row.time_s for row in rows])
        return np.concatenate([weights * errors, _PRIOR * logs])

    start = np.zeros(len(FITTED))
    return _system(
        least_squares(
            residuals, start, loss="soft_l1", f_scale=_SMALL, diff_step=1e-3, max_nfev=25
        ).x
    )


MODERN = ("Hopper", "Blackwell", "dispatch_share", "grouped_share")
"""What is fitted to published throughputs: two speeds of products, and two of all GPUs."""


def fit_modern(rows: Sequence[Published]) -> Mapping[str, float]:
    """Return the factor of each of `MODERN` that fits rows best."""

    def residuals(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        factors = dict(zip(MODERN, np.exp(logs).tolist(), strict=True))
        errors = [np.log(modern_s(row, factors) / row.time_s) for row in rows]
        return np.array([*errors, *(_MODERN_PRIOR * logs)])

    start = np.zeros(len(MODERN))
    found = least_squares(
        residuals, start, loss="soft_l1", f_scale=_SMALL, diff_step=1e-3, max_nfev=12
    ).x
    return dict(zip(MODERN, np.exp(found).tolist(), strict=True))


def modern_s(row: Published, factors: Mapping[str, float]) -> float:
    """Return the seconds of an iteration of a row with constants that many times as large."""
    job, system = _likely(row), row.system()
    product = factors["Hopper" if row.row["gpu"].startswith("h") else "Blackwell"]
    changed = replace(
        system,
        product_flops_per_cycle=system.product_flops_per_cycle * product,
        **{name: getattr(system, name) * factors[name] for name in MODERN[2:]},
    )
    return iteration_s(job, changed, layer_times(job.shape, changed))


def _likely(row: Published) -> Configuration:
    """Return the fastest configuration of a row that fits in memory."""
    if row.name not in _LIKELY:
        system = row.system()
        _LIKELY[row.name] = min(
            (job for job in row.jobs if memory(job, system).fits),
            key=lambda job: iteration_s(job, system),
        )
    return _LIKELY[row.name]


def _system(logs: NDArray[np.float64]) -> System:
    factors = np.exp(logs).tolist()
    return replace(
        A100, **{name: getattr(A100, name) * by for name, by in zip(FITTED, factors, strict=True)}
    )


if __name__ == "__main__":
    sys.exit(main())
