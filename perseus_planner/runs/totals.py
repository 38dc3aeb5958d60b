"""The totals of a run: sums over all iterations that there ever were, also over those whose rows
are gone.

A rank adds the iterations of a file of rows to its totals before the file is replaced or removed.
Its totals say which iteration was the last to be added, so a row that is still there counts once,
wherever the rank was killed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perseus_planner.runs.records import IterationRecord

MOST_TOTALS = 1000
"""How many totals of a rank are kept apart, by attempt and version; older ones are added up to
one.
"""


@dataclass(frozen=True, kw_only=True)
class Total:
    """The iterations by one plan in one attempt of a job, added up: of one rank, or of all ranks
    together.
    """

    attempt: int  #: Number of the attempt; 0 for several attempts together
    #: Version of the plan; None for iterations without a plan, and for several plans together.
    version: int | None
    iterations: int  #: Number of iterations; of all ranks, on the rank that has most
    #: Seconds from their begins to their ends; of all ranks, on the rank that has most.
    time_s: float
    #: Number of iterations whose energy is known; of all ranks, on the rank that has fewest.
    metered_iterations: int
    energy_j: float  #: Joules of the GPUs in iterations whose energy is known
    #: Joules that iterations which ran as planned used less than they would have with all clocks at
    #: maximum, by the profile, in as much time. Negative if they used more.
    saved_j: float
    begin_s: float  #: When the first of them began, seconds since the epoch
    end_s: float  #: When the last of them ended, seconds since the epoch
    last_iteration: int  #: Number of the last of them; of several attempts, the greatest
    #: "measured" or "simulated", for the energy; "simulated" if any of it is, None if none is
    #: known.
    origin: str | None

    @classmethod
    def of(cls, attempt: int, row: IterationRecord) -> Total:
        """Return the total of a single iteration."""
        is_metered = row.energy_j is not None
        energy_j = row.energy_j or 0.0
        return cls(
            attempt=attempt,
            version=row.version,
            iterations=1,
            time_s=row.time_s,
            metered_iterations=int(is_metered),
            energy_j=energy_j,
            saved_j=row.baseline_j - energy_j if is_metered and row.baseline_j is not None else 0.0,
            begin_s=row.begin_s,
            end_s=row.end_s,
            last_iteration=row.iteration,
            origin=row.origin if is_metered else None,
        )

    @property
    def saved_share(self) -> float:
        """`saved_j` over the energy that there would have been, or 0 if no energy is known."""
        whole_j = self.energy_j + self.saved_j
        return self.saved_j / whole_j if whole_j > 0.0 else 0.0

    def plus(self, other: Total) -> Total:
        """Add iterations of the same ranks; attempt and version stay if they are equal."""
        return replace(
            self,
            iterations=self.iterations + other.iterations,
            time_s=self.time_s + other.time_s,
            metered_iterations=self.metered_iterations + other.metered_iterations,
            attempt=self.attempt if self.attempt == other.attempt else 0,
            version=self.version if self.version == other.version else None,
            **self._sums(other),
        )

    def beside(self, other: Total) -> Total:
        """Add the same iterations of another rank."""
        return replace(
            self,
            iterations=max(self.iterations, other.iterations),
            time_s=max(self.time_s, other.time_s),
            metered_iterations=min(self.metered_iterations, other.metered_iterations),
            **self._sums(other),
        )

    def _sums(self, other: Total) -> dict[str, Any]:
        origins = self.origin, other.origin
        return {
            "energy_j": self.energy_j + other.energy_j,
            "saved_j": self.saved_j + other.saved_j,
            "begin_s": min(self.begin_s, other.begin_s),
            "end_s": max(self.end_s, other.end_s),
            "last_iteration": max(self.last_iteration, other.last_iteration),
            "origin": "simulated" if "simulated" in origins else self.origin or other.origin,
        }


class RankTotals:
    """The totals of one rank.

    Args:
        totals: Those that were saved.
    """

    def __init__(self, totals: Iterable[Total] = ()) -> None:
        self._totals = {(each.attempt, each.version): each for each in totals}

    def __iter__(self) -> Iterator[Total]:
        """Yield the totals, oldest first."""
        yield from (self._totals[key] for key in sorted(self._totals, key=_age))

    def add(self, attempt: int, rows: Iterable[IterationRecord]) -> None:
        """Add those iterations of an attempt that were not added before."""
        last = max(
            (each.last_iteration for each in self._totals.values() if each.attempt == attempt),
            default=-1,
        )
        for row in rows:
            if row.iteration > last:
                self._add(Total.of(attempt, row))
        while len(self._totals) > MOST_TOTALS:
            oldest = min((key for key in self._totals if key != _OLDER), key=_age)
            self._add(replace(self._totals.pop(oldest), attempt=0, version=None))

    def _add(self, total: Total) -> None:
        key = total.attempt, total.version
        self._totals[key] = self._totals[key].plus(total) if key in self._totals else total


def of_all_ranks(ranks: Iterable[Iterable[Total]]) -> tuple[Total, ...]:
    """Return the totals of all ranks together, oldest first."""
    found: dict[tuple[int, int | None], Total] = {}
    for totals in ranks:
        for each in totals:
            key = each.attempt, each.version
            found[key] = found[key].beside(each) if key in found else each
    return tuple(found[key] for key in sorted(found, key=_age))


_OLDER = (0, None)


def _age(key: tuple[int, int | None]) -> tuple[int, int]:
    return key[0], key[1] or 0
