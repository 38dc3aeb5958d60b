"""From targets to plans: curves and plans that are known are looked up, others are made by worker
processes, one job at a time for each.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from perseus_planner.extensions.service.curve import Curve, NotSolved, Numbers, Slow
from perseus_planner.extensions.service.solving import (
    Latest,
    PlanRequest,
    curve_of,
    nearest_plan_text,
    plan_text,
)

if TYPE_CHECKING:
    from perseus_planner.extensions.service.models import Decision, RegisteredJob
    from perseus_planner.extensions.service.watch import Watchdog

_log = logging.getLogger(__name__)

# curves and plans; a plan of 8 stages and 96 microbatches has 30 kB, a curve half of that
_KEPT = 1024


class Planning:
    """Curves and plans of frontiers, each made once while it stays in the cache. It may be used
    from any thread.
    """

    def __init__(self, frontier: Callable[[str], bytes], run: Callable[..., Any]) -> None:
        """Start with empty caches.

        Args:
            frontier: Returns the frontier file with a digest.
            run: Calls a function of `solving` with arguments, in this process or in another one.
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
