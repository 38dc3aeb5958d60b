"""The replay of a trace through pools that change: instances every 30 minutes, degrees every 5,
clocks every 5 seconds.

Pools are planned on what was asked for in the period before, or on what will be (`prediction`).
GPUs are taken into use and given back with the instances; between, tensor degrees are planned on
the GPUs in use. Changes take time: where GPUs are free, the pools before serve until the new ones
are ready, else the GPUs that change serve nobody meanwhile.

A request that its pool cannot start in time climbs a ladder: the next larger pool that can; a
higher clock, if the profile says that it carries more; and else the queue, where the earliest
deadline is first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.base.errors import InfeasibleGpus, UsageError
from perseus_planner.inference.plan import BASELINE, allowed, plan_policy
from perseus_planner.inference.programme import (
    PUBLISHED,
    ChangeCosts,
    Pool,
    changed_gpus,
    largest_share,
)
from perseus_planner.inference.servers import Request, Server
from perseus_planner.inference.workload import Load, scaled

if TYPE_CHECKING:
    from perseus_planner.inference.cells import Configuration, InferenceProfile, RequestClass
    from perseus_planner.inference.workload import Trace

PREDICTIONS = ("last", "perfect")
_GAP = 1e-3  #: of the energy of a period above its bound
_LEAST_CLOCKS_S = 0.1  #: between clock changes
_SPARE = 0.999  #: of the load that too few GPUs carry


@dataclass(frozen=True)
class Settings:
    """How a cluster is run.

    Raises:
        UsageError: If the times do not decrease or are too short, or a share is not from 0 to 1.
    """

    gpus: int  #: how many there are
    costs: ChangeCosts = PUBLISHED  #: of changes
    instances_s: float = 1800.0  #: time between changes of the number of GPUs in use, seconds
    sharding_s: float = 300.0  #: time between changes of tensor degrees, seconds
    clocks_s: float = 5.0  #: time between changes of clocks, seconds
    prediction: str = "last"  #: "last": each period is as the one before; "perfect": as it will be
    #: share of requests whose output is predicted one class too long or too short.
    mispredicted: float = 0.0
    seed: int = 0  #: of these
    burst_s: float = 60.0  #: for how long a pool may be filled ahead, seconds

    def __post_init__(self) -> None:
        if not self.instances_s >= self.sharding_s >= self.clocks_s >= _LEAST_CLOCKS_S:
            raise UsageError(
                "periods: instances change no more often than sharding, that no more than clocks, "
                f"and those no more than every {_LEAST_CLOCKS_S:g} s"
            )
        if not 0 <= self.mispredicted <= 1:
            raise UsageError(
                f"mispredicted: {self.mispredicted!r} is not a share of requests; give 0 to 1"
            )


class Period(NamedTuple):
    """What happened between two changes of sharding."""

    start_s: float  #: when it began, seconds
    power_w: float  #: mean power, watts, changes included
    gpus: float  #: mean number of GPUs in use
    requests: int  #: how many arrived
    late: int  #: how many of them were late


@dataclass(frozen=True)
class Replay:
    """What became of a trace under a policy."""

    policy: str  #: name in `POLICIES`
    requests: int  #: how many there were
    late: int  #: how many were late
    moved: int  #: how many were served by a pool that was not planned for their class
    energy_j: float  #: joules, changes included
    change_j: float  #: joules of the changes
    most_gpus: int  #: most GPUs in use
    changes: tuple[int, int, int]  #: how often instances, sharding and clocks changed
    short_periods: int  #: periods in which the GPUs did not carry the predicted load
    periods: tuple[Period, ...]  #: what happened, in the order of time

    @property
    def gpus(self) -> float:
        """Mean number of GPUs in use."""
        return sum(period.gpus for period in self.periods) / len(self.periods)


def replay(
    profile: InferenceProfile, trace: Trace, settings: Settings, policy: str = "planner"
) -> Replay:
    """Replay a trace.

    Args:
        profile: what requests cost.
        trace: the requests.
        settings: how the cluster is run.
        policy: name in `POLICIES` of how configurations are chosen.

    Raises:
        UsageError: If a class of the trace has no configuration that meets its objective.
        InfeasibleGpus: If the GPUs cannot serve every class at all.
    """
    return _Cluster(profile, trace, settings, policy).run()


class _Cluster:
    def __init__(
        self, profile: InferenceProfile, trace: Trace, settings: Settings, policy: str
    ) -> None:
        self.profile, self.trace, self.settings, self.policy = profile, trace, settings, policy
        self.classes = trace.classes(profile)
        self.predicted = _mispredicted(profile, self.classes, settings)
        totals = np.bincount(self.classes, weights=trace.tokens, minlength=len(profile.classes))
        counts = np.bincount(self.classes, minlength=len(profile.classes))
        self.mean_tokens = {
            request_class: max(float(total), 1.0) / max(int(count), 1)
            for request_class, total, count in zip(profile.classes, totals, counts, strict=True)
        }
        every = {configuration.setting for configuration in profile.configurations}
        self.clocks = {max(every)} if policy in (BASELINE, "degree") else every
        self.servers: list[Server] = []
        self.coming: tuple[float, tuple[Pool, ...], int] | None = (
            None  # when, what, and GPUs in use then
        )
        self.late: set[int] = set()
        self.moved = self.short_periods = 0
        self.energy_j = self.change_j = 0.0
        self.changes = [0, 0, 0]
        self.in_use = self.most_gpus = 0
        self.planned: dict[bool, dict[RequestClass, Load]] = {}
        self.per_tick: list[tuple[float, int]] = []  # energy so far, and GPUs in use

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The pools that serve, with their clocks of now."""
        return tuple(replace(server.pool, at=server.at) for server in self.servers)

    def run(self) -> Replay:
        settings, trace = self.settings, self.trace
        ticks = int(trace.end_s // settings.clocks_s) + 1
        every = [
            max(1, round(period_s / settings.clocks_s))
            for period_s in (settings.sharding_s, settings.instances_s)
        ]
        request = 0
        for tick in range(ticks):
            now_s = tick * settings.clocks_s
            if tick:
                self._tick(now_s)
            if tick % every[1] == 0:
                self._plan(now_s, every[1] * settings.clocks_s, more_gpus=True)
            elif tick % every[0] == 0:
                self._plan(now_s, every[0] * settings.clocks_s, more_gpus=False)
            while (
                request < len(trace.times_s) and trace.times_s[request] < now_s + settings.clocks_s
            ):
                self._arrive(request)
                request += 1
        self._tick(ticks * settings.clocks_s)
        for server in self.servers:
            server.resize(max(1, server.pool.instances), ticks * settings.clocks_s)
            server.start(np.inf)
            self.late |= server.late
        return Replay(
            policy=self.policy,
            requests=request,
            late=len(self.late),
            moved=self.moved,
            energy_j=self.energy_j + self.change_j,
            change_j=self.change_j,
            most_gpus=self.most_gpus,
            changes=(self.changes[0], self.changes[1], self.changes[2]),
            short_periods=self.short_periods,
            periods=self._periods(every[0]),
        )

    def _periods(self, ticks: int) -> tuple[Period, ...]:
        """Return what happened in each period of so many ticks."""
        starts = range(0, len(self.per_tick), ticks)
        length_s = ticks * self.settings.clocks_s
        requests = np.bincount((self.trace.times_s // length_s).astype(int), minlength=len(starts))
        late_s = self.trace.times_s[sorted(self.late)]
        late = np.bincount((late_s // length_s).astype(int), minlength=len(starts))
        periods, before_j = [], 0.0
        for number, first in enumerate(starts):
            energies_j, gpus = zip(*self.per_tick[first : first + ticks], strict=True)
            power_w = (energies_j[-1] - before_j) / (len(gpus) * self.settings.clocks_s)
            before_j = energies_j[-1]
            mean = sum(gpus) / len(gpus)
            periods.append(
                Period(number * length_s, power_w, mean, int(requests[number]), int(late[number]))
            )
        return tuple(periods)

    def _tick(self, now_s: float) -> None:
        """End a period between clock changes: start what can start, count energy, choose clocks,
        finish changes.
        """
        costs, length_s = self.settings.costs, self.settings.clocks_s
        for server in self.servers:
            server.start(now_s)
            self.energy_j += server.energy_j(length_s)
            configuration = server.thriftier(self.clocks, length_s, costs.clock.energy_j)
            self._set_clock(server, configuration)
            server.forget()
        self.per_tick.append((self.energy_j + self.change_j, self.in_use))
        if self.coming is not None and self.coming[0] <= now_s:
            _, pools, in_use = self.coming
            self.coming = None
            self._take(in_use)
            self._use(pools, now_s)

    def _set_clock(self, server: Server, at: Configuration) -> None:
        if at != server.at:
            server.at = at
            self.changes[2] += 1
            self.change_j += self.settings.costs.clock.energy_j * server.pool.gpus

    def _plan(self, now_s: float, length_s: float, *, more_gpus: bool) -> None:
        """Plan the next period, on all GPUs or those in use, and begin to change to it; not
        while a change goes on.
        """
        demand = self._predict(now_s, length_s)
        if self.coming is not None or not demand or self.planned.get(more_gpus) == demand:
            return
        before, costs, gpus = self.pools, self.settings.costs, self.settings.gpus
        if not more_gpus:  # GPUs in use without an instance need what re-sharding does, and no more
            costs, gpus = replace(costs, instance=costs.resharding), self.in_use
        options = (length_s, before if before else None, costs, _GAP)
        try:
            plan = plan_policy(self.policy, self.profile, demand, gpus, *options)
        except InfeasibleGpus:
            self.short_periods += 1
            share = (
                largest_share(
                    self.profile, demand, gpus, allowed(self.policy, self.profile, demand)
                )
                * _SPARE
            )
            if share <= 0 and not before:
                raise
            if share <= 0:
                return
            plan = plan_policy(self.policy, self.profile, scaled(demand, share), gpus, *options)
        _, changed, new = changed_gpus(before, plan.pools) if before else (0, 0, 0)
        self.change_j += plan.change_j
        self.changes[not more_gpus or new == 0] += changed > 0
        in_use = plan.gpus if more_gpus else self.in_use
        free = gpus - sum(pool.gpus for pool in before) >= changed
        if changed:
            self.coming = (
                now_s + (costs.instance.time_s if new else costs.resharding.time_s),
                plan.pools,
                in_use,
            )
            self._take(
                max(self.in_use, plan.gpus, (sum(pool.gpus for pool in before) + changed) * free)
            )
            if not free:
                self._use(plan.pools, now_s, changed)
        else:
            self.changes[2] += plan.change_j > 0
            self._take(in_use)
            self._use(plan.pools, now_s)
        self.planned[more_gpus] = demand

    def _take(self, gpus: int) -> None:
        self.in_use, self.most_gpus = gpus, max(gpus, self.most_gpus)

    def _predict(self, now_s: float, length_s: float) -> dict[RequestClass, Load]:
        """Return the load of the period that begins now; classes that were seen before have one
        request at least.
        """
        begin_s = now_s if now_s == 0 or self.settings.prediction == "perfect" else now_s - length_s
        demand = self.trace.demand(self.profile, self.predicted, begin_s, begin_s + length_s)
        for number in np.unique(self.predicted[: np.searchsorted(self.trace.times_s, now_s)]):
            request_class = self.profile.classes[number]
            demand.setdefault(
                request_class, Load(1 / length_s, self.mean_tokens[request_class] / length_s)
            )
        return demand

    def _use(self, pools: Sequence[Pool], now_s: float, unready: int = 0) -> None:
        """Let other pools serve; those that go on keep what they have begun, and what waits is
        queued again.
        """
        self.planned.clear()
        before = {(server.pool.longest, server.at.tensor_degree): server for server in self.servers}
        had = Counter[int]()
        for server in self.servers:
            had[server.at.tensor_degree] += server.pool.instances
        waiting = [request for server in self.servers for request in server.queue]
        self.late.update(*(server.late for server in self.servers))
        self.servers = []
        for pool in pools:
            server = Server(self.profile, pool, self.settings.burst_s, self.mean_tokens)
            degree = pool.at.tensor_degree
            ready = min(pool.instances, had[degree]) if unready else pool.instances
            had[degree] -= ready
            same = before.get((pool.longest, degree))
            server.instances = same.instances if same is not None else ready
            server.filled_s = same.filled_s if same is not None else now_s
            server.resize(ready, now_s)
            self.servers.append(server)
        for request in waiting:
            self._choose(request.of, now_s).queue_again(request)

    def _arrive(self, number: int) -> None:
        """Serve a request; one that grows beyond its prediction begins again in a pool for its
        class.
        """
        real, predicted = (
            self.profile.classes[self.classes[number]],
            self.profile.classes[self.predicted[number]],
        )
        grown = real.output_tokens > predicted.output_tokens
        for request_class, served_as in (
            ((predicted, predicted), (real, real)) if grown else ((predicted, real),)
        ):
            now_s, tokens = float(self.trace.times_s[number]), float(self.trace.tokens[number])
            server = self._choose(request_class, now_s)
            self.moved += request_class not in server.pool.serves
            server.add(
                Request(
                    now_s + server.slack_s(request_class),
                    number,
                    now_s,
                    request_class,
                    served_as,
                    tokens,
                )
            )
            server.start(now_s)

    def _choose(self, of: RequestClass, now_s: float) -> Server:
        """Return the pool for a request: the first step of the ladder that is in time, else the
        shortest wait.
        """
        for server in self.servers:
            server.start(now_s)
        planned = [server for server in self.servers if of in server.pool.serves]
        larger = [
            server
            for server in self.servers
            if server not in planned and server.pool.longest.covers(of)
        ]
        planned.sort(key=lambda server: server.wait_s(now_s))
        larger.sort(key=lambda server: (server.pool.longest, server.wait_s(now_s)))
        ladder = [server for server in (*planned, *larger) if server.slack_s(of) >= 0]
        for server in ladder:
            if server.wait_s(now_s) <= server.slack_s(of):
                return server
        for server in ladder:
            if (configuration := server.faster(of, self.clocks)) is not None:
                self._set_clock(server, configuration)
                return server
        return min(ladder or self.servers, key=lambda server: server.wait_s(now_s))


def _mispredicted(
    profile: InferenceProfile,
    classes: np.ndarray[tuple[int], np.dtype[np.int64]],
    settings: Settings,
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the predicted class of each request: for some, the one with the next shorter or
    longer output.
    """
    random = np.random.default_rng(settings.seed)
    chosen = random.random(len(classes)) < settings.mispredicted
    longer = random.random(len(classes)) < 0.5
    neighbours = np.array(
        [_neighbours(profile, request_class) for request_class in profile.classes]
    )
    return np.where(chosen, neighbours[classes, longer.astype(int)], classes)


def _neighbours(profile: InferenceProfile, of: RequestClass) -> tuple[int, int]:
    """Return the places of the classes with the next shorter and longer output; the other one,
    if there is but one.
    """
    row = [
        number
        for number, request_class in enumerate(profile.classes)
        if request_class.input_tokens == of.input_tokens
    ]
    place = row.index(profile.classes.index(of))
    shorter, longer = max(place - 1, 0), min(place + 1, len(row) - 1)
    return row[shorter if shorter < place else longer], row[longer if longer > place else shorter]
