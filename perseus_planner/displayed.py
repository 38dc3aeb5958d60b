"""What profiles, frontiers, plans and runs have in common: they show themselves in notebooks, and become pandas frames.

Views import the values that they show, so the values know them by name alone, and load them when they are asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


class Shown:
    """A value with a view in `views.notebook` and one in `views.frames`, each chosen by its type."""

    __slots__ = ()

    def to_frame(self) -> pd.DataFrame:
        """As a pandas frame; `views.frames` says which rows and columns one of this type has.

        Raises:
            UsageError: pandas is not installed.
        """
        return _view("frames").frame_of(self)

    def _repr_html_(self) -> str:
        """How a notebook shows it."""
        return str(_view("notebook").html_of(self))


def _view(name: str) -> Any:
    return import_module(f"perseus_planner.views.{name}")
