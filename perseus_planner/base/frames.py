"""pandas frames of profiles, frontiers, plans and runs; the names of columns carry the units.

`frame.attrs` says where the numbers come from and what their baseline is. pandas is imported when a
frame is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import UsageError, how_to_install

if TYPE_CHECKING:
    import pandas as pd

WHOLE = "Int64"  #: pandas' type of whole numbers that may be missing


def make_frame(
    rows: Sequence[Mapping[str, Any]] | Mapping[str, Any],
    types: Mapping[str, Any] | None = None,
    **attrs: Any,
) -> pd.DataFrame:
    """Return a frame, in which values that are not known are missing.

    Args:
        rows: its rows, at least one; or its columns.
        types: the types of columns in which values may be missing.
        attrs: its `attrs`.

    Raises:
        UsageError: If pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        remedy = how_to_install("frames")
        raise UsageError(f"to_frame() needs pandas, which is not installed; {remedy}") from error
    columns = rows if isinstance(rows, Mapping) else rows[0]
    frame = pd.DataFrame(rows, columns=list(columns)).astype(types or {})
    frame.attrs = attrs
    return frame
