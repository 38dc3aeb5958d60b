"""The ledger's guarantee: whatever iterations take, their sum is bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_planner.base.errors import UsageError
from perseus_planner.base.wires import decode, encode
from perseus_planner.runtime.guarantee import Ledger


@given(
    st.lists(st.tuples(st.floats(0.9, 1.1), st.floats(0.8, 3.0)), max_size=80),
    st.sampled_from([1.0, 1.05]),
    st.sampled_from([0.0, 0.005]),
)
def test_the_sum_of_iterations_is_bounded_whatever_they_take(
    iterations: list[tuple[float, float]], slowdown: float, share: float
):
    """Each iteration has a time at full clocks, which counts when the ledger is overdrawn, and
    another one at a plan's.

    The reference is right: it is the time at full clocks of each iteration.
    """
    ledger = Ledger(1.0, slowdown, share, burst_s=0.01)
    total_s = full_s = 0.0
    tripping_s = 0.0
    for at_full_s, factor in iterations:
        ledger = Ledger(at_full_s, slowdown, share, 0.01, ledger.owed_s)
        overdrawn = ledger.is_overdrawn
        time_s = at_full_s if overdrawn else at_full_s * factor
        ledger = ledger.add(time_s, full_clocks=overdrawn)
        total_s, full_s = total_s + time_s, full_s + at_full_s
        if not overdrawn and ledger.is_overdrawn:
            tripping_s = max(tripping_s, time_s - (slowdown + share) * at_full_s)
        assert total_s <= (slowdown + share) * full_s + 0.01 + tripping_s + 1e-9


def test_an_overdrawn_ledger_is_paid_by_iterations_at_full_clocks():
    ledger = Ledger(10.0, burst_s=0.05).add(10.2)
    assert ledger.is_overdrawn
    paid = 0
    while ledger.is_overdrawn:
        ledger, paid = ledger.add(10.3, full_clocks=True), paid + 1
    assert paid == 2  # 0.15 s owed, 0.05 s paid by each until no more than the burst is owed


def test_terms_that_come_late_count_the_iterations_since():
    own = Ledger(10.0, burst_s=0.05)
    for time_s in (10.0, 11.5, 11.5, 11.5):
        own = own.add(time_s)
    assert own.is_overdrawn
    terms = (
        Ledger(11.5, burst_s=0.0575).add(10.0).add(11.5)
    )  # since then it is known that the GPU became slower
    renewed = own.renewed(terms)
    assert not renewed.is_overdrawn
    assert renewed == terms.add(11.5).add(11.5)


def test_terms_of_iterations_that_are_forgotten_keep_what_is_owed():
    own = Ledger(10.0, burst_s=0.05)
    for _ in range(40):
        own = own.add(10.06)
    renewed = own.renewed(Ledger(11.0, burst_s=0.055).add(10.0))
    assert (renewed.reference_s, renewed.owed_s, renewed.last) == (11.0, own.owed_s, 39)


def test_an_iteration_is_charged_with_what_clocks_did_to_it():
    ledger = Ledger(10.0, max_slowdown=0.0, burst_s=1.0, unjudged=0.01)
    assert ledger.add(15.0).owed_s == pytest.approx(0.1)  # of which is not known yet why
    assert ledger.add(15.0, longer_s=0.02).owed_s == pytest.approx(0.02)
    assert ledger.add(15.0, full_clocks=True).owed_s == 0.0


def test_a_ledger_is_plain_values():
    ledger = Ledger(10.0, burst_s=0.05).add(10.1).add(10.0, full_clocks=True)
    assert decode(encode(ledger), Ledger) == ledger


def test_credit_is_limited():
    ledger = Ledger(10.0, burst_s=0.05)
    for _ in range(100):
        ledger = ledger.add(9.0)
    assert ledger.owed_s == pytest.approx(-0.2)


def test_a_slowdown_below_1_is_refused():
    with pytest.raises(UsageError, match=r"^ledger, slowdown: 0\.9 is not "):
        Ledger(10.0, slowdown=0.9)
