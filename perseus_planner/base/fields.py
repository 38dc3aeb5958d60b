"""Fields of dataclasses: what a value must be stands once, in the type of its field.

    @dataclass(frozen=True)
    class ClockChange(Checked, error=ProfileError, prefix="clock_change, "):
        call_s: Wait  #: how long the call holds the driver's lock, seconds
        gpus_per_node: Count = 8  #: GPUs that share a lock

`Wait` is `Annotated[float, WAIT]`: a float for type checkers, with the rule of `base.units` that
every reader of the field obeys. A rule is anything that has the method `check` of `units.Rule`. A
field may also be such a value or None, or a tuple of them.

`documents.load` makes such a dataclass of a mapping in a YAML file. `dump` makes plain values of
one, of which `restore` makes it again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from inspect import get_annotations
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    NamedTuple,
    Protocol,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
)

from perseus_planner.base.errors import PlannerError, UsageError, shown

T = TypeVar("T")
F = TypeVar("F", bound="Callable[..., object]")


class Check(Protocol):
    """A rule of a field."""

    def check(self, value: Any, where: str, error: type[PlannerError] = UsageError) -> Any:
        """Return the value as it is stored, or raise `error` with a text that begins with
        `where`.
        """


class Choice:
    """The rule of a text that is one of several."""

    def __init__(self, *choices: str) -> None:
        self.choices = choices

    def check(self, value: Any, where: str, error: type[PlannerError] = UsageError) -> Any:
        """Return the value; see `units.Rule.check`."""
        if value not in self.choices:
            raise error(f"{where}: {shown(value)} is unknown: give {' or '.join(self.choices)}")
        return value


class CheckedBy(NamedTuple):
    """The rule of a field that a function checks, with the arguments and the result of
    `units.Rule.check`.
    """

    check: Callable[[Any, str, type[PlannerError]], Any]


class Reader(NamedTuple):
    """How `documents.load` reads a field that is neither a number, a text nor a dataclass; stands
    in its type, `Annotated[Source, Reader(read_source)]`.
    """

    read: Callable[[Any, str], Any]  #: called with the document and the key


class Checked:
    """A frozen dataclass that checks its fields by their rules when it is made, and stores what the
    rules return: plain ints and floats.

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
        # Frozen, so past `__setattr__`: what the rule returns replaces what was given.
        for name, rule in rules(type(self)).items():
            checked = rule.check(getattr(self, name), f"{self._prefix}{name}", self._error)
            object.__setattr__(self, name, checked)


class FieldType(NamedTuple):
    """What the type of a field says about its values."""

    inner: Any  #: the type without None, tuple and rule
    rule: Any  #: a `Check`, or None
    reader: Reader | None
    is_optional: bool  #: it may be None
    is_tuple: bool  #: it may be a tuple
    is_one: bool  #: it may be a single value

    def check(self, value: Any, where: str, error: type[PlannerError]) -> Any:
        """Return a value, or a tuple of them, as the rule stores it."""
        if value is None and self.is_optional:
            return None
        # Each of several values obeys the same rule.
        check = self.rule.check
        if self.is_tuple and isinstance(value, (tuple, list)):
            return tuple(check(entry, where, error) for entry in value)
        return check(value, where, error)


def _remembered(function: F) -> F:
    """Return the function with its results kept; `cache` itself hides the types from checkers."""
    return cast("F", cache(function))


@_remembered
def types(kind: type) -> dict[str, FieldType]:
    """Return what the type of each field of a dataclass says; without those fields whose type is
    imported for type checkers only.
    """
    if not is_dataclass(kind):
        raise TypeError(f"{kind.__name__} is not a dataclass")
    # Postponed annotations are texts, which only their own module can evaluate.
    hints = {field.name: _evaluated(kind, field.name, field.type) for field in fields(kind)}
    return {name: _field_type(hint) for name, hint in hints.items() if hint is not None}


