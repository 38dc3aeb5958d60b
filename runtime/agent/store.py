"""Messages from the ranks of a job to its rank 0, through the job's store: locations, detections
and counts.

So only rank 0 connects to the service and needs its token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from perseus_planner.runs.straggler import StragglerDetection
from perseus_planner.runtime.switching.shared_state import read
from perseus_planner.runtime.telemetry.counters import Counts

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass(frozen=True)
class RankLocation:
    """The location of a rank."""

    rank: int  #: Rank in the whole job, from 0
    pipeline: int  #: Data-parallel pipeline of the rank, from 0
    pipeline_rank: int  #: Rank within that pipeline, from 0
    node: str  #: Host name
    gpu: str  #: UUID of its GPU; empty if unknown


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
        """Return the detections that have not been read yet, on rank 0; one store operation if
        there are none.
        """
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
