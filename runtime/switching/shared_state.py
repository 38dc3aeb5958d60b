"""The key of a torch.distributed store on which all ranks act, and how a key is read without waiting for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch.distributed import Store

# What is expected of a key by who only reads it: no key ever holds it.
_ABSENT = "?"


def read(store: Store, key: str) -> bytes | None:
    """What `key` holds, None where it is absent: one operation, which waits for nothing; "?" may not be a value.

    `Store.get` waits for an absent key, also for one that was there when it was checked. compare_set gives back what is
    there, and where nothing is what was expected.
    """
    there: bytes = store.compare_set(key, _ABSENT, _ABSENT)
    return None if there == _ABSENT.encode() else there


class State(NamedTuple):
    """What the ranks of a job agree on.

    Attributes:
        cleared: no rank that could take part in a decision has begun a later iteration.
        newest: the version proposed last.
        is_open: 1 while that is neither decided nor given up, else 0.
        version: what was decided last.
        since: the first iteration that runs by it.
    """

    cleared: int = -1
    newest: int = 1
    is_open: int = 0
    version: int = 1
    since: int = 0

    def text(self) -> str:
        """As the store holds it."""
        return " ".join(map(str, self))

    def has_open(self, version: int) -> bool:
        """Whether `version` is the newest and open."""
        return bool(self.is_open) and self.newest == version


class SharedState:
    """The state in the store, as this rank has seen it last; absent there, it is the first one.

    Both methods take one operation, and raise what the store raises, or a RuntimeError where it has lost the state.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._text = ""
        self.seen = State()

    def look(self) -> None:
        """See what is there."""
        there = read(self._store, "state")
        self._take(there or b"", there is None)

    def change(self, state: State) -> None:
        """Put `state` in the place of the one seen last, if that is still there; see what is there then."""
        text = state.text()
        there: bytes = self._store.compare_set("state", self._text, text)
        # What was expected comes back although it was not replaced: so it was not there.
        self._take(there, there.decode() == self._text != text)

    def _take(self, there: bytes, is_absent: bool) -> None:
        if is_absent and self._text:
            raise RuntimeError("the store has lost what the ranks had agreed on")
        self._text = there.decode()
        self.seen = State(*map(int, self._text.split()))
