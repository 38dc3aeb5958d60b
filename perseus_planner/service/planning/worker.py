"""What the service has another process do: read frontiers, solve, plan. There, it holds up no answer to anyone.

Solving and planning are compiled code that keeps Python's lock: on a thread of the service, answers would wait for
as long as one step takes, which was measured to be up to 0.5 s.
"""

from __future__ import annotations

import io
import os
import signal
import tempfile
import threading
import zipfile
from collections import OrderedDict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

from perseus_planner.errors import FrontierError, InfeasibleDeadline, InfeasiblePower
from perseus_planner.profiles.groups import slowed
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.service.planning.curves import Curve, Slow
from perseus_planner.solver.frontier import Frontier
from perseus_planner.solver.solve import solve_dag

_KEPT = 32  # frontiers of which a process remembers what it made of them
_LARGEST_BYTES = 1 << 30  # of a frontier when unpacked; one of 16 stages and 512 microbatches has some 30 MB
_NICENESS = 10


class PlanRequest(NamedTuple):
    """Which plan is wanted.

    Attributes:
        frontier: digest of the frontier's file.
        time_s: within what an iteration is to end, seconds.
        slow: the stages that are slower than profiled.
        power_w: the most that all its GPUs may draw on average, even if it takes longer then; None: any.
        max_changes, min_dwell_s: switch budget, as for `Frontier.plan_for`.
    """

    frontier: str
    time_s: float
    slow: Slow
    power_w: float | None
    max_changes: int | None
    min_dwell_s: float


def serve_until_closed(service: Connection) -> None:
    """Prepare a process of its own: it gives way to the service, leaves Ctrl-C to it, and ends when it ends.

    Args:
        service: a pipe of which the service has the other end; closed, also by the service's death, it ends this
            process in the middle of what it does. A pool's processes would outlive a service that is killed.
    """
    os.nice(_NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(service,), daemon=True).start()


def curve_of(digest: str, content: bytes) -> Curve:
    """The curve of a frontier.

    Raises:
        FrontierError: `content` is no frontier's file.
    """
    return Curve.of(_frontier(digest, (), content))


def slowed_curve(digest: str, slow: Slow, content: bytes) -> Curve:
    """The curve of the pipeline whose stages in `slow` are slower: solved anew, exactly.

    Raises:
        ProfileError: there is no such stage.
    """
    return Curve.of(_frontier(digest, slow, content))


def plan_text(request: PlanRequest, content: bytes) -> str:
    """The plan that is asked for, as `Plan.dumps` writes it; the most frugal one where none draws so little.

    Raises:
        InfeasibleDeadline: no choice of clocks is that fast.
        InfeasibleBudget: none was found within the switch budget.
    """
    frontier = _frontier(request.frontier, request.slow, content)
    changes, dwell_s = request.max_changes, request.min_dwell_s
    plan = frontier.plan_for(request.time_s, max_changes=changes, min_dwell_s=dwell_s)
    if request.power_w is not None and plan.power_w > request.power_w:
        try:
            plan = frontier.plan_within_power(request.power_w, max_changes=changes, min_dwell_s=dwell_s)
        except InfeasiblePower as error:
            plan = frontier.plan_within_power(error.least_power_w, max_changes=changes, min_dwell_s=dwell_s)
    return plan.dumps()


def nearest_plan_text(request: PlanRequest, content: bytes) -> str:
    """The same, or where no plan is that fast, the fastest that was found."""
    try:
        return plan_text(request, content)
    except InfeasibleDeadline as error:
        return plan_text(request._replace(time_s=error.least_time_s), content)


_frontiers: OrderedDict[tuple[str, Slow], Frontier] = OrderedDict()


def _frontier(digest: str, slow: Slow, content: bytes) -> Frontier:
    """Remembered, as it remembers its own plans."""
    key = (digest, slow)
    if key not in _frontiers:
        _frontiers[key] = _slowed(_frontier(digest, (), content), slow) if slow else _read(content)
    _frontiers.move_to_end(key)
    while len(_frontiers) > _KEPT:
        _frontiers.popitem(last=False)
    return _frontiers[key]


def _slowed(frontier: Frontier, slow: Slow) -> Frontier:
    return solve_dag(PipelineDag(slowed(frontier.profile, dict(slow)), frontier.dag.iteration))


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
    """Refuse a small file that unpacks to more than memory holds."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            size = sum(each.file_size for each in archive.infolist())
    except zipfile.BadZipFile:
        return  # it says what it is instead when it is read
    if size > _LARGEST_BYTES:
        raise FrontierError(f"frontier.npz: unpacks to {size} bytes, more than {_LARGEST_BYTES}; is it a frontier?")


def _end_with(service: Connection) -> None:
    wait([service])
    os._exit(0)
