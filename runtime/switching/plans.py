"""The plans that the pipelines of a job run by, as one value that goes to all ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from perseus_planner.errors import PlanError
from perseus_planner.plans.plan import Plan

OnePlan = Plan | str | os.PathLike[str]
GivenPlan = OnePlan | Mapping[int, OnePlan]

_EVERY = ""  #: the key, as it is sent, of a plan for all pipelines


@dataclass(frozen=True)
class Plans:
    """One plan for all pipelines, or one for each.

    Attributes:
        every: for each pipeline that has none of its own; None: there is no such plan.
        own: pipeline -> its plan.
    """

    every: Plan | None
    own: Mapping[int, Plan]

    @classmethod
    def given(cls, plan: GivenPlan) -> Plans:
        """What a user names: a plan or its file, or such for each pipeline by its number.

        Raises:
            PlanError: a file cannot be read, or is no plan.
        """
        if isinstance(plan, Mapping):
            return cls(None, MappingProxyType({int(number): _loaded(each) for number, each in plan.items()}))
        return cls(_loaded(plan), MappingProxyType({}))

    def of_pipeline(self, pipeline: int) -> Plan:
        """The plan of one pipeline.

        Raises:
            PlanError: it has none.
        """
        plan = self.own.get(pipeline, self.every)
        if plan is None:
            raise PlanError(f"pipeline {pipeline} has no plan; there are plans for {', '.join(map(str, self.own))}")
        return plan

    def dumps(self) -> bytes:
        """As bytes, for other processes."""
        texts = {str(number): plan.dumps() for number, plan in self.own.items()}
        if self.every is not None:
            texts[_EVERY] = self.every.dumps()
        return json.dumps(texts).encode()

    @classmethod
    def loads(cls, data: bytes) -> Plans:
        """Inverse of `dumps`.

        Raises:
            PlanError: it is not what that wrote.
        """
        try:
            texts: dict[str, Any] = json.loads(data)
            plans = {key: Plan.loads(text) for key, text in texts.items()}
            own = {int(key): plan for key, plan in plans.items() if key != _EVERY}
        except (ValueError, TypeError, AttributeError) as error:
            raise PlanError(f"the plans that were sent: {error}; use one planner on all ranks") from error
        return cls(plans.get(_EVERY), MappingProxyType(own))


def missing_file(plan: GivenPlan) -> str | None:
    """The first file that is named and not there; None: all are."""
    given = plan.values() if isinstance(plan, Mapping) else (plan,)
    return next((os.fspath(each) for each in given if not isinstance(each, Plan) and not os.path.exists(each)), None)


def _loaded(plan: OnePlan) -> Plan:
    return plan if isinstance(plan, Plan) else Plan.load(Path(plan))
