"""Curves are estimated as a dense Gaussian process with the same covariances estimates them."""

from __future__ import annotations

import numpy as np
import pytest

from perseus_planner.profiles import smoothing
from perseus_planner.profiles.smoothing import Curves, Points, Scales

GUESS = Scales(
    bend=0.5,
    kink=0.05,
    step=0.01,
    level=0.05,
    slope=0.03,
    shape=0.3,
    noise=0.01,
    drift=0.02,
    length=2.0,
)
SURE = Scales(*[1e-6] * len(GUESS))  #: doubt of the guess: the scales stay as they are
X = np.array([0.0, 0.1, 0.25, 0.4, 0.45, 0.8])


def some_points(seed: int, curves: int) -> list[Points]:
    random = np.random.default_rng(seed)
    points = []
    for _ in range(curves):
        place = np.sort(random.choice(len(X), random.integers(1, len(X) + 1), replace=False))
        value = 0.7 * X[place] + 0.03 * random.standard_normal(len(place)) - 3
        order = random.permutation(len(place)).astype(float)
        points.append(Points(place, value, random.uniform(0.3, 3, len(place)), order))
    return points


def covariances(scales: Scales) -> tuple[np.ndarray, np.ndarray]:
    """Of the shared curve and of a curve's own part, written out."""
    shared, own = np.empty((len(X), len(X))), np.empty((len(X), len(X)))
    for i, a in enumerate(X):
        for j, b in enumerate(X):
            near, far = min(a, b), max(a, b)
            wave = (
                scales.bend**2 * near**2 * (3 * far - near) / 6
                + scales.kink**2 * near
                + scales.step**2 * (i == j)
            )
            shared[i, j] = smoothing._VAGUE * (1 + a * b) + wave
            own[i, j] = scales.level**2 + scales.slope**2 * a * b + scales.shape**2 * wave
            own[i, j] += smoothing._LEAST_STEP**2 * (i == j)
    return shared, own


def dense(points: list[Points], scales: Scales) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of all curves on the grid, from one large covariance."""
    (shared, own), n = covariances(scales), len(X)
    prior = np.kron(np.ones((len(points), len(points))), shared) + np.kron(np.eye(len(points)), own)
    at = np.concatenate([i * n + each.place for i, each in enumerate(points)])
    noise = np.diag(scales.noise**2 * np.concatenate([each.variance for each in points]))
    first = 0
    for each in points:  # each curve has a drift of its own
        for i, a in enumerate(each.order):
            for j, b in enumerate(each.order):
                drift = scales.drift**2 * np.exp(-abs(a - b) / scales.length)
                noise[first + i, first + j] += drift
        first += len(each.order)
    value = np.concatenate([each.value for each in points])
    gain = np.linalg.solve(prior[np.ix_(at, at)] + noise, prior[at]).T
    mean = value.mean() + gain @ (value - value.mean())
    return mean.reshape(len(points), n), prior - gain @ prior[at]


@pytest.mark.parametrize("curves", [1, 2, 5])
@pytest.mark.parametrize("seed", range(3))
def test_the_mean_is_that_of_a_dense_process(
    monkeypatch: pytest.MonkeyPatch, curves: int, seed: int
):
    monkeypatch.setattr(smoothing, "_UNLIKE", {1.0: 0.0})
    points = some_points(seed, curves)
    assert np.allclose(
        Curves(X, points, GUESS, SURE).mean(), dense(points, GUESS)[0], rtol=0, atol=1e-6
    )


def test_draws_have_the_mean_and_the_covariance_of_a_dense_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(smoothing, "_UNLIKE", {1.0: 0.0})
    points = some_points(0, 3)
    mean, covariance = dense(points, GUESS)
    drawn = (
        Curves(X, points, GUESS, SURE)
        .draws(40_000, np.random.default_rng(5))
        .reshape(len(covariance), -1)
    )
    deviation = np.sqrt(np.diag(covariance))
    assert np.abs((drawn.mean(axis=1) - mean.ravel()) / deviation).max() < 0.03
    assert np.abs((np.cov(drawn) - covariance) / np.outer(deviation, deviation)).max() < 0.05


def test_scales_are_found_from_the_points():
    random, x = np.random.default_rng(1), np.linspace(0, 1, 40)
    shared = 0.8 * x + 0.3 * x**2
    points = [
        Points(
            np.arange(40),
            shared + 0.1 * random.standard_normal() + 0.02 * random.standard_normal(40),
            np.ones(40),
            np.arange(40.0),
        )
        for _ in range(8)
    ]
    guess = GUESS._replace(drift=2e-3, length=8.0)
    found = Curves(x, points, guess, Scales(*[1.0] * len(guess))).scales
    assert found.noise == pytest.approx(0.02, rel=0.1)
    assert 0.04 < found.level < 0.25


def test_a_curve_unlike_the_others_is_not_pulled_towards_them():
    x, random = np.linspace(0, 1, 30), np.random.default_rng(2)
    logs = np.array([0.5 * x + (0.03 * np.sin(40 * x) if i == 9 else 0.0) for i in range(10)])
    points = [
        Points(
            np.arange(30),
            each + 2e-3 * random.standard_normal(30),
            np.ones(30),
            np.arange(30.0),
        )
        for each in logs
    ]
    guess = GUESS._replace(
        bend=0.3, kink=0.03, step=0.003, level=0.03, slope=0.02, noise=2e-3, drift=2e-3
    )
    doubt = Scales(*[1.0] * len(guess))._replace(shape=0.4, noise=0.2)
    off = Curves(x, points, guess, doubt).mean() - logs
    assert np.sqrt(np.mean(off[9] ** 2)) < 3e-3
    assert np.sqrt(np.mean(off[:9] ** 2)) < 1.5e-3


def test_the_length_of_a_drift_is_found_in_the_order_of_measurement():
    x, random = np.linspace(0, 1, 40), np.random.default_rng(4)
    points = []
    for _ in range(8):
        drift = [random.standard_normal()]
        for _ in range(39):
            drift.append(0.8 * drift[-1] + 0.6 * random.standard_normal())
        order = random.permutation(40)
        noise = 0.01 * np.array(drift)[order] + 1e-3 * random.standard_normal(40)
        points.append(Points(np.arange(40), 0.5 * x + noise, np.ones(40), order.astype(float)))
    guess = GUESS._replace(noise=1e-3, drift=2e-3, length=8.0)
    doubt = Scales(*[1.0] * len(guess))._replace(noise=0.2)
    found = Curves(x, points, guess, doubt).scales
    assert found.drift == pytest.approx(0.01, rel=0.35)
    assert found.length == pytest.approx(-1 / np.log(0.8), rel=0.5)
