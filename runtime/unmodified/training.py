"""Enters `planner_runtime` at the first training call of a process, and leaves it when the process
exits.

Whatever fails here, training goes on without the planner, and rank 0 says so once. All ranks of a
job reach their first training call together, so they can exchange who they are there.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import fault_text
from perseus_planner.engines import parts_of, wrap_training
from perseus_planner.engines.engine import are_same
from perseus_planner.engines.guard import RetryingGuard

if TYPE_CHECKING:
    from types import ModuleType

    from perseus_planner.runtime.runtime import Runtime

_MOST_STEPS = 100
"""So many steps of other optimizers mean that the first one no longer trains."""

_SESSION = "perseus_planner.runtime.session"
"""Only a script that uses `planner_runtime` itself has loaded this module before its training
begins.
"""

_LOG = logging.getLogger("perseus_planner.runtime")


class UnmodifiedTraining:
    """The training of this process, in which one engine has the runtime; or one optimizer, if no
    engine trains.
    """

    def __init__(self) -> None:
        self._process: int | None = None  #: that has trained
        self._parts: Sequence[Any] = ()  #: of the engine that has the runtime
        self._iterations: Runtime | None = None  #: without an engine
        self._optimizer: Callable[[], Any] = lambda: None  #: whose steps end the iterations
        self._steps = 0  #: of other optimizers since
        self._runtime = ExitStack()
        self.guard = RetryingGuard(self._take_fault)  #: of all calls by the training
        self._has_said = False  #: that there was a fault

    def _take_fault(self, error: Exception) -> None:
        if not self._has_said:
            self._has_said = True
            _LOG.warning("planner: %s; training goes on without the planner", fault_text(error))

    def begin(self, engine: Any) -> bool:
        """Attach the runtime to the first engine that trains; return whether that was done now.

        If a second engine trains, the runtime is detached from the first, because its clocks would
        slow the second.

        Args:
            engine: As for `planner_runtime`.
        """
        parts = parts_of(engine)
        if self._process is None or (self._iterations is not None and self._process == os.getpid()):
            self._runtime.close()
            self._iterations = None
            if self._attach(engine) is not None:
                self._parts = parts
            return bool(self._parts)
        if self._parts and self._process == os.getpid() and not are_same(parts, self._parts):
            self._parts = ()
            self._runtime.close()
            _say(
                f"a second {type(engine).__name__} trains in this process, and only one can be "
                "planned"
            )
        return False  # also in a process that was forked from one that trains

    def stepped(self, optimizer: Any) -> None:
        """End an iteration of training without an engine: the optimizer has made a step."""
        if self._process is None:
            if _is_on_a_gpu(optimizer):
                self._iterations = self._attach(None)
        elif self._iterations is None or self._process != os.getpid():
            return
        if self._iterations is None:
            return
        followed = self._optimizer()
        if followed is None:
            self._optimizer = weakref.ref(optimizer)
        elif followed is not optimizer:
            self._steps += 1
            if self._steps > _MOST_STEPS:
                self._iterations = None
                self._runtime.close()
                _say(
                    "another optimizer trains instead of the first one, so that iterations cannot "
                    "be told apart"
                )
            return
        self._steps = 0
        self._iterations.end_iteration()

    def _attach(self, engine: Any) -> Any:
        """Enter the runtime; return it, or None if it cannot be entered, or the script does so
        itself.
        """
        is_first, self._process = self._process is None, os.getpid()
        if is_first and _SESSION in sys.modules:
            return None
        try:
            from perseus_planner.runtime import planner_runtime
            from perseus_planner.runtime.unmodified.options import read_options

            _show_log()
            runtime = self._runtime.enter_context(
                planner_runtime(engine, strict=False, **read_options(os.environ))
            )
        except Exception as error:
            _say(str(error) or repr(error))
            return None
        atexit.register(self._end)
        return runtime

    def _end(self) -> None:
        """Detach the runtime at the end of the process; a forked process leaves that to its
        parent.
        """
        if self._process == os.getpid():
            error = getattr(
                sys, "last_value", None
            )  # what ends this process, if it is an exception
            try:
                self._runtime.__exit__(
                    type(error) if error else None, error, error.__traceback__ if error else None
                )
            except Exception as problem:  # Python would print where it comes from
                _LOG.warning("planner: %s", problem or repr(problem))


def _is_on_a_gpu(optimizer: Any) -> bool:
    """Whether an optimizer without a pipeline is to be followed: no plan is given, and a GPU
    computes for it.
    """
    if os.environ.get("PLANNER_PLAN"):
        return False
    if (
        os.environ.get("PLANNER_GPU", "")
        .removeprefix("dry-run:")
        .startswith(("emulated:", "simulated:"))
    ):
        return True
    return any(
        parameter.device.type == "cuda"
        for group in optimizer.param_groups
        for parameter in group["params"][:1]
    )


def _show_log() -> None:
    """Print on stderr what the runtime logs, unless the script has decided what becomes of logs."""
    if not _LOG.hasHandlers():
        _LOG.addHandler(logging.StreamHandler())
        _LOG.setLevel(logging.INFO)
        _LOG.propagate = False  # the script may still decide, and would print all twice


def _say(problem: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        _LOG.warning("planner: %s; training goes on without the planner", problem)


_TRAINING = UnmodifiedTraining()


def wrap(module: ModuleType) -> None:
    """Follow what trains in the module of an engine, or of torch's optimizers, that has just been
    loaded.

    Raises:
        AttributeError: If the module is not as in the supported versions.
    """
    if module.__name__ == "torch.optim.optimizer":
        module.register_optimizer_step_post_hook(
            lambda optimizer, *_: _TRAINING.guard.call(_TRAINING.stepped, optimizer)
        )
    else:
        wrap_training(module, _TRAINING.guard, _TRAINING.begin)
