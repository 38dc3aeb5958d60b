"""The options of `planner run`, which reach the processes of a job as environment variables,
such as PLANNER_PLAN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from perseus_planner.base.errors import UsageError
from perseus_planner.base.units import CHANGES, FACTOR, SHARE
from perseus_planner.runtime.options import FOLLOW

_WORDS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def _read_switch(text: str, name: str) -> bool:
    if text.lower() not in _WORDS:
        raise UsageError(f"{name}: {text!r} is neither on nor off; write 1 or 0")
    return _WORDS[text.lower()]


def _read_text(text: str, _: str) -> str:
    return text


def _read_follow(text: str, name: str) -> str:
    if text not in FOLLOW:
        raise UsageError(f"{name}: {text!r} is no way to follow a plan; give {', '.join(FOLLOW)}")
    return text


_READ: Mapping[str, Callable[[str, str], Any]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("plan", "gpu", "record", "state", "service", "job", "frontier", "work"), _read_text
        ),
        "follow": _read_follow,
        "slowdown": FACTOR.read,
        "max_slowdown": SHARE.read,
        "max_changes": CHANGES.read,
        **dict.fromkeys(("dry_run", "learn", "trust_traced"), _read_switch),
    }
    #: arguments of `planner_runtime` that are options of `planner run` -> how they are read from
    #: text
)


def variable(name: str) -> str:
    """Return the environment variable of an argument of `planner_runtime`."""
    return f"PLANNER_{name.upper()}"


def write_options(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables that give these arguments to `planner_runtime`; None is
    left out.
    """
    return {variable(name): _text(value) for name, value in options.items() if value is not None}


def read_options(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of `planner_runtime` that an environment gives; empty variables give
    none.

    Raises:
        UsageError: If a variable cannot be read; names it.
    """
    options = {
        name: read(environment[variable(name)], variable(name))
        for name, read in _READ.items()
        if environment.get(variable(name))
    }
    if "job" not in options:  # the address is then for commands such as `planner status`
        options.pop("service", None)
    return options


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
