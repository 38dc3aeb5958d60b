"""The benchmark that compares a training with the runtime and without it, in pairs."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch")
import gpu_cost


class Turns:
    """Trainings whose time drifts, on a machine that differs from one turn to the next."""

    def __init__(self, seed: int, more: float, noise: float) -> None:
        self._random = random.Random(seed)
        self._more = more
        self._noise = noise
        self.count = 0

    def __call__(self, with_runtime: bool) -> float:
        self.count += 1
        drift = 1.0 + 0.002 * self.count
        noise = self._random.gauss(1.0, self._noise)
        return 0.1 * drift * noise * (1.0 + self._more * with_runtime)


def test_pairs_end_when_the_interval_is_narrow_and_it_holds_the_truth():
    held = 0
    for seed in range(100):
        turns = Turns(seed, more=0.02, noise=0.01)
        ratio, pairs = gpu_cost.pairs_until(turns, lambda: False)
        assert ratio.width < gpu_cost.WIDTH
        assert ratio.pairs == len(pairs) >= gpu_cost.LEAST_PAIRS
        held += ratio.low <= 1.02 <= ratio.high
    # Ending as soon as it is narrow prefers pairs that are alike by chance.
    assert held >= 85


def test_pairs_end_with_the_time_and_say_how_wide_the_interval_is():
    turns = Turns(1, more=0.0, noise=0.2)
    ratio, pairs = gpu_cost.pairs_until(turns, lambda: turns.count >= 8)
    assert len(pairs) == 4
    assert ratio.width > gpu_cost.WIDTH
    assert ratio.low < ratio.mean < ratio.high
