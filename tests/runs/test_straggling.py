"""A slow GPU is reported once for each lasting change, and not for a short disturbance."""

from __future__ import annotations

from statistics import median

from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import fixed

from perseus_planner.runs import IterationRecord
from perseus_planner.runs.verdict import (
    ENOUGH,
    RECOVERED,
    SLOW,
    StragglerDetection,
    StragglerDetector,
)


def ran(
    ratio: float, planned_s: float = 2.0, deviation: str | None = None, **throttled_s: float
) -> IterationRecord:
    """An iteration of 4 s whose computations took `ratio` times as long as planned."""
    return IterationRecord(
        iteration=0,
        version=1,
        pipeline=0,
        pipeline_rank=0,
        begin_s=10.0,
        end_s=14.0,
        busy_s=ratio * planned_s,
        planned_busy_s=planned_s if deviation is None else None,
        throttled_s={name.replace("_", "-"): seconds for name, seconds in throttled_s.items()},
        deviation=deviation,
    )


def reports(
    rows: list[IterationRecord], usual: float | None = 1.0
) -> list[tuple[int, StragglerDetection]]:
    """Return (index of the iteration, what was reported after it)."""
    watch, found = StragglerDetector(usual), []
    for place, row in enumerate(rows):
        watch, news = watch.after(row)
        if news is not None:
            found.append((place, news))
    return found


RATIOS = st.lists(
    st.tuples(
        st.sampled_from((0.9, 1.0, 1.01, 1.03, 1.049, 1.06, 1.1, 1.5, 3.0)), st.integers(1, 12)
    ),
    max_size=12,
).map(lambda runs: [ratio for ratio, times in runs for _ in range(times)])


@settings(fixed, max_examples=200)
@given(RATIOS)
def test_every_report_has_so_many_iterations_in_a_row_behind_it_and_none_is_missed(
    ratios: list[float],
):
    found = dict(reports([ran(ratio) for ratio in ratios]))
    reported = 1.0
    for place in range(len(ratios)):
        last = ratios[max(0, place + 1 - ENOUGH) : place + 1]
        if place in found:
            assert len(last) == ENOUGH
            if found[place].slowdown > 1.0:
                assert min(last) > SLOW
                assert found[place].slowdown == median(last)
                assert min(last) > SLOW * reported or max(last) * SLOW < reported
            else:
                assert reported > 1.0
                assert max(last) < RECOVERED
            reported = found[place].slowdown
        elif len(last) == ENOUGH:
            assert not (reported == 1.0 and min(last) > SLOW)
            assert not (reported > 1.0 and max(last) < RECOVERED)


@settings(fixed, max_examples=50)
@given(st.floats(0.2, 5.0), RATIOS)
def test_what_is_usual_is_learned_so_that_only_what_changes_counts(
    usual: float, ratios: list[float]
):
    rows = [ran(usual)] * ENOUGH + [ran(usual * ratio) for ratio in ratios]
    learned = reports(rows, None)
    expected = reports([ran(ratio) for ratio in ratios])
    assert [(place - ENOUGH, each.reason) for place, each in learned] == [
        (place, each.reason) for place, each in expected
    ]
    for (_, one), (_, other) in zip(learned, expected, strict=True):
        assert abs(one.slowdown - other.slowdown) < 1e-9


@settings(fixed, max_examples=50)
@given(RATIOS, st.data())
def test_iterations_that_did_not_run_as_planned_say_nothing(
    ratios: list[float], data: st.DataObject
):
    rows = [ran(ratio) for ratio in ratios]
    with_others = [*rows]
    for place in sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=5)), reverse=True):
        with_others.insert(place, ran(9.0, deviation="something else"))
    assert [each for _, each in reports(with_others)] == [each for _, each in reports(rows)]


def test_the_reason_is_what_the_counters_say():
    slow = [ran(1.2, sw_thermal=1.0, sw_power_cap=3.0, hw_thermal=0.1)] * ENOUGH
    assert reports(slow) == [
        (
            ENOUGH - 1,
            StragglerDetection(
                1.2, "throttled: sw-power-cap 75 % of the time, sw-thermal 25 % of the time"
            ),
        )
    ]
    assert reports([ran(1.2)] * 9) == [
        (
            ENOUGH - 1,
            StragglerDetection(1.2, "its computations take longer; no throttling was counted"),
        )
    ]


def test_a_gpu_that_is_held_back_from_the_start_is_judged_by_the_profile():
    held, free = ran(1.3, sw_thermal=2.0), ran(1.1)
    found = reports([held] * 7 + [free] * 20, None)
    assert [place for place, _ in found] == [ENOUGH - 1, 7 + 2 * ENOUGH - 1]
    assert [each.slowdown for _, each in found] == [1.3, 1.0]
    assert (
        reports([ran(1.3, sw_power_cap=4.0)] * 20, None) == []
    )  # at its power limit, like many GPUs all the time
