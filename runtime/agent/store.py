"""Messages from the ranks of a job to its rank 0, through the job's store: locations, detections and counts.

So only rank 0 connects to the service and needs its token.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING
from uuid import uuid4

from perseus_planner.runs.straggler import StragglerDetection
from perseus_planner.runtime.switching.shared_state import read
from perseus_planner.runtime.telemetry.counters import Counts, common_counts
from perseus_planner.service.schemas import Counters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import Store


@dataclass(frozen=True)
class RankLocation:
    """The location of a rank.

    Attributes:
        rank: Rank in the whole job, from 0.
        pipeline: Data-parallel pipeline of the rank, from 0.
        pipeline_rank: Rank within that pipeline, from 0.
        node: Host name.
        gpu: UUID of its GPU; empty if unknown.
    """

    rank: int
    pipeline: int
    pipeline_rank: int
    node: str
    gpu: str


@dataclass(frozen=True)
class Detection:
    """What a rank has detected about its GPU."""

    rank: int
    straggling: StragglerDetection


class StoreMessages:
    """The messages in the store. All methods raise the store's RuntimeError when it is gone.

    Args:
        store: The same for all ranks, with a prefix that nothing else uses.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read = 0  #: detections up to this number have been read, except
        self._missing: list[int] = []  #: these, which were numbered but not yet written

    def write_location(self, location: RankLocation) -> None:
        """Write the location of this rank, once."""
        self._store.set(f"place/{location.rank}", json.dumps(asdict(location)))

    def location(self, rank: int) -> RankLocation | None:
        """Return the location of a rank; None if it has not written it."""
        found = read(self._store, f"place/{rank}")
        return None if found is None else RankLocation(**json.loads(found))

    def write_detection(self, detection: Detection) -> None:
        """Write a detection: one store operation to number it, one to write it."""
        number = self._store.add("findings", 1)
        self._store.set(f"findings/{number}", json.dumps(asdict(detection)))

    def new_detections(self) -> list[Detection]:
        """Return the detections that have not been read yet, on rank 0; one store operation if there are none."""
        newest = int(read(self._store, "findings") or 0)
        wanted = [*self._missing, *range(self._read + 1, newest + 1)]
        self._read, self._missing, found = newest, [], []
        for number in wanted:
            text = read(self._store, f"findings/{number}")
            if text is None:
                self._missing.append(number)
                continue
            self._store.delete_key(f"findings/{number}")
            values = json.loads(text)
            found.append(Detection(values["rank"], StragglerDetection(**values["straggling"])))
        return found

    def write_counts(self, rank: int, counts: Sequence[Counts]) -> None:
        """Write the counts of this rank over its earlier ones; one store operation."""
        self._store.set(f"counts/{rank}", json.dumps([asdict(each) for each in counts]))

    def counts(self, rank: int) -> tuple[Counts, ...]:
        """Return the counts of a rank, the newest last; empty if it has written none."""
        found = read(self._store, f"counts/{rank}")
        return () if found is None else tuple(Counts(**each) for each in json.loads(found))


class JobCounts:
    """The counts of all ranks since the beginning of this run, added up by rank 0 from time to time.

    Args:
        messages: Has the counts of the ranks.
        ranks: Number of ranks.
    """

    def __init__(self, messages: StoreMessages, ranks: int) -> None:
        self._messages, self._ranks = messages, ranks
        self._run = uuid4().hex
        self._looked_s = time.monotonic()
        self._found: Counters | None = None

    def update_if_due(self, every_s: float) -> None:
        """Update the counts unless that was done in the last `every_s` seconds."""
        if time.monotonic() - self._looked_s >= every_s:
            self.update()

    def update(self) -> None:
        """Read how far all ranks have come; one store operation for each."""
        self._looked_s = time.monotonic()
        counts = common_counts([self._messages.counts(rank) for rank in range(self._ranks)])
        self._found = None if counts is None else added_up(self._run, counts)

    def take(self) -> Counters | None:
        """Return the new counts once; None if there are none since the last call."""
        found, self._found = self._found, None
        return found


def added_up(run: str, ranks: Sequence[Counts]) -> Counters:
    """Return the counters of a run from the counts of all its ranks at one iteration.

    An iteration in which a rank does not know its energy is not metered, but the energy of the other ranks in it
    counts, so that the saving is never overstated.
    """
    metered = min(each.metered_iterations for each in ranks)
    p50_s = [each.set_p50_s for each in ranks if each.set_p50_s is not None]
    p99_s = [each.set_p99_s for each in ranks if each.set_p99_s is not None]
    simulated = any(each.origin == "simulated" for each in ranks)
    return Counters(
        run=run,
        iterations=min(each.iterations for each in ranks),
        time_s=min(each.time_s for each in ranks),
        metered_iterations=metered,
        metered_s=min(each.metered_s for each in ranks) if metered else 0.0,
        energy_j=sum(each.energy_j for each in ranks) if metered else 0.0,
        energy_is=("simulated" if simulated else "measured") if metered else None,
        late_changes=sum(each.late_changes for each in ranks),
        set_p50_s=median(p50_s) if p50_s else None,
        set_p99_s=max(p99_s, default=None),
    )
