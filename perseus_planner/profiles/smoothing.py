"""Curves of like stages over the clock, estimated together from noisy points: a Gaussian process,
with numpy alone.

The logarithm of a quantity of stage s at a clock is shared(x) + own_s(x) + noise + drift, where x
grows from 0 at the highest clock as the clock falls. Noise is independent from point to point. The
drift is correlated over the order in which the points were measured, by exp(-distance / length): an
Ornstein-Uhlenbeck process. Both curves are a straight line, plus a smooth bend
(the cubic smoothing spline: Wahba 1990), plus kinks and plateaus (Brownian motion), plus a step at
each clock (GPUs run other kernels at some clocks). How large each of these is follows from the
points, by maximum a posteriori; so like stages share nearly everything, and unlike ones little. See
Rasmussen and Williams, "Gaussian Processes for Machine Learning" (2006), chapters 2 and 5.

Given the shared curve, stages are independent, so all matrices are as large as the number of
clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

_VAGUE = 4.0  #: variance of the shared level and slope, of which nothing is assumed
_LEAST_STEP = 5e-4  #: standard deviation of a stage's own step, however alike stages look
_JITTER = 1e-13  #: relative; keeps a covariance positive definite in spite of rounding
_MOST_FITTED = 16  #: curves from which the scales are found; more of them tell little more
#: how much more its own a curve's shape may be -> minus its log probability
_UNLIKE = {1.0: 0.0, 4.0: 1.0, 16.0: 2.0}
_FAR = 4.0  #: standard errors from what all other points tell; a point so far off may be wrong
_WRONG = 3.0  #: minus the log probability that it is
_FEW = 3  #: of fewer curves none stands out
_REPEATS = 3  #: how often scales are found again after curves that stand out
_ROUNDS = 30
_ENOUGH = 1e-2  #: a smaller gain of log probability ends the search for the scales
_FIRST = 0.05  #: the first step per unit of slope, in log scales
_LONGEST = 1.5  #: the longest step, in log scales
_STEP = 1e-3  #: of the finite differences


class Scales(NamedTuple):
    """Standard deviations, of a natural logarithm over x."""

    bend: float  #: of the smooth part: change of slope
    kink: float  #: of the Brownian part
    step: float  #: of each clock
    level: float  #: of the stages' own levels
    slope: float  #: of their own slopes
    shape: float  #: of their own bend, kink and step, relative to the shared ones
    noise: float  #: of a point of variance 1
    drift: float  #: of what points that were measured one after another share
    length: float  #: over which it is correlated, points; not of a logarithm


class Points(NamedTuple):
    """The points of one curve; k of them."""

    place: Integers  #: (k,) index on the grid
    value: Floats  #: (k,) logarithms
    variance: Floats  #: (k,) of their noise, relative to the other points
    order: Floats  #: (k,) when they were measured, in points
    unlike: float = 1.0  #: how much more its own the curve's shape is than that of most


class Curves:
    """Like curves on one grid, given by noisy points.

    Args:
        x: (n,) the grid, rising from 0.
        points: those of each curve, at least one in all.
        guess: the likely scales.
        doubt: standard deviation of the logarithm of each guess.

    Attributes:
        scales: the scales that were found.
    """

    def __init__(self, x: Floats, points: Sequence[Points], guess: Scales, doubt: Scales) -> None:
        self._points = list(points)
        self._parts = _parts(x)
        # Deviations from the mean, of which nothing is assumed.
        self._middle = float(
            np.mean(np.concatenate([curve_points.value for curve_points in points]))
        )
        self._values = [curve_points.value - self._middle for curve_points in points]
        # Few curves tell the scales as well as all of them.
        some = sorted({round(i) for i in np.linspace(0, len(points) - 1, _MOST_FITTED)})
        self.scales = guess
        # Curves that stand out change the scales, and these change what stands out.
        for repeat in range(_REPEATS):
            if repeat:
                before = self._points
                self._points = self._judged()
                # Nothing was judged anew, so the scales would be the same.
                if all(
                    old.unlike == new.unlike and old.variance is new.variance
                    for old, new in zip(before, self._points, strict=True)
                ):
                    break
            self.scales = self._fit(_alike(self._points, some), guess, doubt)
            self._model = _Model(self._parts, self.scales, _alike(self._points, range(len(points))))

    def mean(self) -> Floats:
        """Return the (curves, n) expected logarithms on the grid."""
        shared, own = self._model.given([value[:, None] for value in self._values])
        mean: Floats = self._middle + (shared + own)[:, :, 0]
        return mean

    def draws(self, count: int, random: np.random.Generator) -> Floats:
        """Return (curves, n, count) joint draws of the logarithms on the grid.

        Each is a draw without regard to the points, corrected by what its own noisy points miss of
        the real ones (Matheron's rule).
        """
        # A draw of the model, as if there were no points.
        model = self._model
        n = len(self._parts.line)
        shared = model.root @ random.standard_normal((n, count))
        own = np.empty((len(self._points), n, count))
        for group, covariance in zip(model.alike, model.own, strict=True):
            root = _root(covariance)
            for i in group.curves:
                own[i] = root @ random.standard_normal((n, count))
        # What the drawn points, with their noise, miss of the real ones is the correction.
        missed = []
        for curve_points, value, curve in zip(self._points, self._values, own, strict=True):
            drift = _drift(self.scales, _apart(curve_points.order))
            covariance = _with_noise(drift, self.scales, curve_points.variance)
            noise = np.linalg.cholesky(covariance) @ random.standard_normal((len(value), count))
            missed.append(
                value[:, None] - shared[curve_points.place] - curve[curve_points.place] - noise
            )
        shared_more, own_more = model.given(missed)
        drawn: Floats = self._middle + (shared + shared_more) + (own + own_more)
        return drawn

    def _judged(self) -> list[Points]:
        """Return the points with how much more its own the shape of each curve is than that of
        most, judged by the shared curve. A point that is far from what the others tell, and by
        which alone its curve would be unlike, gets the variance of its deviation.
        """
        # Among so few curves none is more usual than another.
        if len(self._points) < _FEW:
            return list(self._points)
        # Curves are judged by what all share, with the doubt that is left of it.
        shared, uncertain = self._model.shared(self._values)
        return [
            self._explained(given, value - shared[given.place], uncertain)
            for given, value in zip(self._points, self._values, strict=True)
        ]

    def _explained(self, given: Points, missed: Floats, uncertain: Floats) -> Points:
        """Return the points of a curve with the most probable explanation of how they deviate.

        Args:
            given: the points.
            missed: (k,) what they miss of the shared curve.
            uncertain: (n, n) the covariance of the shared curve.
        """
        noise = self.scales.noise**2
        drift = _drift(self.scales, _apart(given.order))
        shape = self._parts.wave(self.scales)
        best = given
        least = np.inf
        # A curve whose shape is its own is less likely, and explains more.
        for unlike, improbable in _UNLIKE.items():
            own = self._parts.own(self.scales, unlike, shape) + uncertain
            covariance = own[np.ix_(given.place, given.place)] + drift
            for price, variance in self._variances(given, missed, covariance):
                # The likelihood of the curve under each explanation decides, with its price.
                cost = improbable + price
                cost += _surprise(missed, covariance + np.diag(noise * variance))
                if cost < least:
                    best = given._replace(variance=variance, unlike=unlike)
                    least = cost
        return best

    def _variances(
        self, given: Points, missed: Floats, covariance: Floats
    ) -> Iterator[tuple[float, Floats]]:
        """Yield variances that points may have, each after minus the log probability that they
        need others than the given ones: these, and those with a single wrong point.
        """
        yield 0.0, given.variance
        noise = self.scales.noise**2
        inverse = np.linalg.inv(covariance + np.diag(noise * given.variance))
        # By how much each point is off, if it is told by all others of its curve.
        left_out = inverse @ missed / np.diag(inverse)
        far = np.abs(left_out) * np.sqrt(np.diag(inverse))
        wrong = int(np.argmax(far))
        if far[wrong] > _FAR:
            variance = given.variance.copy()
            # The point's deviation becomes its noise, so that it tells nothing more.
            variance[wrong] += left_out[wrong] ** 2 / noise
            yield _WRONG, variance

    def _fit(self, alike: Sequence[_Alike], guess: Scales, doubt: Scales) -> Scales:
        """Return the most probable scales. Only the places that have points matter."""
        # Clocks without points do not change the likelihood, and cost time.
        places = np.unique(np.concatenate([group.place for group in alike]))
        parts = self._parts.at(places)
        alike = [group._replace(place=np.searchsorted(places, group.place)) for group in alike]
        # The same for all scales, of which some hundred are tried.
        values = [group.stacked(self._values) for group in alike]
        likely = np.log(guess)

        def cost(log_scales: Floats) -> float:
            # Scales at which the covariance cannot be factored are no solution.
            try:
                model = _Model(parts, Scales(*np.exp(log_scales).tolist()), alike)
                misfit = model.misfit(values)
            except np.linalg.LinAlgError:
                return np.inf
            # The prior of each scale, in logarithms.
            return misfit + 0.5 * float(np.sum(((log_scales - likely) / doubt) ** 2))

        return Scales(*np.exp(_minimise(cost, np.log(self.scales))).tolist())


def _surprise(missed: Floats, covariance: Floats) -> float:
    """Return minus the log probability of (k,) deviations with this covariance, but for a
    constant.
    """
    root = np.linalg.cholesky(covariance)
    pulled = np.linalg.solve(root, missed)
    return float(np.log(np.diag(root)).sum() + 0.5 * pulled @ pulled)


def _minimise(cost: Callable[[Floats], float], start: Floats) -> Floats:
    """Return where a cost is least near `start`, by the method of Broyden, Fletcher, Goldfarb and
    Shanno (Nocedal and Wright, "Numerical Optimization", 2006, chapter 6) with slopes from finite
    differences.

    Args:
        cost: a function of (m,) numbers, smooth but for points at which it is infinite.
        start: (m,) where the search begins.
    """

    def slope(at: Floats, value: float) -> Floats:
        return np.array([(cost(at + step) - value) / _STEP for step in _STEP * np.eye(len(at))])

    here = start
    inverse = _FIRST * np.eye(len(here))
    value = cost(here)
    gradient = slope(here, value)
    for _ in range(_ROUNDS):
        move = -inverse @ gradient
        # Far steps leave the range in which the slope tells anything.
        move *= min(1.0, _LONGEST / max(float(np.abs(move).max()), 1e-300))
        before = value
        value = cost(here + move)
        # Halved until the cost falls by enough, as far as differences can tell.
        while value > before + 1e-4 * float(gradient @ move) and np.abs(move).max() > _STEP:
            move /= 2
            value = cost(here + move)
        # No smaller cost along this direction, so this is the end.
        if value >= before:
            break
        here = here + move
        if before - value < _ENOUGH:
            break
        last = gradient
        gradient = slope(here, value)
        turned = gradient - last
        # The inverse stays positive definite only if the slope has risen along the step.
        curvature = float(move @ turned)
        if curvature > 0.0:
            mix = np.eye(len(here)) - np.outer(move, turned) / curvature
            inverse = mix @ inverse @ mix.T + np.outer(move, move) / curvature
    return here


class _Parts(NamedTuple):
    """(n, n) covariances on the grid, at scales of 1; each step of a clock adds to the diagonal
    alone.
    """

    bend: Floats
    kink: Floats
    line: Floats
    vague: Floats  #: of the shared level and slope

    def at(self, places: Integers) -> _Parts:
        """Return the covariances of some places of the grid."""
        return _Parts(*(covariance[np.ix_(places, places)] for covariance in self))

    def own(self, scales: Scales, unlike: float, wave: Floats) -> Floats:
        """Return the covariance of a curve's own part, given that of the shared `wave`."""
        own: Floats = scales.level**2 + scales.slope**2 * self.line
        own += (unlike * scales.shape) ** 2 * wave
        _add_to_diagonal(own, _LEAST_STEP**2)
        return own

    def wave(self, scales: Scales) -> Floats:
        """Return the covariance of the shape of the shared curve: all but its level and slope."""
        wave: Floats = scales.bend**2 * self.bend + scales.kink**2 * self.kink
        _add_to_diagonal(wave, scales.step**2)
        return wave


def _parts(x: Floats) -> _Parts:
    # The covariance of an integrated Brownian motion, whose curves are cubic splines; and that of a
    # Brownian motion.
    near = np.minimum.outer(x, x)
    far = np.maximum.outer(x, x)
    line = np.outer(x, x)
    return _Parts(near * near * (3 * far - near) / 6, near, line, _VAGUE * (1 + line))


class _Alike(NamedTuple):
    """Curves whose points have the same places and variances, and whose shapes are as much their
    own.
    """

    place: Integers  #: (k,) as in `Points`, and so the next
    variance: Floats
    apart: Floats  #: (k, k) how far the points are from each other in the order of measurement
    unlike: float
    curves: list[int]  #: which ones they are

    def stacked(self, values: Sequence[Floats]) -> Floats:
        """Return the (k, m) values of these curves, given those of all."""
        return np.stack([values[i] for i in self.curves], axis=1)


def _alike(points: Sequence[Points], curves: Sequence[int]) -> list[_Alike]:
    # Equal places, variances and orders have one covariance, which is factored once.
    groups: dict[tuple[bytes, bytes, bytes, float], _Alike] = {}
    apart: dict[bytes, Floats] = {}
    for i in curves:
        curve = points[i]
        key = (
            curve.place.tobytes(),
            curve.variance.tobytes(),
            curve.order.tobytes(),
            curve.unlike,
        )
        if key not in groups:
            if key[2] not in apart:
                apart[key[2]] = _apart(curve.order)
            groups[key] = _Alike(curve.place, curve.variance, apart[key[2]], curve.unlike, [])
        groups[key].curves.append(i)
    return list(groups.values())


class _Model:
    """The curves at known scales."""

    def __init__(self, parts: _Parts, scales: Scales, alike: Sequence[_Alike]) -> None:
        n = len(parts.line)
        self.alike = alike
        wave = parts.wave(scales)
        self.root = _root(parts.vague + wave)
        self.own = [parts.own(scales, group.unlike, wave) for group in alike]
        # Of the covariance of each group's points about the shared curve.
        self.inverses: list[Floats] = []
        self.half_log = 0.0
        # Given the shared curve, curves are independent, so their precisions add up.
        precision = np.zeros((n, n))
        # Groups whose points were measured in one order have one array of distances.
        drifts: dict[int, Floats] = {}
        for group, own in zip(alike, self.own, strict=True):
            if id(group.apart) not in drifts:
                drifts[id(group.apart)] = _drift(scales, group.apart)
            noise = _with_noise(drifts[id(group.apart)], scales, group.variance)
            # What a curve has of its own, and the noise of its points; places rise, so as many as
            # there are on the grid are all of them.
            is_whole = len(group.place) == n
            block = np.ix_(group.place, group.place)
            root = np.linalg.cholesky((own if is_whole else own[block]) + noise)
            half = np.linalg.inv(root)
            inverse = half.T @ half
            self.inverses.append(inverse)
            self.half_log += len(group.curves) * float(np.log(root.diagonal()).sum())
            if is_whole:
                precision += len(group.curves) * inverse
            else:
                precision[block] += len(group.curves) * inverse
        # By the matrix inversion lemma all matrices are as large as the number of clocks.
        inner = self.root.T @ precision @ self.root
        _add_to_diagonal(inner, 1.0)
        self.precision_root = np.linalg.cholesky(inner)
        self.half_log += float(np.log(self.precision_root.diagonal()).sum())

    def misfit(self, values: Sequence[Floats]) -> float:
        """Return minus the log probability of the curves, but for a constant, given the (k, m)
        values of each group of them.
        """
        # The quadratic form of all points is that about the shared curve, less what that explains.
        squares = 0.0
        weighed = np.zeros(len(self.root))
        for group, inverse, value in zip(self.alike, self.inverses, values, strict=True):
            pulled = inverse @ value
            squares += float(np.sum(value * pulled))
            weighed[group.place] += pulled.sum(axis=1)
        # The part of the values that the shared curve explains.
        explained = np.linalg.solve(self.precision_root, self.root.T @ weighed)
        return self.half_log + 0.5 * (squares - float(explained @ explained))

    def shared(self, values: Sequence[Floats]) -> tuple[Floats, Floats]:
        """Return the expected (n,) shared curve given the values of each curve, and its (n, n)
        covariance.
        """
        # What all points together leave uncertain of the shared curve.
        half = np.linalg.solve(self.precision_root, self.root.T)
        return self.given([value[:, None] for value in values])[0][:, 0], half.T @ half

    def given(self, values: Sequence[Floats]) -> tuple[Floats, Floats]:
        """Return the expected (n, m) shared curves and (curves, n, m) own parts, given (k, m)
        values of each curve.
        """
        weighed = np.zeros((len(self.root), values[0].shape[1]))
        for group, inverse in zip(self.alike, self.inverses, strict=True):
            weighed[group.place] += inverse @ np.sum([values[i] for i in group.curves], axis=0)
        # The shared curve first, as it is known from all curves together.
        inner = np.linalg.solve(self.precision_root, self.root.T @ weighed)
        shared: Floats = self.root @ np.linalg.solve(self.precision_root.T, inner)
        own = np.zeros((len(values), *weighed.shape))
        for group, inverse, covariance in zip(self.alike, self.inverses, self.own, strict=True):
            # What a curve's points miss of the shared curve is its own.
            for i in group.curves:
                missed = values[i] - shared[group.place]
                own[i] = covariance[:, group.place] @ (inverse @ missed)
        return shared, own


def _apart(order: Floats) -> Floats:
    """Return the (k, k) distances of points in the order in which they were measured."""
    apart: Floats = np.abs(np.subtract.outer(order, order))
    return apart


def _drift(scales: Scales, apart: Floats) -> Floats:
    """Return the (k, k) covariance of the drift: points that were measured close to each other
    share most of it.
    """
    covariance: Floats = scales.drift**2 * np.exp(-apart / scales.length)
    return covariance


def _with_noise(drift: Floats, scales: Scales, variance: Floats) -> Floats:
    """Return the (k, k) covariance of the drift and the noise of points."""
    covariance: Floats = drift.copy()
    _add_to_diagonal(covariance, scales.noise**2 * variance)
    return covariance


def _add_to_diagonal(matrix: Floats, added: Floats | float) -> None:
    """Add numbers to the diagonal of a matrix that lies in one piece."""
    diagonal = matrix.reshape(-1)[:: len(matrix) + 1]
    np.add(diagonal, added, out=diagonal)


def _root(covariance: Floats) -> Floats:
    """Return the Cholesky factor."""
    # Rounding may leave the covariance of a smooth curve a little below 0.
    positive = covariance.copy()
    _add_to_diagonal(positive, float(_JITTER * np.trace(covariance)))
    return np.asarray(np.linalg.cholesky(positive), dtype=np.float64)
