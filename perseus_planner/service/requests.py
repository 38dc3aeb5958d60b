"""What is asked of the service: a straggler's report and a job's registration, as values and as JSON bodies."""

from __future__ import annotations

import base64
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from perseus_planner.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from perseus_planner.service.model import Cause, Place, Scope


@dataclass(frozen=True)
class ReportRequest:
    """That something is slow, or has recovered, as it is sent.

    How slow is said in exactly one way: `slowdown`, `iteration_s` or `score`.

    Attributes:
        source: who says it; a later report of the same source about the same scope takes the place of the earlier.
        scope: what is slow.
        slowdown: how many times as long it takes, 1 or more; 1: it has recovered.
        iteration_s: the iteration time that is expected of its pipeline, seconds.
        score: performance relative to what it should be, above 0 and at most 1, as NVIDIA's resiliency extension says
            it: its slowdown is 1/score.
        in_s: it begins so many seconds after it is received; with `at_iteration` as well, one of them is None.
        at_iteration: it begins with this iteration of the job.
        ttl_s: for how long it holds once begun, seconds; None: until it is cleared.
        cause: what it is about.
        observed_s: when it was observed, seconds since the epoch; None: when it is received.
        key: which report this is, so that it counts once however often it is sent; None: the service chooses one.
    """

    source: str
    scope: Scope
    slowdown: float | None = None
    iteration_s: float | None = None
    score: float | None = None
    in_s: float | None = None
    at_iteration: int | None = None
    ttl_s: float | None = None
    cause: Cause = "unknown"
    observed_s: float | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("slowdown", "iteration_s", "score") if getattr(self, name) is not None]
        if len(given) != 1:
            raise UsageError(
                "a report says how slow in one way: give a slowdown, an iteration time or a score, "
                f"and not {' and '.join(given) or 'none'}"
            )
        if self.in_s is not None and self.at_iteration is not None:
            raise UsageError("a report begins after a time or with an iteration; give one of the two")
        if self.slowdown is not None and not 1.0 <= self.slowdown < math.inf:
            raise UsageError(f"slowdown {self.slowdown:g} is not a number of 1 or more; 1 says that it has recovered")
        if self.score is not None and not 0.0 < self.score <= 1.0:
            raise UsageError(f"score {self.score:g} is not above 0 and at most 1; 1 says that it has recovered")
        if self.iteration_s is not None and not 0.0 < self.iteration_s < math.inf:
            raise UsageError(f"iteration time {self.iteration_s:g} is not a number of seconds above 0")

    def body(self) -> dict[str, Any]:
        """As JSON has it: what is None is left out."""
        fields = {name: value for name, value in asdict(self).items() if value is not None}
        fields["scope"] = {name: value for name, value in fields["scope"].items() if value is not None}
        return fields


@dataclass(frozen=True)
class Registration:
    """A job, as it is registered.

    Attributes:
        name: unique among those that run.
        frontier: the bytes of its frontier's file.
        pipelines: how many data-parallel pipelines it has.
        places: its ranks; may be empty where reports name pipelines only.
        deadline_s: the iteration time that is wanted where nobody straggles; None: that of all clocks at maximum.
        max_changes, min_dwell_s: switch budget of its plans, as for `Frontier.plan_for`.
        power_w: the most that all its GPUs together may draw on average; None: any.
    """

    name: str
    frontier: bytes
    pipelines: int
    places: tuple[Place, ...] = ()
    deadline_s: float | None = None
    max_changes: int | None = None
    min_dwell_s: float | None = None
    power_w: float | None = None

    def body(self) -> dict[str, Any]:
        """As JSON has it: what is None is left out."""
        numbers: Mapping[str, Any] = {
            name: getattr(self, name) for name in ("deadline_s", "max_changes", "min_dwell_s", "power_w")
        }
        return {
            "name": self.name,
            "frontier": base64.b64encode(self.frontier).decode(),
            "pipelines": self.pipelines,
            "places": [{**asdict(place), "stages": list(place.stages)} for place in self.places],
            **{name: value for name, value in numbers.items() if value is not None},
        }
