"""What the ranks of a job have counted, as one; rank 0 looks at it from time to time."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING
from uuid import uuid4

from perseus_planner.runtime.telemetry.counters import Counts, common_counts
from perseus_planner.service.telemetry import Counters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.runtime.agent.store import Mailbox


class Summing:
    """The counts of all ranks, from the begin of this run.

    Args:
        mailbox: where the ranks say them.
        ranks: how many there are.
    """

    def __init__(self, mailbox: Mailbox, ranks: int) -> None:
        self._mailbox, self._ranks = mailbox, ranks
        self._run = uuid4().hex
        self._looked_s = time.monotonic()
        self._found: Counters | None = None

    def look_if_due(self, every_s: float) -> None:
        """Look, if that was not done for so many seconds; raises as `Mailbox` does."""
        if time.monotonic() - self._looked_s >= every_s:
            self.look()

    def look(self) -> None:
        """See how far all ranks have come; one operation of the store for each."""
        self._looked_s = time.monotonic()
        counts = common_counts([self._mailbox.counts(rank) for rank in range(self._ranks)])
        self._found = None if counts is None else together(self._run, counts)

    def taken(self) -> Counters | None:
        """What was found, once; None: nothing since."""
        found, self._found = self._found, None
        return found


def together(run: str, ranks: Sequence[Counts]) -> Counters:
    """The counts of all ranks of `run`, at one iteration, as the service takes them.

    Where a rank does not know its energy in an iteration, that one is not among the metered ones, but the energy of the
    others in it counts: so a saving is never said to be more than it is.
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
        metered_s=min(each.metered_s for each in ranks),
        energy_j=sum(each.energy_j for each in ranks) if metered else 0.0,
        energy_is=("simulated" if simulated else "measured") if metered else None,
        late_changes=sum(each.late_changes for each in ranks),
        set_p50_s=median(p50_s) if p50_s else None,
        set_p99_s=max(p99_s, default=None),
    )
