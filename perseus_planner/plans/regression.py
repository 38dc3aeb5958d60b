"""The regression of measured iteration times: which terms a few measurements can carry, and how
large they are.

Non-negative least squares of relative errors (Lawson and Hanson 1974; with so few terms all subsets
are tried), by the method of Gauss and Newton, as an iteration's time is linear in each term only
until another path is critical. Terms are chosen by leave-one-out cross-validation (Stone 1974).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

Replay = Callable[[Mapping[str, float]], Sequence[float]]
"""Values of some terms, others being 0 -> replayed seconds of each measurement, without the
constant.
"""

_ROUNDS = 12
_STEP = 1e-3  #: of a term's scale, to find by how much it lengthens iterations
_LEAST_CHANGE = 1e-10  #: of a term's scale
_SAME = 1e-18  #: difference of squared relative errors that is rounding
_GAIN = 0.8  #: more terms must bring the error of measurements that are left out to this part
#: how many more measurements than terms there must be: one for the constant, one to be left out
_SPARE = 2


@dataclass(frozen=True)
class Fit:
    """The values of the terms that were chosen."""

    constant_s: float  #: seconds that every iteration takes beside what is replayed
    values: Mapping[str, float]  #: term -> its value
    #: the mean relative error of predictions of a measurement by a fit to the others; None if there
    #: is only one measurement.
    left_out_error: float | None


def fit_terms(
    measured_s: Sequence[float],
    replay: Replay,
    candidates: Sequence[Sequence[str]],
    scales: Mapping[str, float],
) -> Fit:
    """Return the fit of a constant and of the terms of one of the candidates, that which predicts
    best.

    Args:
        measured_s: seconds of each measurement.
        replay: replays all of them.
        candidates: terms to try, those to prefer first. The constant alone is tried before them.
        scales: term -> a value that makes a difference.
    """
    measured = np.array(measured_s)
    best = _fit(measured, replay, (), scales)
    for terms in candidates:
        if len(measured) < len(terms) + _SPARE:
            continue
        found = _fit(measured, replay, terms, scales)
        if found.left_out_error is not None and best.left_out_error is not None:
            best = found if found.left_out_error < _GAIN * best.left_out_error else best
    return best


def _fit(
    measured: Floats, replay: Replay, terms: Sequence[str], scales: Mapping[str, float]
) -> Fit:
    sizes = np.array([float(measured[0]), *(scales[term] for term in terms)])

    def missing_at(values: Floats) -> Floats:
        """Return what the prediction lacks, as parts of the measured times."""
        replayed_s = np.array(replay(dict(zip(terms, (values * sizes)[1:].tolist(), strict=True))))
        return np.asarray(1 - (replayed_s + values[0] * sizes[0]) / measured)

    values, columns = np.zeros(len(sizes)), np.empty((len(measured), len(sizes)))
    missing = missing_at(values)
    for _ in range(_ROUNDS):
        for place in range(len(sizes)):
            step = np.zeros(len(sizes))
            step[place] = _STEP
            columns[:, place] = (missing - missing_at(values + step)) / _STEP
        change = _solve(columns, missing, values)
        tried = missing_at(values + change)
        while np.sum(tried**2) >= np.sum(missing**2) and np.max(np.abs(change)) > _LEAST_CHANGE:
            change /= 2  # another path is critical there
            tried = missing_at(values + change)
        if np.sum(tried**2) >= np.sum(missing**2):
            break
        values, missing = values + change, tried
    left_out = [abs(_left_out(columns, missing, values, place)) for place in range(len(measured))]
    return Fit(
        float(values[0] * sizes[0]),
        dict(zip(terms, (values * sizes)[1:].tolist(), strict=True)),
        float(np.mean(left_out)) if len(measured) > 1 else None,
    )


def _left_out(columns: Floats, missing: Floats, values: Floats, place: int) -> float:
    """Return the relative error at one measurement of a fit to the others."""
    others = np.arange(len(missing)) != place
    return float(columns[place] @ _solve(columns[others], missing[others], values) - missing[place])


def _solve(columns: Floats, missing: Floats, values: Floats) -> Floats:
    """Return the change of least squared error; no value becomes negative, unless the constant
    is alone.
    """
    count = len(values)
    best, least = np.zeros(count), np.inf
    for chosen in map(
        list, chain.from_iterable(combinations(range(count), size) for size in range(count, -1, -1))
    ):
        change = -values
        if chosen:
            change[chosen] = 0.0
            change[chosen] = np.linalg.lstsq(
                columns[:, chosen], missing - columns @ change, rcond=1e-9
            )[0]
        error = float(np.sum((columns @ change - missing) ** 2))
        if (count == 1 or np.all(values + change >= 0.0)) and error < least - _SAME:
            best, least = change, error
    return best
