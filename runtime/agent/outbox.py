"""What the ranks of a job tell its rank 0 through the job's store, and what rank 0 has to send to
the service: locations, the last detection of each rank, and the counts of all ranks.

So only rank 0 connects to the service and needs its token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from statistics import median
from typing import TYPE_CHECKING
from uuid import uuid4

from perseus_planner.base.wires import Board, Record
from perseus_planner.runs.straggler import StragglerDetection
from perseus_planner.runtime.telemetry.counters import Counts, common_counts
from perseus_planner.service.clock import SteadyClock
from perseus_planner.service.schemas import Counters
from perseus_planner.service.sources import straggling_report

if TYPE_CHECKING:
    from torch.distributed import Store

    from perseus_planner.service.schemas import ReportRequest


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
        return [each for each in self._board.get_all(keys, RankLocation) if each is not None]

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
        self._read, self._missing, detections = newest, [], []
        for number in wanted:
            detection = self._board.get(f"findings/{number}", Detection)
            if detection is None:
                self._missing.append(number)
            else:
                self._board.remove(f"findings/{number}")
                detections.append(detection)
        return detections

    def write_counts(self, rank: int, counts: Sequence[Counts]) -> None:
        """Write the counts of this rank over its earlier ones; one store operation."""
        self._board.put(f"counts/{rank}", counts)

    def counts(self, rank: int) -> tuple[Counts, ...]:
        """Return the counts of a rank, the newest last; empty if it has written none."""
        return self._board.get(f"counts/{rank}", tuple[Counts, ...]) or ()


TTL_S = 900.0
"""How long a detection holds at the service, so that it does not outlive a job that was killed."""


@dataclass(frozen=True)
class _Kept:
    """A detection, the number of its report, and when it was observed and sent; None if it was
    not sent.
    """

    detection: Detection
    number: int
    observed_s: float
    sent_s: float | None = None


class Detections:
    """The last detection of each rank, and which of them have to be sent to the service.

    Rank 0's clock says when each was observed, so they are in order whatever the clocks of other
    ranks say. A detection that stands is sent again before it expires.

    Args:
        now_s: Returns seconds since the epoch; by default a `SteadyClock`.
    """

    def __init__(self, now_s: Callable[[], float] | None = None) -> None:
        self._now_s = now_s or SteadyClock()
        self._run, self._numbers = uuid4().hex, count(1)
        self._kept: dict[int, _Kept] = {}

    def add(self, detection: Detection) -> None:
        """Add a detection, which replaces an earlier one of its rank."""
        self._kept[detection.rank] = _Kept(detection, next(self._numbers), self._now_s())

    def due(self) -> list[ReportRequest]:
        """Return the reports to send now."""
        now_s = self._now_s()
        for rank, kept in self._kept.items():
            if kept.sent_s is not None and now_s - kept.sent_s > TTL_S / 3:
                self._kept[rank] = _Kept(kept.detection, next(self._numbers), now_s)
        return [self._request(kept) for kept in self._kept.values() if kept.sent_s is None]

    def sent(self, request: ReportRequest) -> None:
        """Note that the service has answered a report. A recovery does not have to be sent
        again.
        """
        for rank, kept in list(self._kept.items()):
            if self._key(kept) == request.key:
                self._kept[rank] = replace(kept, sent_s=self._now_s())
                if kept.detection.straggling.slowdown <= 1.0:
                    del self._kept[rank]

    def send_again(self) -> None:
        """Send all detections again, to a service that has forgotten them."""
        self._kept = {rank: replace(kept, sent_s=None) for rank, kept in self._kept.items()}

    def _key(self, kept: _Kept) -> str:
        return f"{self._run}-{kept.number}"

    def _request(self, kept: _Kept) -> ReportRequest:
        straggling, rank = kept.detection.straggling, kept.detection.rank
        return straggling_report(
            straggling, rank, key=self._key(kept), observed_s=kept.observed_s, ttl_s=TTL_S
        )


class JobCounts:
    """The counts of all ranks since the beginning of this run, added up by rank 0 from time to
    time.

    Args:
        messages: Has the counts of the ranks.
        ranks: Number of ranks.
    """

    def __init__(self, messages: StoreMessages, ranks: int) -> None:
        self._messages, self._ranks = messages, ranks
        self._run = uuid4().hex
        self._looked_s = time.monotonic()
        self._new: Counters | None = None

    def update_if_due(self, every_s: float) -> None:
        """Update the counts unless that was done in the last `every_s` seconds."""
        if time.monotonic() - self._looked_s >= every_s:
            self.update()

    def update(self) -> None:
        """Read how far all ranks have come; one store operation for each."""
        self._looked_s = time.monotonic()
        counts = common_counts([self._messages.counts(rank) for rank in range(self._ranks)])
        self._new = None if counts is None else added_up(self._run, counts)

    def take(self) -> Counters | None:
        """Return the new counts once; None if there are none since the last call."""
        counters, self._new = self._new, None
        return counters


def added_up(run: str, ranks: Sequence[Counts]) -> Counters:
    """Return the counters of a run from the counts of all its ranks at one iteration.

    An iteration in which a rank does not know its energy is not metered, but the energy of the
    other ranks in it counts, so that the saving is never overstated.
    """
    metered = min(rank.metered_iterations for rank in ranks)
    p50_s = [rank.set_p50_s for rank in ranks if rank.set_p50_s is not None]
    p99_s = [rank.set_p99_s for rank in ranks if rank.set_p99_s is not None]
    off_plan_s = [rank.off_plan_since_s for rank in ranks if rank.off_plan_since_s is not None]
    simulated = any(rank.origin == "simulated" for rank in ranks)
    return Counters(
        run=run,
        iterations=min(rank.iterations for rank in ranks),
        time_s=min(rank.time_s for rank in ranks),
        metered_iterations=metered,
        metered_s=min(rank.metered_s for rank in ranks) if metered else 0.0,
        energy_j=sum(rank.energy_j for rank in ranks) if metered else 0.0,
        energy_is=("simulated" if simulated else "measured") if metered else None,
        late_changes=sum(rank.late_changes for rank in ranks),
        ranks=len(ranks),
        following=len(ranks) - len(off_plan_s),
        off_plan_since_s=min(off_plan_s, default=None),
        set_p50_s=median(p50_s) if p50_s else None,
        set_p99_s=max(p99_s, default=None),
        gpu_power_limit_w=min(
            (rank.site_limit_w for rank in ranks if rank.site_limit_w is not None), default=None
        ),
    )
