"""`theme.css` and `charts.js`, which the report page and the service's dashboard share."""

from __future__ import annotations

from importlib.resources import files
from typing import Literal


def page_file(name: Literal["theme.css", "charts.js"]) -> str:
    """Return the text of one of the shared files."""
    return (files(__name__) / name).read_text(encoding="utf-8")