@_remembered
def rules(kind: type) -> dict[str, FieldType]:
    """Return the fields of a dataclass that have a rule."""
    return {name: field for name, field in types(kind).items() if field.rule is not None}


@_remembered
def keys(kind: type) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the keys that a mapping must have for `documents.load`, and those that it may have."""
    required = list[str]()
    optional = list[str]()
    for field in fields(kind):
        # Fields that are not given to the constructor cannot be given by a file either.
        if field.init and field.name in types(kind):
            has_default = field.default is not MISSING or field.default_factory is not MISSING
            (optional if has_default else required).append(field.name)
    return tuple(required), tuple(optional)


def dump(value: Any, names: Iterable[str] | None = None, optional: Collection[str] = ()) -> Any:
    """Return plain values of a dataclass: a dictionary of its fields, with lists for tuples and
    text for paths; other values as they are.

    Args:
        value: a dataclass, or one of those that fields may be.
        names: the fields, in the order of the dictionary; None for all.
        optional: the fields that are left out at their default.
    """
    if is_dataclass(value):
        # Fields that the dataclass computes itself are computed again when it is made.
        defaults = {field.name: field for field in fields(value) if field.init}
        return {
            name: dump(getattr(value, name))
            for name in (defaults if names is None else names)
            if name not in optional or not _is_default(defaults[name], getattr(value, name))
        }
    if isinstance(value, Mapping):
        return {key: dump(entry) for key, entry in value.items()}
    # A named tuple is a tuple, too: both are lists in a file.
    if isinstance(value, (tuple, list)):
        return [dump(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


def restore(kind: type[T], values: Mapping[str, Any], **given: Any) -> T:
    """Make a dataclass again of what `dump` returned, and of the fields that are `given`.

    Raises:
        TypeError, ValueError: If they are not those of the dataclass.
    """
    hints = types(kind)
    restored = {name: _restored(hints.get(name), value) for name, value in values.items()}
    return kind(**restored, **given)


def _restored(hint: FieldType | None, value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_restored(hint, entry) for entry in value)
    if hint is None or value is None:
        return value
    # JSON has one kind of number, so 1.0 may come back as 1.
    if hint.inner in (int, float) and hint.rule is None:
        return hint.inner(value)
    if is_dataclass(hint.inner):
        return restore(cast("type[Any]", hint.inner), value)
    return value


def _is_default(field: Field[Any], value: Any) -> bool:
    # A default that is made anew each time has no object to compare with.
    if field.default_factory is not MISSING:
        return bool(value == field.default_factory())
    return bool(value == field.default)


def _evaluated(kind: type, name: str, declared: Any) -> Any:
    """Return the type of a field; None if it is imported for type checkers only."""
    if not isinstance(declared, str):
        return declared
    # An inherited field is evaluated where it was declared: names mean something there only.
    home = next(base for base in kind.__mro__ if name in get_annotations(base))
    try:
        return eval(declared, vars(sys.modules[home.__module__]))
    except NameError:
        return None


def _field_type(hint: Any) -> FieldType:
    """Take a type apart."""
    rule = reader = None
    is_optional = False
    is_tuple = False
    is_one = True
    # Each turn takes one layer off: `Annotated[tuple[Watts, ...] | None, ...]` has three.
    while get_origin(hint) in (Union, UnionType, tuple, Annotated):
        origin = get_origin(hint)
        args = get_args(hint)
        hint = args[0]
        # An inner layer may be a tuple of optional values, or an optional tuple.
        if origin is tuple:
            is_tuple = True
            is_one = False
        elif origin is Annotated:
            for extra in args[1:]:
                reader = extra if isinstance(extra, Reader) else reader
                rule = extra if hasattr(extra, "check") else rule
        else:
            is_optional |= NoneType in args
            # A number, or one for each stage.
            is_tuple |= any(get_origin(choice) is tuple for choice in args[1:])
    return FieldType(hint, rule, reader, is_optional, is_tuple, is_one)
