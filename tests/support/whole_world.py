"""A job without a pipeline in virtual time: what iterations take and cost, by physics that the
search does not know.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from perseus_planner.runtime.whole.rank import RankPart, Terms
from perseus_planner.runtime.whole.search import ValueRow, ValueSearch, Window

TOP_MHZ = 1410
CLOCKS = tuple(range(TOP_MHZ, 200, -15))
COUNTER_STEP_S = 0.1


@dataclass
class World:
    """Data-parallel ranks whose iterations end together.

    Attributes:
        memory: Share of the iteration at the highest clock that does not depend on the clock.
        ranks: Number of ranks.
        jitter: Standard deviation of an iteration's time, as a share.
        top_s: Seconds of an iteration at the highest clock.
        factor: Of the time of an iteration of this number at a clock: what else happens.
    """

    memory: float
    ranks: int = 2
    jitter: float = 0.003
    top_s: float = 0.5
    factor: Callable[[int, int], float] = lambda iteration, clock: 1.0
    seed: int = 0
    times_s: list[float] = field(default_factory=list)
    top_times_s: list[float] = field(default_factory=list)
    energy_j: float = 0.0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.now_s = 0.0

    def time_s(self, clock: int) -> float:
        return self.top_s * (self.memory + (1.0 - self.memory) * TOP_MHZ / clock)

    def power_w(self, clock: int) -> float:
        return 90.0 + 310.0 * (clock / TOP_MHZ) ** 2.4

    def cost_j(self, clock: int) -> float:
        return self.ranks * self.time_s(clock) * self.power_w(clock)

    def best_mhz(self, slowdown: float) -> int:
        """The clock of least energy that the slowdown allows, among those that are tried."""
        return min(
            (
                c
                for c in CLOCKS
                if c >= 0.3 * TOP_MHZ and self.time_s(c) <= slowdown * self.top_s * (1 + 1e-9)
            ),
            key=self.cost_j,
        )

    def run(self, clock: int) -> float:
        """Run an iteration; return its time."""
        iteration = len(self.times_s)
        noise = max(0.5, 1.0 + self.jitter * self._random.gauss(0.0, 1.0))
        top_s = self.top_s * noise * self.factor(iteration, TOP_MHZ)
        time_s = (
            top_s
            if clock == TOP_MHZ
            else self.time_s(clock) * noise * self.factor(iteration, clock)
        )
        self.times_s.append(time_s)
        self.top_times_s.append(top_s)
        self.energy_j += self.ranks * self.power_w(clock) * time_s
        self.now_s += time_s
        return time_s

    def power_since(self, energy_j: float, time_s: float) -> float:
        """Return the mean power of all ranks since then, by counters that are late by up to a
        step.
        """
        spread_s = COUNTER_STEP_S * (self._random.random() - self._random.random())
        return (
            (self.energy_j - energy_j)
            / (self.now_s - time_s)
            * (1.0 + spread_s / (self.now_s - time_s))
        )


@dataclass
class Trained:
    """What a run was.

    Attributes:
        search: The search at the end.
        windows: All windows.
        owed_s: The largest debt of the ledger.
        excess_s: The most that one iteration added to it.
        burst_s: The largest that may be owed.
    """

    search: ValueSearch
    windows: list[Window]
    owed_s: float
    excess_s: float
    burst_s: float


def trained(
    world: World,
    iterations: int,
    slowdown: float,
    max_slowdown: float = 0.005,
    lead: int = 2,
    known: Mapping[int, ValueRow] | None = None,
) -> Trained:
    """Train so many iterations; the ranks are equal, so one part stands for all."""
    search, part = ValueSearch(CLOCKS, slowdown, max_slowdown), RankPart(slowdown, max_slowdown)
    search.begin_with(known or {})
    windows: list[Window] = []
    owed_s = excess_s = burst_s = 0.0
    while len(world.times_s) < iterations:
        window = search.decide(part.ledger)
        windows.append(window)
        part.follow(
            Terms(
                window,
                search.values[window.index],
                part.iteration + lead,
                search.reference_s,
                TOP_MHZ,
            )
        )
        begun: tuple[float, float] | None = None
        while not part.has_ended and len(world.times_s) < iterations:
            part.set_index = part.wanted
            if part.is_measuring and begun is None:
                begun = (world.energy_j, world.now_s)
            time_s, before_s = (
                world.run(search.values[part.set_index]),
                part.ledger.owed_s if part.ledger else 0.0,
            )
            part.end(time_s, at_top=part.set_index == 0)
            if part.ledger is not None:
                owed_s, burst_s = max(owed_s, part.ledger.owed_s), max(burst_s, part.ledger.burst_s)
                excess_s = max(excess_s, part.ledger.owed_s - before_s)
        if part.has_ended:
            mean_s, is_whole = part.result()
            power_w = None if begun is None else world.power_since(*begun)
            energy_j = None if mean_s is None or power_w is None else mean_s * power_w
            search.observe(window, mean_s, energy_j, is_whole=is_whole)
    return Trained(search, windows, owed_s, excess_s, burst_s)
