"""An instance while a trace is replayed: a server with continuous batching, or, where the profile
does not say what tokens cost, its power alone.

A server runs one iteration after the other. An iteration gives each request that has its first
token one more, and computes up to a chunk of the prompts of those that have not, first come, first
served (chunked prefill). It takes what a token of each of these requests takes together with as
many others, and what each input token takes: both come from closed loops of the profile.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from perseus_planner.inference.cells import Configuration, InferenceProfile, RequestClass
    from perseus_planner.inference.programme import Pool


class Request(NamedTuple):
    """A request of the trace."""

    number: int  #: in the trace
    arrival_s: float  #: seconds after the first request
    of: RequestClass  #: its class
    input_tokens: int
    output_tokens: int


class Served(NamedTuple):
    """A request that has got all of its tokens."""

    request: Request
    ttft_s: float  #: time to the first token, seconds
    tbt_s: float  #: mean time between tokens, seconds; 0 if there is one


class Pace(NamedTuple):
    """What the iterations of an instance take at one configuration."""

    input_s: float  #: seconds and joules of an input token
    input_j: float
    #: requests that get a token -> seconds and joules of an iteration, without input tokens.
    decodes: tuple[tuple[float, float, float], ...]
    idle_w: float  #: watts without requests

    def decode(self, requests: int) -> tuple[float, float]:
        """Return seconds and joules of an iteration with so many requests: on the line between
        those that were measured, or beyond them.
        """
        low = self.decodes[0]
        if not requests:
            return 0.0, 0.0
        if len(self.decodes) == 1 or requests <= low[0]:
            return low[1], low[2]
        place = next((k for k, row in enumerate(self.decodes) if row[0] >= requests), -1)
        (begin, *below), (end, *above) = self.decodes[place - 1], self.decodes[place]
        part = (requests - begin) / (end - begin)
        time_s, energy_j = (a + part * (b - a) for a, b in zip(below, above, strict=True))
        return max(time_s, low[1]), max(energy_j, low[2])


def read_paces(profile: InferenceProfile) -> dict[Configuration, Pace]:
    """Return what iterations take at each configuration that has closed loops with the costs of
    tokens.
    """
    paces = {}
    for at in profile.configurations:
        rows = [
            (of, cell)
            for (of, configuration), cells in profile.cells.items()
            for cell in cells
            if configuration == at and cell.concurrency and cell.input_token_s is not None
        ]
        if not rows:
            continue
        # With few prompts an iteration's own time counts as theirs: the least is that of tokens.
        input_s = min(cell.input_token_s or 0.0 for _, cell in rows)
        input_j = min(cell.input_token_j or 0.0 for _, cell in rows)
        by_loop: dict[int, list[tuple[float, float, float]]] = {}
        for of, cell in rows:
            outputs, loop = of.output_tokens - 1, cell.concurrency or 1
            # One of its iterations computes its prompt, or the end of it.
            count, inputs = loop * outputs / of.output_tokens, of.input_tokens / outputs
            time_s = (cell.output_token_s or 0.0) + inputs * ((cell.input_token_s or 0.0) - input_s)
            joules = (cell.output_token_j or 0.0) + inputs * ((cell.input_token_j or 0.0) - input_j)
            by_loop.setdefault(loop, []).append((count, count * time_s, count * joules))
        decodes = sorted(
            (fmean(a), fmean(b), fmean(c))  # a row for each class
            for a, b, c in (zip(*loops, strict=True) for loops in by_loop.values())
        )
        paces[at] = Pace(input_s, input_j, tuple(decodes), profile.idle_w(at))
    return paces


class Instance:
    """What all instances have: what they are planned for, and when they take requests.

    Attributes:
        pool: What was planned.
        planned_tokens_per_s: Of it alone.
        from_s: When it takes requests, seconds after the first one.
        until_s: Until when.
        energy_j: What it has used, joules.
        given: Tokens of all requests that it was given since it was planned.
    """

    def __init__(self, pool: Pool, from_s: float) -> None:
        self.energy_j = 0.0
        self.plan(pool, from_s)

    def plan(self, pool: Pool, from_s: float) -> None:
        """Take requests as planned, from some time on."""
        self.pool, self.from_s, self.until_s, self.given = pool, from_s, math.inf, 0.0
        self.planned_tokens_per_s = max(1.0, sum(pool.serves.values())) / pool.instances

    @property
    def count(self) -> int:
        """How many requests it has."""
        return 0

    def add(self, request: Request) -> None:
        """Take a request, at its arrival."""
        self.given += request.input_tokens + request.output_tokens

    def advance(self, until_s: float) -> Iterator[Served]:
        """Go on until some time, and yield the requests that have got all of their tokens."""
        raise NotImplementedError


class BatchingServer(Instance):
    """A server with continuous batching.

    Args:
        pool: What it is planned for.
        from_s: When it is there.
        paces: What iterations take.
        chunk_tokens: Most input tokens of an iteration.
        most: Most requests at once.
    """

    def __init__(
        self,
        pool: Pool,
        from_s: float,
        paces: Mapping[Configuration, Pace],
        chunk_tokens: int,
        most: int,
    ) -> None:
        super().__init__(pool, from_s)
        self._paces, self._chunk_tokens, self._most = paces, chunk_tokens, most
        self._now_s, self._step = from_s, 0
        self._waiting: deque[Request] = deque()
        self._prompts: deque[tuple[Request, int]] = deque()  #: with the input tokens that are left
        #: step of the last token, number, request, and when its first token came
        self._running: list[tuple[int, int, Request, float]] = []
        self._decode: tuple[tuple[Configuration, int], tuple[float, float]] | None = None

    @property
    def count(self) -> int:
        """How many requests it has."""
        return len(self._waiting) + len(self._prompts) + len(self._running)

    def add(self, request: Request) -> None:
        """Take a request; see `Instance.add`."""
        super().add(request)
        self._waiting.append(request)

    def advance(self, until_s: float) -> Iterator[Served]:
        """Run all iterations that begin before; see `Instance.advance`."""
        pace = self._paces[self.pool.at]
        while self._now_s < until_s:
            while self._waiting and len(self._prompts) + len(self._running) < self._most:
                request = self._waiting.popleft()
                self._prompts.append((request, max(1, request.input_tokens)))
            if not (self._prompts or self._running):
                if until_s < math.inf:
                    self.energy_j += pace.idle_w * (until_s - self._now_s)
                    self._now_s = until_s
                return
            time_s, energy_j = self._decoded(pace)
            if self._prompts:
                firsts, tokens = self._compute(self._chunk_tokens)
                self._run(1, time_s + tokens * pace.input_s, energy_j + tokens * pace.input_j)
                for request in firsts:
                    last = self._step + max(1, request.output_tokens) - 1
                    entry = (last, request.number, request, self._now_s)
                    heapq.heappush(self._running, entry)
            else:
                steps = self._running[0][0] - self._step
                if until_s < math.inf:
                    steps = min(steps, max(1, math.ceil((until_s - self._now_s) / time_s)))
                self._run(steps, time_s, energy_j)
            while self._running and self._running[0][0] <= self._step:
                _, _, request, first_s = heapq.heappop(self._running)
                between = max(1, request.output_tokens - 1)
                ttft_s = first_s - request.arrival_s
                yield Served(request, ttft_s, (self._now_s - first_s) / between)

    def _decoded(self, pace: Pace) -> tuple[float, float]:
        key = self.pool.at, len(self._running)
        if self._decode is None or self._decode[0] != key:
            self._decode = key, pace.decode(len(self._running))
        return self._decode[1]

    def _run(self, steps: int, time_s: float, energy_j: float) -> None:
        self._step += steps
        self._now_s += steps * time_s
        self.energy_j += steps * energy_j

    def _compute(self, tokens: int) -> tuple[list[Request], int]:
        """Compute up to so many input tokens; return the requests whose prompts are done, and how
        many there were.
        """
        done, left = list[Request](), tokens
        while self._prompts and left:
            request, rest = self._prompts.popleft()
            if rest > left:
                self._prompts.appendleft((request, rest - left))
                return done, tokens
            left -= rest
            done.append(request)
        return done, tokens - left


class Fluid(Instance):
    """The power of an instance at the load that it is given; it has no latencies.

    Args:
        pool: What it is planned for.
        from_s: When it is there.
        profile: What requests cost.
    """

    def __init__(self, pool: Pool, from_s: float, profile: InferenceProfile) -> None:
        super().__init__(pool, from_s)
        self._profile, self._now_s = profile, from_s
        self._got: dict[RequestClass, list[float]] = {}  #: requests, input and output tokens

    def add(self, request: Request) -> None:
        """Take a request; see `Instance.add`."""
        super().add(request)
        got = self._got.setdefault(request.of, [0.0, 0.0, 0.0])
        for place, value in enumerate((1.0, request.input_tokens, request.output_tokens)):
            got[place] += value

    def advance(self, until_s: float) -> Iterator[Served]:
        """Count the energy since the last time, at the mean load since then."""
        length_s = until_s - self._now_s
        if 0 < length_s < math.inf:
            self.energy_j += self._power_w(length_s) * length_s
            self._now_s = until_s
            self._got.clear()
        yield from ()

    def _power_w(self, length_s: float) -> float:
        """Return the mean power: each class has its share of the instance's time, on its curve."""
        idle_w, parts = self._profile.idle_w(self.pool.at), []
        for of, (count, inputs, outputs) in self._got.items():
            cells = self._profile.feasible(of, self.pool.at)
            cells = cells or self._profile.feasible(self.pool.longest, self.pool.at)
            points = [cell.carried(inputs / count, outputs / count) for cell in cells]
            parts.append(((inputs + outputs) / length_s / points[-1].tokens_per_s, points))
        load, power_w = sum(share for share, _ in parts), 0.0
        for share, points in parts:
            x = min(1.0, load) * points[-1].tokens_per_s
            below, w = 0.0, idle_w
            for point in points:
                if x <= point.tokens_per_s:
                    part = (x - below) / (point.tokens_per_s - below)
                    w += part * (point.power_w - w)
                    break
                below, w = point
            # More than it carries is carried by what another one would need.
            power_w += share / load * w * max(1.0, load)
        return power_w if parts else idle_w
