"""A server with continuous batching, iteration by iteration and request by request: what the
product's servers are held against. It shares nothing with them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from completions_server import INPUT, OUTPUT, WEIGHTS

from perseus_planner.extensions.inference.serving import ServedRow, Shape
from perseus_planner.gpu.simulated.model import OpCost, find_model

Physics = Callable[[int, int], tuple[float, float]]
"""Input tokens and requests that get a token -> seconds and joules of an iteration."""


@dataclass
class Asked:
    """A request, and when it got its tokens."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    left: int = 0
    done: int = 0
    first_s: float = 0.0
    last_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival_s

    @property
    def tbt_s(self) -> float:
        return (self.last_s - self.first_s) / max(1, self.output_tokens - 1)


def gpu_physics(clock_mhz: int, name: str = "a100-sxm", slower: float = 10.0) -> Physics:
    """Return what iterations take on a simulated GPU, with the costs of `completions_server`."""
    model = find_model(name, name, "GPU", "{}")

    def physics(tokens: int, requests: int) -> tuple[float, float]:
        cost: OpCost = WEIGHTS + INPUT * tokens + OUTPUT * requests
        load = model.load(cost)
        return slower * load.time_s(clock_mhz), slower * load.energy_j(clock_mhz)

    return physics


def run(
    requests: Sequence[Asked],
    physics: Physics,
    idle_w: float,
    *,
    chunk: int = 512,
    most: int = 64,
    concurrency: int | None = None,
    until_s: float = 0.0,
) -> tuple[float, float]:
    """Serve requests at their arrivals, or, in a closed loop, as soon as fewer are there; return
    when it ended and the joules. It goes on to `until_s` at least.
    """
    waiting, there = list(requests), list[Asked]()
    now_s = energy_j = 0.0
    while waiting or there:
        if concurrency is not None:
            for each in waiting[: concurrency - len(there)]:
                each.arrival_s = now_s
        if not there and waiting[0].arrival_s > now_s:
            energy_j += idle_w * (waiting[0].arrival_s - now_s)
            now_s = waiting[0].arrival_s
        while waiting and waiting[0].arrival_s <= now_s and len(there) < (concurrency or most):
            waiting[0].left = max(1, waiting[0].input_tokens)
            there.append(waiting.pop(0))
        budget, computed = chunk, []
        for each in there:
            tokens = min(each.left, budget)
            budget -= tokens
            computed.append(tokens)
        decoding = sum(each.left == 0 for each in there)
        time_s, joules = physics(chunk - budget, decoding)
        now_s, energy_j = now_s + time_s, energy_j + joules
        for each, tokens in zip(there, computed, strict=True):
            if each.left == 0 or each.left == tokens:
                each.done += 1
                each.first_s, each.last_s = each.first_s or now_s, now_s
            each.left -= tokens
        there = [each for each in there if each.done < each.output_tokens or each.left]
    if until_s > now_s:
        energy_j, now_s = energy_j + idle_w * (until_s - now_s), until_s
    return now_s, energy_j


def poisson(rate_per_s: float, count: int, shape: Shape, seed: int = 1) -> list[Asked]:
    """Return requests of a class that arrive at random."""
    drawn, now_s, requests = random.Random(seed), 0.0, []
    for _ in range(count):
        now_s += drawn.expovariate(rate_per_s)
        requests.append(Asked(now_s, *shape))
    return requests


def measured(
    physics: Physics,
    idle_w: float,
    shape: Shape,
    setting: int,
    concurrency: int | None,
    rate_per_s: float | None,
    count: int = 400,
) -> ServedRow:
    """Return the row that `planner inference profile` would measure of this server."""
    requests = [Asked(0.0, *shape) for _ in range(count)]
    if rate_per_s is not None:
        requests = poisson(rate_per_s, count, shape)
    time_s, energy_j = run(requests, physics, idle_w, concurrency=concurrency)
    ttfts_s, tbts_s = (
        sorted(getattr(each, name) for each in requests) for name in ("ttft_s", "tbt_s")
    )
    return ServedRow(
        input=shape.input_tokens,
        output=shape.output_tokens,
        concurrency=concurrency,
        rate_per_s=rate_per_s,
        tensor_degree=1,
        setting=setting,
        tokens_per_s=count * sum(shape) / time_s,
        energy_j=energy_j / count,
        energy_error_j=0.0,
        ttft_p50_s=ttfts_s[count // 2],
        ttft_s=ttfts_s[int(0.95 * count)],
        tbt_p50_s=tbts_s[count // 2] if shape.output_tokens > 1 else None,
        tbt_s=tbts_s[int(0.95 * count)] if shape.output_tokens > 1 else None,
        idle_w=idle_w,
    )
