"""Fields of dataclasses: what a number must be stands once, in the type of its field.

    @dataclass(frozen=True)
    class ClockChange(Checked, error=ProfileError, prefix="clock_change, "):
        call_s: Wait  #: how long the call holds the driver's lock, seconds
        gpus_per_node: Count = 8  #: GPUs that share a lock

`Wait` is `Annotated[float, WAIT]`: a float for type checkers, with the rule of `base.units` that
every reader of the field obeys. A field may also be such a number or None, or a tuple of them.
"""

from __future__ import annotations

import sys
from dataclasses import fields, is_dataclass
from functools import cache
from inspect import get_annotations
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from perseus_planner.base.errors import PlannerError, UsageError
from perseus_planner.base.units import Rule


class Checked:
    """A frozen dataclass that checks its numbers by their rules when it is made, and stores them as
    plain ints and floats.

    Args:
        error: the type of error that it raises.
        prefix: what error texts put before the name of a field, such as "clock_change, ".

    Raises:
        PlannerError: If a field breaks its rule; of the type `error`.
    """

    __slots__ = ()
    _error: type[PlannerError] = UsageError
    _prefix = ""

    def __init_subclass__(
        cls, error: type[PlannerError] | None = None, prefix: str | None = None, **others: Any
    ) -> None:
        super().__init_subclass__(**others)
        if error is not None:
            cls._error = error
        if prefix is not None:
            cls._prefix = prefix

    def __post_init__(self) -> None:
        for name, rule in rules(type(self)).items():  # type: ignore[arg-type]  # a class has a hash
            value = getattr(self, name)
            if value is not None or not rule.is_optional:
                checked = rule.check(value, f"{self._prefix}{name}", self._error)
                object.__setattr__(self, name, checked)


class FieldRule:
    """The rule of a field, and whether the field may be None or is a tuple of numbers."""

    __slots__ = ("is_optional", "is_tuple", "rule")

    def __init__(self, rule: Rule, *, is_optional: bool, is_tuple: bool) -> None:
        self.rule, self.is_optional, self.is_tuple = rule, is_optional, is_tuple

    def check(self, value: Any, where: str, error: type[PlannerError]) -> Any:
        """Return the value as plain numbers; see `Rule.check`."""
        if self.is_tuple and isinstance(value, (tuple, list)):
            return tuple(self.rule.check(each, where, error) for each in value)
        return self.rule.check(value, where, error)


@cache
def rules(kind: type) -> dict[str, FieldRule]:
    """Return the rule of each field of a dataclass whose type has one."""
    if not is_dataclass(kind):
        raise TypeError(f"{kind.__name__} is not a dataclass")
    found = {}
    for each in fields(kind):
        rule = _rule(_type(kind, each.name, each.type))
        if rule is not None:
            found[each.name] = rule
    return found


def _type(kind: type, name: str, declared: Any) -> Any:
    """Return the type of a field; None if it is imported for type checkers only, so has no rule."""
    if not isinstance(declared, str):
        return declared
    home = next(each for each in kind.__mro__ if name in get_annotations(each))
    try:
        return eval(declared, vars(sys.modules[home.__module__]))
    except NameError:
        return None


def _rule(hint: Any) -> FieldRule | None:
    is_optional = is_tuple = False
    if get_origin(hint) in (Union, UnionType):
        others = [each for each in get_args(hint) if each is not NoneType]
        is_optional = len(others) < len(get_args(hint))
        hint = others[0]
        # A number, or one for each stage.
        is_tuple = len(others) == 2 and get_origin(others[1]) is tuple
    if get_origin(hint) is tuple:
        is_tuple, hint = True, get_args(hint)[0]
    if get_origin(hint) is Annotated:
        rule = next((each for each in get_args(hint)[1:] if isinstance(each, Rule)), None)
        if rule is not None:
            return FieldRule(rule, is_optional=is_optional, is_tuple=is_tuple)
    return None
