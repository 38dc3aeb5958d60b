"""Choose the setting to measure next, so that few settings are enough for good plans.

The sweep begins at the top, and goes on at evenly spaced settings in random order, so that a GPU
that warms up meanwhile does not bend the curves; it leaves out those below which the effective
energy of every kind (see `curve.py`) rises. It skips settings above the clock that a power cap
leaves to every kind, as they all run alike.

Then it measures one setting after another where the expected gain is largest. For each computation
a plan minimises energy + price * time over the settings, where the price of a second, in watts,
follows from the deadline (the Lagrangian of the plan; Perseus, SOSP'24, finds such prices by
minimum cuts). At each price, a plan from few settings loses the difference between their minimum
and the minimum over all settings. So the gain of a setting is the amount by which it is expected to
lower the minimum, summed over a range of prices: its expected improvement.

Between two measured neighbours, time and energy are modelled as Brownian motion over the logarithm
of the setting: their mean follows a straight line, and their variance is largest in the middle of a
wide gap (Kushner, "A new method of locating the maximum point of an arbitrary multipeak curve in
the presence of noise", 1964; Locatelli, "Bayesian algorithms for one-dimensional global
optimization", 1997). This assumes neither smooth nor monotone curves: measured ones are not,
because the GPU runs other kernels at other clocks.

How far the saving of plans is known is drawn: a plan that is late pays the price of time too.
So under each joint draw of the curves (`estimation.py`), and at each price, the plan has a saving,
and so has the best plan of that draw. What the first one varies by is not known yet. What the
second one varies by says where to measure: at settings that plans use, at the top one with which
they are compared, and at those that may turn out to be better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.plans.plan import INTERVAL, WIDER_SAVING
from perseus_planner.profiles.keys import Key
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.profiles.profiles import Profile

if TYPE_CHECKING:
    from perseus_planner.profiles.smoothing import Floats

RowTable = Mapping[str, Mapping[int, Measurement]]
"""Kind -> setting -> its row. All kinds have the same settings."""

MAX_SETTINGS = 12
"""An adaptive sweep measures no more settings, but where `find_doubt` asks for more."""

PRICES = tuple(2 ** (half / 2) for half in range(-8, 4))
"""Prices of a second, relative to the power at the top setting: from the price where there is time
to spare to one of nearly three times the power of the GPU. Their logarithms are evenly spaced."""

_COARSE = 6  # settings of the descent, besides the top one
_RISES = 2  # so many rises at the lowest settings: below them nothing is measured
_RISEN = 0.01  # relative to the energy: a smaller change is not a rise, nor is one within the noise
_NOISE = 2.0  # standard errors
# relative standard deviation of time and energy over settings that differ by a factor of e
_ROUGHNESS = 0.3
_NORMAL = NormalDist()


class _Prediction(NamedTuple):
    """The expected row of a setting that was not measured."""

    time_s: float
    energy_j: float
    spread: float  # relative standard deviation of both


def descent(settings: Sequence[int], begin: int) -> list[int]:
    """Return the settings of the coarse descent, highest first: the top one, and from `begin` to
    the lowest.

    Args:
        settings: All settings, highest first.
        begin: One of them.
    """
    step = (begin - settings[-1]) / (_COARSE - 1)
    targets = (begin - number * step for number in range(_COARSE))
    nearest = (min(settings, key=lambda setting: abs(setting - target)) for target in targets)
    return list(dict.fromkeys([settings[0], *nearest]))


def next_setting(
    settings: Sequence[int],
    rows: RowTable,
    blocking_w: float,
    *,
    clocks: bool = True,
    seed: object = 0,
) -> int | None:
    """Return the setting to measure next, or None when the measured ones are enough.

    The result depends on the arguments alone, so a resumed sweep chooses as one that was not
    interrupted.

    Args:
        settings: All settings, highest first.
        rows: The rows measured so far.
        blocking_w: Power of the GPUs while they wait, watts.
        clocks: Whether the settings are clocks in MHz, and not power limits.
        seed: Draws the order of the descent.
    """
    coarse = next_of_descent(settings, rows, blocking_w, clocks=clocks, seed=seed)
    if coarse is not None:
        return coarse
    measured = {setting for table in rows.values() for setting in table}
    if len(measured) >= MAX_SETTINGS:
        return None
    capped = highest_below_cap(settings, rows) if clocks else settings[0]
    # Below the lowest measured one energy rises, and above the cap all settings run alike.
    between = [
        setting
        for setting in settings
        if min(measured) < setting <= capped and setting not in measured
    ]
    return max(between, key=lambda setting: _gain_j(setting, rows, blocking_w), default=None)


def next_of_descent(
    settings: Sequence[int],
    rows: RowTable,
    blocking_w: float,
    *,
    clocks: bool = True,
    seed: object = 0,
) -> int | None:
    """Return the next setting of the coarse descent, or None when it has ended; the arguments
    are those above.
    """
    measured = {setting for table in rows.values() for setting in table}
    coarse = descent(settings, highest_below_cap(settings, rows) if clocks else settings[0])
    done = [setting for setting in coarse if setting in measured]
    # Once energy has risen, nothing below is of use.
    least = done[-_RISES] if _has_risen(done, rows, blocking_w) else -1
    order = [coarse[0], *Random(str(seed)).sample(coarse[1:], len(coarse) - 1)]
    return next((setting for setting in order if setting > least and setting not in done), None)


def highest_below_cap(settings: Sequence[int], rows: RowTable) -> int:
    """Return the highest clock that the power cap lets some kind reach; the top one if there is
    no cap.
    """
    top = [table[settings[0]].evidence for table in rows.values() if settings[0] in table]
    # Only if every kind was capped do the settings above run alike.
    if not top or any(
        evidence is None or "sw-power-cap" not in evidence.throttle for evidence in top
    ):
        return settings[0]
    reached_mhz = max(evidence.achieved_mhz for evidence in top if evidence is not None)
    return next((setting for setting in settings if setting <= reached_mhz), settings[0])


def _has_risen(done: Sequence[int], rows: RowTable, blocking_w: float) -> bool:
    """Return whether, at the lowest settings, the effective energy of every kind was above its
    minimum beyond noise.
    """
    for table in rows.values():
        least_j = min((_cost_j(table[setting], -blocking_w) for setting in done), default=0.0)
        # Both of the lowest settings must be above the least by more than noise.
        for setting in done[-_RISES:]:
            row = table[setting]
            risen_j = max(_NOISE * _error_j(row, blocking_w), _RISEN * row.energy_j)
            if _cost_j(row, -blocking_w) <= least_j + risen_j:
                return False
    return len(done) > _RISES


def _gain_j(setting: int, rows: RowTable, blocking_w: float) -> float:
    """Return what measuring every kind at `setting` is expected to save, joules, summed over the
    prices of time.
    """
    return math.fsum(_kind_gain_j(setting, table, blocking_w) for table in rows.values())


def _kind_gain_j(setting: int, table: Mapping[int, Measurement], blocking_w: float) -> float:
    """Return what measuring one kind at `setting` is expected to save, joules, summed over the
    prices of time.
    """
    predicted = _predict(setting, table)
    top = table[max(table)]
    gain_j = 0.0
    for price in PRICES:
        # A busy GPU does not wait, so a second costs its price less the power of waiting.
        second_w = price * top.energy_j / top.time_s - blocking_w
        # What a plan pays at this price with the settings that are measured.
        least_j = min(_cost_j(row, second_w) for row in table.values())
        # Time and energy of the prediction vary independently.
        spread_j = predicted.spread * math.hypot(predicted.energy_j, second_w * predicted.time_s)
        gain_j += _expected_improvement(least_j - _cost_j(predicted, second_w), spread_j)
    return gain_j


def _predict(setting: int, table: Mapping[int, Measurement]) -> _Prediction:
    """Predict the row of a setting between two measured ones by the Brownian bridge that the
    module describes.
    """
    high = table[min(other for other in table if other > setting)]
    low = table[max(other for other in table if other < setting)]
    above = math.log(high.clock_mhz / setting)
    below = math.log(setting / low.clock_mhz)
    # How far between the two neighbours, along the logarithm of the setting.
    share = above / (above + below)
    return _Prediction(
        high.time_s + share * (low.time_s - high.time_s),
        high.energy_j + share * (low.energy_j - high.energy_j),
        _ROUGHNESS * math.sqrt(above * below / (above + below)),
    )


def _expected_improvement(mean: float, spread: float) -> float:
    """Return the mean of the positive part of a normal distribution (Jones, Schonlau and Welch,
    1998).
    """
    if spread <= 0:
        return max(0.0, mean)
    ratio = mean / spread
    return mean * _NORMAL.cdf(ratio) + spread * _NORMAL.pdf(ratio)


def _cost_j(row: Measurement | _Prediction, second_w: float) -> float:
    """Return the energy plus the time at the price of a second."""
    return row.energy_j + second_w * row.time_s


def _error_j(row: Measurement, blocking_w: float) -> float:
    evidence = row.evidence
    return evidence.energy_stderr_j + blocking_w * evidence.time_stderr_s if evidence else 0.0


_DRAWS = 1000
_MOST_WINDOWS = 48  # a row of as many is not measured again
_TINY = 1e-300
_SINGULAR = 1e-6


class Doubt(NamedTuple):
    """How far the saving is known."""

    #: Half of the 90 % interval of the share of energy that plans save, the mean over the prices of
    #: time. It is cautious: a wrong time counts at its price, and rows of different settings do not
    #: average out.
    share: float
    #: The setting to measure next, perhaps again; None if no other measurement helps.
    setting: int | None


def find_doubt(
    settings: Sequence[int],
    rows: RowTable,
    blocking_w: float,
    *,
    control: str = "clock",
    stages: int = 1,
    without_work: Sequence[str] = (),
) -> Doubt:
    """Return how far the saving is known, and what to measure next: one function, as all its parts
    share the draws and the prices.

    The result depends on the arguments alone, so a resumed sweep chooses as one that was not
    interrupted.

    Args:
        settings: All settings, highest first.
        rows: The rows measured so far, at two settings at least. All kinds have the same settings.
        blocking_w: Power of the GPUs while they wait, watts.
        control: What is set for each row, "clock" or "power-limit".
        stages: Number of stages of the pipeline. Each is measured as well as this one, with noise
            of its own.
        without_work: Kinds of the stage that run nothing, and so are not among the rows.

    Raises:
        ProfileError: If a row has an energy of 0.
    """
    measured = next(iter(rows.values()))
    capped = highest_below_cap(settings, rows) if control == "clock" else settings[0]
    # Settings that a plan could use: from the lowest measured one to the cap.
    useful = [
        clock
        for clock in settings
        if min(measured) <= clock and (clock <= capped or clock in measured)
    ]
    measurements = {
        Key.named(0, kind): tuple(table[clock] for clock in sorted(table, reverse=True))
        for kind, table in rows.items()
    }
    idle = {Key.named(0, kind): (Measurement(max(measured), 0.0, 0.0),) for kind in without_work}
    profile = Profile(
        measurements | idle,
        blocking_w,
        control=control,
    )
    estimate = profile.estimated(useful)
    draws = estimate.draws(_DRAWS)
    rows_at = [i for i, clock in enumerate(useful) if clock in measured]
    # By setting: how much of the variance of possible savings a measurement there would explain.
    told = np.zeros(len(useful))
    variance = np.zeros(len(PRICES))
    baseline_j = 0.0
    for kind, table in rows.items():
        key = Key.named(0, kind)
        top = table[max(table)]
        time_s = draws.time_s[key]
        energy_j = draws.energy_j[key]
        expected = estimate.mean.measurements[key]
        saved_j, possible_j = _savings_j(time_s, energy_j, expected, top, blocking_w)
        # Noise is relative, so logarithms are what it adds to.
        logs = np.log(time_s), np.log(energy_j)
        for quantity, noise in zip(logs, estimate.noise[key], strict=True):
            told += _explained(possible_j, quantity, noise)
        # Like stages share what exact rows would leave unknown, between the settings, but not the
        # noise of their rows.
        between = _unexplained(saved_j, np.concatenate([quantity[rows_at] for quantity in logs]))
        variance += between + np.maximum(saved_j.var(axis=1) - between, 0.0) / stages
        baseline_j += expected[0].energy_j
    # Half of the interval, as wide as those of plans.
    half = WIDER_SAVING * NormalDist().inv_cdf((1 + INTERVAL) / 2)
    # A row of many windows has no noise left to average out.
    allowed = [
        i
        for i, clock in enumerate(useful)
        if clock not in measured or any(_may_repeat(table[clock]) for table in rows.values())
    ]
    best = max(allowed, key=told.__getitem__, default=None)
    return Doubt(
        half * float(np.mean(np.sqrt(variance))) / baseline_j,
        None if best is None else useful[best],
    )


def _savings_j(
    time_s: Floats,
    energy_j: Floats,
    expected: Sequence[Measurement],
    top: Measurement,
    blocking_w: float,
) -> tuple[Floats, Floats]:
    """Return what a plan saves at each price under each draw, and what the best plan of that draw
    saves: (prices, draws) joules each.

    Args:
        time_s: (settings, draws) of one kind, highest setting first.
        energy_j: (settings, draws), likewise.
        expected: the expected row at each setting.
        top: the measured row of the top setting.
        blocking_w: power of the GPUs while they wait, watts.
    """
    saved_j, possible_j = np.empty((2, len(PRICES), _DRAWS))
    for number, price in enumerate(PRICES):
        # A busy GPU does not wait, so a second costs its price less the power of waiting.
        second_w = price * top.energy_j / top.time_s - blocking_w
        # The plan knows the expected rows alone; the best plan of each draw knows that draw.
        expected_j = [_cost_j(row, second_w) for row in expected]
        planned = expected_j.index(min(expected_j))
        cost_j = energy_j + second_w * time_s
        saved_j[number] = cost_j[0] - cost_j[planned]
        possible_j[number] = cost_j[0] - cost_j.min(axis=0)
    return saved_j, possible_j


def _may_repeat(row: Measurement) -> bool:
    return row.evidence is not None and row.evidence.windows < _MOST_WINDOWS


def _explained(of: Floats, by: Floats, noise: float) -> Floats:
    """Return how much of the variances of `of` (values, draws), in all, a noisy value of each of
    `by` explains.
    """
    of = _about_mean(of)
    by = _about_mean(by)
    # Of a linear prediction: the square of the covariance over the variance, noise included.
    together = of @ by.T / of.shape[1]
    explained: Floats = (together**2).sum(axis=0) / (np.mean(by**2, axis=1) + noise**2)
    return explained


def _unexplained(of: Floats, by: Floats) -> Floats:
    """Return the variance of each of `of` (values, draws) that is left if all of `by` are known."""
    of = _about_mean(of)
    by = _about_mean(by)
    # In standard deviations, so that one threshold of singularity fits times and energies.
    scaled = by / np.maximum(by.std(axis=1, keepdims=True), _TINY)
    weights = np.linalg.lstsq(scaled.T, of.T, rcond=_SINGULAR)[0]
    left: Floats = np.mean((of - weights.T @ scaled) ** 2, axis=1)
    return left


def _about_mean(values: Floats) -> Floats:
    centred: Floats = values - values.mean(axis=1, keepdims=True)
    return centred
