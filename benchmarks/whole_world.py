"""A job without a pipeline in virtual time: what iterations take and cost, by physics that the
search does not know.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from perseus_planner import Profile
from perseus_planner.extensions.autopilot.job import (
    AutopilotJob,
    ComputationObservation,
    Decision,
    RankObservation,
)
from perseus_planner.extensions.autopilot.one_clock import OneClock
from perseus_planner.extensions.autopilot.ranks.rank_ledger import RankLedger
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.runtime.options import AutopilotSettings
from perseus_planner.schedules import WHOLE
from perseus_planner.schedules.pipeline import pipeline_iteration

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
        clocks: Those that can be set, highest first.
    """

    memory: float
    ranks: int = 2
    jitter: float = 0.003
    top_s: float = 0.5
    factor: Callable[[int, int], float] = lambda iteration, clock: 1.0
    seed: int = 0
    clocks: tuple[int, ...] = CLOCKS
    times_s: list[float] = field(default_factory=list)
    top_times_s: list[float] = field(default_factory=list)
    energy_j: float = 0.0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.now_s = 0.0

    def time_s(self, clock: int) -> float:
        """Return the seconds of an iteration at a clock, without noise."""
        return self.top_s * (self.memory + (1.0 - self.memory) * self.clocks[0] / clock)

    def power_w(self, clock: int) -> float:
        """Return what a GPU draws at a clock, watts."""
        return 90.0 + 310.0 * (clock / self.clocks[0]) ** 2.4

    def cost_j(self, clock: int) -> float:
        """Return the joules of an iteration at a clock, without noise."""
        return self.ranks * self.time_s(clock) * self.power_w(clock)

    def best_mhz(self, slowdown: float) -> int:
        """The clock of least energy that the slowdown allows, among those that are tried."""
        return min(
            (
                c
                for c in self.clocks
                if c >= 0.3 * self.clocks[0]
                and self.time_s(c) <= slowdown * self.top_s * (1 + 1e-9)
            ),
            key=self.cost_j,
        )

    def run(self, clock: int) -> float:
        """Run an iteration; return its time."""
        iteration = len(self.times_s)
        noise = max(0.5, 1.0 + self.jitter * self._random.gauss(0.0, 1.0))
        top_s = self.top_s * noise * self.factor(iteration, self.clocks[0])
        time_s = (
            top_s
            if clock == self.clocks[0]
            else self.time_s(clock) * noise * self.factor(iteration, clock)
        )
        self.times_s.append(time_s)
        self.top_times_s.append(top_s)
        self.energy_j += self.ranks * self.power_w(clock) * time_s
        self.now_s += time_s
        return time_s

    def counter_j(self) -> float:
        """Return the mean energy of a rank, by counters that are late by up to a step."""
        late_s = COUNTER_STEP_S * self._random.random()
        return self.energy_j / self.ranks - late_s * self.power_w(self.clocks[0]) / 2


class MeasuredWorld(World):
    """A job whose iteration takes and draws what a measured computation does."""

    def __init__(
        self, rows: Sequence[Measurement], factor: Callable[[int, int], float], seed: int
    ) -> None:
        self._rows = {row.clock_mhz: row for row in rows}
        clocks = tuple(sorted(self._rows, reverse=True))
        super().__init__(0.0, factor=factor, seed=seed, clocks=clocks)

    def time_s(self, clock: int) -> float:
        """See `World.time_s`."""
        return self.top_s * self._rows[clock].time_s / self._rows[self.clocks[0]].time_s

    def power_w(self, clock: int) -> float:
        """See `World.power_w`."""
        return self._rows[clock].energy_j / self._rows[clock].time_s


