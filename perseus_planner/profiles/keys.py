"""Key: which rows of a profile a computation has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

from perseus_planner.base.errors import ProfileError, shown
from perseus_planner.profiles.modes import OWN

V = TypeVar("V")
KIND = r"[FBIW](?:\.[a-z0-9_-]+)?"
"""The pattern of a kind."""
_NAME = re.compile(rf"({KIND})(?:@([a-z0-9_-]+))?")
_TEXT = re.compile(rf"(\d+)({_NAME.pattern})")


AnyKey: TypeAlias = Any
"""A `Key`, or (stage, kind) for the one in the training's own way."""


class Key(tuple[int, str]):
    """The computations of a stage that are alike: all of one kind, in one mode. They have the same
    time and energy at each clock.

    A key is the pair (stage, kind) with a mode. In the training's own way it equals that pair, so
    (3, "F") finds its rows in any mapping; in another mode it equals no pair. Its `str()` is its
    text in files, such as "3B.sync@recompute".

    Args:
        stage: number of the stage, from 0.
        kind: "F" (forward), "B" (backward), "I" or "W" (gradient of the inputs, of the weights), or
            one of them with a suffix that tells apart those that take longer, such as "B.sync".
        mode: how they run, such as "recompute"; `OWN` as the training runs without a plan.
    """

    _mode: str

    def __new__(cls, stage: int, kind: str, mode: str = OWN) -> Key:
        """Make the key."""
        key = super().__new__(cls, (stage, kind))
        key._mode = mode
        return key

    @classmethod
    def of(cls, pair: AnyKey) -> Key:
        """Return the key that a key, a (stage, kind), or a (stage, kind, mode) is.

        Raises:
            ProfileError: If the kind is the name of no key.
        """
        if isinstance(pair, Key):
            return pair
        # Files name a kind in a mode by one text, and so may whoever reads them.
        if len(pair) == 2 and isinstance(pair[1], str) and "@" in pair[1]:
            return cls.named(*pair)
        return cls(*pair)

    @property
    def stage(self) -> int:
        """Number of the stage, from 0."""
        return self[0]

    @property
    def kind(self) -> str:
        """The kind, without the mode."""
        return self[1]

    @property
    def mode(self) -> str:
        """How the computations run; `OWN` as the training runs without a plan."""
        return self._mode

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, other) is True and self._mode == getattr(other, "mode", OWN)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        # That of the pair, also in another mode: equal keys must have one, unequal ones may.
        return tuple.__hash__(self)

    def __lt__(self, other: AnyKey) -> bool:
        return (*self, self._mode) < (*other, getattr(other, "mode", OWN))

    def __repr__(self) -> str:
        mode = "" if self._mode == OWN else f", {self._mode!r}"
        return f"Key({self.stage}, {self.kind!r}{mode})"

    def __getnewargs__(self) -> tuple[int, str, str]:
        return self.stage, self.kind, self._mode

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


class ByKey(Mapping[Key, V]):
    """A read-only mapping of keys, in which what users write finds what belongs to it:
    `rows[3, "F"]`, `rows[3, "B@recompute"]`.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[AnyKey, V]) -> None:
        self._values = {Key.of(key): value for key, value in values.items()}

    def __getitem__(self, key: AnyKey) -> V:
        return self._values[key if isinstance(key, Key) else Key.of(key)]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(self._values)
