"""What the ranks of a job tell its rank 0, through the job's own store: where they are, what they find out and count.

So that rank 0 alone reaches the service, and has its token.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from perseus_planner.runs.straggler import StragglerDetection
from perseus_planner.runtime.switching.shared_state import read
from perseus_planner.runtime.telemetry.counters import Counts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import Store


@dataclass(frozen=True)
class Card:
    """Where a rank is.

    Attributes:
        rank: in the whole job, from 0.
        pipeline: which data-parallel pipeline it is in, from 0.
        seat: which rank of its pipeline it is, from 0.
        node: the host's name.
        gpu: the UUID of its GPU; empty: not known.
    """

    rank: int
    pipeline: int
    seat: int
    node: str
    gpu: str


@dataclass(frozen=True)
class Finding:
    """What a rank has found out about its GPU."""

    rank: int
    straggling: StragglerDetection


class Mailbox:
    """The store, as ranks use it for this; all methods raise what the store raises, a RuntimeError, when it is gone.

    Args:
        store: the same for all ranks, under a prefix that nothing else uses.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read = 0  #: findings up to this number were read, but for
        self._missing: list[int] = []  #: these, which were numbered and not yet written

    def say_place(self, card: Card) -> None:
        """Of this rank, once."""
        self._store.set(f"place/{card.rank}", json.dumps(asdict(card)))

    def place(self, rank: int) -> Card | None:
        """Of another rank; None: it has not said it."""
        found = read(self._store, f"place/{rank}")
        return None if found is None else Card(**json.loads(found))

    def say(self, finding: Finding) -> None:
        """One operation of the store to number it, one to write it."""
        number = self._store.add("findings", 1)
        self._store.set(f"findings/{number}", json.dumps(asdict(finding)))

    def findings(self) -> list[Finding]:
        """Those that were not read yet, for rank 0; one operation where there are none."""
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
            found.append(Finding(values["rank"], StragglerDetection(**values["straggling"])))
        return found

    def say_counts(self, rank: int, counts: Sequence[Counts]) -> None:
        """Of this rank, in the place of what it said before: one operation of the store."""
        self._store.set(f"counts/{rank}", json.dumps([asdict(each) for each in counts]))

    def counts(self, rank: int) -> tuple[Counts, ...]:
        """Of another rank, the newest last; empty where it has not said any."""
        found = read(self._store, f"counts/{rank}")
        return () if found is None else tuple(Counts(**each) for each in json.loads(found))
