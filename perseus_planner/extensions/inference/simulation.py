"""The replay of a trace through pools that are planned again and again.

Pools are planned on what was asked for in the period before, or on what will be (`prediction`).
Changes take time: where GPUs are free, the instances before serve until the new ones are there,
else those that are not needed any more stop at once. An instance that stops finishes what it has.

A request goes to a pool that is planned for its class, else to one for longer ones; there to the
instance that has the fewest requests, and of these the one that was given least, each beside what
it is planned for.

An instance is a server with continuous batching, or, where the profile does not say what tokens
cost, its power alone. A server runs one iteration after the other. An iteration gives each request
that has its first token one more, and computes up to a chunk of the prompts of those that have not,
first come, first served (chunked prefill). It takes what a token of each of these requests takes
together with as many others, and what each input token takes: both come from closed loops of the
profile.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, starmap
from operator import attrgetter, itemgetter
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from perseus_planner.base.errors import InfeasibleGpus, UsageError
from perseus_planner.extensions.inference.plan import (
    POLICIES,
    PUBLISHED,
    ChangeCosts,
    Pool,
    changed_gpus,
    largest_share,
    plan_pools,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from perseus_planner.extensions.inference.workload import (
        Configuration,
        InferenceProfile,
        Load,
        RequestClass,
        Trace,
    )


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
        # Nothing decodes, so the iteration has input alone.
        low = self.decodes[0]
        if not requests:
            return 0.0, 0.0
        # One measured loop tells no line, and fewer requests than the smallest take as long as it.
        if len(self.decodes) == 1 or requests <= low[0]:
            return low[1], low[2]
        # Beyond the largest loop, the line of the last two goes on.
        upper = next((k for k, row in enumerate(self.decodes) if row[0] >= requests), -1)
        begin, *below = self.decodes[upper - 1]
        end, *above = self.decodes[upper]
        part = (requests - begin) / (end - begin)
        time_s, energy_j = (a + part * (b - a) for a, b in zip(below, above, strict=True))
        # A line beyond its points may fall, but no iteration is shorter than the smallest.
        return max(time_s, low[1]), max(energy_j, low[2])


_LOOP = attrgetter(
    "concurrency", "input_token_s", "input_token_j", "output_token_s", "output_token_j"
)


def read_paces(profile: InferenceProfile) -> dict[Configuration, Pace]:
    """Return what iterations take at each configuration that has closed loops with the costs of
    tokens.
    """
    paces = {}
    # Only configurations with closed loops, as only these know how many requests were at once.
    for at in profile.configurations:
        rows = [
            (request_class, *of_cell)
            for (request_class, configuration), cells in profile.cells.items()
            for of_cell in map(_LOOP, cells)
            if configuration == at and None not in of_cell
        ]
        if not rows:
            continue
        # With few prompts an iteration's own time counts as theirs: the least is that of tokens.
        least_s, least_j = (min(row[column] for row in rows) for column in (2, 3))
        # Classes differ in length, and loops of one size are averaged over them.
        by_loop: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
        for request_class, loop, input_s, input_j, output_s, output_j in rows:
            outputs = request_class.output_tokens - 1
            # One of its iterations computes its prompt, or the end of it.
            count = loop * outputs / request_class.output_tokens
            inputs = request_class.input_tokens / outputs
            time_s = output_s + inputs * (input_s - least_s)
            joules = output_j + inputs * (input_j - least_j)
            by_loop[loop].append((count, count * time_s, count * joules))
        decodes = sorted(
            (fmean(a), fmean(b), fmean(c))  # a row for each class
            for a, b, c in (zip(*loops, strict=True) for loops in by_loop.values())
        )
        paces[at] = Pace(least_s, least_j, tuple(decodes), profile.idle_w(at))
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
        self.pool = pool
        self.from_s = from_s
        self.until_s = math.inf
        self.given = 0.0
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
        self._paces = paces
        self._chunk_tokens = chunk_tokens
        self._most = most
        self._now_s = from_s
        self._step = 0
        self._waiting: deque[Request] = deque()
        self._prompts: deque[tuple[Request, int]] = deque()  #: with the input tokens that are left
        #: step of the last token, number, request, and when its first token came
        self._running: list[tuple[int, int, Request, float]] = []

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
            # The batch takes requests up to its limit, first come, first served.
            while self._waiting and len(self._prompts) + len(self._running) < self._most:
                request = self._waiting.popleft()
                self._prompts.append((request, max(1, request.input_tokens)))
            # An empty server idles until the time is up or it stops; without an end there is
            # nothing to do.
            if not (self._prompts or self._running):
                if until_s < math.inf:
                    end_s = max(self._now_s, min(until_s, self.until_s))
                    self.energy_j += pace.idle_w * (end_s - self._now_s)
                    self._now_s = end_s
                return
            # All that have their first token get one more in each iteration.
            time_s, energy_j = pace.decode(len(self._running))
            # Iterations with prompts go one by one, as who gets a first token changes each of them.
            if self._prompts:
                firsts, tokens = self._compute(self._chunk_tokens)
                self._run(1, time_s + tokens * pace.input_s, energy_j + tokens * pace.input_j)
                for request in firsts:
                    last = self._step + max(1, request.output_tokens) - 1
                    entry = (last, request.number, request, self._now_s)
                    heapq.heappush(self._running, entry)
            # Without prompts nothing changes until the first of the batch ends, so these run at
            # once.
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

    def _run(self, steps: int, time_s: float, energy_j: float) -> None:
        self._step += steps
        self._now_s += steps * time_s
        self.energy_j += steps * energy_j

    def _compute(self, tokens: int) -> tuple[list[Request], int]:
        """Compute up to so many input tokens; return the requests whose prompts are done, and how
        many there were.
        """
        done = list[Request]()
        left = tokens
        while self._prompts and left:
            # A prompt may be longer than an iteration computes; what is left of it comes first next
            # time.
            request, left_of_prompt = self._prompts.popleft()
            if left_of_prompt > left:
                self._prompts.appendleft((request, left_of_prompt - left))
                return done, tokens
            left -= left_of_prompt
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
        self._profile = profile
        self._now_s = from_s
        #: requests, input and output tokens
        self._got: dict[RequestClass, npt.NDArray[np.float64]] = defaultdict(lambda: np.zeros(3))

    def add(self, request: Request) -> None:
        """Take a request; see `Instance.add`."""
        super().add(request)
        self._got[request.of] += (1.0, request.input_tokens, request.output_tokens)

    def advance(self, until_s: float) -> Iterator[Served]:
        """Count the energy since the last time, at the mean load since then."""
        # It takes no request from its own end on, and draws nothing then.
        end_s = min(until_s, self.until_s)
        length_s = end_s - self._now_s
        if 0 < length_s < math.inf:
            self.energy_j += self._power_w(length_s) * length_s
            self._now_s = end_s
            self._got.clear()
        yield from ()

    def _power_w(self, length_s: float) -> float:
        """Return the mean power: each class has its share of the instance's time, on its curve."""
        # Each class has a curve of its own, and its share of the instance's time on that.
        at = self.pool.at
        parts = []
        idle_w = self._profile.idle_w(at)
        for request_class, (count, inputs, outputs) in self._got.items():
            # A class that is served by a longer pool may have no curve here, so the pool's counts.
            cells = self._profile.feasible(request_class, at) or self._profile.feasible(
                self.pool.longest, at
            )
            points = (cell.carried(inputs / count, outputs / count) for cell in cells)
            loads, powers_w = zip((0.0, idle_w), *points, strict=True)
            parts.append(((inputs + outputs) / length_s / loads[-1], loads, powers_w))
        load = sum(share for share, _, _ in parts)
        if not load:
            return idle_w
        # More than it carries is carried by what another one would need.
        power_w: float = max(1.0, load) * sum(
            share / load * np.interp(min(1.0, load) * loads[-1], loads, powers_w)
            for share, loads, powers_w in parts
        )
        return power_w


