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

import ctypes
import json
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
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

if TYPE_CHECKING:
    import numpy.typing as npt

    from perseus_planner.inference.workload import (
        Configuration,
        InferenceProfile,
        Load,
        Point,
        RequestClass,
    )


class Change(NamedTuple):
    """What a change costs: seconds until the instance serves, and joules of each of its GPUs
    meanwhile.
    """

    time_s: float
    energy_j: float


_INSTANCE, _RESHARDING, _CLOCK = Change(423.0, 42300.0), Change(33.0, 3300.0), Change(0.05, 5.0)


@dataclass(frozen=True)
class ChangeCosts:
    """What changes cost. The times are those of table V of DynamoLLM; the joules are 100 W of each
    GPU meanwhile.

    Raises:
        UsageError: If a larger change costs less energy than a smaller one.
    """

    #: a new instance on GPUs that were not in use: machine, environment, weights, engine, GPUs; 423
    #: s.
    instance: Change = _INSTANCE
    #: an instance of another tensor degree on GPUs in use: engine and weights onto GPUs; 33 s.
    resharding: Change = _RESHARDING
    clock: Change = _CLOCK  #: another clock or power limit

    def __post_init__(self) -> None:
        if not self.instance.energy_j >= self.resharding.energy_j >= self.clock.energy_j >= 0:
            raise UsageError(
                "costs of changes: a new instance costs no less than re-sharding, and that than a "
                "clock"
            )

    def between(self, before: Sequence[Pool], after: Sequence[Pool]) -> float:
        """Return the energy of changing from some pools to others, joules."""
        return sum(
            price_j * gpus
            for price_j, gpus in zip(self.prices_j, changed_gpus(before, after), strict=True)
        )

    @property
    def prices_j(self) -> tuple[float, float, float]:
        """What each of `changed_gpus` adds, joules."""
        changed_j, resharded_j = self.clock.energy_j, self.resharding.energy_j
        return changed_j, resharded_j - changed_j, self.instance.energy_j - resharded_j


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


def changed_gpus(before: Sequence[Pool], after: Sequence[Pool]) -> tuple[int, int, int]:
    """Return the GPUs of changed instances, how many of them are of other degrees, and how many
    of those are new.
    """
    changed, resharded, new = (
        sum(max(0, gpus - had[group]) for group, gpus in gpus_by(key, after).items())
        for key, had in ((key, gpus_by(key, before)) for key in SAME)
    )
    return changed, resharded, new


SAME: tuple[Callable[[Configuration], object], ...] = (
    lambda at: at,
    lambda at: at.tensor_degree,
    lambda at: None,
)
"""What GPUs have in common between which nothing changes; no other degree; nothing new."""


def gpus_by(key: Callable[[Configuration], object], pools: Sequence[Pool]) -> dict[object, int]:
    """Return how many GPUs the pools have, by the key of their configurations."""
    gpus: dict[object, int] = defaultdict(int)
    for pool in pools:
        gpus[key(pool.at)] += pool.gpus
    return gpus


@dataclass(frozen=True)
class PoolPlan:
    """Pools for one period."""

    pools: tuple[Pool, ...]  #: the pools
    power_w: float  #: mean power in the period, watts, without changes
    change_j: float  #: energy of the changes since the period before, joules
    energy_j: float  #: energy of the period, joules, changes included
    bound_j: float  #: no pools of these configurations need less, joules

    @property
    def gpus(self) -> int:
        """GPUs in use."""
        return sum(pool.gpus for pool in self.pools)


INSTALL = how_to_install("inference")
_LIMIT_S = 20.0  #: of a solve; a plan that is not proved best by then says so by its gap
_GAP = 1e-7  #: between a plan's energy and the bound, relative, at which it counts as best
_SHARE_GAP = 1e-3  #: of the largest share of a load
_ROUNDING = 1e-6  #: of an instance, that the solver's arithmetic may be off


def plan_pools(
    profile: InferenceProfile,
    demand: Mapping[RequestClass, Load],
    gpus: int | None,
    period_s: float,
    *,
    only: Mapping[RequestClass, Collection[Configuration]] | None = None,
    before: Sequence[Pool] | None = None,
    costs: ChangeCosts = PUBLISHED,
    gap: float = _GAP,
) -> PoolPlan:
    """Return the pools of least energy.

    Args:
        profile: what requests cost.
        demand: load of each class; not empty.
        gpus: how many there are; None for any number.
        period_s: length of the period, seconds.
        only: class -> configurations that may serve it; None: any.
        before: the pools of the period before; None if changes cost nothing, as at the start.
        costs: of changes.
        gap: how far the energy may be above the bound, relative.

    Raises:
        InfeasibleGpus: If there are too few GPUs.
        UsageError: If a class has no configuration that meets its objective.
    """
    model = _Model(profile, demand, period_s, only, before, costs)
    answer = model.solve(model.energies_j, gpus, gap)
    if answer is None:
        raise InfeasibleGpus(gpus or 0, *least_gpus(profile, demand, only))
    return model.plan(answer)


