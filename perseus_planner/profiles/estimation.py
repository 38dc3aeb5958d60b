"""Estimate time and energy at every clock from noisy rows, with their joint uncertainty.

A measured row is an estimate. Whoever chooses the best of many noisy rows chooses lucky ones, so
plans from raw rows are late and save less than they promise. But rows at neighbouring clocks, and
rows of like stages, tell about each other; `smoothing.py` has the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

from perseus_planner.base.errors import ProfileError
from perseus_planner.base.units import CLOCK, COUNT, INDEX
from perseus_planner.profiles.csv_file import unit_of, word_of
from perseus_planner.profiles.keys import AnyKey, ByKey, Key
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.profiles.smoothing import Curves, Points, Scales

if TYPE_CHECKING:
    from perseus_planner.profiles.smoothing import Floats

Rows = Mapping[Key, tuple[Measurement, ...]]
"""Measurements, highest clock first."""
P = TypeVar("P")
"""What holds the rows: a profile."""
_UNIT = 0.7  #: the x of the model is ln(highest clock / clock) over this: about 0 to 1
_NOISE = {"noise": 0.003, "drift": 0.002, "length": 8.0}
_TIME = Scales(bend=0.3, kink=0.03, step=0.003, level=0.03, slope=0.02, shape=0.3, **_NOISE)
_ENERGY = Scales(bend=1.0, kink=0.05, step=0.005, level=0.03, slope=0.02, shape=0.3, **_NOISE)
# Standard deviations of the logarithms of these: a factor of e either way is nothing unusual. That
# of the shape is smaller, as stages that look alike to the last bit in some profiles are not in
# others.
_DOUBT = Scales(
    bend=1.0,
    kink=1.0,
    step=1.0,
    level=1.0,
    slope=1.0,
    shape=0.4,
    noise=0.2,
    drift=1.0,
    length=0.7,
)
_NO_ERRORS = 1.5  #: that of the noise if rows have no standard errors
_LEAST_J = 1e-300  #: of a logarithm
_LEAST_NOISE = 1e-5  #: relative
_LEAST_SPACING = 5  #: MHz or watts; settings that are evenly spaced are no closer
_MOST_CLOCKS = 256  #: that are taken between the measured ones


class Draws(NamedTuple):
    """Joint draws of the time and energy that computations may really take.

    Draws of one number belong together: replayed with the times of one number, a plan takes a time
    that it may take.
    """

    clocks_mhz: tuple[int, ...]  #: highest first
    time_s: Mapping[AnyKey, Floats]  #: (clocks, draws), seconds
    energy_j: Mapping[AnyKey, Floats]  #: (clocks, draws), joules


@dataclass(frozen=True, eq=False)
class Estimate(Generic[P]):
    """What the rows of a profile tell about time and energy at every clock; made by
    `Profile.estimated`.
    """

    #: the expected time and energy at every clock. A row that was measured keeps its evidence,
    #: though its time and energy are estimates now; an interpolated one has no evidence.
    mean: P
    #: (stage, kind) -> the clocks at which it was not measured, MHz, highest first.
    interpolated: ByKey[tuple[int, ...]]
    #: whether rows have standard errors. If not, the noise is taken from how far like stages, and
    #: neighbouring clocks, scatter.
    has_errors: bool
    #: (stage, kind) -> the relative standard errors of the time, and of the energy, of a row, as
    #: they were found for all stages of its kind together.
    noise: ByKey[tuple[float, float]]
    _clocks: tuple[int, ...] = field(repr=False)
    _without_work: tuple[Key, ...] = field(repr=False)
    _kinds: tuple[_Kind, ...] = field(repr=False)
    _shared_errors: Callable[[int], tuple[float, float]] = field(repr=False)

    def draws(self, count: int, seed: int = 0) -> Draws:
        """Return `count` joint draws; equal seeds give equal draws.

        The error that the rows of a stage share is that of its top clock against all others.

        Raises:
            UsageError: If `count` is not a whole number of at least 1, or `seed` not one of at
                least 0.
        """
        count = COUNT.check(count, "count")
        # Times and energies of a kind are drawn by curve, so neighbouring clocks go together.
        random = np.random.default_rng(INDEX.check(seed, "seed"))
        time_s = dict[Key, "Floats"]()
        energy_j = dict[Key, "Floats"]()
        for kind in self._kinds:
            time_s |= kind.table(kind.reachable(kind.time.draws(count, random)))
            energy_j |= kind.table(kind.energy.draws(count, random))
        # What the rows of a stage share is drawn once for all of its kinds.
        drift = {key.stage: random.standard_normal((2, count)) for key in time_s}
        for key in time_s:
            errors = self._shared_errors(key.stage)
            drawn_of_stage = drift[key.stage]
            for table, error, drawn in zip((time_s, energy_j), errors, drawn_of_stage, strict=True):
                # The error is that of the top clock against others, so the top itself keeps its
                # draws.
                table[key][1:] *= np.exp(error * drawn)
        for key in self._without_work:
            time_s[key] = np.zeros((len(self._clocks), count))
            energy_j[key] = np.zeros((len(self._clocks), count))
        return Draws(self._clocks, ByKey(time_s), ByKey(energy_j))


class _Kind(NamedTuple):
    """The curves of computations of one kind in one mode, such as F, of all stages that have it."""

    keys: list[Key]
    clocks: tuple[int, ...]
    lowest: int  #: index of the lowest clock that was measured
    time: Curves
    energy: Curves

    def table(self, logs: Floats) -> dict[Key, Floats]:
        return dict(zip(self.keys, np.exp(logs), strict=True))

    def reachable(self, logs: Floats) -> Floats:
        """Return log times within physical bounds below the lowest measured clock.

        A computation at a lower clock is no faster, and its time grows at most as the clock falls.
        """
        # Above the lowest measured clock rows hold the curve, and below it only physics does.
        below = self.lowest + 1
        last = logs[:, self.lowest : below]
        slower = np.log(self.clocks[self.lowest] / np.array(self.clocks[below:]))
        slower = slower.reshape(-1, *[1] * (logs.ndim - 2))
        return np.concatenate(
            [logs[:, :below], np.clip(logs[:, below:], last, last + slower)], axis=1
        )


def exact_draws(rows: Rows) -> Draws:
    """Return the one draw of rows that are exact, without number at a clock that a key lacks."""
    clocks = tuple(sorted({row.clock_mhz for row in chain(*rows.values())}, reverse=True))
    time_s, energy_j = (
        {key: np.full((len(clocks), 1), math.nan) for key in rows} for _ in range(2)
    )
    for key, of_key in rows.items():
        for row in of_key:
            position = clocks.index(row.clock_mhz)
            time_s[key][position] = row.time_s
            energy_j[key][position] = row.energy_j
    return Draws(clocks, ByKey(time_s), ByKey(energy_j))


def on_other_gpus(
    draws: Draws, gpu_of: Mapping[int, int], spread: float, count: int, seed: int = 0
) -> Draws:
    """Return draws on other GPUs than those that were profiled: all rows of a GPU take so many
    times as long, at the same power, its highest clock's too.

    Args:
        draws: `count` of them, or one for all.
        gpu_of: stage -> the number of its GPU.
        spread: the relative standard deviation of these factors; with 0 the draws stay as they are.
        count: the number of draws.
        seed: of the factors.
    """
    if not spread:
        return draws
    # A seed of its own, so that the factors do not follow the draws of rows.
    random = np.random.default_rng([seed, 1])
    gpus = dict.fromkeys(sorted(gpu_of.values()))
    # GPUs that hold several stages slow all of them alike.
    longer = {gpu: np.exp(spread * random.standard_normal(count)) for gpu in gpus}
    # At the same power, joules grow as seconds do.
    time_s, energy_j = (
        ByKey({key: rows * longer[gpu_of[key.stage]] for key, rows in table.items()})
        for table in (draws.time_s, draws.energy_j)
    )
    return Draws(draws.clocks_mhz, time_s, energy_j)


def estimate_rows(
    rows: Rows,
    control: str,
    clocks_mhz: Collection[int] | None,
    shared_errors: Callable[[int], tuple[float, float]],
    profile_of: Callable[[Rows], P],
) -> Estimate[P]:
    """Return what the rows of a profile tell about every clock, as `Profile.estimated` describes
    it; `profile_of` makes a profile of other rows.
    """
    # Computations without work have no curve, and 0 at every clock.
    clocks = _clocks(rows, control, clocks_mhz)
    without_work = tuple(key for key, of_key in rows.items() if not of_key[0].has_work)
    busy = {key: of_key for key, of_key in rows.items() if of_key[0].has_work}
    # Stages share a curve only with computations of their kind and mode, such as forwards.
    alike: dict[tuple[str, str], list[Key]] = {}
    for key in busy:
        alike.setdefault((key.kind, key.mode), []).append(key)
    kinds = tuple(_kind(busy, control, keys, clocks) for keys in alike.values())
    expected = dict[Key, tuple[Measurement, ...]]()
    for key in without_work:
        expected[key] = tuple(Measurement(mhz, 0.0, 0.0) for mhz in clocks)
    for kind in kinds:
        times_s = kind.table(kind.reachable(kind.time.mean()))
        energies_j = kind.table(kind.energy.mean())
        for key in kind.keys:
            # A measured row keeps its evidence, as a plan says what it is based on.
            evidence = {row.clock_mhz: row.evidence for row in rows[key]}
            values = zip(clocks, times_s[key].tolist(), energies_j[key].tolist(), strict=True)
            expected[key] = tuple(
                Measurement(mhz, time_s, energy_j, evidence.get(mhz))
                for mhz, time_s, energy_j in values
            )
    # What was not measured is said, so that a plan says on how much of that it rests.
    measured = {key: {row.clock_mhz for row in of_key} for key, of_key in rows.items()}
    return Estimate(
        profile_of(expected),
        ByKey(
            {
                key: tuple(mhz for mhz in clocks if mhz not in measured_mhz)
                for key, measured_mhz in measured.items()
                if key in busy
            }
        ),
        any(row.evidence is not None for row in chain(*rows.values())),
        ByKey(
            {
                key: (kind.time.scales.noise, kind.energy.scales.noise)
                for kind in kinds
                for key in kind.keys
            }
        ),
        clocks,
        without_work,
        kinds,
        shared_errors,
    )


def scatter(rows: Rows) -> float:
    """Return how far rows typically are from a smooth curve over the clock, relative: the larger
    one of time's and energy's.

    Each row is compared with the cubic through its two neighbours on either side, over the
    logarithms, and the median of the deviations is taken, which a few kinks and steps do not
    change. It is 0 if no computation has five rows.
    """
    medians = [0.0]
    # Each quantity may be rounded or smooth by itself, and the noisier one counts.
    for quantity in ("time_s", "energy_j"):
        deviations = list[float]()
        for of_key in rows.values():
            x = np.log([row.clock_mhz for row in of_key])
            y = np.log([max(getattr(row, quantity), _LEAST_J) for row in of_key])
            for i in range(2, len(of_key) - 2):
                # The row itself is left out, so that its own noise does not hide in the curve.
                near = [i - 2, i - 1, i + 1, i + 2]
                # Lagrange's weights of the cubic through the four neighbours.
                weights = np.array(
                    [math.prod((x[i] - x[k]) / (x[j] - x[k]) for k in near if k != j) for j in near]
                )
                # The deviation has the noise of the row and of its neighbours, by their weights.
                deviations.append(abs(y[i] - weights @ y[near]) / math.hypot(1.0, *weights))
        if deviations:
            medians.append(median(deviations))
    return max(medians)


def _clocks(rows: Rows, control: str, clocks_mhz: Collection[int] | None) -> tuple[int, ...]:
    """Return the measured clocks and those to estimate, highest first."""
    measured = {row.clock_mhz for row in chain(*rows.values())}
    highest = max(measured)
    if clocks_mhz is None:
        # Settings that are evenly spaced have a step, and nothing else is known to exist between
        # them.
        step = math.gcd(*(highest - clock for clock in measured))
        # A small step means that the clocks are not evenly spaced, and observed ones were never
        # set.
        evenly = range(min(measured), highest + 1, step) if step >= _LEAST_SPACING else ()
        clocks_mhz = evenly if len(evenly) <= _MOST_CLOCKS and control != "observed" else ()
    for clock in clocks_mhz:
        if CLOCK.check(clock, "clocks_mhz", ProfileError) > highest:
            raise ProfileError(
                f"clocks_mhz: {clock} is above {highest} {unit_of(control)}, the highest "
                "that was measured; measure it, or leave it out"
            )
    return tuple(sorted({*measured, *clocks_mhz}, reverse=True))


def _kind(table: Rows, control: str, keys: list[Key], clocks: tuple[int, ...]) -> _Kind:
    rows = [table[key] for key in keys]
    # Logarithms need energies above 0.
    for key, key_rows in zip(keys, rows, strict=True):
        for row in key_rows:
            if row.energy_j == 0.0:
                name = word_of(key.name)
                where = f"stage {key.stage} {name} at {row.clock_mhz} {unit_of(control)}"
                raise ProfileError(
                    f"{where}: has an energy of 0 J, from which nothing can be estimated; measure "
                    "it, or ask for plans that take rows as measured"
                )
    # Over the logarithm of the clock, the logarithm of time is nearly a line.
    x = np.log(clocks[0] / np.array(clocks)) / _UNIT
    index = {clock: i for i, clock in enumerate(clocks)}
    places = [np.array([index[row.clock_mhz] for row in key_rows]) for key_rows in rows]
    orders = list(map(_order, rows))
    curves = []
    for quantity, guess in (("time_s", _TIME), ("energy_j", _ENERGY)):
        values = [np.log([getattr(row, quantity) for row in key_rows]) for key_rows in rows]
        # Errors of all rows are pooled, as each alone is known from few windows.
        noise, variances = pooled_errors(rows, quantity)
        points = list(map(Points, places, values, variances, orders))
        # Without standard errors the noise is found from how rows scatter, within wide bounds.
        if noise is None:
            curves.append(Curves(x, points, guess, _DOUBT._replace(noise=_NO_ERRORS)))
        else:
            curves.append(Curves(x, points, guess._replace(noise=max(noise, _LEAST_NOISE)), _DOUBT))
    # Below the lowest clock that any stage has, times are bounded by physics.
    lowest = max(int(positions.max()) for positions in places)
    return _Kind(keys, clocks, lowest, *curves)


def _order(rows: Sequence[Measurement]) -> Floats:
    """Return the place of each row among those of its computation, in the order in which they were
    measured: as they say, else from the highest clock down, as most sweeps go.
    """
    orders = [
        row.evidence.order
        for row in rows
        if row.evidence is not None and row.evidence.order is not None
    ]
    if len(orders) < len(rows):
        return np.arange(len(rows), dtype=float)
    ranks: Floats = np.argsort(np.argsort(orders, kind="stable")).astype(np.float64)
    return ranks


def pooled_errors(
    rows: Sequence[Sequence[Measurement]], quantity: str
) -> tuple[float | None, list[Floats]]:
    """Return the relative standard error of a typical row, and the variance of each row relative to
    it.

    The standard error of a row from a few windows is uncertain itself, so those of all rows are
    pooled: each window is taken to be as noisy as the others. Each row counts by its degrees of
    freedom, so that it does not matter that measuring ended when windows agreed, as they also do by
    chance. Without standard errors there is no typical one, and all rows are alike.
    """
    error = "time_stderr_s" if quantity == "time_s" else "energy_stderr_j"
    with_evidence = [
        (row, row.evidence) for key_rows in rows for row in key_rows if row.evidence is not None
    ]
    # Without evidence all rows are alike, and no typical error is known.
    if not with_evidence:
        return None, [np.ones(len(key_rows)) for key_rows in rows]
    # The variance of a window, weighed by the degrees of freedom of each row.
    of_window = np.average(
        [
            (getattr(evidence, error) / getattr(row, quantity)) ** 2 * evidence.windows
            for row, evidence in with_evidence
        ],
        weights=[max(evidence.windows - 1, 1) for _, evidence in with_evidence],
    )
    # A row of as many windows as the median has the typical error.
    typical = median(evidence.windows for _, evidence in with_evidence)
    windows = [
        [typical if row.evidence is None else row.evidence.windows for row in key_rows]
        for key_rows in rows
    ]
    return math.sqrt(of_window / typical), [
        typical / np.array(key_windows, dtype=float) for key_windows in windows
    ]
