"""The programs of the autopilot, as they are sent to all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, zip_longest
from typing import Any, TypeVar

from perseus_planner.base.errors import PlanError
from perseus_planner.base.wires import Message, decode
from perseus_planner.runs.autopilot import AutopilotStatus
from perseus_planner.runtime.autopilot.job import Decision, Ledger
from perseus_planner.runtime.hook import Program
from perseus_planner.schedules import Computation

T = TypeVar("T")
Runs = tuple[tuple[T, int], ...]
"""Values, and how often each comes in a row."""


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
    clocks: tuple[tuple[Runs[int], ...], ...]
    pipelines: tuple[int, ...]  #: The kind of each pipeline
    top: int  #: The value that counts as full clocks
    time_s: float  #: Expected time of an iteration, seconds
    #: The reference and the limits for the ledger of each rank; None before the reference is known.
    ledger: Ledger | None
    status: AutopilotStatus  #: What the autopilot knew
    #: For each pipeline, the seconds that its ranks compute, as `Autopilot.busy_s`; empty if not
    #: known.
    busy_s: tuple[tuple[float, ...], ...] = ()
    #: Modes, likewise as `clocks`; empty if the job has one.
    modes: tuple[tuple[Runs[str], ...], ...] = ()

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
            modes = sent.modes[sent.pipelines[pipeline]][rank] if sent.modes else ()
        except (ValueError, IndexError) as error:
            raise PlanError(
                f"the autopilot's program cannot be read: {error}; use the same version of the "
                "planner on all ranks"
            ) from error
        clocks = values_of(runs)
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
            modes=values_of(modes),
        )


def program_runs(decision: Decision) -> dict[str, Any]:
    """Return `Programs.clocks`, `Programs.modes` and `Programs.pipelines` of a decision."""
    pipelines = list(zip_longest(decision.clocks, decision.modes))
    kinds = list(dict.fromkeys(pipelines))
    clocks, modes = (
        tuple(tuple(map(runs_of, ranks)) for ranks in each if ranks)
        for each in zip(*kinds, strict=True)
    )
    return {"clocks": clocks, "modes": modes, "pipelines": tuple(map(kinds.index, pipelines))}


def runs_of(values: Iterable[T]) -> Runs[T]:
    """Return values with how often each comes in a row."""
    return tuple((value, len(list(group))) for value, group in groupby(values))


def values_of(runs: Runs[T]) -> tuple[T, ...]:
    """Return the values of `runs_of`."""
    return tuple(value for value, count in runs for _ in range(count))


def order_of(noted: Iterable[Any]) -> tuple[Computation, ...]:
    """Return an order of computations that was noted or sent as (stage, kind, microbatch)."""
    return tuple(
        Computation(int(stage), str(kind), int(microbatch)) for stage, kind, microbatch in noted
    )