def least_gpus(
    profile: InferenceProfile,
    demand: Mapping[RequestClass, Load],
    only: Mapping[RequestClass, Collection[Configuration]] | None = None,
) -> tuple[int, bool]:
    """Return the least number of GPUs that carry the demand, and whether no fewer do for sure; the
    arguments and errors are those of `plan_pools`.
    """
    model = _Model(profile, demand, 1.0, only, None, PUBLISHED)
    answer = model.solve(model.gpus, None)
    gpus = 0 if answer is None else model.plan(answer).gpus
    return gpus, answer is not None and answer.bound > gpus - 1 + _ROUNDING


def largest_share(
    profile: InferenceProfile,
    demand: Mapping[RequestClass, Load],
    gpus: int,
    only: Mapping[RequestClass, Collection[Configuration]] | None = None,
) -> float:
    """Return the largest share of the demand, up to 1, that the GPUs carry; the arguments are
    those of `plan_pools`.
    """
    model = _Model(profile, demand, 1.0, only, None, PUBLISHED, least_share=0.0)
    answer = model.solve({model.share: -1.0}, gpus, _SHARE_GAP)
    return 0.0 if answer is None else float(answer.values[model.share])


class _Entry(NamedTuple):
    """A variable: how many instances' worth of a class runs at one end of a segment."""

    column: int
    group: int  #: position of the instances in `_Model.groups`
    of: RequestClass
    point: Point  #: load and power there
    largest: float  #: the largest load there may be, tokens per second


class _Group(NamedTuple):
    """Instances of a possible pool on one segment of the curve."""

    column: int  #: how many there are
    longest: RequestClass
    at: Configuration
    segment: int


class _Answer(NamedTuple):
    values: npt.NDArray[np.float64]
    bound: float


