"""The look that the report and the service share: `theme.css` and `charts.js`, with no dependency and no build step."""

from __future__ import annotations

from importlib.resources import files
from typing import Literal


def page_file(name: Literal["theme.css", "charts.js"]) -> str:
    """The text of one of the shared files."""
    return (files(__name__) / name).read_text(encoding="utf-8")
