"""Targets -> plans: what was solved and planned before is looked up, all else is done by other processes."""

from __future__ import annotations

import multiprocessing
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import CancelledError, Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from perseus_planner.errors import PlannerError
from perseus_planner.service.planning import worker
from perseus_planner.service.planning.curves import Curve, KnownNumbers, Slow, slow_of
from perseus_planner.service.planning.worker import PlanRequest

if TYPE_CHECKING:
    from types import TracebackType

    from perseus_planner.service.model import Decision, Job
    from perseus_planner.service.outcomes import PlanSet

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Result = TypeVar("Result")

_PLANS, _CURVES = 1024, 1024  # remembered; a plan of 8 stages and 96 microbatches has 30 kB, a curve half of that


class NotPlanned(PlannerError):
    """The process that was to solve or plan was killed."""


class Ending(NotPlanned):
    """The service is ending, and nothing more is planned."""


class Processes:
    """Processes that solve and plan, started when first needed. A context manager: leaving it ends them at once.

    They end too when the process that made them is killed.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._open = True
        self._lock = threading.Lock()
        self._pool: Executor | None = None
        self._theirs, self._ours = multiprocessing.Pipe(duplex=False)

    def __enter__(self) -> Processes:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the processes, whatever they do."""
        with self._lock:
            self._open = False
            self._ours.close()
            if self._pool is not None:
                self._pool.shutdown()
            self._theirs.close()

    def run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """What `function`, which has a name in a module, gives there.

        If its process is killed, such as for want of memory, it is tried once more in a new one.

        Raises:
            NotPlanned: that was killed too.
            Ending: the context has been left.
        """
        pool = None
        for _ in range(2):
            pool = self._living(pool)
            try:
                return pool.submit(function, *arguments).result()
            except (BrokenProcessPool, CancelledError):
                continue
        raise NotPlanned("the process that solves and plans was killed twice; see that this machine has enough memory")

    def _living(self, broken: Executor | None) -> Executor:
        """The pool, a new one if it is `broken`."""
        with self._lock:
            if not self._open:
                raise Ending("the service is ending; ask again when it runs")
            if self._pool is None or self._pool is broken:
                context = multiprocessing.get_context("spawn")  # a fork would have the service's sockets and locks
                prepare = worker.serve_until_closed
                self._pool = ProcessPoolExecutor(self._count, context, prepare, (self._theirs,))
            return self._pool


class _Remembered(Generic[Key, Value]):
    """The values that were last used; from any thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def get(self, key: Key) -> Value | None:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Key, value: Value) -> None:
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._most:
                self._values.popitem(last=False)


class Planning:
    """Curves and plans of frontiers, each made once as long as it is remembered. From any thread."""

    def __init__(self, frontier: Callable[[str], bytes], run: Callable[..., Any]) -> None:
        """From where it has what.

        Args:
            frontier: the file of the frontier of that digest.
            run: calls a function of `solving_process` with arguments, wherever it likes.
        """
        self._frontier = frontier
        self._run = run
        self._texts = _Remembered[PlanRequest, str](_PLANS)
        self._curves = _Remembered[tuple[str, Slow], Curve](_CURVES)

    def curve(self, digest: str, content: bytes) -> Curve:
        """The curve of a frontier that no job has yet.

        Raises:
            FrontierError: `content` is no frontier's file.
        """
        known = self._curves.get((digest, ()))
        if known is None:
            known = self._run(worker.curve_of, digest, content)
            self._curves.put((digest, ()), known)
        return known

    def numbers(self, job: Job, curve: Curve) -> KnownNumbers:
        """What the policy asks of the job's frontier, whose curve is `curve`, as far as it has been solved."""
        return KnownNumbers(curve, lambda slow: self._curves.get((job.frontier, slow)))

    def solve(self, job: Job, slow: Slow) -> None:
        """Solve the pipeline with these slow stages, so that `numbers` knows it."""
        content = self._frontier(job.frontier)
        self._curves.put((job.frontier, slow), self._run(worker.slowed_curve, job.frontier, slow, content))

    def text(self, request: PlanRequest) -> str | None:
        """The plan that is asked for, if it was made before."""
        return self._texts.get(request)

    def plan(self, request: PlanRequest) -> str:
        """The plan that is asked for, or where no plan is that fast, the fastest found."""
        return self._made(request, worker.nearest_plan_text, self._frontier)

    def first_plan(self, request: PlanRequest, content: bytes) -> str:
        """A plan of a job that does not run yet, whose frontier's file is `content`.

        Raises:
            InfeasibleDeadline, InfeasibleBudget: as `Frontier.plan_for`.
        """
        return self._made(request, worker.plan_text, lambda _: content)

    def remember(self, job: Job, curve: Curve, versions: Iterable[tuple[PlanSet, Decision]]) -> None:
        """These versions of a job's plans were made for these decisions."""
        for plan_set, decision in versions:
            for pipeline, request in enumerate(requests_of(job, curve, decision)):
                self._texts.put(request, plan_set.text(pipeline))

    def _made(self, request: PlanRequest, make: Callable[..., str], content: Callable[[str], bytes]) -> str:
        text = self._texts.get(request)
        if text is None:
            text = str(self._run(make, request, content(request.frontier)))
            self._texts.put(request, text)
        return text


def requests_of(job: Job, curve: Curve, decision: Decision) -> tuple[PlanRequest, ...]:
    """The plan of each pipeline that a decision asks for; no pipeline is slower than it is of use."""

    @cache  # most pipelines are to do the same
    def request(time_s: float, slow: Slow, power_w: float | None) -> PlanRequest:
        within_s = time_s if slow else min(time_s, curve.max_time_s)
        return PlanRequest(job.frontier, within_s, slow, power_w, job.max_changes, job.min_dwell_s)

    return tuple(request(each.time_s, slow_of(each.slow_stages), each.power_w) for each in decision.targets)


def once_each(values: Iterable[Key]) -> tuple[tuple[Key, ...], tuple[int, ...]]:
    """The values that differ, in the order in which they come, and the place in there of each."""
    places: dict[Key, int] = {}
    of_each = tuple(places.setdefault(value, len(places)) for value in values)
    return tuple(places), of_each
