"""The power of computations and of waiting, learnt by regression, as each GPU's counter tells the
energy of all that it ran in an iteration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

# All by hand. Numbers 22 and 31 of `benchmarks/run.py` show what the autopilot saves with them.

_KNOTS = 7  #: clocks at most between which power is taken as linear
#: expected power of a waiting GPU, relative to the highest power
_WAITING = 0.2
#: standard deviation of that power of all ranks together
_WAITING_DOUBT = 0.08
#: standard deviation of that power from one rank to another
_OWN_WAITING = 0.01
_ENERGY_NOISE = 0.002  #: standard deviation of an energy, relative
_DRIFT = 0.002  #: of the level of a stage's power between iterations, relative
#: of the energy that a counter has not shown, as a part of the highest power times its step
_UNREAD = 0.35


class PowerRows:
    """Power of computations by (class, clock), and of waiting.

    Power is linear between a few clocks, at which stages share a curve and deviate from it;
    everything is linear and Gaussian, so each reading of a counter is one update of a Kalman
    filter. What the counter had not shown yet at the end of an iteration it shows in the next one;
    that is a part of the state as well.

    Args:
        clocks_mhz: all clocks, highest first.
        kinds: the number of the kind of each class.
        stages: the stage of each class.
        ranks: the rank of each class.
        gpus: number of GPUs, pipeline by pipeline.
    """

    def __init__(
        self,
        clocks_mhz: Sequence[int],
        kinds: Sequence[int],
        stages: Sequence[int],
        ranks: Sequence[int],
        gpus: int,
    ) -> None:
        clocks = np.asarray(clocks_mhz, dtype=np.float64)
        x = clocks / clocks[0]
        # Knots are fewer than clocks, because power is smooth over the clock.
        knots = np.linspace(x[0], x[-1], min(_KNOTS, len(clocks))) if len(clocks) > 1 else x
        hats = [np.interp(-x, -knots, unit_row) for unit_row in np.eye(len(knots))]
        self._hats = np.array(hats).T  #: (clocks, knots) how much each knot counts at each clock
        self._classes = len(kinds)
        self._knots = len(knots)
        self._ranks = max(ranks) + 1
        self._gpus = gpus
        self._class_ranks = np.asarray(ranks)
        self.top_w = 0.0  #: the highest power, roughly; 0 before it is known
        # The state has powers of all classes, of waiting, and what each counter has not shown yet.
        size = self._classes * self._knots
        #: where the power of each rank's waiting begins
        self._waiting = size
        #: where what each counter has not shown begins; the last one is the next
        self._unread = size + self._ranks
        self._mean = np.zeros(self._unread + gpus + 1)
        # Expected at first is a power that falls with the square of the clock, down to an idle
        # part.
        self._mean[:size] = np.tile(0.3 + 0.7 * knots**2, self._classes)
        self._mean[self._waiting : self._unread] = _WAITING
        self._covariance = np.zeros((len(self._mean), len(self._mean)))
        self._covariance[:size, :size] = _prior(1.0 - knots, np.asarray(kinds), np.asarray(stages))
        waiting = slice(self._waiting, self._unread)
        # Ranks wait nearly alike, so what one's counter tells of waiting tells of the others.
        self._covariance[waiting, waiting] = _WAITING_DOUBT**2 + _OWN_WAITING**2 * np.eye(
            self._ranks
        )
        self._steps_s = np.zeros(gpus)

    def start(self, energy_j: float, busy_s: float, waiting_s: float) -> None:
        """Find the scale of all powers from what GPUs drew at full clocks."""
        self.top_w = energy_j / (busy_s + _WAITING * waiting_s)

    def add(
        self, gpu: int, seconds: Floats, waiting_s: float, energy_j: float, step_s: float
    ) -> None:
        """Learn from the energy of one GPU in one iteration.

        Args:
            gpu: its number, pipeline by pipeline.
            seconds: (classes, clocks) for which it ran each row.
            waiting_s: for which it waited.
            energy_j: joules, as its counter shows.
            step_s: between updates of the counter.
        """
        rank = gpu % self._ranks
        time_s = float(seconds.sum()) + waiting_s
        row = np.zeros(len(self._mean))
        row[: self._waiting] = (seconds @ self._hats).ravel()
        row[self._waiting + rank] = waiting_s
        # What the counter shows now began before and ends early by what it has not shown yet.
        place = self._unread + gpu
        following = len(self._mean) - 1
        doubt = (_UNREAD * step_s) ** 2
        # Before the first reading nothing is known of the counter's lag but its size.
        if not self._steps_s[gpu]:
            self._reset(place, doubt)
            self._steps_s[gpu] = step_s
        self._reset(following, doubt)
        row[place] = 1.0
        row[following] = -1.0
        # The level of a power drifts between iterations, so old readings fade.
        self._drift(rank)
        self._update(row, energy_j / self.top_w, (_ENERGY_NOISE * time_s) ** 2)
        # What this reading lacked is what the next one has too much.
        self._mean[place] = self._mean[following]
        self._covariance[place] = self._covariance[following]
        self._covariance[:, place] = self._covariance[:, following]
        self._covariance[place, place] = self._covariance[following, following]

    def add_row(self, row: int, clock: int, power_w: float, doubt: float) -> None:
        """Learn the power of a row, watts, known with a relative standard error."""
        weights = np.zeros(len(self._mean))
        weights[row * self._knots : (row + 1) * self._knots] = self._hats[clock]
        value = power_w / self.top_w
        self._update(weights, value, (doubt * value) ** 2)

    def tables(self) -> tuple[Floats, Floats, Floats]:
        """Return the power of each row and its standard error, (classes, clocks), and of
        waiting, (ranks,): watts.
        """
        # The filter's state holds powers at knots, so rows and errors follow by interpolation.
        size = self._waiting
        hats = self._hats
        mean = self._mean[:size].reshape(self._classes, self._knots) @ hats.T
        blocks = [
            self._covariance[i : i + self._knots, i : i + self._knots]
            for i in range(0, size, self._knots)
        ]
        variance = np.array([np.einsum("ck,kl,cl->c", hats, block, hats) for block in blocks])
        # A waiting GPU draws something, even where the regression says it does not.
        waiting = np.maximum(self._mean[self._waiting : self._unread], 0.02)
        error = np.sqrt(np.maximum(variance, 0.0))
        return self.top_w * np.maximum(mean, 0.05), self.top_w * error, self.top_w * waiting

    def energy(self, seconds: Floats, waiting_s: Floats) -> tuple[float, Floats]:
        """Return joules of (classes, clocks) seconds and (ranks,) waits, and their gradient in
        the state.
        """
        row = np.zeros(len(self._mean))
        row[: self._waiting] = (seconds @ self._hats).ravel()
        row[self._waiting : self._unread] = waiting_s
        row *= self.top_w
        return float(row @ self._mean), row

    def variance(self, gradient: Floats) -> float:
        """Return the variance of a quantity with this gradient."""
        return max(0.0, float(gradient @ self._covariance @ gradient))

    def _reset(self, place: int, variance: float) -> None:
        self._mean[place] = 0.0
        self._covariance[place] = self._covariance[:, place] = 0.0
        self._covariance[place, place] = variance

    def _drift(self, rank: int) -> None:
        of_rank = np.repeat(self._class_ranks == rank, self._knots)
        level = _DRIFT * self._mean[: self._waiting] * of_rank
        self._covariance[: self._waiting, : self._waiting] += np.outer(level, level)

    def _update(self, row: Floats, value: float, noise: float) -> None:
        gain = self._covariance @ row
        variance = float(row @ gain) + noise
        self._mean += gain * ((value - float(row @ self._mean)) / variance)
        self._covariance -= np.outer(gain, gain) / variance


def _prior(u: Floats, kinds: NDArray[np.int64], stages: NDArray[np.int64]) -> Floats:
    """Return the covariance of the powers of all classes at the knots, relative to the highest
    power.

    Args:
        u: (knots,) how far each is below the highest clock, relative.
        kinds: (classes,)
        stages: (classes,)
    """
    # A line and a walk from the highest clock, at which only levels differ.
    line = np.outer(u, u)
    walk = np.minimum.outer(u, u)
    # What all classes share, then those of a kind, those of a stage, and each by itself.
    every = 0.10**2 + 0.4**2 * line + 0.10**2 * walk
    of_kind = 0.08**2 + 0.2**2 * line + 0.05**2 * walk
    of_stage = 0.04**2 + 0.1**2 * line + 0.01**2 * walk
    own = 0.02**2 + 0.07**2 * line + 0.02**2 * walk
    same_kind = kinds[:, None] == kinds
    same_stage = stages[:, None] == stages
    ones = np.ones_like(same_kind)
    parts = (
        (ones, every),
        (same_kind, of_kind),
        (same_stage, of_stage),
        (np.eye(len(kinds), dtype=bool), own),
    )
    # Kronecker products, as each share is a mask over classes times a shape over knots.
    total: Floats = sum(
        (np.kron(mask, part) for mask, part in parts), np.zeros((len(kinds) * len(u),) * 2)
    )
    return total
