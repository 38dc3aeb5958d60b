"""Worker processes of the service.

Solving and planning are compiled code that holds Python's global lock. On a thread of the service,
answers would wait for up to 0.5 s.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import CancelledError, Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from perseus_planner.base.errors import PlannerError, UsageError

Result = TypeVar("Result")

_NICENESS = 10
LONGEST_S = 300.0
"""How long one call of a worker process may take: a solution or a plan."""


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
        pool: Executor | None = None
        for _ in range(2):
            try:
                # The pool that was just seen broken is named, as another thread may have replaced
                # it by now.
                pool, made = self._submit(pool, function, arguments)
                return made.result(timeout_s)
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

    def _submit(
        self, broken: Executor | None, function: Callable[..., Result], arguments: tuple[Any, ...]
    ) -> tuple[Executor, Future[Result]]:
        """Call a function in a pool other than `broken`, and return the pool too."""
        pool = self._living(broken)
        try:
            return pool, pool.submit(function, *arguments)
        except RuntimeError:
            # Another thread has ended this pool since, or has found it broken.
            pool = self._living(pool)
            return pool, pool.submit(function, *arguments)

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


def _end_with(service: Connection) -> None:
    wait([service])
    os._exit(0)
