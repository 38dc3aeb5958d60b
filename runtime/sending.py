"""What all ranks of a job run, on its way to them: one encoding, and one reader with its bounds.

Three things travel so: plans of people and of a service (`Plans`), the programs of a decider that
makes its own, and what each rank is told of a batch. Each is a record (`base.wires.Record`) as one
object of JSON. The job's store carries it compressed: `pack` and `unpack` keep both lengths within
bounds, as the store drops a rank that sends too much, and with it the whole job.

Clocks and modes of a rank travel as `Runs`, as neighbours are mostly alike.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from perseus_planner.base.errors import PlanError
from perseus_planner.base.wires import Record, decode, encode
from perseus_planner.plans.plan import Plan, check_trusted

T = TypeVar("T")

OnePlan = Plan | str | os.PathLike[str]
GivenPlan = OnePlan | Mapping[int, OnePlan]

Runs = tuple[tuple[T, int], ...]
"""Values, and how often each comes in a row."""

LONGEST_PACKED_BYTES = 4 << 20
"""The most that the job's store takes at once: a TCPStore drops a rank that sends 8 MiB, and the
whole job with it.
"""
LONGEST_BYTES = 64 * LONGEST_PACKED_BYTES
"""The most that is unpacked: six times what plans need, which compress to a tenth (by hand)."""


def runs_of(values: Iterable[T]) -> Runs[T]:
    """Return values with how often each comes in a row."""
    return tuple((value, len(list(group))) for value, group in groupby(values))


def values_of(runs: Runs[T]) -> tuple[T, ...]:
    """Return the values of `runs_of`."""
    return tuple(value for value, count in runs for _ in range(count))


def pack(data: bytes) -> bytes:
    """Return what the job's store carries of an encoded record.

    Raises:
        PlanError: If it is too long.
    """
    if len(data) > LONGEST_BYTES:
        raise PlanError(
            f"the plan has {len(data)} bytes, and ranks read {LONGEST_BYTES}; plan for fewer "
            "microbatches"
        )
    packed = zlib.compress(data, 1)
    if len(packed) > LONGEST_PACKED_BYTES:
        raise PlanError(
            f"the plan has {len(packed)} bytes, compressed, and the job's store takes "
            f"{LONGEST_PACKED_BYTES}; plan for fewer microbatches"
        )
    return packed


def unpack(packed: bytes) -> bytes:
    """Return what was packed.

    Raises:
        PlanError: If it is anything else, or longer than `pack` lets it be.
    """
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(packed, LONGEST_BYTES + 1)
    except zlib.error as error:
        raise unreadable(error) from error
    if len(data) > LONGEST_BYTES:
        raise unreadable(f"it has more than {LONGEST_BYTES} bytes")
    if not inflater.eof:
        raise unreadable("its end is missing")
    return data


def read(data: bytes, kind: type[T]) -> T:
    """Return the record that was encoded and sent to all ranks.

    Args:
        data: What was unpacked.
        kind: Its type.

    Raises:
        PlanError: If it is anything else.
    """
    try:
        return decode(data, kind)
    except ValueError as error:
        raise unreadable(error) from error


def unreadable(why: object) -> PlanError:
    """Return the error of what was sent and cannot be read."""
    return PlanError(
        f"what was sent to all ranks cannot be read: {why}; use the same version of the planner "
        "on all ranks"
    )


class _SentPlans(Record, frozen=True):
    """`Plans`, as they are sent: pipelines with equal plans share the text."""

    texts: tuple[str, ...]  #: What `Plan.dumps` returns
    of_pipeline: dict[int, int]  #: Number of a pipeline -> the index of its plan
    common: int | None = None  #: The index of the plan of all others; None if they have none
    number: int | None = None  #: What a service counts them by


@dataclass(frozen=True)
class Plans:
    """One plan for all pipelines, or one for each."""

    #: Plan of each pipeline that is not in `by_pipeline`; None if there is no such plan.
    common: Plan | None
    by_pipeline: Mapping[int, Plan]  #: Number of a pipeline -> its plan
    #: What a service counts them by; None if they come from elsewhere.
    number: int | None = None

    @classmethod
    def load(cls, plan: GivenPlan, number: int | None = None) -> Plans:
        """Load what a user gives: a plan or its file, or one for each pipeline by its number.

        Args:
            plan: What is given.
            number: What a service counts it by.

        Raises:
            PlanError: If a file cannot be read, or is not a plan.
        """
        if isinstance(plan, Mapping):
            return cls(
                None,
                MappingProxyType(
                    {int(pipeline): _load(own_plan) for pipeline, own_plan in plan.items()}
                ),
                number,
            )
        return cls(_load(plan), MappingProxyType({}), number)

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

    def check_trusted(self, trusts_traced: bool) -> None:
        """Refuse plans of traced profiles, unless they are trusted: their rows at all clocks but
        one are estimates.

        Raises:
            PlanError: If one is of a traced profile.
        """
        plans = [plan for plan in (self.common, *self.by_pipeline.values()) if plan is not None]
        for plan in plans:
            check_trusted(plan, trusts_traced)

    def rank_clocks(self, pipeline: int) -> Sequence[float]:
        """Return the mean clock of each rank of a pipeline."""
        return self.of_pipeline(pipeline).rank_clocks

    def dumps(self) -> bytes:
        """Return the plans as bytes, for other processes."""
        # A service gives many pipelines one plan, which is written once.
        plans = {id(plan): plan for plan in (self.common, *self.by_pipeline.values())}
        texts = {key: plan.dumps() for key, plan in plans.items() if plan is not None}
        index_of_text = {text: index for index, text in enumerate(dict.fromkeys(texts.values()))}
        return encode(
            _SentPlans(
                texts=tuple(index_of_text),
                of_pipeline={
                    pipeline: index_of_text[texts[id(plan)]]
                    for pipeline, plan in self.by_pipeline.items()
                },
                common=None if self.common is None else index_of_text[texts[id(self.common)]],
                number=self.number,
            )
        )

    @classmethod
    def loads(cls, data: bytes) -> Plans:
        """Load what `dumps` returned.

        Raises:
            PlanError: If the data is anything else.
        """
        sent = read(data, _SentPlans)
        plans = dict(enumerate(map(Plan.loads, sent.texts)))
        # The bytes may come from another version, whose numbers name texts that are not there.
        try:
            by_pipeline = {pipeline: plans[index] for pipeline, index in sent.of_pipeline.items()}
            common = None if sent.common is None else plans[sent.common]
        except KeyError as error:
            raise unreadable(f"it has no plan {error}") from error
        return cls(common, MappingProxyType(by_pipeline), sent.number)


def _load(plan: OnePlan) -> Plan:
    return plan if isinstance(plan, Plan) else Plan.load(Path(plan))