class _Model:
    """Columns with their least and most value, and rows with theirs: an integer programme,
    without its objective.
    """

    def __init__(
        self,
        profile: InferenceProfile,
        demand: Mapping[RequestClass, Load],
        period_s: float,
        only: Mapping[RequestClass, Collection[Configuration]] | None,
        before: Sequence[Pool] | None,
        costs: ChangeCosts,
        least_share: float = 1.0,
    ) -> None:
        self.demand, self.period_s = dict(sorted(demand.items())), period_s
        self.before, self.costs = before, costs
        self.idle_w = {
            configuration: profile.idle_w(configuration) for configuration in profile.configurations
        }
        self._columns: list[tuple[float, float, bool]] = []
        self._rows: list[tuple[dict[int, float], float, float]] = []
        # Column -> joules of one, less what idle instances cost anyhow.
        self.energies_j: dict[int, float] = {}
        self.gpus: dict[int, float] = {}
        self.share = self._add(least_share, 1.0)
        self.groups: list[_Group] = []
        self.entries: list[_Entry] = []
        self._points = {
            (of, at): [cell.carried(*load.lengths(of)) for cell in profile.feasible(of, at)]
            for of, load in self.demand.items()
            for at in profile.configurations
            if only is None or at in only[of]
        }
        for longest in self.demand:
            for at in profile.configurations:
                for segment in range(len(profile.feasible(longest, at))):
                    self._add_group(longest, at, segment, len(profile.feasible(longest, at)))
        for request_class, load in self.demand.items():
            loads = {
                entry.column: entry.point.tokens_per_s
                for entry in self.entries
                if entry.of == request_class
            }
            most = max(loads.values(), default=0.0)
            if not most:
                among = "" if only is None else " of those allowed"
                raise UsageError(
                    f"class {request_class.name}: no configuration{among} meets its latency "
                    "objective; "
                    "measure a higher clock or tensor degree, or loosen the objective"
                )
            row = {column: carried / most for column, carried in loads.items()}
            self._rows.append(({**row, self.share: -load.tokens_per_s / most}, 0.0, 0.0))
        if before is not None:
            self._add_changes(before)

    def _add(self, least: float = 0.0, most: float = math.inf, *, integer: bool = False) -> int:
        self._columns.append((least, most, integer))
        return len(self._columns) - 1

    def _add_group(
        self, longest: RequestClass, at: Configuration, segment: int, segments: int
    ) -> None:
        """Add the instances of a pool on a segment, and what classes have of them."""
        served = {
            of: points[:segments]
            for (of, configuration), points in self._points.items()
            if configuration == at and longest.covers(of) and len(points) > segment
        }
        if not served:
            return
        instances, number = self._add(integer=True), len(self.groups)
        self.groups.append(_Group(instances, longest, at, segment))
        self.gpus[instances] = float(at.tensor_degree)
        idle_w = 0.0 if segment else self.idle_w[at]
        self.energies_j[instances] = idle_w * self.period_s
        shares, peaks = {instances: -1.0}, {instances: -1.0}
        for of, points in served.items():
            for point in points[max(0, segment - 1) : segment + 1]:
                entry = _Entry(self._add(), number, of, point, points[-1].tokens_per_s)
                self.entries.append(entry)
                self.energies_j[entry.column] = (point.power_w - idle_w) * self.period_s
                shares[entry.column] = 1.0
                peaks[entry.column] = self.demand[of].peak * point.tokens_per_s / entry.largest
        self._rows.append((shares, 0.0 if segment else -math.inf, 0.0))
        self._rows.append((peaks, -math.inf, 0.0))

    def _add_changes(self, before: Sequence[Pool]) -> None:
        """Add the GPUs that have to change, as in `ChangeCosts.between`."""
        for key, price_j in zip(SAME, self.costs.prices_j, strict=True):
            had = gpus_by(key, before)
            rows: dict[object, dict[int, float]] = defaultdict(dict)
            for column, _, configuration, _ in self.groups:
                rows[key(configuration)][column] = float(configuration.tensor_degree)
            for group, row in rows.items():
                more = self._add()
                self.energies_j[more] = price_j
                self._rows.append(({**row, more: -1.0}, -math.inf, float(had[group])))

    def solve(
        self, objective: Mapping[int, float], gpus: int | None, gap: float = _GAP
    ) -> _Answer | None:
        """Return the columns for which the objective is least, and a bound on it; None if there are
        none.

        Raises:
            UsageError: If scipy is not installed.
            PlannerError: If the solver finds neither within `_LIMIT_S`.
        """
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import csr_array
        except ImportError as error:
            raise UsageError(
                f"plans for inference need scipy, which is not installed; {INSTALL}"
            ) from error
        rows = self._rows if gpus is None else [*self._rows, (self.gpus, -math.inf, float(gpus))]
        where = [(number, column) for number, (row, _, _) in enumerate(rows) for column in row]
        values = [value for row, _, _ in rows for value in row.values()]
        matrix = csr_array(
            (values, tuple(zip(*where, strict=True))), shape=(len(rows), len(self._columns))
        )
        least, most, integer = zip(*self._columns, strict=True)
        scale = max([abs(value) for value in objective.values()], default=0.0) or 1.0
        weights = np.zeros(len(self._columns))
        weights[list(objective)] = [value / scale for value in objective.values()]
        limits = LinearConstraint(matrix, [row[1] for row in rows], [row[2] for row in rows])
        with _without_output():
            options = {"mip_rel_gap": gap, "time_limit": _LIMIT_S}
            whole = np.array(integer, float)
            solution = milp(
                weights,
                integrality=whole,
                bounds=Bounds(least, most),
                constraints=limits,
                options=options,
            )
        if solution.x is None:
            if solution.status == 2:  # infeasible
                return None
            raise PlannerError(
                f"no pools were found in the {_LIMIT_S:g} s that the solver may take; give more "
                "GPUs, or a profile with fewer configurations or loads"
            )
        return _Answer(solution.x, float(solution.mip_dual_bound) * scale)

    def plan(self, answer: _Answer) -> PoolPlan:
        """Return the pools of an answer, with no more instances than their shares need."""
        needed: dict[int, float] = defaultdict(float)
        shares: dict[int, float] = defaultdict(float)
        serves: dict[int, dict[RequestClass, float]] = defaultdict(lambda: defaultdict(float))
        power_w = 0.0
        for column, group, of, point, largest in self.entries:
            share = float(answer.values[column])
            if share > _ROUNDING / 100:
                shares[group] += share
                needed[group] += share * self.demand[of].peak * point.tokens_per_s / largest
                serves[group][of] += share * point.tokens_per_s
                power_w += share * point.power_w
        first, pools = [], []
        for group, served in serves.items():
            _, longest, at, segment = self.groups[group]
            if segment:  # the solver's instances, all of which have work
                pools.append(Pool(longest, at, round(shares[group]), dict(sorted(served.items()))))
            else:
                power_w -= shares[group] * self.idle_w[at]
                first.append((longest, at, max(shares[group], needed[group]), dict(served)))
        joined = _joined(first)
        power_w += sum(pool.instances * self.idle_w[pool.at] for pool in joined)
        every = sorted([*pools, *joined], key=lambda pool: (pool.longest, pool.at))
        change_j = 0.0 if self.before is None else self.costs.between(self.before, every)
        energy_j = power_w * self.period_s + change_j
        return PoolPlan(tuple(every), power_w, change_j, energy_j, min(answer.bound, energy_j))


