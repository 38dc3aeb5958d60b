"""The plans of all pipelines of a job, as one value that is sent to all ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from perseus_planner.base.errors import PlanError
from perseus_planner.base.wires import decode, encode
from perseus_planner.plans.plan import Plan

OnePlan = Plan | str | os.PathLike[str]
GivenPlan = OnePlan | Mapping[int, OnePlan]

_COMMON = ""  #: key of the common plan in the bytes that are sent


@dataclass(frozen=True)
class Plans:
    """One plan for all pipelines, or one for each."""

    #: Plan of each pipeline that is not in `by_pipeline`; None if there is no such plan.
    common: Plan | None
    by_pipeline: Mapping[int, Plan]  #: Number of a pipeline -> its plan

    @classmethod
    def load(cls, plan: GivenPlan) -> Plans:
        """Load what a user gives: a plan or its file, or one for each pipeline by its number.

        Raises:
            PlanError: If a file cannot be read, or is not a plan.
        """
        if isinstance(plan, Mapping):
            return cls(
                None,
                MappingProxyType(
                    {int(number): _load(pipeline_plan) for number, pipeline_plan in plan.items()}
                ),
            )
        return cls(_load(plan), MappingProxyType({}))

    def of_pipeline(self, pipeline: int) -> Plan:
        """Return the plan of one pipeline.

        Raises:
            PlanError: If the pipeline has no plan.
        """
        plan = self.by_pipeline.get(pipeline, self.common)
        if plan is None:
            numbers = ", ".join(map(str, self.by_pipeline))
            raise PlanError(f"pipeline {pipeline} has no plan; there are plans for {numbers}")
        return plan

    def rank_clocks(self, pipeline: int) -> Sequence[float]:
        """Return the mean clock of each rank of a pipeline."""
        return self.of_pipeline(pipeline).rank_clocks

    def dumps(self) -> bytes:
        """Return the plans as bytes, for other processes."""
        texts = {str(number): plan.dumps() for number, plan in self.by_pipeline.items()}
        if self.common is not None:
            texts[_COMMON] = self.common.dumps()
        return encode(texts)

    @classmethod
    def loads(cls, data: bytes) -> Plans:
        """Load what `dumps` returned.

        Raises:
            PlanError: If the data is anything else.
        """
        try:
            texts = decode(data, dict[str, str])
            plans = {key: Plan.loads(text) for key, text in texts.items()}
            by_pipeline = {int(key): plan for key, plan in plans.items() if key != _COMMON}
        except ValueError as error:
            raise PlanError(
                f"the plans that were sent cannot be read: {error}; use the same version of the "
                "planner on all ranks"
            ) from error
        return cls(plans.get(_COMMON), MappingProxyType(by_pipeline))


def _load(plan: OnePlan) -> Plan:
    return plan if isinstance(plan, Plan) else Plan.load(Path(plan))
