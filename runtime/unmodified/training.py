"""Enters `planner_runtime` at the first training call of a process, and leaves it when the process exits.

Whatever fails here, training goes on without the planner, and rank 0 says so once. All ranks of a job reach their first
training call together, so they can exchange who they are there.
"""

from __future__ import annotations

import atexit
import logging
import operator
import os
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from perseus_planner.training.engine_kinds import megatron_chunks

if TYPE_CHECKING:
    from collections.abc import Sequence

_LOG = logging.getLogger("perseus_planner.runtime")


class UnmodifiedTraining:
    """The training of this process, in which one engine has the runtime."""

    def __init__(self) -> None:
        self._process: int | None = None  #: that has called `begin`
        self._parts: Sequence[Any] = ()  #: of the engine that has the runtime
        self._runtime = ExitStack()

    def begin(self, engine: Any) -> bool:
        """Attach the runtime to the first engine that trains; return whether that was done now.

        If a second engine trains, the runtime is detached from the first, because its clocks would slow the second.

        Args:
            engine: As for `planner_runtime`.
        """
        parts = megatron_chunks(engine)
        if self._process is None:
            self._process = os.getpid()
            return self._attach(engine, parts)
        if self._parts and self._process == os.getpid() and not _are_same(parts, self._parts):
            self._parts = ()
            self._runtime.close()
            _say(f"a second {type(engine).__name__} trains in this process, and only one can be planned")
        return False  # also in a process that was forked from one that trains

    def _attach(self, engine: Any, parts: Sequence[Any]) -> bool:
        try:
            from perseus_planner.runtime import planner_runtime
            from perseus_planner.runtime.unmodified.options import read_options

            _show_log()
            self._runtime.enter_context(planner_runtime(engine, **read_options(os.environ)))
        except Exception as error:
            _say(str(error) or repr(error))
            return False
        self._parts = parts
        atexit.register(self._end)
        return True

    def _end(self) -> None:
        """Detach the runtime at the end of the process; a forked process leaves that to its parent."""
        if self._process == os.getpid():
            error = getattr(sys, "last_value", None)  # what ends this process, if it is an exception
            self._runtime.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


def _show_log() -> None:
    """Print on stderr what the runtime logs, unless the script has decided what becomes of logs."""
    if not _LOG.hasHandlers():
        _LOG.addHandler(logging.StreamHandler())
        _LOG.setLevel(logging.INFO)
        _LOG.propagate = False  # the script may still decide, and would print all twice


def _are_same(parts: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(parts) == len(others) and all(map(operator.is_, parts, others))


def _say(problem: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        _LOG.warning("planner: %s; training goes on without the planner", problem)


begin = UnmodifiedTraining().begin
