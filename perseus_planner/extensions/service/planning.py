"""From targets to plans: curves and plans that are known are looked up, others are made by worker
processes, one job at a time for each.

Solving and planning are compiled code that holds Python's global lock. On a thread of the service,
answers would wait for up to 0.5 s.
"""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import re
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import CancelledError, Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from perseus_planner.base.errors import (
    FrontierError,
    InfeasibleDeadline,
    InfeasiblePower,
    PlannerError,
    ProfileError,
    UsageError,
)
from perseus_planner.base.units import ON_TIME
from perseus_planner.extensions.service.curve import Curve, NotSolved, Numbers, Slow
from perseus_planner.plans.job import Job, Settings
from perseus_planner.profiles.groups import slowed, within_power_limit
from perseus_planner.profiles.profiles import profile_document
from perseus_planner.schedules import schedule_names
from perseus_planner.solver.frontier import Frontier, check_unpacked, solve_dag

if TYPE_CHECKING:
    from perseus_planner.extensions.service.models import Decision, RegisteredJob
    from perseus_planner.extensions.service.watch import Watchdog

Result = TypeVar("Result")
Name = TypeVar("Name")
Value = TypeVar("Value")

_FRONTIERS = 32  # frontiers that a process keeps in memory
# Of an unpacked frontier; one of 16 stages and 512 microbatches has some 30 MB.
_LARGEST_BYTES = 10**8
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
    limits: dict[str, Any] = {name: getattr(request, name) for name in ("max_changes", "on_time")}
    # First the plan for the time: if that draws little enough anyway, no search within power is
    # needed.
    plan = frontier.plan_until(request.time_s, **limits)
    sure = plan.on_time
    # With a time that is kept with a probability, the power is known as a range; its upper end must
    # fit.
    power_w = plan.power_w if sure is None else sure.power_w.high
    if request.power_w is not None and power_w > request.power_w:
        try:
            within = frontier.plan_within_power(request.power_w, **limits)
        except InfeasiblePower as error:
            within = frontier.plan_within_power(error.least_power_w, **limits)
        plan = within if sure is None else max(plan, within, key=lambda candidate: candidate.time_s)
    return plan.dumps()


def nearest_plan_text(request: PlanRequest, content: bytes) -> str:
    """Return the requested plan, or the fastest one that was found if none is that fast."""
    try:
        return plan_text(request, content)
    except InfeasibleDeadline as error:
        frontier = _frontier(request.frontier, request.slow, request.gpu_power_limit_w, content)
        least_s = max(error.least_time_s, frontier.least_deadline_s(request.on_time))
        return plan_text(request._replace(time_s=least_s), content)


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


def _end_with(service: Connection) -> None:
    wait([service])
    os._exit(0)


LONGEST_S = 300.0
"""How long one call of a worker process may take: a solution or a plan."""
# curves and plans; a plan of 8 stages and 96 microbatches has 30 kB, a curve half of that
_KEPT = 1024


class NotPlanned(PlannerError):
    """The process that was solving or planning was killed."""


class Ending(NotPlanned):
    """The service is ending and makes no more plans."""