def noise(kind: str, seed: int) -> Callable[[int, int], float]:
    """Return by what each iteration takes longer, whatever its clock.

    Args:
        kind: "lengths" and percents: log-normal; "tails": a tenth is longer by an exponential with
            a mean of 10 %, and 3e-4 take 2 to 5 times as long; "drift": 1 % per 100; "loader":
            each tenth waits 5 %; "pauses": one in fifty takes 3 times as long; "shared": iterations
            near each other share .5 %; "quiet": none.
        seed: of the draws.
    """
    draws, factors, shared = random.Random(f"{kind}/{seed}"), list[float](), 0.0
    name, _, percents = kind.partition(" ")

    def draw(iteration: int) -> float:
        nonlocal shared
        if name == "lengths":
            spread = float(percents) / 100
            return math.exp(draws.gauss(0.0, spread) - spread**2 / 2)
        if name == "tails":
            longer = 1.0 + (draws.random() < 0.1) * draws.expovariate(10.0)
            return longer * (draws.uniform(2.0, 5.0) if draws.random() < 3e-4 else 1.0)
        if name == "shared":
            shared = 0.9 * shared + draws.gauss(0.0, 0.005 * math.sqrt(1 - 0.9**2))
            return 1.0 + shared
        return {
            "drift": 1.01 ** (iteration / 100),
            "loader": 1.05 if iteration % 10 == 0 else 1.0,
            "pauses": 3.0 if draws.random() < 0.02 else 1.0,
        }.get(name, 1.0)

    def factor(iteration: int, _: int) -> float:
        while len(factors) <= iteration:
            factors.append(draw(len(factors)))
        return factors[iteration]

    return factor


@dataclass
class Trained:
    """What a run was.

    Attributes:
        pilot: What decided.
        decisions: What it decided, of each iteration.
        owed_s: The largest debt of a rank's ledger after a planned iteration; afterwards the search
            charges that, and what it is unsure of.
        excess_s: The most that one iteration added to it.
        burst_s: The largest that may be owed.
        forced: How many iterations a ledger forced to full clocks, or the search to pay it.
    """

    pilot: OneClock
    decisions: list[Decision]
    owed_s: float
    excess_s: float
    burst_s: float
    forced: int

    @property
    def best_mhz(self) -> int:
        """The clock that is best by what is known."""
        return self.pilot.values[self.pilot.best[0]]

    @property
    def effect(self) -> tuple[float, float]:
        """Time as a multiple, and saving, of the best clock by what is known."""
        return self.pilot.best[1:]

    @property
    def reference_s(self) -> float | None:
        """Seconds of an iteration at full clocks, as known."""
        return self.pilot.reference_s


def pilot_of(
    world: World, slowdown: float, max_slowdown: float = 0.005, prior: Profile | None = None
) -> OneClock:
    """Return what decides the clocks of a world."""
    job = AutopilotJob(pipeline_iteration(WHOLE), world.clocks, pipelines=world.ranks)
    return OneClock(job, AutopilotSettings(slowdown, max_slowdown), prior)


def trained(
    world: World,
    iterations: int,
    slowdown: float,
    max_slowdown: float = 0.005,
    lead: int = 2,
    prior: Profile | None = None,
) -> Trained:
    """Train so many iterations; the ranks are equal, so the ledger of one stands for all."""
    pilot, ledger = pilot_of(world, slowdown, max_slowdown, prior), RankLedger()
    decisions = [pilot.decide(number) for number in range(lead)]
    owed_s = excess_s = burst_s = 0.0
    forced = 0
    for number in range(iterations):
        ledger.renew(decisions[number].ledger)
        before_s = ledger.ledger.owed_s if ledger.ledger else 0.0
        version, clock = decisions[number].version, decisions[number].clocks[0][0][0]
        forced += decisions[number].phase == "paying" or (version > 0 and ledger.is_overdrawn)
        if ledger.is_overdrawn:
            version, clock = 0, world.clocks[0]
        time_s, energy_j = world.run(clock), world.counter_j()
        ledger.add(number, time_s, full_clocks=version == 0)
        if ledger.ledger is not None:
            owed_s = max(owed_s, ledger.ledger.owed_s if version else 0.0)
            burst_s = max(burst_s, ledger.ledger.burst_s)
            excess_s = max(excess_s, ledger.ledger.owed_s - before_s)
        ran = ComputationObservation(0.0, time_s, clock)
        pilot.observe(
            [
                RankObservation(
                    *(pipeline, 0, number, version, time_s, (ran,)), metered=(number, energy_j)
                )
                for pipeline in range(world.ranks)
            ]
        )
        decisions.append(pilot.decide(number + lead))
    return Trained(pilot, decisions[:iterations], owed_s, excess_s, burst_s, forced)
