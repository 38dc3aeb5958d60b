"""Drawn traffic for a large model on one simulated H100, at a fixed clock or at that of a
`ServerClock`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

from event_model import Asked, Physics
from serving_world import World

from perseus_planner.extensions.inference.online import OnlineSettings, ServerClock
from perseus_planner.gpu.simulated.model import OpCost, find_model

_MODEL = find_model("h100-sxm", "h100-sxm", "GPU", "{}")
CLOCKS = tuple(mhz for mhz in _MODEL.clocks_mhz if mhz >= 0.4 * _MODEL.clocks_mhz[0])[::6]
EVERY_S = 0.05
SETTINGS = {
    kind: OnlineSettings(2.0 if kind == "code" else 0.4, 0.1) for kind in ("busy", "idle", "code")
}
_WEIGHTS, _INPUT, _OUTPUT = OpCost(1e9, 16e9), OpCost(16e9, 1e5), OpCost(16e9, 1.5e8)
"""8e9 parameters of 16 bits; 1,200 tokens of context in the cache of each request."""


class Outcome(NamedTuple):
    """What became of traffic."""

    energy_j: float
    late: float  #: share of the requests
    lowest_mhz: int


@lru_cache
def physics(clock_mhz: int) -> Physics:
    @cache
    def iteration(tokens: int, requests: int) -> tuple[float, float]:
        load = _MODEL.load(_WEIGHTS + _INPUT * tokens + _OUTPUT * requests)
        return load.time_s(clock_mhz), load.energy_j(clock_mhz)

    return iteration


def idle_w(clock_mhz: int) -> float:
    """Return the power without requests: some of it goes with the clock."""
    return 70.0 + 50.0 * clock_mhz / CLOCKS[0]


def traffic(kind: str, length_s: float, seed: int = 1) -> list[Asked]:
    """Return conversations of a busy or nearly idle server, or bursts of long prompts of code."""
    drawn, now_s, requests = random.Random(seed), 0.0, list[Asked]()
    rate_per_s = {"busy": 12.0, "idle": 0.4, "code": 0.8}[kind]
    while now_s < length_s:
        now_s += drawn.expovariate(rate_per_s)
        for _ in range(drawn.choice((1, 1, 5)) if kind == "code" else 1):
            inputs, outputs = (2500, 30) if kind == "code" else (900, 220)
            requests.append(
                Asked(
                    now_s,
                    1 + int(drawn.expovariate(1 / inputs)),
                    1 + int(drawn.expovariate(1 / outputs)),
                )
            )
    return requests


def served(kind: str, length_s: float, choose: Callable[[World], int]) -> Outcome:
    """Serve traffic, with the clock that `choose` returns every 100 ms."""
    requests, settings = traffic(kind, length_s), SETTINGS[kind]
    world, lowest = World(requests, physics, idle_w, CLOCKS[0]), CLOCKS[0]
    now_s = 0.0
    while not world.is_done:
        now_s += EVERY_S
        world.run(now_s)
        world.clock_mhz = choose(world)
        lowest = min(lowest, world.clock_mhz)
    late = sum(each.ttft_s > settings.ttft_s or each.tbt_s > settings.tbt_s for each in requests)
    return Outcome(world.energy_j, late / len(requests), lowest)


def at_fixed(kind: str, length_s: float, clock_mhz: int) -> Outcome:
    return served(kind, length_s, lambda _: clock_mhz)


def online(kind: str, length_s: float) -> tuple[Outcome, ServerClock]:
    chooser = ServerClock(CLOCKS, SETTINGS[kind])

    def choose(world: World) -> int:
        return chooser.observe(world.state(), world.energy_j)

    return served(kind, length_s, choose), chooser


if __name__ == "__main__":
    for kind in SETTINGS:
        fixed = [at_fixed(kind, 600.0, clock_mhz) for clock_mhz in CLOCKS]
        best = min(
            (each for each in fixed if each.late <= SETTINGS[kind].late),
            key=lambda each: each.energy_j,
        )
        kept, chooser = online(kind, 600.0)
        for name, outcome in (("best fixed clock", best), ("online", kept)):
            saved = 100 * (1 - outcome.energy_j / fixed[0].energy_j)
            print(f"{kind}: {name}: {saved:.1f} % less energy, {100 * outcome.late:.2f} % late")
