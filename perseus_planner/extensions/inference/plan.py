"""Plans of pools, epoch by epoch, beside other ways to choose them; their file, inference.yaml. The
pools of least energy are found by an exact integer programme.

A pool is made of equal instances: so many GPUs each, at one clock, under one load. It serves one
class of requests, and may serve shorter ones as well. Power over load is a line from an idle
instance to the first measured load, and from each measured load to the next. An instance has one
load, so it is on one of these segments: the variables are, of every possible pool, the instances on
each segment (integers), and how much of them each class has at the two ends. Segment 3 of one class
goes with segment 3 of another. Minimised is the energy of a period: of requests, of idle instances,
and of what has to change since the period before.

    min   period * sum power * share + cost of changes
    with  sum load * share = demand of each class
          sum share = instances on each segment; on the first one, the rest of them are idle
          sum peak * load * share / largest load <= instances on each segment
          sum GPUs of an instance * instances <= GPUs

HiGHS solves it by branch and bound; its dual bound is the certificate. Pools on the first segment
at one configuration are then joined where that leaves an instance over.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from perseus_planner.base.documents import check_digest, read_document
from perseus_planner.base.errors import (
    InfeasibleGpus,
    PlanError,
    PlannerError,
    UsageError,
    how_to_install,
)
from perseus_planner.base.files import sha256, write_file
from perseus_planner.solver.programme import Programme, Row, Solved

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from perseus_planner.extensions.inference.workload import (
        Configuration,
        InferenceProfile,
        Load,
        Point,
        RequestClass,
    )


@dataclass(frozen=True)
class ChangeCosts:
    """What changes cost. The times are those of table V of DynamoLLM.

    Raises:
        UsageError: If a larger change costs less than a smaller one.
    """

    #: seconds until it serves: a new instance on GPUs that were not in use (machine, environment,
    #: weights, engine, GPUs); an instance of another tensor degree on GPUs in use (engine and
    #: weights onto GPUs); another clock or power limit.
    times_s: tuple[float, float, float] = (423.0, 33.0, 0.05)
    power_w: float = 100.0  #: of each GPU meanwhile

    def __post_init__(self) -> None:
        if sorted(self.times_s, reverse=True) != [*self.times_s]:
            raise UsageError(
                "costs of changes: a new instance costs no less than re-sharding, and that than a "
                "clock"
            )

    @property
    def prices_j(self) -> list[float]:
        """What a GPU of each number of `changed_gpus` adds, joules."""
        return [self.power_w * (more - less) for more, less in pairwise((*self.times_s, 0.0))]

    def between(self, before: Sequence[Pool], after: Sequence[Pool]) -> float:
        """Return the energy of changing from some pools to others, joules."""
        changed = zip(self.prices_j, changed_gpus(before, after), strict=True)
        return sum(price_j * gpus for price_j, gpus in changed)


PUBLISHED = ChangeCosts()


@dataclass(frozen=True)
class Pool:
    """Equal instances under equal loads."""

    longest: RequestClass  #: the longest class that it may serve
    at: Configuration  #: tensor degree and clock of its instances
    instances: int  #: how many there are
    #: class -> tokens per second of it that are planned.
    serves: Mapping[RequestClass, float] = field(default_factory=dict)

    @property
    def gpus(self) -> int:
        """GPUs of all its instances."""
        return self.instances * self.at.tensor_degree


def changed_gpus(before: Sequence[Pool], after: Sequence[Pool]) -> list[int]:
    """Return the GPUs of new instances; of these and of instances of other degrees; and of all
    changed instances.
    """
    return [(gpus_by(key, after) - gpus_by(key, before)).total() for key in SAME]


SAME: tuple[Callable[[Configuration], object], ...] = (
    lambda at: None,
    lambda at: at.tensor_degree,
    lambda at: at,
)
"""What GPUs have in common between which nothing is new; no degree is another; nothing changes."""


def gpus_by(key: Callable[[Configuration], object], pools: Sequence[Pool]) -> Counter[object]:
    """Return how many GPUs the pools have, by the key of their configurations."""
    gpus = Counter[object]()
    for pool in pools:
        gpus[key(pool.at)] += pool.gpus
    return gpus


@dataclass(frozen=True)
class PoolPlan:
    """Pools for one period."""

    power_w: float  #: mean power in the period, watts, without changes
    change_j: float  #: energy of the changes since the period before, joules
    energy_j: float  #: energy of the period, joules, changes included
    bound_j: float  #: no pools of these configurations need less, joules
    pools: tuple[Pool, ...]  #: the pools

    @property
    def gpus(self) -> int:
        """GPUs in use."""
        return sum(pool.gpus for pool in self.pools)


POLICIES = MappingProxyType(
    {
        "highest": "highest clock, largest tensor degree",
        "clock": "best clock alone",
        "degree": "best tensor degree alone",
        "hierarchical": "tensor degree first, then the clock",
        "planner": "planner",
    }
)
"""How configurations are chosen; the first one is the baseline, the last one is what is planned."""
BASELINE = next(iter(POLICIES))
PLANNER = "planner"
INSTALL = how_to_install("inference")
_LIMIT_S = 20.0  #: of a solve; a plan that is not proved best by then says so by its gap
_GAP = 1e-7  #: between a plan's energy and the bound, relative, at which it counts as best
_SHARE_GAP = 1e-3  #: of the largest share of a load
_ROUNDING = 1e-6  #: of an instance, that the solver's arithmetic may be off


def plan_pools(
    profile: InferenceProfile,
    demand: Mapping[RequestClass, Load],
    gpus: float,
    period_s: float,
    policy: str = PLANNER,
    *,
    before: Sequence[Pool] | None = None,
    costs: ChangeCosts = PUBLISHED,
    gap: float = _GAP,
) -> PoolPlan:
    """Return the pools of least energy.

    Args:
        profile: what requests cost.
        demand: load of each class; not empty.
        gpus: how many there are; infinite for any number.
        period_s: length of the period, seconds.
        policy: name in `POLICIES` of how configurations are chosen.
        before: the pools of the period before; None if changes cost nothing, as at the start.
        costs: of changes.
        gap: how far the energy may be above the bound, relative.

    Raises:
        InfeasibleGpus: If there are too few GPUs.
        UsageError: If a class has no configuration that meets its objective.
    """
    profile = _allowed(profile, policy)
    # Degrees are chosen first, and are kept while clocks are chosen.
    if policy == "hierarchical":
        first = plan_pools(profile, demand, gpus, period_s, "degree", gap=gap)
        degrees = {
            (request_class, pool.at.tensor_degree)
            for pool in first.pools
            for request_class in (pool.longest, *pool.serves)
        }
        profile = profile.only(
            lambda request_class, at: (request_class, at.tensor_degree) in degrees
        )
    model = _Model(profile, demand, period_s, before, costs)
    answer = model.solve(model.energies_j, gpus, gap)
    if answer is None:
        # The error says how many GPUs would do, which another solve tells.
        raise InfeasibleGpus(int(gpus), *least_gpus(profile, demand))
    return model.plan(*answer)


def least_gpus(profile: InferenceProfile, demand: Mapping[RequestClass, Load]) -> tuple[int, bool]:
    """Return the least number of GPUs that carry the demand, and whether no fewer do for sure; the
    arguments and errors are those of `plan_pools`.
    """
    model = _Model(profile, demand)
    answer = model.solve(model.gpus)
    assert answer is not None  # so many GPUs as it takes
    gpus = model.plan(*answer).gpus
    return gpus, answer[1] > gpus - 1 + _ROUNDING


def largest_share(
    profile: InferenceProfile,
    demand: Mapping[RequestClass, Load],
    gpus: int,
    policy: str = PLANNER,
) -> float:
    """Return the largest share of the demand, up to 1, that the GPUs carry; the arguments are
    those of `plan_pools`.
    """
    model = _Model(_allowed(profile, policy), demand, least_share=0.0)
    answer = model.solve({model.share: -1.0}, gpus, _SHARE_GAP)
    return 0.0 if answer is None else float(answer[0][model.share])


def _allowed(profile: InferenceProfile, policy: str) -> InferenceProfile:
    """Return the profile with the configurations alone that a policy allows."""
    degree, setting = map(max, zip(*profile.configurations, strict=True))
    return profile.only(
        lambda _, at: (
            (at.tensor_degree == degree or policy not in (BASELINE, "clock"))
            and (at.setting == setting or policy not in (BASELINE, "degree"))
        )
    )


class _Entry(NamedTuple):
    """A variable: how many instances' worth of a class runs at one end of a segment."""

    column: int
    of: RequestClass
    point: Point  #: load and power there
    filled: float  #: share of the largest load there may be, in the busiest minute


