"""What the ranks of a job tell its rank 0 through the job's store, and what rank 0 has to send to
the service: the registration with locations, the last detection of each rank, and the accounts of
all ranks.

So only rank 0 connects to the service and needs its token.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, is_dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from perseus_planner.base.errors import UsageError
from perseus_planner.base.loops import SteadyClock
from perseus_planner.base.units import ON_TIME
from perseus_planner.base.wires import Board, Record
from perseus_planner.extensions.service.client import Client
from perseus_planner.extensions.service.models import (
    MOST_RANKS,
    Counters,
    Place,
    Registration,
    ReportRequest,
    Scope,
)
from perseus_planner.runs.account import Account
from perseus_planner.runs.verdict import StragglerDetection, verdict_of, why_no_saving
from perseus_planner.runtime.telemetry import Checkpoint, common_checkpoint
from perseus_planner.schedules.schedule import parse_grid
from perseus_planner.solver.frontier import Frontier

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence

    from torch.distributed import Store

    from perseus_planner.plans.plan import Plan
    from perseus_planner.runtime.decider import Learnt
    from perseus_planner.schedules import Schedule


class RankLocation(Record, frozen=True):
    """The location of a rank."""

    rank: int  #: Rank in the whole job, from 0
    pipeline: int  #: Data-parallel pipeline of the rank, from 0
    pipeline_rank: int  #: Rank within that pipeline, from 0
    node: str  #: Host name
    gpu: str  #: UUID of its GPU; empty if unknown


class Detection(Record, frozen=True):
    """What a rank has detected about its GPU."""

    rank: int
    straggling: StragglerDetection


class StoreMessages:
    """The messages in the store. All methods raise the store's RuntimeError when it is gone.

    Args:
        store: The same for all ranks, with a prefix that nothing else uses.
    """

    def __init__(self, store: Store) -> None:
        self._board = Board(store)
        self._read = 0  #: detections up to this number have been read, except
        self._missing: list[int] = []  #: these, which were numbered but not yet written

    def write_location(self, location: RankLocation) -> None:
        """Write the location of this rank, once."""
        self._board.put(f"place/{location.rank}", location)

    def locations(self, ranks: int) -> list[RankLocation]:
        """Return the locations of those of so many ranks that have written them."""
        keys = [f"place/{rank}" for rank in range(ranks)]
        return [place for place in self._board.get_all(keys, RankLocation) if place is not None]

    def write_detection(self, detection: Detection) -> None:
        """Write a detection: one store operation to number it, one to write it."""
        number = self._board.store.add("findings", 1)
        self._board.put(f"findings/{number}", detection)

    def new_detections(self) -> list[Detection]:
        """Return the detections that have not been read yet, on rank 0; one store operation if
        there are none.
        """
        newest = self._board.get("findings", int) or 0
        wanted = [*self._missing, *range(self._read + 1, newest + 1)]
        self._read = newest
        self._missing = []
        detections = []
        # A rank numbers a detection before it writes it, so one may not be there yet: it is looked
        # for again.
        for number in wanted:
            detection = self._board.get(f"findings/{number}", Detection)
            if detection is None:
                self._missing.append(number)
            else:
                self._board.remove(f"findings/{number}")
                detections.append(detection)
        return detections

    def write_checkpoints(self, rank: int, kept: Sequence[Checkpoint]) -> None:
        """Write the checkpoints of this rank over its earlier ones; one store operation."""
        self._board.put(f"counts/{rank}", [told(checkpoint) for checkpoint in kept])

    def checkpoints(self, rank: int) -> tuple[Checkpoint, ...]:
        """Return the checkpoints of a rank, the newest last; empty if it has written none."""
        return self._board.get(f"counts/{rank}", tuple[Checkpoint, ...]) or ()


def told(value: Any) -> Any:
    """Return what is sent of a dataclass: its fields without those that are as by default."""
    if not is_dataclass(value):
        return value
    kind: Any = type(value)
    default = vars(_default(kind))
    return {name: told(field) for name, field in vars(value).items() if field != default[name]}


@cache
def _default(kind: Any) -> Any:
    return kind()


@dataclass(frozen=True)
class ServiceSettings:
    """The service of a training job, as the caller of `planner_runtime` gave it."""

    address: str  #: Of the service, as for `Client`
    name: str | None  #: Name of the job. Like `frontier`, it is not None after `check`.
    frontier: str | os.PathLike[str] | None  #: The frontier file
    max_changes: int | None = None  #: Switch budget of the plans, as for `Frontier.plan_for`
    #: Whether there is no plan: training makes its own, and says what it knows of clocks.
    is_learning: bool = False
    slowdown: float = 1.0  #: That the autopilot may plan for

    def check(self) -> None:
        """Check that the job can be registered, without asking the service.

        Raises:
            UsageError: If the name or the frontier is missing, there is a frontier without a plan,
                or the address is malformed.
            FrontierError: If the file cannot be read.
        """
        if self.is_learning and self.frontier is not None:
            raise UsageError(
                "frontier= is for training with plan=; without a plan the frontier is learnt, so "
                "leave it out"
            )
        if not self.name or (self.frontier is None and not self.is_learning):
            missing = (
                "frontier=, the file that `planner solve` wrote"
                if self.name
                else "job=, a name for this training"
            )
            raise UsageError(
                f"service={self.address!r} needs {missing}; give it to planner_runtime"
            )
        Client(self.address).close()
        if self.frontier is not None:
            Frontier.load(self.frontier)

    def registration(
        self, locations: Iterable[RankLocation], pipelines: int, plan: Plan | None
    ) -> Registration:
        """Return the registration of the job.

        Args:
            locations: The locations of its ranks.
            pipelines: Number of data-parallel pipelines.
            plan: The plan it starts with, which gives deadline and the probability of being
                on time.

        Raises:
            FrontierError: If the file can no longer be read.
        """
        assert self.name is not None  # as checked
        assert self.frontier is not None
        frontier = Frontier.load(self.frontier)
        sure = None if plan is None else plan.on_time
        deadline_s = None if plan is None else plan.deadline_s
        # The plan's own is that of estimated times.
        if sure is not None and sure.limit_ratio is not None:
            ratio = sure.expected_limit_ratio or sure.limit_ratio
            deadline_s = ratio * frontier.baseline_time_s
        # As fast as all clocks at maximum is what a job without a deadline is planned for.
        if deadline_s is not None and math.isclose(deadline_s, frontier.baseline_time_s):
            deadline_s = None
        # Without a plan to take it from, as sure as plans are by default.
        on_time: float | None = ON_TIME
        if plan is not None:
            on_time = None if sure is None else sure.probability
        return Registration(
            name=self.name,
            pipelines=pipelines,
            frontier=Path(self.frontier).read_bytes(),
            places=_places(locations, frontier.dag.schedule),
            deadline_s=deadline_s,
            max_changes=self.max_changes,
            on_time=on_time,
        )

    def learnt_registration(
        self, locations: Iterable[RankLocation], pipelines: int, learnt: Learnt
    ) -> Registration:
        """Return the registration of the job with what its autopilot has learnt.

        Args:
            locations: The locations of its ranks.
            pipelines: Number of data-parallel pipelines.
            learnt: What was learnt.
        """
        assert self.name is not None  # as checked
        return Registration(
            name=self.name,
            pipelines=pipelines,
            places=_places(locations, parse_grid(learnt.schedule, "as trained", "the schedule")),
            deadline_s=None if self.slowdown == 1.0 else self.slowdown * learnt.time_s,
            max_changes=self.max_changes,
            profile_csv=learnt.profile_csv,
            profile_yaml=learnt.profile_yaml,
            schedule=learnt.schedule,
            take_over=True,
        )


def _places(locations: Iterable[RankLocation], schedule: Schedule) -> tuple[Place, ...]:
    stages = [
        tuple(sorted({computation.stage for computation in program})) for program in schedule.ranks
    ]
    return tuple(
        Place(
            location.rank,
            location.pipeline,
            stages[location.pipeline_rank],
            location.node,
            location.gpu,
        )
        for location in locations
        if location.pipeline_rank < len(stages)
    )


RUNTIME = "perseus-planner runtime"
"""The source, as reports name it, followed by its rank."""


TTL_S = 900.0
"""How long a detection holds at the service, so that it does not outlive a job that was killed."""


class Detections:
    """The last detection of each rank, and which of them have to be sent to the service.

    Rank 0's clock says when each was observed, so they are in order whatever the clocks of other
    ranks say. A detection that stands is sent again before it expires.

    Args:
        now_s: Returns seconds since the epoch; by default a `SteadyClock`.
    """

    def __init__(self, now_s: Callable[[], float] | None = None) -> None:
        self._now_s = now_s or SteadyClock()
        self._run = uuid4().hex
        self._numbers = count(1)
        #: Rank -> its report, and when it was sent; None if it was not.
        self._kept: dict[int, tuple[ReportRequest, float | None]] = {}

    def add(self, detection: Detection) -> None:
        """Add a detection, which replaces an earlier one of its rank."""
        report = ReportRequest(
            source=f"{RUNTIME}, rank {detection.rank}",
            scope=Scope("rank", str(detection.rank)),
            slowdown=max(1.0, detection.straggling.slowdown),
            cause="compute",
            ttl_s=TTL_S,
        )
        self._kept[detection.rank] = self._numbered(report), None

    def due(self) -> list[ReportRequest]:
        """Return the reports to send now."""
        for rank, (report, sent_s) in self._kept.items():
            # Before it expires at the service, even if one or two tries fail.
            if sent_s is not None and self._now_s() - sent_s > TTL_S / 3:
                self._kept[rank] = self._numbered(report), None
        return [report for report, sent_s in self._kept.values() if sent_s is None]

    def sent(self, request: ReportRequest) -> None:
        """Note that the service has answered a report. A recovery does not have to be sent
        again.
        """
        for rank, (report, _) in list(self._kept.items()):
            if report.key == request.key:
                self._kept[rank] = report, self._now_s()
                if (report.slowdown or 1.0) <= 1.0:
                    del self._kept[rank]

    def send_again(self) -> None:
        """Send all detections again, to a service that has forgotten them."""
        self._kept = {rank: (report, None) for rank, (report, _) in self._kept.items()}

    def _numbered(self, report: ReportRequest) -> ReportRequest:
        """Return the report as one of its own, observed now."""
        key = f"{self._run}-{next(self._numbers)}"
        return replace(report, key=key, observed_s=self._now_s())


class JobCounts:
    """The accounts of all ranks since the beginning of this run, added up by rank 0 from time to
    time.

    Args:
        messages: Has the checkpoints of the ranks.
        ranks: Number of ranks.
    """

    def __init__(self, messages: StoreMessages, ranks: int) -> None:
        self._messages = messages
        self._ranks = ranks
        self._run = uuid4().hex
        self._looked_s = time.monotonic()
        #: The accounts when they last changed, and before that: the verdict is of what is between.
        self._latest: Sequence[Account] = [Account()] * ranks
        self._before: Sequence[Account] = self._latest
        self._new: Counters | None = None

    def update_if_due(self, every_s: float) -> None:
        """Update the counts unless that was done in the last `every_s` seconds."""
        if time.monotonic() - self._looked_s >= every_s:
            self.update()

    def update(self) -> None:
        """Read how far all ranks have come; one store operation for each."""
        self._looked_s = time.monotonic()
        kept = common_checkpoint([self._messages.checkpoints(rank) for rank in range(self._ranks)])
        if kept is None:
            return
        # The same checkpoint may be read twice; the verdict is of what lies between two that
        # differ.
        if kept[0].account.windows != self._latest[0].windows:
            self._before = self._latest
            self._latest = [rank.account for rank in kept]
        self._new = added_up(self._run, kept, self._before)

    def take(self) -> Counters | None:
        """Return the new counts once; None if there are none since the last call."""
        counters = self._new
        self._new = None
        return counters


def added_up(run: str, ranks: Sequence[Checkpoint], before: Sequence[Account]) -> Counters:
    """Return the counters of a run from the checkpoints of all its ranks at one iteration.

    Args:
        run: Name of the run.
        ranks: The checkpoints.
        before: The accounts of the ranks at the iteration before which the verdict does not look.
    """
    # The usual time is the median of ranks, and the slow one that of the slowest.
    p50_s = [rank.set_p50_s for rank in ranks if rank.set_p50_s is not None]
    p99_s = [rank.set_p99_s for rank in ranks if rank.set_p99_s is not None]
    off_plan_s = [rank.off_plan_since_s for rank in ranks if rank.off_plan_since_s is not None]
    recent = {
        number: rank.account.since(earlier)
        for number, (rank, earlier) in enumerate(zip(ranks, before, strict=True))
    }
    # Nothing is planned for the full clocks of a dry run, so its times are compared with none.
    compared = {} if any(rank.is_dry_run for rank in ranks) else recent
    verdict = verdict_of(compared)
    return Counters(
        **vars(sum((rank.account for rank in ranks), Account())),
        run=run,
        ranks=len(ranks),
        following=len(ranks) - len(off_plan_s),
        off_plan_since_s=min(off_plan_s, default=None),
        set_p50_s=median(p50_s) if p50_s else None,
        set_p99_s=max(p99_s, default=None),
        # one limit for all GPUs: the service plans all pipelines by one frontier
        gpu_power_limit_w=min(
            (rank.site_limit_w for rank in ranks if rank.site_limit_w is not None), default=None
        ),
        verdict=None if verdict is None else str(verdict),
        time_over_planned=None if verdict is None else verdict.ratio,
        unlike_plan=why_no_saving(compared, ranks[0].planned_gpu, [rank.gpu for rank in ranks]),
        # a number for each rank, which the service draws for so many
        waiting=tuple(map(_waiting, recent.values())) if len(ranks) <= MOST_RANKS else (),
    )


def _waiting(recent: Account) -> float:
    """Return the share of its windows in which a rank ran no computation."""
    return round(max(0.0, 1.0 - recent.busy_s / recent.gpu_s), 3) if recent.gpu_s else 0.0
