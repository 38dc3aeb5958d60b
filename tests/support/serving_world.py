"""A server of the event model in virtual time, at a clock that can be changed while it serves; it
states what `/metrics` of a server does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from completions_server import BUCKETS, Histogram
from event_model import Asked, Physics

from perseus_planner.extensions.inference import metrics
from perseus_planner.extensions.inference.metrics import ServerState


class World:
    """One server.

    Args:
        requests: What arrives.
        physics: Clock -> what iterations take.
        idle_w: Clock -> power without requests.
    """

    def __init__(
        self,
        requests: Sequence[Asked],
        physics: Callable[[int], Physics],
        idle_w: Callable[[int], float],
        clock_mhz: int,
        chunk: int = 2048,
        most: int = 256,
    ) -> None:
        self._arriving, self._physics, self._idle_w = deque(requests), physics, idle_w
        self.clock_mhz, self._chunk, self._most = clock_mhz, chunk, most
        self.now_s = self.energy_j = 0.0
        self._waiting: deque[Asked] = deque()
        self._there: list[Asked] = []
        self._ttft, self._tbt, self._tpot = Histogram("ttft"), Histogram("tbt"), Histogram("tpot")
        self._inputs = self._outputs = 0

    @property
    def is_done(self) -> bool:
        return not (self._arriving or self._waiting or self._there)

    def run(self, until_s: float) -> None:
        """Run the iterations that begin before."""
        while self.now_s < until_s:
            while self._arriving and self._arriving[0].arrival_s <= self.now_s:
                self._waiting.append(self._arriving.popleft())
            # As in vLLM, a request waits until there is room in an iteration for its prompt.
            left = self._chunk - sum(each.left for each in self._there)
            while self._waiting and len(self._there) < self._most and left > 0:
                self._waiting[0].left = self._waiting[0].input_tokens
                left -= self._waiting[0].left
                self._there.append(self._waiting.popleft())
            if not self._there:
                next_s = self._arriving[0].arrival_s if self._arriving else math.inf
                end_s = min(until_s, next_s)
                self.energy_j += self._idle_w(self.clock_mhz) * (end_s - self.now_s)
                self.now_s = end_s
                continue
            self._iterate()

    def _iterate(self) -> None:
        budget, computed = self._chunk, []
        for each in self._there:
            tokens = min(each.left, budget)
            budget -= tokens
            computed.append(tokens)
        decoding = sum(each.left == 0 for each in self._there)
        time_s, joules = self._physics(self.clock_mhz)(self._chunk - budget, decoding)
        self.now_s += time_s
        self.energy_j += joules
        self._inputs += self._chunk - budget
        for each, tokens in zip(self._there, computed, strict=True):
            if each.left == tokens:
                if each.done:
                    self._tbt.add(self.now_s - each.last_s)
                else:
                    each.first_s = self.now_s
                    self._ttft.add(each.ttft_s)
                each.done, each.last_s = each.done + 1, self.now_s
                self._outputs += 1
            each.left -= tokens
        for each in self._there:
            if each.done == each.output_tokens:
                self._tpot.add(each.tbt_s)
        self._there = [each for each in self._there if each.done < each.output_tokens or each.left]

    def state(self) -> ServerState:
        return ServerState(
            self.now_s,
            float(len(self._there)),
            float(len(self._waiting)),
            float(self._inputs),
            float(self._outputs),
            _histogram(self._ttft),
            _histogram(self._tbt),
            _histogram(self._tpot),
        )


def _histogram(histogram: Histogram) -> metrics.Histogram:
    counts, total = [], 0.0
    for count in histogram.counts:
        total += count
        counts.append(total)
    return metrics.Histogram((*BUCKETS, math.inf), tuple(counts), histogram.sum)
