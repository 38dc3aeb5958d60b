"""Enters `planner_runtime` at the first training call of a process, and leaves it when the process
exits.

A script that plans its training itself is left alone. That is decided at the call that trains: what
a script imports says nothing of what it does.

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
from perseus_planner.engines import blocks, parts_of, wrap_training
from perseus_planner.engines.engine import are_same
from perseus_planner.engines.guard import RetryingGuard

if TYPE_CHECKING:
    from types import ModuleType

    from perseus_planner.runtime.runtime import Runtime

_MOST_STEPS = 100
"""So many steps of other optimizers mean that the first one no longer trains."""

_UNUSED = (
    "with planner_runtime, so `planner run` leaves it alone and the options of `planner run` are "
    "not used"
)

_LOG = logging.getLogger("perseus_planner.runtime")


class UnmodifiedTraining:
    """The training of this process, in which one engine has the runtime; or one optimizer, if no
    engine trains.
    """

    def __init__(self) -> None:
        self._process: int | None = None  #: that has trained
        self._is_a_pipeline = False  #: whether a pipeline trains, attached or not
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
        self._is_a_pipeline = True
        if self._is_left_to_the_script():
            return False
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
            if self._is_a_pipeline or self._is_left_to_the_script():
                return
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

    def _is_left_to_the_script(self) -> bool:
        """Return whether the first call that trains belongs to the script, which profiles it or
        plans its training itself.
        """
        if self._process is not None:
            return False
        if blocks.is_open("profile"):
            return True  # the next call decides
        if not blocks.is_open("runtime"):
            return False
        self._process = os.getpid()  # for good, also after the block
        _warn(f"this script plans its training itself, {_UNUSED}")
        return True

    def _give_way(self) -> None:
        """Detach the runtime, as the script opens a block of its own."""
        if self._process != os.getpid():
            return
        self._parts = ()
        self._iterations = None
        self._runtime.close()
        _warn(f"from here on this script plans its training itself, {_UNUSED}")

    def _attach(self, engine: Any) -> Any:
        """Enter the runtime; return it, or None if it cannot be entered."""
        self._process = os.getpid()
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
        blocks.give_way_by(self._give_way)
        self._runtime.callback(blocks.forget, self._give_way)
        atexit.register(self._end)
        return runtime

    def _end(self) -> None:
        """Detach the runtime at the end of the process; a forked process leaves that to its
        parent.
        """
        if self._process == os.getpid():
            # What ends this process, if it is an exception.
            error = getattr(sys, "last_value", None)
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
    _warn(f"{problem}; training goes on without the planner")


def _warn(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        _LOG.warning("planner: %s", text)


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
