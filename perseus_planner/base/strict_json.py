"""Read dataclasses back from JSON strictly: exactly their fields, each of its declared type."""

from __future__ import annotations

import math
from dataclasses import is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


def read_fields(kind: type[T], content: object) -> T:
    """Build a dataclass from a decoded JSON object.

    Args:
        kind: A dataclass. Its fields may be str, int, float, bool, Literal, dict[str, ...], a
            dataclass, or any of these or None. Integers are accepted for float fields; booleans are
            not accepted as numbers.
        content: What `json.loads` returned.

    Raises:
        ValueError: If `content` is not an object with exactly these fields, or if a value has
            another type or is not finite.
    """
    hints = _hints(cast("type", kind))
    if not isinstance(content, dict) or content.keys() != hints.keys():
        raise ValueError(f"the fields of {kind.__name__} are {', '.join(hints) or 'none'}")
    return kind(
        **{
            name: _checked(value, hints[name], f"{kind.__name__}.{name}")
            for name, value in content.items()
        }
    )


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _checked(value: object, hint: Any, name: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType) and NoneType in arguments:
        (other,) = (argument for argument in arguments if argument is not NoneType)
        return None if value is None else _checked(value, other, name)
    if is_dataclass(hint):
        return read_fields(cast("type[Any]", hint), value)
    if origin is dict and isinstance(value, dict):
        return {key: _checked(item, arguments[1], name) for key, item in value.items()}
    if origin is Literal and value in arguments:
        return value
    if hint is float and type(value) in (float, int):
        return _finite(cast("float", value), name)
    if type(value) is hint:
        return value
    raise ValueError(f"{name} is of another type")


def _finite(value: float, name: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} is not finite")
    return number
