"""Whether a profile of stages that `fully_shard` has sharded carries over to another release of
torch.

torch.distributed.pipelining decides when the weights of such stages are gathered and their
gradients reduced: in a computation, whose measured rows then hold it, or beside computations. That
has changed with releases, so a profile names the torch that it was measured with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

TORCH = "torch"
"""The condition of a profile that says which torch it was measured with."""
SHARDED = "sharded"
"""The condition of a profile whose stages are sharded; says by what."""

_CHANGED_IN = (
    (2, 10),  # took the reduction of gradients out of the last backward of a stage
    (2, 15),  # lets a reduction, and gathering, go on beside later computations
)
"""Releases of torch that gather and reduce at other moments than the one before, by their source.

By default 2.13 and 2.15 reduce in the same places between computations
(`pytest tests/runtime/test_torch_schedules.py -k sharded`). How they overlap on a GPU is not
measured.
"""


def difference(profiled: str | None, trained: str | None) -> str | None:
    """Return in a clause why a profile of sharded stages does not carry over; None if it does, or
    the versions are not known.

    Args:
        profiled: Version of torch that it was measured with.
        trained: Version of torch that trains.
    """
    if profiled is None or trained is None:
        return None
    before = _release(profiled)
    after = _release(trained)
    if before is None or after is None or before == after:
        return None
    return (
        f"its sharded stages were profiled with torch {profiled} and train with torch {trained}, "
        "which gathers weights and reduces gradients at other moments"
    )


def remark(conditions: Mapping[str, str]) -> str | None:
    """Return in a sentence with which releases of torch a profile is to be used; None if that does
    not matter, or is not known.

    Args:
        conditions: `Profile.conditions`.
    """
    version = conditions.get(TORCH)
    release = None if version is None else _release(version)
    if SHARDED not in conditions or release is None:
        return None
    # Between which two releases that changed something it was measured.
    begin = "" if release == 0 else f"{_text(_CHANGED_IN[release - 1])} or later"
    end = "" if release == len(_CHANGED_IN) else f"below {_text(_CHANGED_IN[release])}"
    return (
        f"Its sharded stages were profiled with torch {version}: train with torch "
        f"{' and '.join(filter(None, (begin, end)))}, or profile again, as others gather weights "
        "and reduce gradients at other moments."
    )


def _release(version: str) -> int | None:
    """Return the number of changes up to a version; None if it is no version."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return None
    release = (int(match[1]), int(match[2]))
    return sum(release >= changed for changed in _CHANGED_IN)


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
