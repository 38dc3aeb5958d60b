"""From targets to plans: curves and plans that are known are looked up, others are made by worker
processes, one job at a time for each.
"""

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent import futures
from concurrent.futures import CancelledError, Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from perseus_planner.base.errors import PlannerError, UsageError
from perseus_planner.service import worker
from perseus_planner.service.models import Curve, KnownNumbers, NotSolved, Slow, distinct, slow_of
from perseus_planner.service.worker import PlanRequest, RecentlyUsed

if TYPE_CHECKING:
    from perseus_planner.service.models import Decision, PlanSet, RegisteredJob

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")

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
                prepare = worker.prepare_process
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
        self._texts = RecentlyUsed[PlanRequest, str](_KEPT)
        self._curves = RecentlyUsed[tuple[str, Slow, float | None], Curve](_KEPT)

    def curve(self, digest: str, content: bytes) -> Curve:
        """Return the curve of a frontier that no job has yet.

        Raises:
            FrontierError: If `content` is not a frontier file.
        """
        curve = self._curves.get((digest, (), None))
        if curve is None:
            curve = self._run(worker.curve_of, digest, content)
            self._curves.put((digest, (), None), curve)
        return curve

    def numbers(self, job: RegisteredJob, curve: Curve) -> KnownNumbers:
        """Return what the policy needs of the job's frontier, whose curve is `curve`, as far as it
        has been solved.

        Raises:
            NotSolved: If it has not been solved under the power limit of the job's GPUs.
        """
        limit_w = job.gpu_power_limit_w

        def solved(slow: Slow) -> Curve | None:
            return self._curves.get((job.frontier, slow, limit_w))

        limited = curve if limit_w is None else solved(())
        if limited is None:
            raise NotSolved(())
        return KnownNumbers.on(limited, solved)

    def solve(self, job: RegisteredJob, slow: Slow) -> None:
        """Solve the pipeline with these slow stages under its GPUs' power limit, so that
        `numbers` can look it up.
        """
        key = (job.frontier, slow, job.gpu_power_limit_w)
        self._curves.put(key, self._run(worker.solved_curve, *key, self._frontier(job.frontier)))

    def text(self, request: PlanRequest) -> str | None:
        """Return the requested plan, if it was made before."""
        return self._texts.get(request)

    def plan(self, request: PlanRequest) -> str:
        """Return the requested plan, or the fastest one that was found if none is that fast."""
        return self._made(request, worker.nearest_plan_text, self._frontier)

    def first_plan(self, request: PlanRequest, content: bytes) -> str:
        """Return a plan of a job that does not run yet, whose frontier file is `content`.

        Raises:
            InfeasibleDeadline, InfeasibleBudget: As for `Frontier.plan_for`.
        """
        return self._made(request, worker.plan_text, lambda _: content)

    def remember(
        self, job: RegisteredJob, curve: Curve, versions: Iterable[tuple[PlanSet, Decision]]
    ) -> None:
        """Add versions of a job's plans, with the decisions that they were made for, to the
        cache.
        """
        for plan_set, decision in versions:
            requests, asked = requests_of(job, curve, decision)
            indices = (*plan_set.of_pipeline, plan_set.own)
            for request, index in {*zip(asked, indices, strict=False)}:
                if index is not None:
                    self._texts.put(requests[request], plan_set.texts[index])

    def _made(
        self, request: PlanRequest, make: Callable[..., str], content: Callable[[str], bytes]
    ) -> str:
        text = self._texts.get(request)
        if text is None:
            text = str(self._run(make, request, content(request.frontier)))
            self._texts.put(request, text)
        return text


def requests_of(
    job: RegisteredJob, curve: Curve, decision: Decision
) -> tuple[tuple[PlanRequest, ...], tuple[int, ...]]:
    """Return the plans to request, each once, and for each pipeline the index of its own; then that
    for `decision.own` if there is one. Beyond the frontier's slow end, slower plans save nothing.
    """
    requests: dict[PlanRequest, int] = {}
    of_target: dict[int, int] = {}
    targets = decision.targets if decision.own is None else (*decision.targets, decision.own)
    for target, _ in distinct(targets):
        slow, gpu_w = slow_of(target.slow_stages), target.gpu_power_limit_w
        is_as_profiled = not slow and gpu_w is None
        request = PlanRequest(
            job.frontier,
            min(target.time_s, curve.max_time_s) if is_as_profiled else target.time_s,
            slow,
            target.power_w,
            job.max_changes,
            job.on_time,
            gpu_w,
        )
        of_target[id(target)] = requests.setdefault(request, len(requests))
    return tuple(requests), tuple(map(of_target.__getitem__, map(id, targets)))


def deduplicated(values: Iterable[Key]) -> tuple[tuple[Key, ...], tuple[int, ...]]:
    """Return the distinct values in order of appearance, and for each value its index among
    them.
    """
    indices: dict[Key, int] = {}
    of_each = tuple(indices.setdefault(value, len(indices)) for value in values)
    return tuple(indices), of_each


_log = logging.getLogger(__name__)


class Replanner:
    """Prepares jobs in the order in which they were requested. Use it as a context manager, which
    ends its threads.

    A job that is requested again while it waits keeps its position, and what it needs is determined
    when its turn comes. So jobs whose reports change often do not delay others, and outdated plans
    are not made. A job that needs more than one solution is requested again after each, so that
    others take turns with it.
    """

    def __init__(self, prepare: Callable[[str], None], threads: int) -> None:
        """Call `prepare` with the name of each job."""
        self._prepare = prepare
        self._pool = ThreadPoolExecutor(threads, "planner-replanning")
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
