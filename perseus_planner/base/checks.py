"""Checks: what is tried one after the other, and what to do when it does not work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from perseus_planner.base.errors import GpuNotPermitted, GpuNotSupported, PlannerError

C = TypeVar("C")

PASSED = "passed"
FAILED = "failed"
NOT_CHECKED = "not checked"
"""Results of checks; that of a setting that may not be made is "not permitted" or "not
supported".
"""


class NotCheckedError(PlannerError):
    """What cannot be checked here; the text says why."""


@dataclass(frozen=True)
class Finding:
    """What a check has found."""

    text: str  #: One line
    values: Mapping[str, Any] = field(default_factory=dict)  #: The numbers, as plain values


@dataclass(frozen=True)
class Check(Generic[C]):
    """Something that is tried."""

    name: str  #: What it is
    run: Callable[[C], Finding | str]  #: Tries it; returns what it has found, or raises an error
    advice: str = ""  #: What to do if it does not work, if the error does not say it
    passed: str = PASSED  #: The result if it works


@dataclass(frozen=True)
class CheckResult:
    """The result of a check."""

    name: str  #: What was checked
    #: "passed" or another word of the check; "failed", "not permitted", "not supported" or "not
    #: checked".
    result: str
    text: str  #: What was found; or why it does not work or was not checked, and what to do
    values: Mapping[str, Any] = field(default_factory=dict)  #: The numbers, as plain values


def run_check(check: Check[C], context: C) -> CheckResult:
    """Run a check; an error of the planner becomes its result."""
    try:
        answer = check.run(context)
    except NotCheckedError as reason:
        return CheckResult(check.name, NOT_CHECKED, str(reason))
    except PlannerError as error:
        return failure(check, error)
    # A check that has no numbers returns its line alone.
    finding = Finding(answer) if isinstance(answer, str) else answer
    return CheckResult(check.name, check.passed, finding.text, finding.values)


def failure(check: Check[Any], error: PlannerError) -> CheckResult:
    """Return the result of a check that raised `error`."""
    # These kinds are no failure of what is checked: something else may still be set.
    kinds = ((GpuNotPermitted, "not permitted"), (GpuNotSupported, "not supported"))
    result = next((text for kind, text in kinds if isinstance(error, kind)), FAILED)
    return CheckResult(check.name, result, "; ".join(filter(None, (str(error), check.advice))))