class _Group(NamedTuple):
    """Instances of a possible pool on one segment of the curve."""

    column: int  #: how many there are
    longest: RequestClass
    at: Configuration
    segment: int
    entries: list[_Entry]


class _Model:
    """The integer programme of all possible pools, without its objective."""

    def __init__(
        self,
        profile: InferenceProfile,
        demand: Mapping[RequestClass, Load],
        period_s: float = 1.0,
        before: Sequence[Pool] | None = None,
        costs: ChangeCosts = PUBLISHED,
        least_share: float = 1.0,
    ) -> None:
        # Sorted, so that equal demands give equal programmes.
        demand = dict(sorted(demand.items()))
        self._period_s = period_s
        self._before = before
        self._costs = costs
        self._idle_w = {at: profile.idle_w(at) for at in profile.configurations}
        self._programme = Programme(
            f"plans for inference need scipy, which is not installed; {INSTALL}"
        )
        # Column -> joules of one, less what idle instances cost anyhow.
        self.energies_j: dict[int, float] = {}
        self.gpus: dict[int, float] = {}
        # Without scarce GPUs the share is all; the least share is below 1 only to find what fits.
        self.share = self._programme.add(most=1.0, least=least_share)
        self._groups: list[_Group] = []
        # Requests of a trace differ in length from those measured, so loads are carried over.
        points = {
            (request_class, at): [
                cell.carried(*load.lengths(request_class))
                for cell in profile.feasible(request_class, at)
            ]
            for request_class, load in demand.items()
            for at in profile.configurations
        }
        carried: dict[RequestClass, dict[int, float]] = {
            request_class: {} for request_class in demand
        }
        for (longest, at), of_longest in points.items():
            for segment in range(len(of_longest)):
                group = _Group(self._programme.add(whole=True), longest, at, segment, [])
                for request_class, load in demand.items():
                    served = points[request_class, at][: len(of_longest)]
                    # A longer pool serves shorter classes, on segments that both curves have.
                    if longest.covers(request_class) and len(served) > segment:
                        # The two ends of the segment; the first segment begins at an idle instance.
                        for point in served[max(0, segment - 1) : segment + 1]:
                            # Filled counts in the busiest minute, which is what an instance has to
                            # carry.
                            filled = load.peak * point.tokens_per_s / served[-1].tokens_per_s
                            entry = _Entry(self._programme.add(), request_class, point, filled)
                            group.entries.append(entry)
                            carried[request_class][entry.column] = point.tokens_per_s
                self._add_group(group)
        # A class without any column could not be served by anything.
        for request_class, loads in carried.items():
            if not loads:
                raise UsageError(
                    f"class {request_class.name}: no configuration meets its latency objective; "
                    "measure a higher clock or tensor degree, or loosen the objective"
                )
            # Rows are scaled to about 1, as the solver's tolerances are absolute.
            most = max(loads.values())
            loads[self.share] = -demand[request_class].tokens_per_s
            row = {column: load / most for column, load in loads.items()}
            self._programme.limit(row, 0.0, 0.0)
        if before is not None:
            self._add_changes(before)

    def _add_group(self, group: _Group) -> None:
        """Add the instances of a pool on a segment, and what classes have of them."""
        instances, _, at, segment, entries = group
        self._groups.append(group)
        self.gpus[instances] = at.tensor_degree
        # On the first segment an instance may be partly idle, so idling is counted there alone.
        idle_w = 0.0 if segment else self._idle_w[at]
        self.energies_j[instances] = idle_w * self._period_s
        for entry in entries:
            self.energies_j[entry.column] = (entry.point.power_w - idle_w) * self._period_s
        shares = {entry.column: 1.0 for entry in entries}
        peaks = {entry.column: entry.filled for entry in entries}
        # Beyond the first segment no instance idles, so the shares add up to the instances.
        least = 0.0 if segment else -math.inf
        self._programme.limit({instances: -1.0, **shares}, 0.0, least)
        self._programme.limit({instances: -1.0, **peaks}, 0.0)

    def _add_changes(self, before: Sequence[Pool]) -> None:
        """Add the GPUs that have to change, as in `ChangeCosts.between`."""
        for key, price_j in zip(SAME, self._costs.prices_j, strict=True):
            # GPUs that the configuration had before are free; only more of it than that changes.
            had = gpus_by(key, before)
            rows: dict[object, dict[int, float]] = defaultdict(dict)
            for group in self._groups:
                rows[key(group.at)][group.column] = group.at.tensor_degree
            for same, row in rows.items():
                # Never below 0, so fewer GPUs than before bring nothing back.
                more = self._programme.add()
                self.energies_j[more] = price_j
                self._programme.limit({**row, more: -1.0}, had[same])

    def solve(
        self, objective: Mapping[int, float], gpus: float = math.inf, gap: float = _GAP
    ) -> Solved | None:
        """Return the columns for which the objective is least, and a bound on it; None if there are
        none.

        Raises:
            UsageError: If scipy is not installed.
            PlannerError: If the solver finds neither within `_LIMIT_S`.
        """
        limits = [Row(self.gpus, gpus)]
        try:
            return self._programme.solve(objective, limits, gap, _LIMIT_S)
        except UsageError:
            raise
        except PlannerError as error:
            raise PlannerError(
                f"no pools were found in the {_LIMIT_S:g} s that the solver may take; give more "
                "GPUs, or a profile with fewer configurations or loads"
            ) from error

    def plan(self, values: npt.NDArray[np.float64], bound: float) -> PoolPlan:
        """Return the pools of an answer, with no more instances than their shares need."""
        power_w = 0.0
        first = list[_Part]()
        pools = list[Pool]()
        for _, longest, at, segment, entries in self._groups:
            shares = needed = 0.0
            serves: dict[RequestClass, float] = defaultdict(float)
            for column, request_class, point, filled in entries:
                share = float(values[column])
                # Shares below rounding are noise of the solver and no plan.
                if share > _ROUNDING / 100:
                    shares += share
                    needed += share * filled
                    serves[request_class] += share * point.tokens_per_s
                    power_w += share * point.power_w
            if serves and segment:  # the solver's instances, all of which have work
                pools.append(Pool(longest, at, round(shares), dict(sorted(serves.items()))))
            # On the first one, instances are filled by load or by the busiest minute, whichever is
            # more.
            elif serves:
                power_w -= shares * self._idle_w[at]
                first.append(_Part(at, longest, max(shares, needed), serves))
        # Idle power depends on how many instances are left after joining.
        for pool in _joined(first):
            power_w += pool.instances * self._idle_w[pool.at]
            pools.append(pool)
        pools.sort(key=lambda pool: (pool.longest, pool.at))
        change_j = 0.0 if self._before is None else self._costs.between(self._before, pools)
        energy_j = power_w * self._period_s + change_j
        # The bound is never above the plan, whatever rounding made of both.
        return PoolPlan(power_w, change_j, energy_j, min(bound, energy_j), tuple(pools))


