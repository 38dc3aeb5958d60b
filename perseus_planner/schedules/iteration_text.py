"""The parts of an iteration that files hold beside its schedule: kinds with a suffix, fixed
operations and waits.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import PlannerError, ScheduleError
from perseus_planner.schedules.iteration import Iteration, parse_operation
from perseus_planner.schedules.pipeline import KIND, pipeline_iteration

if TYPE_CHECKING:
    from collections.abc import Mapping

    from perseus_planner.schedules import Schedule

_KEY = re.compile(rf"(\d+)({KIND.pattern})")
ITERATION_KEYS = (
    "kinds",
    "operations",
    "waits",
)  #: of `iteration_to_dict`; each only if it is not the default


def iteration_to_dict(iteration: Iteration) -> dict[str, Any]:
    """Return plain values from which `iteration_from_dict` makes `iteration` again.

    kinds: computation -> its kind, for those with a suffix. operations: name -> [rank, seconds,
    joules or null]. waits: node -> predecessor -> lag in seconds; left out if they are those of a
    pipeline without lags.
    """
    content: dict[str, Any] = {}
    kinds = {
        str(computation): kind
        for computation, (_, kind) in zip(iteration.computations, iteration.keys, strict=True)
        if kind != computation.kind
    }
    if kinds:
        content["kinds"] = kinds
    if iteration.operations:
        content["operations"] = {
            str(each): [each.rank, each.time_s, each.energy_j] for each in iteration.operations
        }
    if not _is_plain_pipeline(iteration):
        names = iteration.names
        content["waits"] = {
            names[place]: {names[other]: lag_s for other, lag_s in waits}
            for place, waits in enumerate(iteration.waits)
        }
    return content


def iteration_from_dict(schedule: Schedule, content: Mapping[str, Any]) -> Iteration:
    """Return the iteration of `schedule` with the `content` that `iteration_to_dict` returned.

    Raises:
        ScheduleError: If `content` does not describe an iteration of `schedule`.
    """
    kinds = content.get("kinds", {})
    operations = tuple(
        parse_operation(text, *fixed) for text, fixed in content.get("operations", {}).items()
    )
    if "waits" not in content:
        plain = pipeline_iteration(schedule)
        predecessors, lags_s = plain.predecessors, plain.lags_s
    else:
        names = [*map(str, schedule.computations()), *map(str, operations)]
        place = {name: i for i, name in enumerate(names)}
        each = [content["waits"][name] for name in names]
        predecessors = tuple(tuple(place[other] for other in waits) for waits in each)
        lags_s = tuple(tuple(map(float, waits.values())) for waits in each)
        lags_s = lags_s if any(map(any, lags_s)) else ()
    own = tuple(kinds.get(str(c), c.kind) for c in schedule.computations()) if kinds else ()
    return Iteration(schedule, predecessors, lags_s, operations, own)


def parse_stage_kind(text: str) -> tuple[int, str]:
    """Return stage and kind of a text such as "3B" or "3B.sync".

    Raises:
        ScheduleError: If the text is not a stage and a kind.
    """
    match = _KEY.fullmatch(text)
    if match is None:
        raise ScheduleError(f"{text!r} is not a stage and a kind; write them as 3B, or 3B.sync")
    return int(match[1]), match[2]


def _is_plain_pipeline(iteration: Iteration) -> bool:
    if iteration.operations or iteration.lags_s:
        return False
    try:
        return pipeline_iteration(iteration.schedule).predecessors == iteration.predecessors
    except PlannerError:
        return False
