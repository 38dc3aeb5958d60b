"""The replay of a trace through pools that are planned again and again.

Pools are planned on what was asked for in the period before, or on what will be (`prediction`).
Changes take time: where GPUs are free, the instances before serve until the new ones are there,
else those that are not needed any more stop at once. An instance that stops finishes what it has.

A request goes to a pool that is planned for its class, else to one for longer ones; there to the
instance that has the fewest requests, and of these the one that was given least, each beside what
it is planned for.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.base.errors import InfeasibleGpus, UsageError
from perseus_planner.inference.plan import allowed, plan_policy
from perseus_planner.inference.programme import (
    PUBLISHED,
    ChangeCosts,
    Pool,
    changed_gpus,
    largest_share,
)
from perseus_planner.inference.servers import (
    BatchingServer,
    Fluid,
    Instance,
    Request,
    read_paces,
)
from perseus_planner.inference.workload import Load, scaled

if TYPE_CHECKING:
    from collections.abc import Iterable

    from perseus_planner.inference.cells import InferenceProfile, RequestClass
    from perseus_planner.inference.workload import Trace

PREDICTIONS = ("last", "perfect")
_GAP = 1e-3  #: of the energy of a period above its bound
_TICK_S = 300.0  #: after which energy is counted
_SPARE = 0.999  #: of the load that too few GPUs carry


@dataclass(frozen=True)
class Settings:
    """How a cluster is run.

    Raises:
        UsageError: If a number is too small.
    """

    gpus: int  #: how many there are
    costs: ChangeCosts = PUBLISHED  #: of changes
    epoch_s: float = 1800.0  #: how long pools stay as they are, seconds
    prediction: str = "last"  #: "last": each period is as the one before; "perfect": as it will be
    chunk_tokens: int = 2048  #: most input tokens of an iteration of a server
    most_requests: int = 256  #: most requests of a server at once

    def __post_init__(self) -> None:
        if self.epoch_s < 1 or self.chunk_tokens < 1 or self.most_requests < 1:
            raise UsageError(
                "settings: an epoch has 1 s or more, and servers have a token and a request or more"
            )


class Period(NamedTuple):
    """What happened in a part of the trace."""

    start_s: float  #: when it began, seconds
    power_w: float  #: mean power, watts, changes included
    gpus: int  #: GPUs in use at its end
    requests: int  #: how many arrived
    late: int | None  #: how many of them were late; None if the profile does not tell


@dataclass(frozen=True)
class Replay:
    """What became of a trace under a policy."""

    policy: str  #: name in `POLICIES`
    requests: int  #: how many there were
    #: how many got their first token, or the others, later than the objectives; None if the profile
    #: does not say what tokens cost, so that there are no times.
    late: int | None
    ttft_p95_s: float | None  #: time to the first token, seconds; None likewise
    tbt_p95_s: float | None  #: mean time between tokens, seconds; None likewise
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
        self.paces = read_paces(profile)
        self.has_times = set(self.paces) == set(profile.configurations)
        self.pools: tuple[Pool, ...] = ()
        self.instances: list[Instance] = []
        self.ended_j = self.change_j = 0.0
        self.changes, self.short_periods = [0, 0, 0], 0
        self.latencies_s: dict[int, tuple[float, float]] = {}

    def run(self) -> Replay:
        trace, settings = self.trace, self.settings
        periods, before_j, request = [], 0.0, 0
        length_s = min(_TICK_S, settings.epoch_s)
        ticks = int(trace.end_s // length_s) + 1
        every = max(1, round(settings.epoch_s / length_s))
        starts = list[int]()
        for tick in range(ticks):
            now_s = tick * length_s
            if tick % every == 0:
                self._plan(now_s, every * length_s)
            starts.append(request)
            while request < len(trace.times_s) and trace.times_s[request] < now_s + length_s:
                self._arrive(request)
                request += 1
            end_s = min(now_s + length_s, max(trace.end_s, now_s + 1.0))
            gpus = self._advance(self.instances, end_s)
            energy_j = self._energy_j()
            periods.append((now_s, (energy_j - before_j) / (end_s - now_s), gpus))
            before_j = energy_j
        self._advance(self.instances, float("inf"))
        late = self._late()
        return Replay(
            policy=self.policy,
            requests=request,
            late=len(late) if self.has_times else None,
            ttft_p95_s=self._quantile(0),
            tbt_p95_s=self._quantile(1),
            energy_j=self._energy_j(),
            change_j=self.change_j,
            most_gpus=max(gpus for _, _, gpus in periods),
            changes=(self.changes[0], self.changes[1], self.changes[2]),
            short_periods=self.short_periods,
            periods=tuple(
                Period(
                    *period,
                    end - start,
                    sum(start <= each < end for each in late) if self.has_times else None,
                )
                for period, start, end in zip(periods, starts, [*starts[1:], request], strict=True)
            ),
        )

    def _energy_j(self) -> float:
        return self.ended_j + self.change_j + sum(each.energy_j for each in self.instances)

    def _quantile(self, which: int) -> float | None:
        if not self.has_times:
            return None
        return float(np.quantile([times_s[which] for times_s in self.latencies_s.values()], 0.95))

    def _late(self) -> list[int]:
        """Return the numbers of the requests that were later than their objectives."""
        most_s = [self.profile.ttft_s(of) for of in self.profile.classes]
        return [
            number
            for number, (ttft_s, tbt_s) in self.latencies_s.items()
            if ttft_s > most_s[self.classes[number]] or tbt_s > self.profile.objectives.tbt_s
        ]

    def _advance(self, instances: Iterable[Instance], until_s: float) -> int:
        """Let instances go on; return the GPUs of those that go on after that."""
        gpus = 0
        for instance in list(instances):
            for request, ttft_s, tbt_s in instance.advance(until_s):
                self.latencies_s[request.number] = ttft_s, tbt_s
            if instance.until_s <= until_s and not instance.count:
                self.instances.remove(instance)
                self.ended_j += instance.energy_j
            gpus += instance.pool.at.tensor_degree
        return gpus

    def _plan(self, now_s: float, length_s: float) -> None:
        """Plan the next period, and begin to change to it."""
        demand = self._predict(now_s, length_s)
        if not demand:
            return
        before, settings = self.pools, self.settings
        options = (length_s, before or None, settings.costs, _GAP)
        try:
            plan = plan_policy(self.policy, self.profile, demand, settings.gpus, *options)
        except InfeasibleGpus:
            self.short_periods += 1
            only = allowed(self.policy, self.profile, demand)
            share = largest_share(self.profile, demand, settings.gpus, only) * _SPARE
            if share <= 0 and not before:
                raise
            if share <= 0:
                return
            demand = scaled(demand, share)
            plan = plan_policy(self.policy, self.profile, demand, settings.gpus, *options)
        self.change_j += plan.change_j
        changed, resharded, new = changed_gpus(before, plan.pools) if before else (0, 0, 0)
        if changed:
            self.changes[0 if new else 1 if resharded else 2] += 1
        costs = settings.costs
        change = costs.instance if new else costs.resharding if resharded else costs.clock
        free = settings.gpus - sum(pool.gpus for pool in before) >= resharded
        ready_s = now_s + (change.time_s if before else 0.0)
        self._use(plan.pools, now_s, ready_s, ready_s if free else now_s)

    def _use(self, pools: tuple[Pool, ...], now_s: float, ready_s: float, stop_s: float) -> None:
        """Have these pools: instances of the same tensor degree go on, new ones are there from
        `ready_s`, and others stop at `stop_s`.
        """
        self.pools = pools
        had = [instance for instance in self.instances if instance.until_s == float("inf")]
        wanted = [pool for pool in pools for _ in range(pool.instances)]
        for pool in pools:
            same = [each for each in had if each.pool.at.tensor_degree == pool.at.tensor_degree]
            same.sort(key=lambda each: (each.pool.longest != pool.longest, each.pool.at != pool.at))
            for instance in same[: pool.instances]:
                self._advance([instance], now_s)
                instance.plan(pool, min(instance.from_s, ready_s))
                had.remove(instance)
                wanted.remove(pool)
        for instance in had:
            instance.until_s = stop_s
        self.instances += [self._new(pool, ready_s) for pool in wanted]

    def _new(self, pool: Pool, from_s: float) -> Instance:
        if not self.has_times:
            return Fluid(pool, from_s, self.profile)
        settings = self.settings
        return BatchingServer(
            pool, from_s, self.paces, settings.chunk_tokens, settings.most_requests
        )

    def _predict(self, now_s: float, length_s: float) -> dict[RequestClass, Load]:
        """Return the load of the period that begins now; classes that were seen before have one
        request at least.
        """
        begin_s = now_s if now_s == 0 or self.settings.prediction == "perfect" else now_s - length_s
        demand = self.trace.demand(self.profile, self.classes, begin_s, begin_s + length_s)
        count = int(np.searchsorted(self.trace.times_s, now_s))
        for number, seen in Counter(self.classes[:count].tolist()).items():
            chosen = self.classes[:count] == number
            inputs = float(self.trace.input_tokens[:count][chosen].sum()) / seen
            tokens = max(1.0, float(self.trace.tokens[:count][chosen].sum()) / seen)
            load = Load(1 / length_s, tokens / length_s, 1.0, inputs / length_s)
            demand.setdefault(self.profile.classes[number], load)
        return demand

    def _arrive(self, number: int) -> None:
        """Give a request to an instance."""
        of, now_s = self.profile.classes[self.classes[number]], float(self.trace.times_s[number])
        there = [instance for instance in self.instances if instance.until_s > now_s]
        planned = [instance for instance in there if of in instance.pool.serves]
        longer = [instance for instance in there if instance.pool.longest.covers(of)]
        # Those that are there now, else the first ones that will be.
        candidates = next(
            (
                ready
                for group in (planned, longer, there)
                if (ready := [instance for instance in group if instance.from_s <= now_s])
            ),
            planned or longer or there,
        )
        if self.has_times:
            self._advance(candidates, now_s)
        chosen = min(
            candidates,
            key=lambda each: (
                each.from_s > now_s and each.from_s,
                each.count / each.planned_tokens_per_s,
                each.given / each.planned_tokens_per_s,
            ),
        )
        inputs, outputs = (
            int(tokens[number]) for tokens in (self.trace.input_tokens, self.trace.output_tokens)
        )
        chosen.add(Request(number, now_s, of, inputs, outputs))
