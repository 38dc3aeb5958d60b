"""In any order of store operations there is one order of versions, all ranks come to the last,
and none waits.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import random
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import strategies as st
from stepped_ranks import Disagreement, World
from strategies import drawn, few_and_many

from perseus_planner.runtime.switching import AgreedState, Agreement

NODES = (1, 2)  #: ranks of each node
RANKS = range(sum(NODES))
STEPS = {
    f"step {times}": lambda world, rank, times=times: world.step(rank, times)
    for times in (1, 2, 3, 7)
}
OTHERS = {
    "begin": World.begin,
    "propose": World.propose,
    "wait": lambda world, _: world.wait(0.03),
    "wait long": lambda world, _: world.wait(1.0),
}
FAULTS = {"kill": World.kill, "lose": World.lose}
ACTIONS = {**STEPS, **OTHERS, **FAULTS}
WEIGHTS = {
    "step 1": 20,
    "step 2": 10,
    "step 3": 10,
    "step 7": 10,
    "begin": 30,
    "propose": 3,
    "wait": 5,
}

Happening = tuple[str, int]
"""What happens next, to which rank."""


@contextmanager
def lived(kind: type[Agreement], happenings: list[Happening]) -> Iterator[World]:
    """Run the drawn events on ranks that follow the protocol `kind`, and check the result."""
    world = World(NODES, kind)
    try:
        for action, rank in happenings:
            ACTIONS[action](world, rank)
        yield world
    finally:
        world.end()


def check(happenings: list[Happening], kind: type[Agreement] = Agreement) -> None:
    with lived(kind, happenings) as world:
        world.settle()
        world.check_settled()


def happenings(*actions: dict[str, Any]) -> st.SearchStrategy[list[Happening]]:
    """Each rule is one store operation of any rank, or an event."""
    names = [name for group in actions for name in group for _ in range(WEIGHTS.get(name, 1))]
    return st.lists(st.tuples(st.sampled_from(names), st.sampled_from(RANKS)), max_size=150)


@drawn(20, 100, happenings(STEPS, OTHERS), anew=True)
def test_ranks_agree_in_every_order_of_their_operations(happenings: list[Happening]):
    check(happenings)


@drawn(20, 100, happenings(STEPS, OTHERS, FAULTS), anew=True)
def test_ranks_agree_where_some_die_or_lose_the_store(happenings: list[Happening]):
    check(happenings)


def at_random(seed: int, *groups: dict[str, Any]) -> list[Happening]:
    choice = random.Random(seed)
    names = [name for group in groups for name in group]
    drawn = choice.choices(names, [WEIGHTS.get(name, 1) for name in names], k=300)
    return [(name, choice.choice(RANKS)) for name in drawn]


@pytest.mark.parametrize("faults", [{}, FAULTS], ids=["alive", "faults"])
@few_and_many("count", 15, 100)
def test_ranks_agree_in_orders_of_a_generator_of_its_own(faults: dict[str, Any], count: int):
    for seed in range(count):
        check(at_random(seed, STEPS, OTHERS, faults))


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_ranks_agree_in_thousands_of_orders():
    for seed in range(5000):
        check(at_random(seed, STEPS, OTHERS))
        check(at_random(seed, STEPS, OTHERS, FAULTS))


class ReadsThenSets(Agreement):
    """Changes the state by a read and a write instead of one compare_set."""

    def _read_state(self, new: AgreedState | None = None) -> None:
        super()._read_state()
        if new is not None:
            self._store.set("state", " ".join(map(str, new)))
            super()._read_state()


class Overwrites(Agreement):
    """Puts an older version in the place of a newer one."""

    def _read_state(self, new: AgreedState | None = None) -> None:
        super()._read_state(new)
        while new is not None and self._seen.version > new.version:
            super()._read_state(new)


class Hurries(Agreement):
    """Runs by a version before its iteration."""

    def version_at(self, iteration: int) -> int:
        return super().version_at(iteration + 1)


class ForgetsTheOlder(Agreement):
    """Drops what it is still to run by when it learns of a newer version."""

    def _learn(self, state: AgreedState, packed: bytes) -> None:
        super()._learn(state, packed)
        self._known = self._known[:1] + self._known[-1:]


class Deaf(Agreement):
    """Looks no more after the first version that it has learned of."""

    def look(self) -> None:
        if len(self._known) == 1 or self._queued:
            super().look()


@pytest.mark.parametrize("kind", [ReadsThenSets, Overwrites, Hurries, ForgetsTheOlder, Deaf])
def test_the_search_finds_a_broken_protocol(kind: type[Agreement]):
    def search() -> None:
        for seed in range(1000):
            check(at_random(seed, STEPS, OTHERS), kind)

    with pytest.raises(Disagreement):
        search()
