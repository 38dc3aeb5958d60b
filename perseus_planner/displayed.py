"""What profiles, frontiers, plans and runs have in common: notebooks display them, and they become
pandas frames.

The views import these classes, so the classes load the views only when they are needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


class Displayable:
    """A value that notebooks display and that can become a pandas frame."""

    __slots__ = ()

    def to_frame(self) -> pd.DataFrame:
        """Return a pandas frame; see `views.frames.frame_of` for its rows and columns.

        Raises:
            UsageError: If pandas is not installed.
        """
        return _view("frames").frame_of(self)

    def _repr_html_(self) -> str:
        """Return HTML for notebooks."""
        return str(_view("notebook").html_of(self))


def _view(name: str) -> Any:
    return import_module(f"perseus_planner.views.{name}")
