"""In any order of store operations, all ranks run an iteration by the same plan, and no rank waits."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import random
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import given, settings
from hypothesis import strategies as st
from stepped_ranks import Disagreement, World

from perseus_planner.runtime.switching.agreement import Agreement

RANKS = range(3)
STEPS = {f"step {times}": lambda world, rank, times=times: world.step(rank, times) for times in (1, 2, 3, 7)}
OTHERS = {
    "begin": World.begin,
    "propose": World.propose,
    "refuse": World.refuse,
    "accept": World.accept,
    "wait": lambda world, _: world.wait(1.0),
    "wait long": lambda world, _: world.wait(100.0),
}
FAULTS = {"kill": World.kill, "lose": World.lose}
ACTIONS = {**STEPS, **OTHERS, **FAULTS}
WEIGHTS = {"step 1": 20, "step 2": 10, "step 3": 10, "step 7": 10, "begin": 30, "propose": 3, "accept": 5}

Happening = tuple[str, int]
"""What happens next, to which rank."""


@contextmanager
def lived(kind: type[Agreement], happenings: list[Happening]) -> Iterator[World]:
    """Run the drawn events on ranks that follow the protocol `kind`, and check the result."""
    world = World(len(RANKS), kind)
    try:
        for action, rank in happenings:
            ACTIONS[action](world, rank)
        yield world
    finally:
        world.end()


def check(happenings: list[Happening]) -> None:
    with lived(Agreement, happenings) as world:
        world.settle()
        for rank in 3 * [*RANKS]:
            world.begin(rank)
        world.check_settled()


def happenings(*actions: dict[str, Any]) -> st.SearchStrategy[list[Happening]]:
    """Each rule is one store operation of any rank, or an event."""
    names = [name for group in actions for name in group for _ in range(WEIGHTS.get(name, 1))]
    return st.lists(st.tuples(st.sampled_from(names), st.sampled_from(RANKS)), max_size=150)


@given(happenings(STEPS, OTHERS))
@settings(max_examples=100)
def test_ranks_agree_in_every_order_of_their_operations(happenings: list[Happening]):
    check(happenings)


@given(happenings(STEPS, OTHERS, FAULTS))
@settings(max_examples=100)
def test_ranks_agree_where_some_die_or_lose_the_store(happenings: list[Happening]):
    check(happenings)


def at_random(seed: int, *groups: dict[str, Any]) -> list[Happening]:
    choice = random.Random(seed)
    names = [name for group in groups for name in group]
    drawn = choice.choices(names, [WEIGHTS.get(name, 1) for name in names], k=300)
    return [(name, choice.choice(RANKS)) for name in drawn]


@pytest.mark.parametrize("faults", [{}, FAULTS], ids=["alive", "faults"])
def test_ranks_agree_in_orders_of_a_generator_of_its_own(faults: dict[str, Any]):
    """It finds decisions that come one iteration early, which Hypothesis's first examples miss."""
    for seed in range(100):
        check(at_random(seed, STEPS, OTHERS, faults))


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_ranks_agree_in_thousands_of_orders():
    for seed in range(5000):
        check(at_random(seed, STEPS, OTHERS))
        check(at_random(seed, STEPS, OTHERS, FAULTS))


class Uncleared(Agreement):
    """Says yes before the other ranks know its limit."""

    def _clear(self, through: int) -> None:
        pass


class Unpromised(Agreement):
    """Says yes without setting a limit."""

    def _promise(self, version: int, through: int) -> bool:
        return True


class ReadsThenSets(Agreement):
    """Changes the state by a read and a write instead of one compare_set."""

    def _change(self, **fields: int) -> None:
        self._state.look()
        state = self._state.seen._replace(**fields)
        self._store.set("state", state.text())
        self._state.look()
        self._follow()


class Impatient(Agreement):
    """Decides before all ranks have answered."""

    def _advance(self, own: Any) -> None:
        self._decide(own)


class Forgetful(Agreement):
    """Drops its limit when it raises `cleared`, before it knows the decision."""

    def _follow(self) -> None:
        super()._follow()
        self._limit = None


@pytest.mark.parametrize("kind", [Uncleared, Unpromised, ReadsThenSets, Impatient, Forgetful])
def test_the_search_finds_a_broken_protocol(kind: type[Agreement]):
    def search() -> None:
        for seed in range(1000):
            with lived(kind, at_random(seed, STEPS, OTHERS)):
                pass

    with pytest.raises(Disagreement):
        search()
