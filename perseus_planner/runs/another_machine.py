"""Tells whether a plan is of the machine that ran it."""

from __future__ import annotations

from perseus_planner.base.prefixes import si

MOST_APART = 2.0
"""Iterations that take more than this times as long or as short as planned did not run on what
the plan is of.
"""


def of_another_machine(time_s: float | None, planned_s: float) -> str | None:
    """Return a sentence if iterations of `time_s` are far from those of `planned_s` of their plan;
    None otherwise.

    Nothing that the plan promises holds then, so no saving against it is shown.

    Args:
        time_s: Measured time of an iteration, seconds; None if it is not known.
        planned_s: Its time by the plan, seconds.
    """
    if time_s is None or planned_s / MOST_APART <= time_s <= MOST_APART * planned_s:
        return None
    return (
        f"This plan is of another machine: iterations take {si(time_s, 's')} here, "
        f"{si(planned_s, 's')} by the plan, so no saving is shown; profile where you train, and "
        "plan again"
    )
