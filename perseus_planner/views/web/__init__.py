"""What the pages are made of; the service's dashboard has `theme.css` and `charts.js` too."""

from __future__ import annotations

from importlib.resources import files


def page_file(name: str) -> str:
    """Return the text of a file of this folder."""
    return (files(__name__) / name).read_text(encoding="utf-8")
