"""How long computations take by the work of their microbatch, learnt from the times of iterations
at full clocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from perseus_planner.solver.batch import Law

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

Key: TypeAlias = "tuple[int, str]"

ITERATIONS = 10
"""So many iterations at full clocks tell the laws."""
_AGAIN = (2, 4, 8)  #: so many times as many tell them better; then they stay
_SAMPLES = 8  #: computations for each number of a law
_ROUNDS = 20  #: of reweighting
_TUNING = 1.345  #: standard deviations from which a time counts less (Huber)
_UNVARIED = 1e-6  #: relative spread of work below which a slope cannot be told
_STIFFNESS = 1e-6  #: keeps slopes of work that varies alike small


def fit_law(work: Floats, time_s: Floats) -> Law:
    """Return the affine law that times follow, robustly: by Huber's weights, reweighted.

    Where work does not vary, its slope is 0; where two numbers vary alike, they share the slope.

    Args:
        work: (n, numbers) work of the microbatch of each computation.
        time_s: (n,) what each took, seconds.
    """
    mean, spread = work.mean(axis=0), work.std(axis=0)
    varied = spread > _UNVARIED * np.maximum(np.abs(mean), 1e-300)
    scaled = (work[:, varied] - mean[varied]) / spread[varied]
    design = np.column_stack([np.ones(len(work)), scaled])
    penalty = _STIFFNESS * len(work) * np.eye(design.shape[1])
    penalty[0, 0] = 0.0
    weight: Floats = np.ones(len(work))
    found: Floats = np.zeros(design.shape[1])
    for _ in range(_ROUNDS):
        weighted = design * weight[:, None]
        found = np.asarray(np.linalg.solve(design.T @ weighted + penalty, weighted.T @ time_s))
        missed = np.abs(time_s - design @ found)
        noise = 1.4826 * float(np.median(missed))
        before, weight = weight, np.minimum(1.0, _TUNING * noise / np.maximum(missed, 1e-300))
        if noise == 0.0 or np.abs(weight - before).max() < 1e-3:
            break
    slopes: Floats = np.zeros(work.shape[1])
    slopes[varied] = found[1:] / spread[varied]
    fixed_s = float(found[0] - slopes @ mean)
    return Law(fixed_s, tuple(map(float, slopes)))


class LawLearner:
    """Learns the laws of the computations of one rank."""

    def __init__(self) -> None:
        self._samples: dict[Key, list[tuple[Floats, float]]] = {}
        self._iterations = 0
        self._due = [ITERATIONS, *(ITERATIONS * times for times in _AGAIN)]
        self.laws: Mapping[Key, Law] | None = None  #: None before they are known

    @property
    def is_done(self) -> bool:
        """Whether nothing more is learnt: what takes longer from now on is slow, not large."""
        return not self._due

    def add(self, seen: Sequence[tuple[Key, Floats, float]]) -> bool:
        """Learn from computations of one more iteration that ran at full clocks.

        Args:
            seen: (stage, kind), work of the microbatch, and seconds of each.

        Returns:
            Whether there are new laws.
        """
        if not seen or self.is_done:
            return False
        for key, work, time_s in seen:
            samples = self._samples.setdefault(key, [])
            if samples and len(samples[0][0]) != len(work):  # the function has changed
                samples.clear()
            samples.append((work, time_s))
        self._iterations += 1
        numbers = 1 + len(seen[0][1])
        fewest = min(map(len, self._samples.values()))
        if self._iterations < self._due[0] or fewest < _SAMPLES * numbers:
            return False
        while self._due and self._due[0] <= self._iterations:
            del self._due[0]
        self.laws = {
            key: fit_law(
                np.array([work for work, _ in samples]), np.array([time_s for _, time_s in samples])
            )
            for key, samples in self._samples.items()
        }
        return True