class _Part(NamedTuple):
    """Instances of a possible pool on the first segment."""

    at: Configuration
    longest: RequestClass
    filled: float  #: how many are filled
    serves: dict[RequestClass, float]


def _joined(parts: list[_Part]) -> Iterator[Pool]:
    """Yield pools with so many instances as are filled; join two where fewer do for both."""
    # Longest classes first, as only they may take in others.
    waiting = sorted(parts, key=lambda part: part[:2], reverse=True)
    while waiting:
        at, longest, filled, serves = waiting.pop(0)
        for other in list(waiting):
            # Joining pays only where both together round up to fewer instances.
            fewer = _instances(filled + other.filled) < _instances(filled) + _instances(
                other.filled
            )
            if other.at == at and longest.covers(other.longest) and fewer:
                filled += other.filled
                for request_class, tokens in other.serves.items():
                    serves[request_class] += tokens
                waiting.remove(other)
        yield Pool(longest, at, _instances(filled), dict(sorted(serves.items())))


def _instances(filled: float) -> int:
    return max(1, math.ceil(filled - _ROUNDING))


_FORMAT = "perseus-planner/inference"
_VERSION = 1
_KEYS = ("profile", "control", "gpus", "classes", "policies", "epochs")


def make_plan(
    profile: InferenceProfile,
    periods: Sequence[tuple[float, float, Mapping[RequestClass, Load]]],
    gpus: int,
    costs: ChangeCosts = PUBLISHED,
) -> dict[str, Any]:
    """Plan each period, by every policy; changes are paid from one period to the next.

    Args:
        profile: what requests cost.
        periods: start and length of each, seconds, and its demand; those without demand are left
            out.
        gpus: how many there are.
        costs: of changes.

    Returns:
        What stands in the file: the pools of each period, and what each policy needs over all of
        them: `energy_j`, None if it meets the objectives with no number of GPUs, and `gpus`, the
        most in use, more than there are if it needs more.

    Raises:
        InfeasibleGpus: If there are too few GPUs.
        UsageError: If a class has no configuration that meets its objective.
    """
    totals = dict[str, dict[str, Any]]()
    plans = list[PoolPlan]()
    # The planner is the last policy, so its plans are the ones that stand after the loop.
    for name in POLICIES:
        plans = []
        for _, length_s, demand in periods:
            # The first period has no pools before it, so nothing changes there.
            before = plans[-1].pools if plans else None
            plan = partial(
                plan_pools,
                profile,
                demand,
                period_s=length_s,
                policy=name,
                before=before,
                costs=costs,
            )
            try:
                plans.append(plan(gpus=gpus))
            # Other policies may need more GPUs than there are, which is shown as their need.
            except InfeasibleGpus as error:
                if name == PLANNER:
                    least, proved = zip(
                        *(least_gpus(profile, demand) for _, _, demand in periods), strict=True
                    )
                    raise InfeasibleGpus(gpus, max(least), all(proved)) from error
                plans.append(plan(gpus=math.inf))
            # Without a configuration in time, a policy has no energy to compare.
            except UsageError:
                if name == PLANNER:
                    raise
                break
        is_complete = len(plans) == len(periods)
        totals[name] = {
            "energy_j": sum(plan.energy_j for plan in plans) if is_complete else None,
            "gpus": max((plan.gpus for plan in plans), default=0),
        }
    return {
        "profile": profile.digest,
        "control": profile.control,
        "gpus": gpus,
        "classes": {
            request_class.name: [
                None if tokens == math.inf else int(tokens)
                for tokens in (request_class.input_tokens, request_class.output_tokens)
            ]
            for request_class in sorted(
                {request_class for _, _, demand in periods for request_class in demand}
            )
        },
        "policies": totals,
        "epochs": [_epoch(*period, plan) for period, plan in zip(periods, plans, strict=True)],
    }


