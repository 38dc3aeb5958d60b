"""Pools of equal instances, and what changing them costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.base.errors import UsageError

if TYPE_CHECKING:
    from perseus_planner.inference.cells import Configuration, RequestClass


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
        changed_j, resharded_j, new_j = (
            self.clock.energy_j,
            self.resharding.energy_j,
            self.instance.energy_j,
        )
        return changed_j, resharded_j - changed_j, new_j - resharded_j


PUBLISHED = ChangeCosts()


@dataclass(frozen=True)
class Pool:
    """Equal instances."""

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
    found: dict[object, int] = defaultdict(int)
    for pool in pools:
        found[key(pool.at)] += pool.gpus
    return found


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

    @property
    def gap(self) -> float:
        """How far the energy is above the bound, relative."""
        return max(self.energy_j / self.bound_j - 1, 0.0) if self.bound_j > 0 else 0.0
