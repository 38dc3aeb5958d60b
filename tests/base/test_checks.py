"""A check becomes a result, whatever happens to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from perseus_planner.base.checks import Check, CheckResult, Finding, NotCheckedError, run_check
from perseus_planner.base.errors import GpuError, GpuNotPermitted, PlannerError


def fail(error: PlannerError) -> Callable[[int], str]:
    def run(_: int) -> str:
        raise error

    return run


@pytest.mark.parametrize(
    ("run", "result", "text"),
    [
        (lambda context: f"{context} W", "passed", "7 W"),
        (fail(NotCheckedError("there is none")), "not checked", "there is none"),
        (fail(GpuError("it is lost")), "failed", "it is lost; reboot"),
        (fail(GpuNotPermitted("it may not")), "not permitted", "it may not; reboot"),
    ],
)
def test_what_was_found_or_failed_is_the_result(run: Callable[[int], str], result: str, text: str):
    assert run_check(Check("power", run, "reboot"), 7) == CheckResult("power", result, text)


def test_numbers_and_a_word_of_its_own_are_kept():
    check = Check[int]("limit", lambda _: Finding("", {"w": 7}), passed="permitted")
    assert run_check(check, 0) == CheckResult("limit", "permitted", "", {"w": 7})


def test_a_bug_is_not_a_result():
    with pytest.raises(ZeroDivisionError):
        run_check(Check[int]("bug", lambda number: str(1 / number)), 0)
