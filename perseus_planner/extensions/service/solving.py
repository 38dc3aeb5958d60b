"""What worker processes do: solve profiles, and make plans of frontiers, which they keep."""

from __future__ import annotations

import io
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from perseus_planner.base.errors import (
    FrontierError,
    InfeasibleDeadline,
    InfeasiblePower,
    PlannerError,
    ProfileError,
    UsageError,
)
from perseus_planner.base.units import ON_TIME
from perseus_planner.extensions.service.curve import Curve, Slow
from perseus_planner.plans.job import Job, Settings
from perseus_planner.profiles.groups import slowed, within_power_limit
from perseus_planner.profiles.profiles import profile_document
from perseus_planner.schedules import schedule_names
from perseus_planner.solver.frontier import Frontier, check_unpacked, solve_dag

if TYPE_CHECKING:
    from perseus_planner.plans.plan import Plan

Name = TypeVar("Name")
Value = TypeVar("Value")

_FRONTIERS = 32  # frontiers that a process keeps in memory
# Of an unpacked frontier; one of 16 stages and 512 microbatches has some 30 MB.
_LARGEST_BYTES = 10**8
_LARGEST_HEADER_BYTES = 4 * 10**6  # some 500,000 computations, each of which takes time to read
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


class Latest(dict[Name, Value]):
    """A cache of the values that were put last, at most so many, for any thread."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def put(self, key: Name, value: Value) -> Value:
        """Put and return a value; the oldest ones go if there are too many."""
        self[key] = value
        for old in [*self][: -self._most]:
            self.pop(old, None)
        return value


@dataclass(frozen=True)
class Unsolved:
    """A profile and a schedule to solve."""

    #: The texts of the two files of a profile.
    profile_csv: str
    profile_yaml: str
    schedule: str  #: The name of a schedule, or a text grid
    microbatches: int | None  #: Per iteration; None with a text grid, which determines it


class PlanRequest(NamedTuple):
    """A plan that is wanted."""

    frontier: str  #: Digest of the frontier file
    time_s: float  #: Deadline of an iteration, seconds
    slow: Slow  #: Stages that are slower than profiled
    #: Upper bound on the average power of the pipeline, watts, which goes before `time_s`; None for
    #: no bound.
    power_w: float | None
    max_changes: int | None  #: Switch budget, as for `Frontier.plan_for`
    on_time: float | None = ON_TIME  #: The probability of keeping deadline or power, likewise
    #: Power limit of each GPU, watts; None for that under which it was profiled.
    gpu_power_limit_w: float | None = None


def solve_profile(unsolved: Unsolved) -> bytes:
    """Solve a profile with a schedule, as `planner solve` does; returns the frontier file.

    Raises:
        UsageError: If the profile or the schedule cannot be used, or they do not fit each other.
    """
    with tempfile.TemporaryDirectory(prefix="planner-solve-") as name:
        folder = Path(name)
        try:
            (dag,) = Job.of(_written(unsolved, folder)).dags()
            solve_dag(dag).save(folder / "frontier.npz")
        except PlannerError as error:
            raise UsageError(str(error).replace(f"{folder}/", "")) from None
        return (folder / "frontier.npz").read_bytes()


def curve_of(digest: str, slow: Slow, gpu_power_limit_w: float | None, content: bytes) -> Curve:
    """Return the curve of a pipeline, solved anew and exactly if some of its stages are slow or its
    GPUs limited.

    Raises:
        FrontierError: If `content` is not a frontier file.
        ProfileError: If there is no such stage, or no clock keeps a computation within the limit.
    """
    return Curve.of(_frontier(digest, slow, gpu_power_limit_w, content))


def plan_text(request: PlanRequest, content: bytes) -> str:
    """Return the requested plan as `Plan.dumps` writes it; that of the least power if none draws so
    little.

    Raises:
        InfeasibleDeadline: If no choice of clocks is that fast.
        InfeasibleBudget: If none was found within the switch budget.
    """
    frontier = _frontier(request.frontier, request.slow, request.gpu_power_limit_w, content)
    plan = frontier.plan_until(
        request.time_s, max_changes=request.max_changes, on_time=request.on_time
    )
    # A plan for the time that draws little enough anyway needs no search within power.
    if request.power_w is None or _most_w(plan) <= request.power_w:
        return plan.dumps()
    within = _plan_within_power(frontier, request, request.power_w)
    # With a probability, the plan for the time may be the slower one of the two.
    if plan.on_time is not None and plan.time_s > within.time_s:
        return plan.dumps()
    return within.dumps()


def _most_w(plan: Plan) -> float:
    """Return the power of a plan, watts: the upper end of its range if its time is kept with a
    probability.
    """
    return plan.power_w if plan.on_time is None else plan.on_time.power_w.high


def _plan_within_power(frontier: Frontier, request: PlanRequest, power_w: float) -> Plan:
    """Return the fastest plan within a power, or the one of the least power."""

    def within(most_w: float) -> Plan:
        return frontier.plan_within_power(
            most_w, max_changes=request.max_changes, on_time=request.on_time
        )

    try:
        return within(power_w)
    except InfeasiblePower as error:
        return within(error.least_power_w)


def nearest_plan_text(request: PlanRequest, content: bytes) -> str:
    """Return the requested plan, or the fastest one that was found if none is that fast."""
    try:
        return plan_text(request, content)
    except InfeasibleDeadline as error:
        frontier = _frontier(request.frontier, request.slow, request.gpu_power_limit_w, content)
        least_s = max(error.least_time_s, frontier.least_deadline_s(request.on_time))
        return plan_text(request._replace(time_s=least_s), content)


_frontiers = Latest[tuple[str, Slow, float | None], Frontier](_FRONTIERS)


def _frontier(digest: str, slow: Slow, limit_w: float | None, content: bytes) -> Frontier:
    """Return a frontier, kept in memory as it caches its plans."""
    key = (digest, slow, limit_w)
    frontier = _frontiers.get(key)
    if frontier is None:
        if slow or limit_w is not None:
            frontier = _changed(_frontier(digest, (), None, content), slow, limit_w)
        else:
            frontier = _read(content)
        _frontiers.put(key, frontier)
    return frontier


def _changed(frontier: Frontier, slow: Slow, limit_w: float | None) -> Frontier:
    profile = frontier.profile if limit_w is None else within_power_limit(frontier.profile, limit_w)
    profile = slowed(profile, dict(slow)) if slow else profile
    return (
        frontier if profile is frontier.profile else solve_dag(frontier.dag.with_profile(profile))
    )


def _read(content: bytes) -> Frontier:
    check_unpacked(io.BytesIO(content), "frontier.npz", _LARGEST_BYTES, _LARGEST_HEADER_BYTES)
    with tempfile.TemporaryDirectory(prefix="perseus-planner-") as folder:
        path = Path(folder) / "frontier.npz"
        path.write_bytes(content)
        try:
            return Frontier.load(path)
        except FrontierError as error:
            raise FrontierError(str(error).replace(str(path), path.name)) from None


def _written(unsolved: Unsolved, folder: Path) -> Settings:
    """Write the profile into `folder`, and the schedule if it is a grid; returns the settings
    that name them.
    """
    document = folder / "profile.yaml"
    document.write_text(unsolved.profile_yaml, encoding="utf-8", newline="")
    table = profile_document(document).values["measurements"]
    # The text comes from a client, and must not make this machine read or write a file elsewhere.
    if not isinstance(table, str) or not _FILE_NAME.fullmatch(table) or table == document.name:
        raise ProfileError(
            "profile.yaml: measurements: is not a plain file name; write profile.csv there"
        )
    # As it was sent, line ends included.
    (folder / table).write_text(unsolved.profile_csv, encoding="utf-8", newline="")
    schedule: str | Path = unsolved.schedule
    if schedule not in schedule_names():
        schedule = folder / "schedule.txt"
        schedule.write_text(unsolved.schedule, encoding="utf-8", newline="")
    return Settings(profile=document, schedule=schedule, microbatches=unsolved.microbatches)
