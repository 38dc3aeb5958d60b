"""Key: which rows of a profile a computation has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

from perseus_planner.base.errors import ProfileError, shown
from perseus_planner.profiles.modes import OWN

V = TypeVar("V")
KIND = r"[FBIW](?:\.[a-z0-9_-]+)?"
"""The pattern of a kind."""
_NAME = re.compile(rf"({KIND})(?:@([a-z0-9_-]+))?")
_TEXT = re.compile(rf"(\d+)({_NAME.pattern})")


class Key(NamedTuple):
    """The computations of a stage that are alike: all of one kind, in one mode. They have the same
    time and energy at each clock.

    Its `str()` is its text in files, such as "3B.sync@recompute".
    """

    stage: int
    #: "F" (forward), "B" (backward), "I" or "W" (gradient of the inputs, of the weights), or one of
    #: them with a suffix that tells apart those that take longer, such as "B.sync".
    kind: str
    mode: str = OWN  #: how they run, such as "recompute"; `OWN` as the training runs without a plan

    @property
    def name(self) -> str:
        """The kind, with any mode but the training's own behind it, as in "B@recompute"."""
        return name_of(self.kind, self.mode)

    def __str__(self) -> str:
        return f"{self.stage}{self.name}"

    def in_mode(self, mode: str) -> Key:
        """Return the key of the same computations in another mode."""
        return Key(self.stage, self.kind, mode)

    @classmethod
    def named(cls, stage: int, name: str) -> Key:
        """Return the key of this `name` in a stage.

        Raises:
            ProfileError: If the text is not the name of a key.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            raise ProfileError(f"{shown(name)} is not a kind; write it as B, or B.sync")
        return cls(stage, match[1], match[2] or OWN)

    @classmethod
    def parse(cls, text: str) -> Key:
        """Return the key whose `str()` is this text.

        Raises:
            ProfileError: If the text is not one of a key.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ProfileError(
                f"{shown(text)} is not a stage and a kind; write them as 3B, or 3B.sync"
            )
        return cls.named(int(match[1]), match[2])


def is_kind(text: str) -> bool:
    """Return whether a text is a kind."""
    return re.fullmatch(KIND, text) is not None


def name_of(kind: str, mode: str) -> str:
    """Return `Key.name` of a kind in a mode, of any stage."""
    return kind if mode == OWN else f"{kind}@{mode}"


AnyKey: TypeAlias = Any
"""A `Key`, or (stage, kind) for the one in the training's own way."""


class ByKey(Mapping[Key, V]):
    """A read-only mapping of keys. (stage, kind) finds what belongs to the training's own way:
    `rows[3, "F"]`.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[AnyKey, V]) -> None:
        self._values = {Key(*key): value for key, value in values.items()}

    def __getitem__(self, key: AnyKey) -> V:
        return self._values[key if isinstance(key, Key) else Key(*key)]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(self._values)
