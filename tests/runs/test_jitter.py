"""The jitter that a recorded run shows: its three parts, found again from drawn times."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import few_and_many

from perseus_planner.base.errors import ProfileError
from perseus_planner.profiles.jitter import Jitter, Tail
from perseus_planner.runs.jitter import parts_of

RANKS = 8
COMPUTATIONS = 24  #: of a rank


def seen(jitter: Jitter, iterations: int, seed: int = 0, drift: float = 0.0) -> Jitter:
    """Return what times with this jitter show; all ranks drift together."""
    random = np.random.default_rng(seed)
    logs = {}
    for rank in range(RANKS):
        own = jitter.own * random.standard_normal((iterations, COMPUTATIONS))
        own += jitter.common * random.standard_normal((iterations, 1))
        own += drift * np.sin(np.arange(iterations) / 7.0)[:, np.newaxis]
        if jitter.tail is not None:
            own[random.random(own.shape) < jitter.tail.share] += math.log(jitter.tail.factor)
        own -= np.median(own, axis=0)
        logs[rank] = dict(enumerate(own.tolist()))
    freedom = RANKS * (iterations * (COMPUTATIONS - 1) - COMPUTATIONS)
    return parts_of(logs, freedom)


@pytest.mark.parametrize("own", [0.002, 0.01, 0.03])
@pytest.mark.parametrize("common", [0.0, 0.5, 1.0])
def test_own_and_common_parts_are_found_again(own: float, common: float):
    found = seen(Jitter(own, common * own), iterations=40)
    assert found.own == pytest.approx(own, rel=0.05)
    assert found.common == pytest.approx(common * own, abs=0.1 * own)
    assert found.tail is None


@pytest.mark.parametrize(("share", "factor"), [(0.01, 1.3), (0.002, 1.2), (0.03, 1.15)])
def test_a_tail_is_told_from_the_rest(share: float, factor: float):
    found = seen(Jitter(0.01, 0.005, Tail(share, factor)), iterations=100)
    assert found.tail is not None
    assert found.tail.share == pytest.approx(share, rel=0.25)
    assert found.tail.factor == pytest.approx(factor, rel=0.02)
    assert found.own == pytest.approx(0.01, rel=0.05)
    assert found.common == pytest.approx(0.005, rel=0.2)


def test_what_all_ranks_have_in_common_makes_none_wait_and_is_left_out():
    found = seen(Jitter(0.01, 0.0), iterations=60, drift=0.02)
    assert found.common < 0.002


@few_and_many("seeds", 5, 50)
def test_normal_times_have_no_tail(seeds: int):
    tails = [seen(Jitter(0.01, 0.005), iterations=30, seed=seed).tail for seed in range(seeds)]
    shares = [0.0 if tail is None else tail.share for tail in tails]
    # A few of 6,000 normal times are 4 deviations above their middle.
    assert max(shares) < 1e-3


def test_draws_have_the_three_parts():
    ranks = [number % 4 for number in range(400)]
    factors = Jitter(0.01, 0.02, Tail(0.05, 1.5)).draw(ranks, 500)
    assert factors.shape == (400, 500)
    long = factors > 1.25
    assert long.mean() == pytest.approx(0.05, rel=0.05)
    logs = np.log(np.where(long, factors / 1.5, factors))
    of_rank = np.stack([logs[rank::4].mean(axis=0) for rank in range(4)])
    assert of_rank.std() == pytest.approx(0.02, rel=0.1)
    own = logs - of_rank[np.array(ranks)]
    assert own.std() == pytest.approx(0.01, rel=0.05)


@given(own=st.floats(0.0, 0.05), seed=st.integers(0, 9))
def test_a_jitter_without_common_part_and_tail_draws_as_before(own: float, seed: int):
    expected = np.exp(own * np.random.default_rng(0).standard_normal((3, 7)))
    assert np.array_equal(Jitter(own).draw([0, 1, seed], 7), expected)
    assert bool(Jitter(own)) == (own > 0.0)


@pytest.mark.parametrize(
    ("share", "factor", "message"),
    [
        (0.0, 1.3, "jitter_tail, share: 0.0 is not a part of all computations: give one above 0"),
        (1.5, 1.3, "jitter_tail, share: 1.5 is not a part of all computations: give one above 0"),
        (0.01, -1.0, "jitter_tail, factor: -1.0 is not a slowdown"),
    ],
)
def test_a_tail_that_cannot_be_is_refused(share: float, factor: float, message: str):
    with pytest.raises(ProfileError) as refusal:
        Tail(share, factor)
    assert str(refusal.value).startswith(message)
