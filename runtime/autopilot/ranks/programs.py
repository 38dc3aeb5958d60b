"""The programs of the autopilot, as they are sent to all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from perseus_planner.base.errors import PlanError
from perseus_planner.base.wires import Message, decode
from perseus_planner.runs.autopilot import AutopilotStatus
from perseus_planner.runtime.autopilot.job import Ledger
from perseus_planner.runtime.hook import Program
from perseus_planner.schedules import Computation

Clocks = tuple[tuple[int, ...], ...]
"""The clock of each computation, for each rank of a pipeline."""


def order_number(order: Iterable[tuple[int, str, int]]) -> int:
    """Return a number that tells orders of computations apart."""
    return zlib.crc32(
        " ".join(f"{stage}{kind}{microbatch}" for stage, kind, microbatch in order).encode()
    )


class Programs(Message, frozen=True):
    """What all ranks run in an iteration, as the autopilot sends it."""

    decision: int  #: `Decision.version`: 0 for full clocks
    orders: tuple[int, ...]  #: For each rank of a pipeline, the number of its order of computations
    #: For each kind of pipeline and each of its ranks, clocks, and how often each comes in a row.
    clocks: tuple[tuple[tuple[tuple[int, int], ...], ...], ...]
    pipelines: tuple[int, ...]  #: The kind of each pipeline
    top: int  #: The value that counts as full clocks
    time_s: float  #: Expected time of an iteration, seconds
    #: The reference and the limits for the ledger of each rank; None before the reference is known.
    ledger: Ledger | None
    status: AutopilotStatus  #: What the autopilot knew
    #: For each pipeline, the seconds that its ranks compute, as `Autopilot.busy_s`; empty if not
    #: known.
    busy_s: tuple[tuple[float, ...], ...] = ()

    def rank_clocks(self, pipeline: int) -> Sequence[float]:
        """Return the mean clock of each rank of a pipeline, over its computations."""
        return [
            sum(clock * count for clock, count in runs) / sum(count for _, count in runs)
            for runs in self.clocks[self.pipelines[pipeline]]
        ]

    @staticmethod
    def program_of(
        data: bytes,
        version: int,
        pipeline: int,
        rank: int,
        orders: Mapping[int, tuple[Computation, ...]],
    ) -> Program:
        """Return the program of one rank.

        Args:
            data: The programs, as they were sent.
            version: Number of the program in this job.
            pipeline: The rank's pipeline.
            rank: The rank in its pipeline.
            orders: By number, the orders that the rank has run.

        Raises:
            PlanError: If it is not for what this rank runs.
        """
        try:
            sent = decode(data, Programs)
            number = sent.orders[rank]
            runs = sent.clocks[sent.pipelines[pipeline]][rank]
            busy_s = sent.busy_s[pipeline][rank] if sent.busy_s else None
        except (ValueError, IndexError) as error:
            raise PlanError(
                f"the autopilot's program cannot be read: {error}; use the same version of the "
                "planner on all ranks"
            ) from error
        clocks = tuple(clock for clock, count in runs for _ in range(count))
        order = orders.get(number)
        if order is None or len(order) != len(clocks):
            raise PlanError("the autopilot's program is for another order of computations")
        return Program(
            version=version,
            computations=order,
            clocks=clocks,
            time_s=sent.time_s,
            decision=sent.decision,
            order=number,
            top=sent.top,
            ledger=sent.ledger,
            status=sent.status,
            busy_s=busy_s,
            sent=sent,
        )


def clock_runs(clocks: Sequence[Clocks]) -> tuple[Any, tuple[int, ...]]:
    """Return `Programs.clocks` and `Programs.pipelines` of the clocks of each pipeline."""
    kinds = list(dict.fromkeys(clocks))
    runs = tuple(
        tuple(
            tuple((clock, len(list(group))) for clock, group in groupby(rank)) for rank in pipeline
        )
        for pipeline in kinds
    )
    return runs, tuple(map(kinds.index, clocks))


def order_of(noted: Iterable[Any]) -> tuple[Computation, ...]:
    """Return an order of computations that was noted or sent as (stage, kind, microbatch)."""
    return tuple(
        Computation(int(stage), str(kind), int(microbatch)) for stage, kind, microbatch in noted
    )
