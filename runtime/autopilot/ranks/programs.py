"""The programs of the autopilot, as they are sent to all ranks, and as each rank runs its own."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from perseus_planner.base.errors import PlanError, PlannerError
from perseus_planner.profiles.measurement import changes_per_rank, with_fewer_changes
from perseus_planner.runs.autopilot import AutopilotStatus
from perseus_planner.runtime.autopilot.ledger import Ledger
from perseus_planner.schedules import Computation

Clocks = tuple[tuple[int, ...], ...]
"""The clock of each computation, for each rank of a pipeline."""


def order_number(order: Iterable[tuple[int, str, int]]) -> int:
    """Return a number that tells orders of computations apart."""
    return zlib.crc32(
        " ".join(f"{stage}{kind}{microbatch}" for stage, kind, microbatch in order).encode()
    )


@dataclass(frozen=True)
class Programs:
    """What all ranks run in an iteration, as the autopilot sends it."""

    decision: int  #: `Decision.version`: 0 for full clocks
    orders: tuple[int, ...]  #: For each rank of a pipeline, the number of its order of computations
    clocks: tuple[Clocks, ...]  #: For each pipeline, the clocks of its ranks
    top_mhz: int  #: The clock that counts as full
    time_s: float  #: Expected time of an iteration, seconds
    #: The reference and the limits for the ledger of each rank; None before the reference is known.
    ledger: Ledger | None
    status: AutopilotStatus  #: What the autopilot knew
    #: For each pipeline, the seconds that its ranks compute, as `Autopilot.busy_s`; empty if not
    #: known.
    busy_s: tuple[tuple[float, ...], ...] = ()

    def dumps(self) -> bytes:
        """Return the programs as bytes: runs of equal clocks, and equal pipelines once."""
        kinds = list(dict.fromkeys(self.clocks))
        values = {
            "decision": self.decision,
            "orders": self.orders,
            "clocks": [[_runs(rank) for rank in clocks] for clocks in kinds],
            "pipelines": [kinds.index(clocks) for clocks in self.clocks],
            "top_mhz": self.top_mhz,
            "time_s": self.time_s,
            "ledger": None if self.ledger is None else self.ledger.to_dict(),
            "status": asdict(self.status),
            "busy_s": self.busy_s,
        }
        return json.dumps(values, separators=(",", ":")).encode()

    @staticmethod
    def program_of(
        data: bytes,
        version: int,
        pipeline: int,
        rank: int,
        orders: Mapping[int, tuple[Computation, ...]],
    ) -> AutopilotProgram:
        """Return the program of one rank, from what `dumps` returned; nothing else in it is
        decoded.

        Args:
            data: What was sent.
            version: Number of the program in this job.
            pipeline: The rank's pipeline.
            rank: The rank in its pipeline.
            orders: By number, the orders that the rank has run.

        Raises:
            PlanError: If it is not for what this rank runs.
        """
        try:
            values = json.loads(data)
            number = int(values["orders"][rank])
            runs = values["clocks"][values["pipelines"][pipeline]][rank]
            ledger = None if values["ledger"] is None else Ledger(**values["ledger"])
            status = AutopilotStatus(**values["status"])
            top_mhz, decision, time_s = (
                int(values["top_mhz"]),
                int(values["decision"]),
                float(values["time_s"]),
            )
            clocks = tuple(clock for clock, count in runs for _ in range(count))
            busy_s = float(values["busy_s"][pipeline][rank]) if values["busy_s"] else None
        except (ValueError, TypeError, KeyError, IndexError, PlannerError) as error:
            raise PlanError(
                f"the autopilot's program cannot be read: {error}; use the same version of the "
                "planner on all ranks"
            ) from error
        order = orders.get(number)
        if order is None or len(order) != len(clocks):
            raise PlanError("the autopilot's program is for another order of computations")
        return AutopilotProgram(
            version, decision, number, order, clocks, time_s, top_mhz, ledger, status, busy_s
        )


def _runs(clocks: Sequence[int]) -> list[tuple[int, int]]:
    return [(clock, len(list(group))) for clock, group in groupby(clocks)]


@dataclass(frozen=True)
class AutopilotProgram:
    """What one rank runs in an iteration by the autopilot; see `RankProgram`."""

    version: int  #: Number of the program in this job
    decision: int  #: `Decision.version`: 0 for full clocks
    order: int  #: Number of the order of computations
    computations: tuple[Computation, ...] = field(repr=False)  #: What the rank runs, in order
    clocks: tuple[int, ...] = field(repr=False)  #: The clock of each, MHz
    time_s: float  #: Expected time of an iteration, seconds
    top_mhz: int  #: The clock that counts as full, MHz
    #: Reference and limits for the rank's ledger; None before the reference is known.
    ledger: Ledger | None
    status: AutopilotStatus  #: What the autopilot knew
    #: Seconds that the rank computes, were its GPU as fast as at first; None if that is not known.
    busy_s: float | None = None
    plan: None = None
    control: str = "clock"

    @cached_property
    def changes(self) -> int:
        """How often the clock changes in an iteration, including the change back to the first
        one.
        """
        return changes_per_rank(self.clocks)

    @cached_property
    def microbatches(self) -> int:
        """Number of microbatches of an iteration."""
        return 1 + max(each.microbatch for each in self.computations)

    @cached_property
    def at_full_clocks(self) -> AutopilotProgram:
        """The same with the highest clock for each computation.

        It is locked, not only left to the GPU: so an iteration at full clocks runs at a clock that
        is known, and its times are those of a row of the profile.
        """
        if self.decision == 0:
            return self
        return replace(self, decision=0, clocks=(self.top_mhz,) * len(self.clocks), busy_s=None)

    def with_changes(self, most: int) -> AutopilotProgram:
        """Return the program with at most so many changes in an iteration."""
        return replace(self, clocks=with_fewer_changes(self.clocks, most), busy_s=None)


def order_of(noted: Iterable[Any]) -> tuple[Computation, ...]:
    """Return an order of computations that was noted or sent as (stage, kind, microbatch)."""
    return tuple(
        Computation(int(stage), str(kind), int(microbatch)) for stage, kind, microbatch in noted
    )
