"""What ranks and the autopilot's process say to each other; and what rank 0's agent at the service
and its part in the autopilot, or in clocks that follow the batch, give each other.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, TypeAlias

import msgspec

from perseus_planner.base.errors import PlanError
from perseus_planner.base.wires import Message
from perseus_planner.extensions.autopilot.job import (
    ComputationObservation,
    Decision,
    RankObservation,
    RankRow,
)
from perseus_planner.extensions.autopilot.status import AutopilotStatus
from perseus_planner.profiles.modes import OWN
from perseus_planner.runs.savings import Cost, RankCosts
from perseus_planner.runtime.decider import Learnt
from perseus_planner.runtime.guarantee import Ledger
from perseus_planner.runtime.options import AutopilotSettings
from perseus_planner.runtime.program import Expected, Program
from perseus_planner.runtime.sending import Runs, read, runs_of, unreadable, values_of
from perseus_planner.schedules import Computation


def order_number(order: Iterable[tuple[int, str, int]]) -> int:
    """Return a number that tells orders of computations apart."""
    return zlib.crc32(
        " ".join(f"{stage}{kind}{microbatch}" for stage, kind, microbatch in order).encode()
    )


@dataclass(frozen=True)
class Noted:
    """What a rank remembers with a program of the autopilot."""

    decision: int  #: `Decision.version`: 0 for full clocks
    order: int  #: Number of the order of computations
    ledger: Ledger | None  #: Reference and limits for its own; None before the reference is known
    status: AutopilotStatus  #: What the autopilot knew


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
    #: `Autopilot.rank_costs`; empty if not known.
    costs: tuple[tuple[RankRow, ...], ...] = ()
    saving_stderr: float = 0.0  #: `Decision.saving_stderr`
    #: Whether a rank's computing is told from its waiting, so that a slow one can be seen.
    tells_busy: bool = True
    #: The mode of each computation, in runs as `clocks` has them; empty if the job has one.
    modes: tuple[tuple[Runs[str], ...], ...] = ()

    @property
    def number(self) -> None:
        """No service counts them."""
        return

    def rank_clocks(self, pipeline: int) -> Sequence[float]:
        """Return the mean clock of each rank of a pipeline, over its computations."""
        return [
            sum(clock * count for clock, count in runs) / sum(count for _, count in runs)
            for runs in self.clocks[self.pipelines[pipeline]]
        ]

    def _rank_costs(self, pipeline: int, rank: int) -> RankCosts:
        """Return what a rank takes and uses, with its part of the error of the saving."""
        rows = self.costs[pipeline]
        own = self.costs[pipeline][rank]
        all_j = sum(row.full_j + row.waiting_w * max(0.0, self.time_s - row.full_s) for row in rows)
        each = (Cost(own.busy_s, own.busy_j, own.full_s, own.full_j),)
        error_j = self.saving_stderr * all_j / len(rows)
        return RankCosts(each, own.waiting_w, self.time_s, error_j)

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
        sent = read(data, Programs)
        try:
            number = sent.orders[rank]
            runs = sent.clocks[sent.pipelines[pipeline]][rank]
            costs = sent._rank_costs(pipeline, rank) if sent.costs else None
            busy_s = sent.costs[pipeline][rank].busy_s if sent.costs else None
            modes = sent.modes[sent.pipelines[pipeline]][rank] if sent.modes else ()
        except IndexError as error:
            raise unreadable(error) from error
        clocks = values_of(runs)
        # The rank has run something else since the decision, so clocks would fall on other
        # computations.
        order = orders.get(number)
        if order is None or len(order) != len(clocks):
            raise PlanError("the autopilot's program is for another order of computations")
        return Program(
            version=version,
            computations=order,
            clocks=clocks,
            modes=values_of(modes),
            expected=Expected(
                time_s=sent.time_s,
                top=sent.top,
                # Where waiting looks like computing, a busy time would blame the wrong rank.
                busy_s=busy_s if sent.tells_busy else None,
                costs=costs,
                sent=sent,
            ),
            note=Noted(sent.decision, number, sent.ledger, sent.status),
        )


def noted(program: Program) -> Noted:
    """Return what a rank remembers with a program of the autopilot."""
    note = program.note
    assert isinstance(note, Noted)  # all of the autopilot's have one
    return note


def at_full_clocks(program: Program) -> Program:
    """Return a program of the autopilot with the highest clock for each computation, in the
    training's own way.

    It is locked, not only left to the GPU: so an iteration at full clocks runs at a clock that is
    known, and its times are those of a row of the profile.
    """
    note = noted(program)
    if note.decision == 0:
        return program
    full = program.at((program.expected.top,) * len(program.clocks))
    return replace(full, modes=(), note=replace(note, decision=0))


def program_runs(decision: Decision) -> dict[str, Any]:
    """Return `Programs.clocks`, `Programs.modes` and `Programs.pipelines` of a decision."""
    pipelines = list(zip_longest(decision.clocks, decision.modes))
    kinds = list(dict.fromkeys(pipelines))
    clocks, modes = (
        tuple(tuple(map(runs_of, ranks)) for ranks in each if ranks)
        for each in zip(*kinds, strict=True)
    )
    return {"clocks": clocks, "modes": modes, "pipelines": tuple(map(kinds.index, pipelines))}


def order_of(noted: Iterable[Any]) -> tuple[Computation, ...]:
    """Return an order of computations that was noted or sent as (stage, kind, microbatch)."""
    return tuple(
        Computation(int(stage), str(kind), int(microbatch)) for stage, kind, microbatch in noted
    )


READERS = 64
"""Of how many ranks rank 0 reads an iteration; in larger jobs, pipelines take turns."""


@dataclass(frozen=True)
class Frame:
    """One iteration of one rank. Times are seconds from its begin, by the rank's clock."""

    rank: int  #: Rank in the whole job
    order: int  #: Number of the order of computations that the rank runs; 0 if it is not known yet
    iteration: int  #: Number of the iteration
    decision: int  #: `Decision.version` of its program; 0 if it ran at full clocks
    time_s: float  #: How long it took
    #: Begin and end of each computation, one after the other; empty if nothing can be learnt of
    #: them.
    spans_s: tuple[float, ...] = ()
    #: When clocks came into force, and which (MHz); the first is the one at its begin, with a time
    #: of 0. A clock of 0 is not known.
    changes: tuple[tuple[float, int], ...] = ()
    energy_j: float | None = None  #: Energy of the GPU; None if it is not known
    throttled_s: float = 0.0  #: Seconds in which the GPU was throttled
    #: How many iterations had a known energy so far, and their joules together; rank 0 does not see
    #: all iterations if they are short.
    metered: tuple[int, float] = (0, 0.0)
    #: How long the last calls took that set a clock, seconds, their median; 0 if that is not known.
    call_s: float = 0.0
    #: The modes of the computations, and how often each comes in a row; empty if they ran in the
    #: training's own way.
    modes: Runs[str] = ()

    def observation(
        self, pipeline: int, rank: int, gpus: int, energy_step_s: float
    ) -> RankObservation:
        """Return what the autopilot is told.

        Args:
            pipeline: The rank's pipeline.
            rank: The rank in its pipeline.
            gpus: How many GPUs like this one the rank of the pipeline has.
            energy_step_s: How old a reading of the energy counter can be, in seconds.
        """
        # Frames carry no modes where all ran in the training's own way.
        modes = values_of(self.modes) or (OWN,) * (len(self.spans_s) // 2)
        return RankObservation(
            pipeline,
            rank,
            self.iteration,
            self.decision,
            self.time_s,
            tuple(
                self._computation(begin_s, end_s, mode)
                for begin_s, end_s, mode in zip(
                    self.spans_s[0::2], self.spans_s[1::2], modes, strict=True
                )
            ),
            # One GPU's counter stands for all GPUs of the rank, which are alike.
            None if self.energy_j is None else gpus * self.energy_j,
            energy_step_s,
            self.throttled_s,
            (self.metered[0], gpus * self.metered[1]),
        )

    def _computation(self, begin_s: float, end_s: float, mode: str) -> ComputationObservation:
        # The clock at the begin is the last one that came into force before it.
        before = [clock for at_s, clock in self.changes if at_s <= begin_s]
        inside = [change for change in self.changes if begin_s < change[0] < end_s]
        # With an unknown clock, or more than one change, no time can be told for any clock.
        if not before or not before[-1] or len(inside) > 1 or not all(clock for _, clock in inside):
            return ComputationObservation(begin_s, end_s, None, mode=mode)
        change_s, changed_mhz = inside[0] if inside else (None, None)
        return ComputationObservation(begin_s, end_s, before[-1], change_s, changed_mhz, mode)


@dataclass(frozen=True)
class FrameHead:
    """The part of a `Frame` that rank 0 reads."""

    order: int
    iteration: int


@dataclass(frozen=True)
class ObservedGpu:
    """The GPU of a rank."""

    name: str  #: Its name
    origin: str  #: "measured" or "simulated"
    clocks_mhz: tuple[int, ...]  #: The clocks that may be set, highest first
    control: str = "clock"  #: What they are; power limits are watts


@dataclass(frozen=True)
class RankTraining:
    """What a rank runs, and on which GPU."""

    order: tuple[tuple[int, str, int], ...]  #: Stage, kind and microbatch of its computations
    gpu: ObservedGpu | None  #: None if no clock can be set


@dataclass(frozen=True)
class Places:
    """Which ranks observe for the autopilot."""

    #: Rank in the whole job -> its pipeline and its rank there. If several ranks have one place,
    #: the first.
    of: Mapping[int, tuple[int, int]]
    pipelines: int  #: Number of pipelines
    gpus_per_stage: int  #: How many ranks have one place
    #: Each pipeline is observed in one of so many iterations: pipeline p in those with the same
    #: remainder.
    every: int

    @classmethod
    def among(cls, everyone: Sequence[tuple[int, int] | None]) -> Places:
        """Return the places of a job, given the pipeline and the rank in it of each rank; None
        for absent ranks.
        """
        # Several ranks may share a place, and one of them speaks for it.
        first: dict[tuple[int, int], int] = {}
        for rank, place in enumerate(everyone):
            if place is not None:
                first.setdefault(place, rank)
        present = sum(place is not None for place in everyone)
        place_of = {rank: place for place, rank in first.items()}
        # Absent ranks are not in any pipeline, so pipelines are counted by those present.
        pipelines = len({pipeline for pipeline, _ in first})
        gpus_per_stage = max(1, present // max(1, len(first)))
        return cls(place_of, pipelines, gpus_per_stage, turns(pipelines, len(first)))

    def observed_in(self, iteration: int) -> list[int]:
        """Return the ranks that observe an iteration."""
        turn = iteration % self.every
        return [rank for rank, (pipeline, _) in self.of.items() if pipeline % self.every == turn]


def turns(pipelines: int, positions: int) -> int:
    """Return how many iterations pass until all pipelines were observed, which have so many ranks
    together.
    """
    per_pipeline = max(1, positions // max(1, pipelines))
    return max(1, -(-pipelines // max(1, READERS // per_pipeline)))


class JobDescription(Message, frozen=True):
    """What rank 0 says of the job."""

    settings: AutopilotSettings
    places: Places
    sets_clocks: bool  #: Whether clocks are set; otherwise only full clocks can be observed
    state: str | None  #: File of what is learnt; None for none
    gpus_per_node: int = 8  #: How many GPUs share the lock of a driver
    is_shared: bool = False  #: Whether a service wants to know what is learnt
    modes: tuple[str, ...] = (OWN,)  #: As `AutopilotJob.modes`
    shares_microbatch: bool = False  #: As there
    #: By rank in the whole job, of the first pipeline; empty while they are not known.
    trainings: Mapping[int, RankTraining] = {}


class Observations(Message, frozen=True):
    """What the ranks observed of an iteration."""

    since: int  #: The iteration that a program begins with which is proposed now
    frames: tuple[msgspec.Raw, ...]  #: Each a `Frame`, which rank 0 passes on as it is


class Waits(Message, frozen=True):
    """How long each pipeline may take; see `ServiceExchange`."""

    waits_s: tuple[float, ...]


class End(Message, frozen=True):
    """Write what was learnt, and end."""


class LogLine(Message, frozen=True):
    """A line to log, or to warn with."""

    text: str
    is_warning: bool = False


class Status(Message, frozen=True):
    """What the autopilot knows now."""

    status: AutopilotStatus


ToProcess: TypeAlias = JobDescription | Observations | Waits | End
FromProcess: TypeAlias = Programs | LogLine | Status | Learnt