CHANGES = ("instance_changes", "sharding_changes", "clock_changes")
_GAP = 1e-3  #: of the energy of a period above its bound
_TICK_S = 300.0  #: after which energy is counted
_SPARE = 0.999  #: of the load that too few GPUs carry


@dataclass(frozen=True)
class Settings:
    """How a cluster is run.

    Raises:
        UsageError: If an epoch is too short.
    """

    gpus: int  #: how many there are
    costs: ChangeCosts = PUBLISHED  #: of changes
    epoch_s: float = 1800.0  #: how long pools stay as they are, seconds
    prediction: str = "last"  #: "last": each period is as the one before; "perfect": as it will be
    chunk_tokens: int = 2048  #: most input tokens of an iteration of a server
    most_requests: int = 256  #: most requests of a server at once

    def __post_init__(self) -> None:
        if self.epoch_s < 1:
            raise UsageError("settings: an epoch has 1 s or more")


def replay(
    profile: InferenceProfile, trace: Trace, settings: Settings, policy: str = "planner"
) -> dict[str, Any]:
    """Replay a trace.

    Args:
        profile: what requests cost.
        trace: the requests.
        settings: how the cluster is run.
        policy: name in `POLICIES` of how configurations are chosen.

    Returns:
        What became of it: `late`, how many requests got their first token, or the others, later
        than the objectives; the 95th percentiles of the time to the first token and of the mean
        time between tokens, all None if the profile does not say what tokens cost; `energy_j`,
        changes included; `gpus` in use, on average and at most; how often instances, sharding and
        clocks changed; `short_periods`, in which the GPUs did not carry the predicted load; and the
        `periods`, in the order of time, with their mean power and GPUs in use at their end.

    Raises:
        UsageError: If a class of the trace has no configuration that meets its objective.
        InfeasibleGpus: If the GPUs cannot serve every class at all.
    """
    return _Cluster(profile, trace, settings, policy).run()


