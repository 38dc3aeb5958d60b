"""Plans of pools, epoch by epoch, beside other ways to choose them; their file, inference.yaml."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import yaml

from perseus_planner.base.documents import check_digest, read_document
from perseus_planner.base.errors import InfeasibleGpus, PlanError, UsageError
from perseus_planner.base.files import sha256, write_file
from perseus_planner.inference.cells import Configuration, RequestClass
from perseus_planner.inference.programme import (
    PUBLISHED,
    ChangeCosts,
    Pool,
    PoolPlan,
    least_gpus,
    plan_pools,
)
from perseus_planner.inference.workload import Load

if TYPE_CHECKING:
    from perseus_planner.inference.cells import InferenceProfile

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


@dataclass(frozen=True)
class Epoch:
    """A period with one set of pools."""

    start_s: float  #: when it begins, seconds after the first request
    length_s: float  #: how long it is, seconds
    demand: Mapping[RequestClass, Load]  #: load of each class
    plan: PoolPlan  #: the pools


@dataclass(frozen=True)
class PolicyTotal:
    """What one way to choose configurations needs over all epochs."""

    energy_j: float | None  #: joules; None if it meets the objectives with no number of GPUs
    gpus: int  #: most GPUs in use; more than there are if it needs more


@dataclass(frozen=True)
class InferencePlan:
    """Pools for each epoch."""

    epochs: tuple[Epoch, ...]  #: in the order of time
    policies: Mapping[str, PolicyTotal]  #: name in `POLICIES` -> its total
    gpus: int  #: how many GPUs there are
    control: str  #: "clock" or "power-limit"
    profile_digest: str  #: of the inference profile

    @property
    def energy_j(self) -> float:
        """Energy of all epochs, joules, changes included."""
        return sum(epoch.plan.energy_j for epoch in self.epochs)

    @property
    def gap(self) -> float:
        """The largest gap of an epoch."""
        return max(epoch.plan.gap for epoch in self.epochs)

    def saved_share(self, policy: str = "planner") -> float | None:
        """Return the saving against the baseline, relative; None if one of them is impossible."""
        baseline_j, energy_j = self.policies[BASELINE].energy_j, self.policies[policy].energy_j
        return None if baseline_j is None or energy_j is None else 1 - energy_j / baseline_j

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as YAML; equal plans give equal bytes.

        Raises:
            PlanError: If the file cannot be written.
        """
        content = self._content()
        document = {"format": _FORMAT, "version": _VERSION, "digest": _digest(content), **content}
        write_file(
            path,
            yaml.safe_dump(document, sort_keys=False, width=120, default_flow_style=None),
            PlanError,
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> InferencePlan:
        """Read a file that `save` wrote.

        Raises:
            PlanError: If the file cannot be read, or is not exactly what was written.
        """
        document = read_document(Path(path), _FORMAT, _VERSION, ("digest", *_KEYS), (), PlanError)
        return _from_content(check_digest(document, _digest, "planner inference plan"))

    def _content(self) -> dict[str, Any]:
        classes = {request_class for epoch in self.epochs for request_class in epoch.demand}
        return {
            "profile": self.profile_digest,
            "control": self.control,
            "gpus": self.gpus,
            "classes": {
                request_class.name: [
                    _finite(request_class.input_tokens),
                    _finite(request_class.output_tokens),
                ]
                for request_class in sorted(classes)
            },
            "policies": {
                name: {"energy_j": total.energy_j, "gpus": total.gpus}
                for name, total in self.policies.items()
            },
            "epochs": [epoch_content(epoch) for epoch in self.epochs],
        }


def make_plan(
    profile: InferenceProfile,
    periods: Sequence[tuple[float, float, Mapping[RequestClass, Load]]],
    gpus: int,
    costs: ChangeCosts = PUBLISHED,
) -> InferencePlan:
    """Plan each period, by every policy; changes are paid from one period to the next.

    Args:
        profile: what requests cost.
        periods: start and length of each, seconds, and its demand; those without demand are left
            out.
        gpus: how many there are.
        costs: of changes.

    Raises:
        InfeasibleGpus: If there are too few GPUs.
        UsageError: If a class has no configuration that meets its objective.
    """
    totals: dict[str, PolicyTotal] = {}
    for name in POLICIES:
        epochs: list[Epoch] = []
        for start_s, length_s, demand in periods:
            before = epochs[-1].plan.pools if epochs else None
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
            epochs.append(Epoch(start_s, length_s, demand, plan))
        complete = len(epochs) == len(periods)
        energy_j = sum(epoch.plan.energy_j for epoch in epochs) if complete else None
        totals[name] = PolicyTotal(energy_j, max((epoch.plan.gpus for epoch in epochs), default=0))
    return InferencePlan(tuple(epochs), totals, gpus, profile.control, profile.digest)


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
    degree, setting = (
        max(configuration.tensor_degree for configuration in every),
        max(configuration.setting for configuration in every),
    )
    fixed_degree, fixed_setting = policy in (BASELINE, "clock"), policy in (BASELINE, "degree")
    if not (fixed_degree or fixed_setting):
        return None
    chosen = [
        configuration
        for configuration in every
        if configuration.tensor_degree == degree or not fixed_degree
    ]
    chosen = [
        configuration
        for configuration in chosen
        if configuration.setting == setting or not fixed_setting
    ]
    return dict.fromkeys(demand, chosen)


def _finite(tokens: float) -> int | None:
    return None if tokens == math.inf else int(tokens)


def _tokens(bound: int | None) -> float:
    return math.inf if bound is None else float(bound)


def _digest(content: Mapping[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True, default=str).encode())


def epoch_content(epoch: Epoch) -> dict[str, Any]:
    """Return what stands in the file for a period."""
    plan = epoch.plan
    return {
        "start_s": epoch.start_s,
        "length_s": epoch.length_s,
        "power_w": plan.power_w,
        "change_j": plan.change_j,
        "energy_j": plan.energy_j,
        "bound_j": plan.bound_j,
        "demand": {
            request_class.name: load._asdict() for request_class, load in epoch.demand.items()
        },
        "pools": [
            {
                "longest": pool.longest.name,
                "tensor_degree": pool.at.tensor_degree,
                "setting": pool.at.setting,
                "instances": pool.instances,
                "serves": {
                    request_class.name: tokens for request_class, tokens in pool.serves.items()
                },
            }
            for pool in plan.pools
        ],
    }


def _from_content(content: Mapping[str, Any]) -> InferencePlan:
    """Return the plan of a content whose digest is right, so that this planner wrote it."""
    classes = {
        name: RequestClass(_tokens(first), _tokens(second), name)
        for name, (first, second) in content["classes"].items()
    }
    epochs = []
    for epoch in content["epochs"]:
        pools = tuple(
            Pool(
                classes[pool["longest"]],
                Configuration(pool["tensor_degree"], pool["setting"]),
                pool["instances"],
                {classes[name]: tokens for name, tokens in pool["serves"].items()},
            )
            for pool in epoch["pools"]
        )
        plan = PoolPlan(
            pools, epoch["power_w"], epoch["change_j"], epoch["energy_j"], epoch["bound_j"]
        )
        demand = {classes[name]: Load(**load) for name, load in epoch["demand"].items()}
        epochs.append(Epoch(epoch["start_s"], epoch["length_s"], demand, plan))
    policies = {name: PolicyTotal(**total) for name, total in content["policies"].items()}
    return InferencePlan(
        tuple(epochs), policies, content["gpus"], content["control"], content["profile"]
    )