@contextmanager
def _without_output() -> Iterator[None]:
    """Drop what C code prints: releases of HiGHS print a line of their own now and then, into
    what may be JSON.
    """
    if sys.stdout is None:  # closed by the shell
        yield
        return
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    flush(None)
    kept = os.dup(1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)


def _joined(
    found: list[tuple[RequestClass, Configuration, float, dict[RequestClass, float]]],
) -> list[Pool]:
    """Return pools with so many instances as are filled; join two where fewer do for both."""
    pools, rest = [], sorted(found, key=lambda each: (each[1], each[0]), reverse=True)
    while rest:
        longest, configuration, filled, serves = rest.pop(0)
        for other in list(rest):
            fewer = _instances(filled + other[2]) < _instances(filled) + _instances(other[2])
            if other[1] == configuration and longest.covers(other[0]) and fewer:
                filled += other[2]
                serves = {
                    request_class: serves.get(request_class, 0.0) + other[3].get(request_class, 0.0)
                    for request_class in {**serves, **other[3]}
                }
                rest.remove(other)
        pools.append(Pool(longest, configuration, _instances(filled), dict(sorted(serves.items()))))
    return pools


def _instances(filled: float) -> int:
    return max(1, math.ceil(filled - _ROUNDING))


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
_FORMAT, _VERSION = "perseus-planner/inference", 1
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
    totals, plans = dict[str, dict[str, Any]](), list[PoolPlan]()
    for name in POLICIES:
        plans = []
        for _, length_s, demand in periods:
            before = plans[-1].pools if plans else None
            try:
                plan = plan_policy(name, profile, demand, gpus, length_s, before, costs)
            except (InfeasibleGpus, UsageError) as error:
                if name == "planner" and isinstance(error, InfeasibleGpus):
                    least, proved = zip(
                        *(least_gpus(profile, demand) for _, _, demand in periods), strict=True
                    )
                    raise InfeasibleGpus(gpus, max(least), all(proved)) from error
                if name == "planner":
                    raise
                if isinstance(error, UsageError):
                    break
                plan = plan_policy(name, profile, demand, None, length_s, before, costs)
            plans.append(plan)
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
            of.name: [
                None if tokens == math.inf else int(tokens)
                for tokens in (of.input_tokens, of.output_tokens)
            ]
            for of in sorted({of for _, _, demand in periods for of in demand})
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
        "power_w": plan.power_w,
        "change_j": plan.change_j,
        "energy_j": plan.energy_j,
        "bound_j": plan.bound_j,
        "demand": {of.name: load._asdict() for of, load in demand.items()},
        "pools": [
            {
                "longest": pool.longest.name,
                "tensor_degree": pool.at.tensor_degree,
                "setting": pool.at.setting,
                "instances": pool.instances,
                "serves": {of.name: tokens for of, tokens in pool.serves.items()},
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


def plan_policy(
    policy: str,
    profile: InferenceProfile,
    demand: Mapping[RequestClass, Load],
    gpus: int | None,
    period_s: float,
    before: Sequence[Pool] | None = None,
    costs: ChangeCosts = PUBLISHED,
    gap: float = 1e-7,
) -> PoolPlan:
    """Return the pools of least energy among those that a policy allows; arguments and errors as
    in `plan_pools`.
    """
    only = allowed(policy, profile, demand)
    if policy == "hierarchical":
        first = plan_pools(
            profile, demand, gpus, period_s, only=allowed("degree", profile, demand), gap=gap
        )
        degrees = {
            request_class: {
                pool.at.tensor_degree for pool in first.pools if request_class in pool.serves
            }
            for request_class in demand
        }
        only = {
            request_class: [
                configuration
                for configuration in profile.configurations
                if configuration.tensor_degree in degrees[request_class]
            ]
            for request_class in demand
        }
    return plan_pools(
        profile, demand, gpus, period_s, only=only, before=before, costs=costs, gap=gap
    )


def allowed(
    policy: str, profile: InferenceProfile, demand: Mapping[RequestClass, Load]
) -> dict[RequestClass, list[Configuration]] | None:
    """Return the configurations that a policy allows each class; None for all."""
    every = profile.configurations
    degree, setting = map(max, zip(*every, strict=True))
    fixed_degree, fixed_setting = policy in (BASELINE, "clock"), policy in (BASELINE, "degree")
    if not (fixed_degree or fixed_setting):
        return None
    chosen = [
        at
        for at in every
        if (at.tensor_degree == degree or not fixed_degree)
        and (at.setting == setting or not fixed_setting)
    ]
    return dict.fromkeys(demand, chosen)


def _digest(content: Mapping[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True, default=str).encode())