class _Cluster:
    def __init__(
        self, profile: InferenceProfile, trace: Trace, settings: Settings, policy: str
    ) -> None:
        self.profile = profile
        self.trace = trace
        self.settings = settings
        self.policy = policy
        # The class of a request never changes, so it is looked up once for all.
        self.classes = trace.classes(profile)
        self.paces = read_paces(profile)
        self.has_times = set(self.paces) == set(profile.configurations)
        self.pools: tuple[Pool, ...] = ()
        self.instances: list[Instance] = []
        self.ended_j = self.change_j = 0.0
        self.changes = [0, 0, 0]
        self.short_periods = 0
        #: of each request, to its first token and between tokens
        self.latencies_s = np.zeros((len(trace.times_s), 2))

    def run(self) -> dict[str, Any]:
        trace = self.trace
        settings = self.settings
        periods = list[dict[str, Any]]()
        before_j = 0.0
        # Energy is counted in ticks, and plans change at whole numbers of them.
        length_s = min(_TICK_S, settings.epoch_s)
        every = max(1, round(settings.epoch_s / length_s))
        starts_s = length_s * np.arange(int(trace.end_s // length_s) + 2)
        edges = np.searchsorted(trace.times_s, starts_s).tolist()
        for tick, requests in enumerate(starmap(range, pairwise(edges))):
            now_s = float(starts_s[tick])
            # Plans are made before the period's requests arrive, from what was predicted.
            if tick % every == 0:
                self._plan(now_s, every * length_s)
            for number in requests:
                self._arrive(number)
            # The last tick ends with the trace, but is long enough to have a mean power.
            end_s = min(now_s + length_s, max(trace.end_s, now_s + 1.0))
            gpus = self._advance(self.instances, end_s)
            energy_j = self._energy_j()
            power_w = (energy_j - before_j) / (end_s - now_s)
            before_j = energy_j
            periods.append(
                {"start_s": now_s, "power_w": power_w, "gpus": gpus, "requests": len(requests)}
            )
        # What is still running when the trace ends is finished, so all latencies are known.
        self._advance(self.instances, math.inf)
        late: list[Any] = [None] * len(periods)
        total = None
        p95s_s = (None, None)
        # Without times of tokens, only power was replayed, and nobody knows who was late.
        if self.has_times:
            ttfts_s, tbts_s = self.latencies_s.T
            most_s = np.array(
                [self.profile.ttft_s(request_class) for request_class in self.profile.classes]
            )
            is_late = ttfts_s > most_s[self.classes]
            is_late |= tbts_s > self.profile.objectives.tbt_s
            late = [int(is_late[first:last].sum()) for first, last in pairwise(edges)]
            total = sum(late)
            p95s_s = np.quantile(self.latencies_s, 0.95, axis=0).tolist()
        return {
            "policy": self.policy,
            "description": POLICIES[self.policy],
            "late": total,
            "ttft_p95_s": p95s_s[0],
            "tbt_p95_s": p95s_s[1],
            "energy_j": self._energy_j(),
            "change_j": self.change_j,
            "gpus": fmean(period["gpus"] for period in periods),
            "most_gpus": max(period["gpus"] for period in periods),
            **dict(zip(CHANGES, self.changes, strict=True)),
            "short_periods": self.short_periods,
            "periods": [{**period, "late": n} for period, n in zip(periods, late, strict=True)],
        }

    def _energy_j(self) -> float:
        return self.ended_j + self.change_j + sum(instance.energy_j for instance in self.instances)

    def _advance(self, instances: Iterable[Instance], until_s: float) -> int:
        """Let instances go on; return the GPUs of those that go on after that."""
        gpus = 0
        for instance in list(instances):
            for request, ttft_s, tbt_s in instance.advance(until_s):
                self.latencies_s[request.number] = ttft_s, tbt_s
            if instance.until_s <= until_s and not instance.count:
                self.instances.remove(instance)
                self.ended_j += instance.energy_j
            else:
                gpus += instance.pool.at.tensor_degree
        return gpus

    def _plan(self, now_s: float, length_s: float) -> None:
        """Plan the next period, and begin to change to it."""
        # The plan sees a prediction, and requests come as they do in the trace.
        demand = self._predict(now_s, length_s)
        settings = self.settings
        before = self.pools
        plan_for = partial(
            plan_pools,
            self.profile,
            gpus=settings.gpus,
            period_s=length_s,
            policy=self.policy,
            before=before or None,
            costs=settings.costs,
            gap=_GAP,
        )
        # Too few GPUs carry a part of the load, and the pools for that part take all requests.
        try:
            plan = plan_for(demand)
        except InfeasibleGpus:
            self.short_periods += 1
            share = largest_share(self.profile, demand, settings.gpus, self.policy) * _SPARE
            # If nothing can be carried, the pools of before go on.
            if share <= 0:
                if before:
                    return
                raise
            plan = plan_for(
                {request_class: load.scaled(share) for request_class, load in demand.items()}
            )
        self.change_j += plan.change_j
        # The slowest kind of change that is needed decides when all is ready.
        new, resharded, changed = changed_gpus(before, plan.pools) if before else (0, 0, 0)
        kind = 2
        if new:
            kind = 0
        elif resharded:
            kind = 1
        self.changes[kind] += changed > 0
        # With free GPUs the old instances serve until the new ones are ready; else they stop at
        # once.
        free = settings.gpus - sum(pool.gpus for pool in before) >= resharded
        ready_s = now_s + (settings.costs.times_s[kind] if before else 0.0)
        self._use(plan.pools, now_s, ready_s, ready_s if free else now_s)

    def _use(self, pools: tuple[Pool, ...], now_s: float, ready_s: float, stop_s: float) -> None:
        """Have these pools: instances of the same tensor degree go on, new ones are there from
        `ready_s`, and others stop at `stop_s`.
        """
        self.pools = pools
        had = [instance for instance in self.instances if instance.until_s == math.inf]
        for pool in pools:
            # A degree cannot change while an instance runs, so only those of the same one go on.
            same = [
                earlier for earlier in had if earlier.pool.at.tensor_degree == pool.at.tensor_degree
            ]
            # Those with the same class and clock are kept first, as they change the least.
            same.sort(
                key=lambda earlier: (
                    earlier.pool.longest != pool.longest,
                    earlier.pool.at != pool.at,
                )
            )
            for instance in same[: pool.instances]:
                # What was used by now was used in the old configuration.
                self._advance([instance], now_s)
                instance.plan(pool, min(instance.from_s, ready_s))
                had.remove(instance)
            missing = pool.instances - len(same)
            self.instances += [self._new(pool, ready_s) for _ in range(missing)]
        # What no pool needs stops, and finishes what it has.
        for instance in had:
            instance.until_s = stop_s

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
        demand = partial(self.trace.demand, self.profile, self.classes)
        # By the past, the period before stands for the next one.
        begin_s = now_s if now_s == 0 or self.settings.prediction == "perfect" else now_s - length_s
        least = {
            request_class: load.scaled(1 / (length_s * load.requests_per_s))._replace(peak=1.0)
            for request_class, load in demand(0.0, now_s).items()
        }
        return least | demand(begin_s, begin_s + length_s)

    def _arrive(self, number: int) -> None:
        """Give a request to an instance."""
        request_class = self.profile.classes[self.classes[number]]
        now_s = float(self.trace.times_s[number])

        # Pools planned for the class come first, then those that cover it, then those that are
        # there soonest.
        def rank(instance: Instance) -> tuple[float, ...]:
            """Return how well its pool fits; instances that are there now come first."""
            wait_s = max(0.0, instance.from_s - now_s)
            fits = (
                request_class not in instance.pool.serves,
                not instance.pool.longest.covers(request_class),
            )
            return wait_s > 0, *fits, wait_s

        ranks = [
            (rank(instance), instance) for instance in self.instances if instance.until_s > now_s
        ]
        best, _ = min(ranks, key=itemgetter(0))
        candidates = [instance for ranked, instance in ranks if ranked == best]
        # Their queues must be those of now, before they are compared.
        if self.has_times:
            self._advance(candidates, now_s)
        # Beside what each is planned for, so that larger pools get more.
        chosen = min(
            candidates,
            key=lambda instance: (
                instance.count / instance.planned_tokens_per_s,
                instance.given / instance.planned_tokens_per_s,
            ),
        )
        inputs, outputs = (
            int(tokens[number]) for tokens in (self.trace.input_tokens, self.trace.output_tokens)
        )
        chosen.add(Request(number, now_s, request_class, inputs, outputs))