def _epoch(
    start_s: float, length_s: float, demand: Mapping[RequestClass, Load], plan: PoolPlan
) -> dict[str, Any]:
    return {
        "start_s": start_s,
        "length_s": length_s,
        "demand": {request_class.name: load._asdict() for request_class, load in demand.items()},
        **vars(plan),
        "pools": [
            {
                "longest": pool.longest.name,
                **pool.at._asdict(),
                "instances": pool.instances,
                "serves": {
                    request_class.name: tokens for request_class, tokens in pool.serves.items()
                },
            }
            for pool in plan.pools
        ],
    }


def save_plan(plan: Mapping[str, Any], path: Path) -> None:
    """Write a plan as YAML; equal plans give equal bytes.

    Raises:
        PlanError: If the file cannot be written.
    """
    document = {"format": _FORMAT, "version": _VERSION, "digest": _digest(plan), **plan}
    text = yaml.safe_dump(document, sort_keys=False, width=120, default_flow_style=None)
    write_file(path, text, PlanError)


def read_plan(path: Path) -> Mapping[str, Any]:
    """Read a file that `save_plan` wrote.

    Raises:
        PlanError: If the file cannot be read, or is not exactly what was written.
    """
    document = read_document(path, _FORMAT, _VERSION, ("digest", *_KEYS), (), PlanError)
    return check_digest(document, _digest, "planner inference plan")


def _digest(content: Mapping[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True, default=str).encode())
