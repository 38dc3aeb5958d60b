"""The local search over one clock a rank is on time, and as good as trying all neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from perseus_planner.solver.exchanges import Path, Replay, exchange

RANKS, OPTIONS, CASES = 4, 6, 20


class Toy:
    """An iteration in which every case takes as long as the longest of some sums of ranks."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        #: (ranks, options, cases), seconds: slower from option to option
        self.time_s = np.cumsum(random.uniform(0.5, 1.5, (RANKS, OPTIONS, CASES)), axis=1)
        self.options_j = (-np.cumsum(random.uniform(0.1, 2, (RANKS, OPTIONS)), axis=1)).tolist()
        self.paths = random.integers(0, 3, (5, RANKS))
        self.limit_s = 1.8 * np.quantile(self.seconds([0] * RANKS), 0.9)
        self.replays = 0

    def each_s(self, chosen: Sequence[int]) -> np.ndarray:
        """Return the (paths, cases) seconds of each sum."""
        return self.paths @ self.time_s[range(RANKS), list(chosen)]

    def seconds(self, chosen: Sequence[int]) -> np.ndarray:
        return self.each_s(chosen).max(axis=0)

    def are_on_time(self, seconds: np.ndarray) -> np.ndarray:
        return np.quantile(seconds, 0.9, axis=-1) <= self.limit_s

    def replay(self, chosen: Sequence[int]) -> Replay:
        self.replays += 1
        longest = self.paths[self.each_s(chosen).argmax(axis=0)].T
        option_s = [longest[rank] * self.time_s[rank] for rank in range(RANKS)]
        return Replay(bool(self.are_on_time(self.seconds(chosen))), Path(np.zeros(CASES), option_s))

    def cost_j(self, chosen: Sequence[int]) -> float:
        return sum(of_rank[i] for of_rank, i in zip(self.options_j, chosen, strict=True))


@pytest.mark.parametrize("seed", range(8))
def test_no_rank_and_no_pair_of_ranks_could_save_more_in_time(seed: int):
    toy = Toy(seed)
    chosen = exchange([0] * RANKS, toy.options_j, toy.replay, toy.are_on_time)
    assert toy.are_on_time(toy.seconds(chosen))
    assert toy.cost_j(chosen) < toy.cost_j([0] * RANKS)
    neighbours = [
        other
        for other in product(range(OPTIONS), repeat=RANKS)
        # One rank slower, or one slower and one faster.
        if sum(a > b for a, b in zip(other, chosen, strict=True)) == 1
        and sum(a < b for a, b in zip(other, chosen, strict=True)) <= 1
        # No move has a step of five options.
        and all(abs(a - b) != 5 for a, b in zip(other, chosen, strict=True))
        and toy.cost_j(other) < toy.cost_j(chosen)
    ]
    assert not any(toy.are_on_time(toy.seconds(other)) for other in neighbours)
    # The paths that were seen refuse the others.
    assert toy.replays < 30
