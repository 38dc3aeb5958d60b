"""Which rows of a profile are worth measuring again for a plan: those that it uses most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perseus_planner.plans.plan import Plan

_MOST = 2
"""Clocks of a computation that are measured again, besides its highest one and their neighbours.
With 4, two thirds more rows kept no more of the saving (by hand, on two data sets of Bloom of
`python benchmarks/run.py --only 47`)."""

VISITS = 1
"""How often each of them is measured. Three times took nearly three times as long, and kept as much
(by hand, on the same data sets)."""


def clocks_in_use(plan: Plan) -> dict[tuple[int, str], tuple[int, ...]]:
    """Return (stage, kind) -> the clocks that most of its computations run at, highest first; empty
    for a kind without work.
    """
    counts: dict[tuple[int, str], Counter[int]] = {}
    for computation in plan.iteration.computations:
        row = plan.measurement(computation)
        own = counts.setdefault(plan.key(computation), Counter())
        if row.has_work:
            own[row.clock_mhz] += 1
    return {
        key: tuple(sorted((clock for clock, _ in own.most_common(_MOST)), reverse=True))
        for key, own in counts.items()
    }


def with_neighbours(clocks_mhz: Collection[int], possible: Collection[int]) -> tuple[int, ...]:
    """Return the clocks with the next possible ones above and below each, and the highest one;
    highest first. A clock that is not possible is left out.
    """
    ordered = sorted(possible, reverse=True)
    places = {0}
    for place, clock in enumerate(ordered):
        if clock in clocks_mhz:
            places.update((place - 1, place, place + 1))
    return tuple(ordered[place] for place in sorted(places) if 0 <= place < len(ordered))


def rows_again(
    plan: Plan, possible: Mapping[tuple[int, str], Collection[int]]
) -> dict[tuple[int, str], tuple[int, ...]]:
    """Return (stage, kind) -> the clocks to measure again for a plan, highest first, of those that
    are possible for it.
    """
    return {
        key: with_neighbours(clocks, possible[key])
        for key, clocks in clocks_in_use(plan).items()
        if clocks
    }
