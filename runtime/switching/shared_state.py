"""The one key of a torch.distributed store on which all ranks act, and how to read a key without
waiting for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch.distributed import Store

_ABSENT = "?"  #: a value that no key ever has


def read(store: Store, key: str) -> bytes | None:
    """Return the value of a key, or None if it is absent: one operation, which never waits.

    `Store.get` waits for an absent key, even for one that was there when it was checked.
    `compare_set` returns the value of the key or, if it is absent, the value that was expected. So
    "?" must not be a value.
    """
    value: bytes = store.compare_set(key, _ABSENT, _ABSENT)
    return None if value == _ABSENT.encode() else value


class AgreedState(NamedTuple):
    """What the ranks of a job agree on."""

    version: int = 1  #: The newest version; it only grows
    since: int = 0  #: The first iteration that runs by it

    def text(self) -> str:
        """Return the state as the store holds it."""
        return " ".join(map(str, self))


class SharedState:
    """The state in the store as this rank saw it last.

    Both methods take one operation. They raise what the store raises, or a RuntimeError if it has
    lost the state.

    Attributes:
        seen: The state seen last.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._text = ""  #: of the state in the store; empty while the key is absent
        self.seen = AgreedState()

    def look(self) -> None:
        """Read the state."""
        value = read(self._store, "state")
        self._take(value or b"", is_absent=value is None)

    def change(self, state: AgreedState) -> None:
        """Replace the state seen last by `state`, if it is still in the store; read what is
        there then.
        """
        text = state.text()
        value: bytes = self._store.compare_set("state", self._text, text)
        # If the key is absent, the expected value comes back although it was not replaced.
        self._take(value, is_absent=value.decode() == self._text != text)

    def _take(self, value: bytes, *, is_absent: bool) -> None:
        if is_absent and self._text:
            raise RuntimeError("the store has lost what the ranks had agreed on")
        self._text = value.decode()
        self.seen = AgreedState(*map(int, self._text.split()))
