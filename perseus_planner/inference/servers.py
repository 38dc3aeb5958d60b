"""A pool while a trace is replayed: its backlog, its queue by deadline, its clock, and the energy
that it needs.

An instance meets its objective while its load, over a minute, is at most the largest one at which
the profile says so. So each request fills an instance for its tokens over that load, and may start
while the pool is filled for less than `burst_s`, a minute. Others wait; the one with the earliest
deadline starts first. The deadline is the objective of the time to the first token, less that time
where the profile has it; a request that starts later is late.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from perseus_planner.inference.cells import Configuration, InferenceProfile, RequestClass
    from perseus_planner.inference.programme import Pool


class Request(NamedTuple):
    """A request as it waits; the order is that of deadlines."""

    deadline_s: float  #: when it must start, seconds after the first request
    number: int  #: of the request in the trace
    arrival_s: float  #: seconds after the first request
    of: RequestClass  #: its class, as predicted
    real: RequestClass  #: its class
    tokens: float  #: input and output tokens


class Server:
    """A pool at work.

    Attributes:
        pool: what was planned.
        at: tensor degree and clock now.
        instances: how many serve now.
        late: numbers of the requests that were late.
    """

    def __init__(
        self,
        profile: InferenceProfile,
        pool: Pool,
        burst_s: float,
        mean_tokens: dict[RequestClass, float],
    ) -> None:
        self.pool, self.at, self.instances = pool, pool.at, pool.instances
        self.late: set[int] = set()
        self.queue: list[Request] = []
        self.filled_s = 0.0  # when all that has started is done, at the largest load
        self._profile, self._burst_s, self._mean_tokens = profile, burst_s, mean_tokens
        self._waiting_s = 0.0  # what the queue fills one instance for
        self._served: dict[RequestClass, list[float]] = defaultdict(
            lambda: [0.0, 0.0]
        )  # requests and tokens

    def load_tokens_per_s(self, of: RequestClass, at: Configuration | None = None) -> float:
        """Return the largest load of an instance for a class; that of its longest class where
        `of` is too slow.
        """
        at = at or self.at
        cells = self._profile.feasible(of, at) or self._profile.feasible(self.pool.longest, at)
        return cells[-1].tokens_per_s if cells else 1.0

    def slack_s(self, of: RequestClass) -> float:
        """Return how long a request may wait, seconds; negative where its objective is violated
        in any case.
        """
        cells = self._profile.feasible(of, self.at)
        return self._profile.ttft_s(of) - (cells[-1].ttft_s or 0.0) if cells else -1.0

    def wait_s(self, now_s: float) -> float:
        """Return how long a request that arrives now would wait behind all others, seconds."""
        if self.instances == 0:
            return np.inf
        return max(0.0, self.filled_s + self._waiting_s / self.instances - self._burst_s - now_s)

    def add(self, request: Request) -> None:
        """Queue a request, and count it."""
        self.queue_again(request)
        counts = self._served[request.real]
        counts[0] += 1
        counts[1] += request.tokens

    def queue_again(self, request: Request) -> None:
        """Queue a request that was counted elsewhere."""
        heapq.heappush(self.queue, request)
        self._waiting_s += self._work_s(request)

    def start(self, until_s: float) -> None:
        """Start all requests that can start until then."""
        while self.queue and self.instances and self.filled_s - self._burst_s <= until_s:
            request = heapq.heappop(self.queue)
            work_s = self._work_s(request)
            self._waiting_s = max(0.0, self._waiting_s - work_s) if self.queue else 0.0
            begin_s = max(self.filled_s - self._burst_s, request.arrival_s)
            if begin_s > request.deadline_s:
                self.late.add(request.number)
            self.filled_s = max(self.filled_s, begin_s) + work_s / self.instances

    def resize(self, instances: int, now_s: float) -> None:
        """Change the number of instances that serve; those share the backlog."""
        if instances and self.instances:
            self.filled_s = now_s + max(0.0, self.filled_s - now_s) * self.instances / instances
        elif instances:
            self.filled_s = max(self.filled_s, now_s)
        self.instances = instances

    def faster(self, of: RequestClass, settings: Collection[int]) -> Configuration | None:
        """Return the configuration with another clock at which the most load can be carried, if
        it is more than now.
        """
        best = max(
            self._settings([*self.pool.serves, of], settings),
            key=lambda at: self.load_tokens_per_s(of, at),
            default=None,
        )
        return (
            best
            if best is not None and self.load_tokens_per_s(of, best) > self.load_tokens_per_s(of)
            else None
        )

    def thriftier(
        self, settings: Collection[int], length_s: float, change_j: float
    ) -> Configuration:
        """Return the clock of least energy for what was served lately, if it saves more than
        `change_j` a GPU.
        """
        served = [request_class for request_class, (count, _) in self._served.items() if count]
        fits = [
            configuration
            for configuration in self._settings([*self.pool.serves, *served], settings)
            if sum(
                self._served[request_class][1]
                / self.load_tokens_per_s(request_class, configuration)
                for request_class in served
            )
            <= self.instances * length_s
        ]
        if not fits or not served:
            return self.at
        best = min(fits, key=lambda at: self.energy_j(length_s, at))
        return (
            best
            if self.energy_j(length_s) - self.energy_j(length_s, best) > change_j * self.pool.gpus
            else self.at
        )

    def energy_j(self, length_s: float, at: Configuration | None = None) -> float:
        """Return the energy of what was served in the last `length_s`, idle instances included,
        joules.
        """
        at = at or self.at
        idle_w = self._profile.idle_w(at)
        tokens = sum(tokens for _, tokens in self._served.values())
        load = tokens / length_s / max(self.instances, 1)
        busy_j = sum(
            count * self._request_j(request_class, at, load, idle_w)
            for request_class, (count, _) in self._served.items()
            if count
        )
        return busy_j + idle_w * self.instances * length_s

    def forget(self) -> None:
        """Begin to count anew what is served."""
        self._served.clear()

    def _work_s(self, request: Request) -> float:
        return request.tokens / self.load_tokens_per_s(request.of)

    def _settings(
        self, classes: Iterable[RequestClass], settings: Collection[int]
    ) -> list[Configuration]:
        """Return the configurations of its tensor degree with one of the settings that serve all
        classes.
        """
        return [
            configuration
            for configuration in self._profile.configurations
            if configuration.tensor_degree == self.at.tensor_degree
            and configuration.setting in settings
            and all(
                self._profile.feasible(request_class, configuration) for request_class in classes
            )
        ]

    def _request_j(self, of: RequestClass, at: Configuration, load: float, idle_w: float) -> float:
        """Return the energy of a request beyond what idle instances need, at some load of each
        instance, joules.
        """
        cells = self._profile.feasible(of, at)
        if (
            not cells
        ):  # its objective is violated, so the profile has no energy: take the most of its class
            class_cells = [
                cell
                for configuration in self._profile.configurations
                for cell in self._profile.feasible(of, configuration)
            ]
            return max((cell.energy_j or 0.0 for cell in class_cells), default=0.0)
        loads = [cell.tokens_per_s for cell in cells]
        tokens = self._mean_tokens[of]
        powers_w = [(cell.energy_j or 0.0) * cell.tokens_per_s / tokens - idle_w for cell in cells]
        load = min(max(load, loads[0]), loads[-1])
        return float(np.interp(load, loads, powers_w)) * tokens / load
