"""What all ranks say when they enter, as all of them come to know it."""

from __future__ import annotations

import json
import time
import zlib
from typing import TYPE_CHECKING

from perseus_planner.errors import RankError
from perseus_planner.runtime.switching.shared_state import read

if TYPE_CHECKING:
    from torch.distributed import Store

# Between two looks, at most.
_LONGEST_PAUSE_S = 0.05


def entered(store: Store, rank: int, ranks: int, mine: bytes, timeout_s: float) -> list[bytes | None]:
    """What each rank has said, the same list on all ranks; None for who had not come in time.

    The first rank puts the list together once all have come. Who has waited for `timeout_s` does it with those who are
    there. The first list written is everyone's: a rank that comes later finds None in its own place. This waits, in
    short pauses, and can be interrupted.

    Args:
        store: the same for all ranks, under a prefix that nothing else uses.
        rank: which one this is, from 0.
        ranks: how many there are.
        mine: what this one says.
        timeout_s: for how long it waits for the others, seconds.

    Raises:
        RankError: the store is gone.
    """
    try:
        return _entered(store, rank, ranks, mine, time.monotonic() + timeout_s)
    except RuntimeError as error:
        raise RankError("the rank or launcher that holds the job's store has ended; see why") from error


def _entered(store: Store, rank: int, ranks: int, mine: bytes, until_s: float) -> list[bytes | None]:
    words = [f"words/{each}" for each in range(ranks)]
    store.set(words[rank], zlib.compress(mine))
    pause_s = 1e-3
    while (everyone := read(store, "everyone")) is None:
        if time.monotonic() > until_s or (rank == 0 and store.check(words)):
            store.compare_set("everyone", "", _packed([read(store, word) for word in words]))
        else:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    store.delete_key(words[rank])
    return _unpacked(everyone)


def _packed(words: list[bytes | None]) -> bytes:
    # Latin-1 has a character for each byte, and what ranks say is mostly alike.
    texts = [None if word is None else zlib.decompress(word).decode("latin-1") for word in words]
    return zlib.compress(json.dumps(texts).encode())


def _unpacked(everyone: bytes) -> list[bytes | None]:
    return [None if text is None else text.encode("latin-1") for text in json.loads(zlib.decompress(everyone))]
