"""Which rows of a profile are worth measuring again for a plan: those that it uses most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perseus_planner.plans.plan import Plan
    from perseus_planner.profiles.keys import Key

_MOST = 2
"""Clocks of a computation that are measured again, besides its highest one and their neighbours.
With 4, two thirds more rows kept no more of the saving (by hand, on two data sets of Bloom of
`python benchmarks/run.py --only 47`)."""

VISITS = 1
"""How often each of them is measured. Three times took nearly three times as long, and kept as much
(by hand, on the same data sets)."""


def clocks_in_use(plan: Plan) -> dict[Key, tuple[int, ...]]:
    """Return (stage, kind) -> the clocks that most of its computations run at, highest first; empty
    for a kind without work.
    """
    counts: dict[Key, Counter[int]] = {}
    for computation in plan.iteration.computations:
        row = plan.measurement(computation)
        # Computations without work may have any clock, which tells nothing.
        clock_counts = counts.setdefault(plan.key(computation), Counter())
        if row.has_work:
            clock_counts[row.clock_mhz] += 1
    return {
        key: tuple(sorted((clock for clock, _ in clock_counts.most_common(_MOST)), reverse=True))
        for key, clock_counts in counts.items()
    }


def with_neighbours(clocks_mhz: Collection[int], possible: Collection[int]) -> tuple[int, ...]:
    """Return the clocks with the next possible ones above and below each, and the highest one;
    highest first. A clock that is not possible is left out.
    """
    ordered = sorted(possible, reverse=True)
    # The highest clock is the baseline of every saving.
    places = {0}
    for position, clock in enumerate(ordered):
        if clock in clocks_mhz:
            places.update((position - 1, position, position + 1))
    return tuple(ordered[position] for position in sorted(places) if 0 <= position < len(ordered))


def rows_again(plan: Plan, possible: Mapping[Key, Collection[int]]) -> dict[Key, tuple[int, ...]]:
    """Return (stage, kind) -> the clocks to measure again for a plan, highest first, of those that
    are possible for it.
    """
    return {
        key: with_neighbours(clocks, possible[key])
        for key, clocks in clocks_in_use(plan).items()
        if clocks
    }
