"""Functions that a training has registered with a schedule of torch.distributed.pipelining to run
computations in its place (`register_custom_function`): whether they can be followed.

Computations are followed through the methods of their stages, one after the other. A function that
calls these in turn is followed like the schedule itself; one that runs a stage in another way hides
what it runs, and one that starts threads runs two computations at the same time. Which of these it
is must be known before training, so it is read from the names in its code, and in that of the
functions that it calls.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

_METHODS = {
    "FORWARD": ("forward_one_chunk",),
    "FULL_BACKWARD": ("backward_one_chunk",),
    "BACKWARD_INPUT": ("backward_one_chunk",),
    "BACKWARD_WEIGHT": ("backward_weight_one_chunk",),
    "OVERLAP_F_B": ("forward_one_chunk", "backward_one_chunk"),
}
"""What the schedule runs -> the methods of stages that run it."""

_LOSS = "_maybe_compute_loss"  #: with which a forward of the last stage ends
_WITH_LOSS = ("FORWARD", "OVERLAP_F_B")
_THREADS = ("threading", "_thread", "concurrent", "multiprocessing", "asyncio")
"""Modules with which a function runs several things at the same time."""


def refusal_of_functions(schedule: Any) -> str | None:
    """Return why a schedule cannot be followed because of the functions registered with it; None if
    it can.
    """
    functions: Mapping[Any, Callable[..., Any]] = getattr(
        schedule, "_comp_type_to_function_map", {}
    )
    runs = _kinds_run(schedule) if functions else set()
    for kind, function in functions.items():
        if kind.name not in _METHODS or kind.name not in runs:
            continue
        reason = _refusal(kind.name, function, has_loss=_has_loss(schedule))
        if reason is not None:
            name = getattr(function, "__qualname__", type(function).__name__)
            return (
                f"{type(schedule).__name__} runs {kind.name} by the registered function {name}, "
                f"which {reason}; register one that calls the methods of the stages one after the "
                "other, or none"
            )
    return None


def _kinds_run(schedule: Any) -> set[str]:
    """Return the names of the types of action that a schedule has, on any rank."""
    rows: Mapping[int, Any] = (
        getattr(schedule, "pipeline_order_with_comms", None)
        or getattr(schedule, "pipeline_order", None)
        or {}
    )
    actions = [action for row in rows.values() for action in row if action is not None]
    return {action.computation_type.name for action in actions}


def _has_loss(schedule: Any) -> bool:
    return any(stage.is_last for stage in schedule._stages)


def _refusal(kind: str, function: Callable[..., Any], *, has_loss: bool) -> str | None:
    """Return what a function does that is not followed; None if it does nothing of the kind."""
    code = _Code()
    code.read(function)
    needed = _METHODS[kind]
    if has_loss and kind in _WITH_LOSS:
        needed = (*needed, _LOSS)
    missing = next((name for name in needed if name not in code.names), None)
    if missing is not None:
        return f"does not call {missing}, so that the planner does not see what it runs"
    if code.has_threads:
        return "starts threads, and computations that run at the same time cannot each have a clock"
    return None


class _Code:
    """The names in the code of a function, and of those that it calls by these names.

    Attributes:
        names: All names.
        has_threads: Whether it uses threads.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.has_threads = False
        self._read: set[CodeType] = set()

    def read(self, function: Any) -> None:
        """Add the names of a function, a bound method, or an object that can be called."""
        if isinstance(function, partial):
            self.read(function.func)
            for given in (*function.args, *function.keywords.values()):
                self._look_at(given)
            return
        owner = None
        if isinstance(function, MethodType):
            owner = function.__self__
            function = function.__func__
        elif not isinstance(function, FunctionType):  # an object with __call__
            owner = function
            function = inspect.getattr_static(type(function), "__call__", None)
        function = inspect.unwrap(function) if callable(function) else None
        if isinstance(function, FunctionType) and function.__code__ not in self._read:
            self._read.add(function.__code__)
            self._add(function, owner)

    def _add(self, function: FunctionType, owner: Any) -> None:
        names = set(_names_in(function.__code__))
        self.names |= names
        self.has_threads = self.has_threads or any(name in _THREADS for name in names)

        # What the names stand for: globals, and what the function has closed over.
        known = [function.__globals__[name] for name in names if name in function.__globals__]
        for cell in function.__closure__ or ():
            try:
                known.append(cell.cell_contents)
            except ValueError:  # not assigned yet
                continue
        for value in known:
            self._look_at(value)

        # Its own object, and the attributes of that and of the others.
        for value in [owner, *known]:
            for name in names:
                self._look_at_attribute(value, name)

    def _look_at(self, value: Any) -> None:
        kind = value if isinstance(value, type) else type(value)
        if issubclass(kind, (threading.Thread, Executor)):
            self.has_threads = True
        elif isinstance(value, ModuleType):
            if value.__name__.split(".")[0] in _THREADS:
                self.has_threads = True
        elif isinstance(value, (FunctionType, MethodType, partial)) and _is_own(value):
            self.read(value)

    def _look_at_attribute(self, value: Any, name: str) -> None:
        """Look at what an attribute of this name is, without running a property."""
        if value is None or name in _ALL_METHODS:
            return
        found = inspect.getattr_static(value, name, None)
        if isinstance(found, (staticmethod, classmethod)):
            found = found.__func__
        if isinstance(found, FunctionType) and not isinstance(value, (ModuleType, type)):
            found = MethodType(found, value)
        self._look_at(found)


_ALL_METHODS = {_LOSS, *(name for names in _METHODS.values() for name in names)}


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names and texts in code, and in that of functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _names_in(constant)


def _is_own(function: Any) -> bool:
    """Whether a function is the training's, and not torch's or Python's."""
    target = function.func if isinstance(function, partial) else function
    root = (getattr(target, "__module__", None) or "").split(".")[0]
    return root != "torch" and root not in sys.stdlib_module_names
