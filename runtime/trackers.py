"""Hands the numbers of each iteration to the trackers that a training logs to.

    with planner_runtime(engine, plan="plan.yaml", log=SummaryWriter()):
        train()

A tracker is called on a thread of its own: training does not wait for it, nor does what sets
clocks. Each is used through its own client, which the training has opened; none is imported here.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from perseus_planner.base.errors import UsageError, shown
from perseus_planner.runs.values import values_of

if TYPE_CHECKING:
    from perseus_planner.runs.records import IterationRecord

Values: TypeAlias = Mapping[str, float | str]
"""Name -> number or text; see `values_of`."""
LogFunction: TypeAlias = Callable[[int, Values], object]
"""Called with the number of an iteration and its values."""

_PREFIX = "planner/"  #: before each name, in a tracker
_KEPT = 1024
"""How many iterations wait for a slow tracker, at most. More are left out: the training goes on."""

CLOSE_S = 5.0
"""How long the end of training waits for trackers, seconds."""


def log_function(target: Any) -> LogFunction:
    """Return the function that logs to a tracker: a SummaryWriter of TensorBoard, a run of wandb,
    the module `mlflow` with an active run, or a function already.

    Raises:
        UsageError: If it is none of these, or has no run yet.
    """
    if hasattr(target, "add_scalar"):
        return _to_tensorboard(target)
    if hasattr(target, "define_metric"):
        return _to_wandb(target)
    if hasattr(target, "log_metrics") and hasattr(target, "active_run"):
        return _to_mlflow(target)
    if callable(target):
        function: LogFunction = target
        return function
    raise UsageError(
        f"log={shown(target)}: is no tracker; give a SummaryWriter of TensorBoard, a run of wandb, "
        "the module mlflow, a function of the iteration and its values, or a list of them"
    )


def log_functions(log: Any) -> tuple[LogFunction, ...]:
    """Return the functions for the option `log` of `planner_runtime`."""
    if log is None:
        return ()
    targets = log if isinstance(log, (list, tuple)) else [log]
    return tuple(log_function(target) for target in targets)


def _to_tensorboard(writer: Any) -> LogFunction:
    said: list[str] = []  #: the last verdict: a text at each iteration would hide the changes

    def log(iteration: int, values: Values) -> None:
        for name, value in values.items():
            if isinstance(value, float):
                writer.add_scalar(_PREFIX + name, value, iteration)
            elif said[-1:] != [value]:
                writer.add_text(_PREFIX + name, value, iteration)
                said[:] = [value]

    return log


def _to_wandb(run: Any) -> LogFunction:
    if isinstance(run, ModuleType):
        run = run.run
    if run is None:
        raise UsageError("log=wandb: has no run yet; call wandb.init() before planner_runtime")
    axis = f"{_PREFIX}iteration"
    run.define_metric(axis)
    run.define_metric(f"{_PREFIX}*", step_metric=axis)

    def log(iteration: int, values: Values) -> None:
        # Iterations come late, and wandb drops rows of a step that is over. So they go into the row
        # that the training's own next call of `log` ends, and have an axis of their own.
        named = {_PREFIX + name: value for name, value in values.items()}
        run.log({axis: iteration, **named}, commit=False)

    return log


def _to_mlflow(mlflow: Any) -> LogFunction:
    # The active run belongs to a thread: on another one, mlflow would begin a new run.
    active = mlflow.active_run()
    if active is None:
        raise UsageError(
            "log=mlflow: has no active run; call mlflow.start_run() before planner_runtime"
        )
    run_id = active.info.run_id

    def log(iteration: int, values: Values) -> None:
        numbers = {
            _PREFIX + name: value for name, value in values.items() if isinstance(value, float)
        }
        mlflow.log_metrics(numbers, step=iteration, run_id=run_id)

    return log


class Trackers:
    """Calls the log functions with each iteration, on a thread of its own.

    Args:
        functions: The functions; without any, nothing is done.
        warn: Called with a key and a sentence when a function fails or cannot keep up.
    """

    def __init__(self, functions: Sequence[LogFunction], warn: Callable[[str, str], None]) -> None:
        self._functions = functions
        self._warn = warn
        self._waiting: queue.SimpleQueue[IterationRecord | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if functions:
            self._thread = threading.Thread(
                target=self._run, name="perseus-planner trackers", daemon=True
            )
            self._thread.start()

    def add(self, records: Sequence[IterationRecord]) -> None:
        """Take iterations; returns at once."""
        if self._thread is None:
            return
        for record in records:
            if self._waiting.qsize() >= _KEPT:
                self._warn("log is slow", "log= does not keep up, so iterations are left out of it")
                return
            self._waiting.put(record)

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Wait until all iterations are logged, for a limited time."""
        if self._thread is None:
            return
        self._waiting.put(None)
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self._warn(
                "log is slow",
                f"log= has not ended in {limit_s:g} s: the last iterations are not in it",
            )

    def _run(self) -> None:
        for record in iter(self._waiting.get, None):
            values = values_of(record)
            for number, function in enumerate(self._functions):
                try:
                    function(record.iteration, values)
                except Exception as error:  # raised by another program
                    self._warn(
                        f"log/{number}",
                        f"log= raised {type(error).__name__}: {error}; training goes on, and it is "
                        "called again with the next iteration",
                    )
