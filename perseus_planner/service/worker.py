"""What runs in the service's worker processes: reading frontiers, solving, planning.

Solving and planning are compiled code that holds Python's global lock. On a thread of the service,
answers would wait for up to 0.5 s, so other processes do it.
"""

from __future__ import annotations

import io
import os
import re
import signal
import tempfile
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from perseus_planner.base.errors import (
    FrontierError,
    InfeasibleDeadline,
    InfeasiblePower,
    PlannerError,
    ProfileError,
    UsageError,
)
from perseus_planner.base.units import ON_TIME
from perseus_planner.plans.job import Job
from perseus_planner.plans.settings import Settings
from perseus_planner.profiles.groups import slowed, within_power_limit
from perseus_planner.profiles.profiles import profile_document
from perseus_planner.schedules import NAMES
from perseus_planner.service.models import Curve, Slow
from perseus_planner.solver.frontier import Frontier, solve_dag

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

_KEPT = 32  # frontiers that a process keeps in memory
_LARGEST_BYTES = (
    10**8
)  # of an unpacked frontier; one of 16 stages and 512 microbatches has some 30 MB
_LARGEST_HEADER_BYTES = 4 * 10**6  # some 500,000 computations, each of which takes time to read
_NICENESS = 10
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


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


def prepare_process(service: Connection) -> None:
    """Prepare this process: low priority, Ctrl-C left to the service, and an end together with the
    service.

    Args:
        service: A pipe whose other end the service holds. When that is closed, even by the
            service's death, this process ends at once. Pool processes would otherwise outlive a
            service that is killed.
    """
    os.nice(_NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(service,), daemon=True).start()


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


def curve_of(digest: str, content: bytes) -> Curve:
    """Return the curve of a frontier.

    Raises:
        FrontierError: If `content` is not a frontier file.
    """
    return Curve.of(_frontier(digest, (), None, content))


def solved_curve(digest: str, slow: Slow, gpu_power_limit_w: float | None, content: bytes) -> Curve:
    """Return the curve of the pipeline with some stages slowed down and its GPUs limited: solved
    anew, exactly.

    Raises:
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
    limits: dict[str, Any] = {name: getattr(request, name) for name in ("max_changes", "on_time")}
    plan = frontier.plan_until(request.time_s, **limits)
    sure = plan.on_time
    power_w = plan.power_w if sure is None else sure.power_w.high
    if request.power_w is not None and power_w > request.power_w:
        try:
            within = frontier.plan_within_power(request.power_w, **limits)
        except InfeasiblePower as error:
            within = frontier.plan_within_power(error.least_power_w, **limits)
        plan = within if sure is None else max(plan, within, key=lambda each: each.time_s)
    return plan.dumps()


def nearest_plan_text(request: PlanRequest, content: bytes) -> str:
    """Return the requested plan, or the fastest one that was found if none is that fast."""
    try:
        return plan_text(request, content)
    except InfeasibleDeadline as error:
        frontier = _frontier(request.frontier, request.slow, request.gpu_power_limit_w, content)
        least_s = max(error.least_time_s, frontier.least_deadline_s(request.on_time))
        return plan_text(request._replace(time_s=least_s), content)


class RecentlyUsed(Generic[Key, Value]):
    """A cache of the values that were last used, for any thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def get(self, key: Key) -> Value | None:
        """Return the value of a key, which is then the one used last; None if it is not there."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Key, value: Value) -> None:
        """Add a value, in place of the one that was not used for longest if there are too many."""
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._most:
                self._values.popitem(last=False)


_frontiers = RecentlyUsed[tuple[str, Slow, float | None], Frontier](_KEPT)


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
    _check_size(content)
    with tempfile.TemporaryDirectory(prefix="perseus-planner-") as folder:
        path = Path(folder) / "frontier.npz"
        path.write_bytes(content)
        try:
            return Frontier.load(path)
        except FrontierError as error:
            raise FrontierError(str(error).replace(str(path), path.name)) from None


def _check_size(content: bytes) -> None:
    """Refuse a small file that unpacks to more than fits in memory."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            sizes = {member.filename: member.file_size for member in archive.infolist()}
    except zipfile.BadZipFile:
        return  # reading it says what it is instead
    size, computations = sum(sizes.values()), sizes.get("header.npy", 0)
    if computations > _LARGEST_HEADER_BYTES:
        raise FrontierError(
            f"frontier.npz: its list of computations unpacks to {computations} bytes, more than "
            f"{_LARGEST_HEADER_BYTES}; is it a frontier?"
        )
    if size > _LARGEST_BYTES:
        raise FrontierError(
            f"frontier.npz: unpacks to {size} bytes, more than {_LARGEST_BYTES}; is it a frontier?"
        )


def _written(unsolved: Unsolved, folder: Path) -> Settings:
    """Write the profile into `folder`, and the schedule if it is a grid; returns the settings
    that name them.
    """
    document = folder / "profile.yaml"
    document.write_text(unsolved.profile_yaml, encoding="utf-8", newline="")
    table = profile_document(document).values["measurements"]
    if not isinstance(table, str) or not _FILE_NAME.fullmatch(table) or table == document.name:
        raise ProfileError(
            "profile.yaml: measurements: is not a plain file name; write profile.csv there"
        )
    (folder / table).write_text(unsolved.profile_csv, encoding="utf-8", newline="")
    schedule: str | Path = unsolved.schedule
    if schedule not in NAMES:
        schedule = folder / "schedule.txt"
        schedule.write_text(unsolved.schedule, encoding="utf-8", newline="")
    return Settings(profile=document, schedule=schedule, microbatches=unsolved.microbatches)


def _end_with(service: Connection) -> None:
    wait([service])
    os._exit(0)
