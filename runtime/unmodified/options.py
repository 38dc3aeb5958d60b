"""The options of `planner run`, which reach the processes of a job as environment variables,
such as PLANNER_PLAN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perseus_planner.base.errors import UsageError
from perseus_planner.runtime.options import said_options

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
    options: dict[str, Any] = {}
    for name, said in said_options().items():
        text = environment.get(variable(name))
        if not text:
            continue
        if not said.word:
            options[name] = _read_switch(text, variable(name))
        elif said.rule is not None:
            options[name] = said.rule.read(text, variable(name))
        elif said.choices and text not in said.choices:
            choices = " or ".join(said.choices)
            raise UsageError(f"{variable(name)}: {text!r} is none of its values; give {choices}")
        else:
            options[name] = text
    if "job" not in options:  # the address is then for commands such as `planner status`
        options.pop("service", None)
    return options


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
