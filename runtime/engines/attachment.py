"""What a runtime puts on an engine's objects, and takes off again: attributes of single instances, never of classes."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from perseus_planner.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

_MARK = "_perseus_planner_attached"


@contextmanager
def replaced(owner: object, **attributes: Any) -> Iterator[None]:
    """While the block runs, `owner` has these attributes of its own; afterwards those that were found, or none."""
    own = vars(owner)
    found = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            own.pop(name, None)
        own.update(found)


@contextmanager
def attached_once(owner: object, **attributes: Any) -> Iterator[None]:
    """As `replaced`, for a runtime: an engine has one at a time.

    Raises:
        UsageError: a block of another one is open.
    """
    check_free(owner)
    with replaced(owner, **{_MARK: True}, **attributes):
        yield


def check_free(owner: object) -> None:
    """Refuse an engine that a runtime is attached to.

    Raises:
        UsageError: inside the block of `attached_once`.
    """
    if _MARK in vars(owner):
        raise UsageError(
            f"a runtime is attached to this {type(owner).__name__} already; leave its block before another is entered"
        )


def check_has(owner: object, names: tuple[str, ...], wanted: str) -> None:
    """Refuse an engine that lacks what an adapter holds on to.

    Args:
        owner: of the attributes.
        names: of these.
        wanted: the engine and its versions that have them, in words.

    Raises:
        UsageError: names the first that is missing.
    """
    missing = next((name for name in names if not hasattr(owner, name)), None)
    if missing is not None:
        raise UsageError(f"{type(owner).__name__} has no {missing}, through which a runtime follows it; use {wanted}")