class Processes:
    """Worker processes, started when first needed. Use it as a context manager, which ends them at
    once.

    They also end when the process that started them is killed.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._open = True
        self._lock = threading.Lock()
        self._pool: Executor | None = None
        self._theirs, self._ours = multiprocessing.Pipe(duplex=False)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._open = False
            self._end()

    def run(
        self, function: Callable[..., Result], *arguments: Any, timeout_s: float = LONGEST_S
    ) -> Result:
        """Call a module-level function in a worker process and return its result.

        If the process is killed, for example for lack of memory, a new one tries once more. If it
        takes longer than `timeout_s` seconds, the processes are started again, so that others do
        not wait for it.

        Raises:
            NotPlanned: If the second process was killed too.
            UsageError: If it takes too long.
            Ending: If the context has been left.
        """
        pool = None
        for _ in range(2):
            # The pool that was just seen broken is named, as another thread may have replaced it by
            # now.
            pool = self._living(pool)
            try:
                return pool.submit(function, *arguments).result(timeout_s)
            except (BrokenProcessPool, CancelledError):
                continue
            except futures.TimeoutError as error:
                self.restart()
                raise UsageError(
                    f"solving takes longer than {timeout_s:g} s; run `planner solve` yourself and "
                    "register its frontier"
                ) from error
        raise NotPlanned(
            "the process that solves and plans was killed twice; check that this machine has "
            "enough memory"
        )

    def restart(self) -> None:
        """End the processes, whatever they are doing; new ones start when needed."""
        with self._lock:
            if self._open:
                self._end()
                self._pool = None
                # Workers end when their pipe closes; new ones need a new one.
                self._theirs, self._ours = multiprocessing.Pipe(duplex=False)

    def _end(self) -> None:
        self._ours.close()
        if self._pool is not None:
            self._pool.shutdown()
        self._theirs.close()

    def _living(self, broken: Executor | None) -> Executor:
        """Return the pool, a new one in place of `broken`."""
        with self._lock:
            if not self._open:
                raise Ending("the service is ending; ask again when it runs")
            if self._pool is None or self._pool is broken:
                # a fork would inherit the service's sockets and locks
                context = multiprocessing.get_context("spawn")
                prepare = prepare_process
                self._pool = ProcessPoolExecutor(self._count, context, prepare, (self._theirs,))
            return self._pool


class Planning:
    """Curves and plans of frontiers, each made once while it stays in the cache. It may be used
    from any thread.
    """

    def __init__(self, frontier: Callable[[str], bytes], run: Callable[..., Any]) -> None:
        """Start with empty caches.

        Args:
            frontier: Returns the frontier file with a digest.
            run: Calls a function of `worker` with arguments, in this process or in another one.
        """
        self._frontier = frontier
        self._run = run
        self._texts = Latest[PlanRequest, str](_KEPT)
        self._curves = Latest[tuple[str, Slow, float | None], Curve](_KEPT)

    def curve(self, digest: str, content: bytes) -> Curve:
        """Return the curve of a frontier that no job has yet.

        Raises:
            FrontierError: If `content` is not a frontier file.
        """
        key = (digest, (), None)
        return self._curves.get(key) or self._solved(key, content)

    def _solved(self, key: tuple[str, Slow, float | None], content: bytes) -> Curve:
        return self._curves.put(key, self._run(curve_of, *key, content))

    def numbers(self, job: RegisteredJob, curve: Curve) -> Numbers:
        """Return what the policy needs of the job's frontier, whose curve is `curve`, as far as it
        has been solved.

        Raises:
            NotSolved: If it has not been solved under the power limit of the job's GPUs.
        """
        limit_w = job.gpu_power_limit_w

        def slowed(stages: Mapping[int, float]) -> Curve:
            slow = tuple(sorted(stages.items()))
            solved = self._curves.get((job.frontier, slow, limit_w))
            if solved is None:
                raise NotSolved(slow)
            return solved

        # With a limit, even the pipeline without slow stages is another one than was profiled.
        return Numbers(**vars(curve if limit_w is None else slowed({})), slowed=slowed)

    def solve(self, job: RegisteredJob, slow: Slow) -> None:
        """Solve the pipeline with these slow stages under its GPUs' power limit, so that
        `numbers` can look it up.
        """
        key = (job.frontier, slow, job.gpu_power_limit_w)
        self._solved(key, self._frontier(job.frontier))

    def text(self, request: PlanRequest) -> str | None:
        """Return the requested plan, if it was made before."""
        return self._texts.get(request)

    def plan(self, request: PlanRequest, content: bytes | None = None) -> str:
        """Return the requested plan, or the fastest one that was found if none is that fast.

        `content` is the frontier file of a job that does not run yet, which has the plan or none.

        Raises:
            InfeasibleDeadline, InfeasibleBudget: As for `Frontier.plan_for`, with `content`.
        """
        text = self._texts.get(request)
        if text is not None:
            return text
        # A new job that cannot be planned is refused; a running one gets the nearest plan, as it
        # cannot be sent away.
        make = nearest_plan_text if content is None else plan_text
        made = self._run(make, request, content or self._frontier(request.frontier))
        return self._texts.put(request, made)


def requests_of(
    job: RegisteredJob, curve: Curve, decision: Decision
) -> tuple[tuple[PlanRequest, ...], tuple[int, ...]]:
    """Return the plans to request, each once, and for each pipeline the index of its own; then that
    for `decision.own` if there is one. Beyond the frontier's slow end, slower plans save nothing.
    """
    requests: dict[PlanRequest, int] = {}
    targets = decision.targets if decision.own is None else (*decision.targets, decision.own)
    of_target = []
    for target in targets:
        slow = tuple(sorted(target.slow_stages.items()))
        gpu_w = target.gpu_power_limit_w
        is_as_profiled = not slow and gpu_w is None
        # Only the end of the profiled frontier is known here; slowed ones have ends of their own,
        # which the worker knows.
        request = PlanRequest(
            job.frontier,
            min(target.time_s, curve.max_time_s) if is_as_profiled else target.time_s,
            slow,
            target.power_w,
            job.max_changes,
            job.on_time,
            gpu_w,
        )
        of_target.append(requests.setdefault(request, len(requests)))
    indices = tuple(map(of_target.__getitem__, decision.of_pipeline))
    return tuple(requests), indices if decision.own is None else (*indices, of_target[-1])


_log = logging.getLogger(__name__)


class Replanner:
    """Prepares jobs in the order in which they were requested. Use it as a context manager, which
    ends its threads.

    A job that is requested again while it waits keeps its position, and what it needs is determined
    when its turn comes. So jobs whose reports change often do not delay others, and outdated plans
    are not made. A job that needs more than one solution is requested again after each, so that
    others take turns with it.
    """

    def __init__(self, prepare: Callable[[str], None], threads: int, watchdog: Watchdog) -> None:
        """Call `prepare` with the name of each job, on threads that are watched."""
        self._prepare = prepare
        self._pool = ThreadPoolExecutor(threads, "planner-replanning", watchdog.watch)
        self._lock = threading.Lock()
        self._waiting: set[str] = set()

    def __enter__(self) -> Replanner:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def request(self, name: str) -> None:
        """Have the plans of a job made."""
        with self._lock, suppress(RuntimeError):  # the pool has ended
            if name not in self._waiting:
                self._pool.submit(self._run, name)
                self._waiting.add(name)

    def _run(self, name: str) -> None:
        with self._lock:
            self._waiting.remove(name)
        try:
            self._prepare(name)
        except Exception:
            _log.exception("The plans of job %r could not be made", name)
