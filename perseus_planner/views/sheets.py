"""A page of tables: one HTML file without scripts that opens offline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from perseus_planner.views.report import content_policy
from perseus_planner.views.web import page_file

if TYPE_CHECKING:
    from perseus_planner.base.tables import Sheet


def page_of_sheets(
    title: str,
    heading: str,
    first: tuple[str, str, str],
    sheets: Sequence[Sheet],
    *,
    figure: str = "",
    style: str = "",
) -> str:
    """Return a page. Texts are escaped, whatever they contain.

    Args:
        title: Its title.
        heading: Its heading.
        first: Its first section: the heading, the sentence under it, and a note.
        sheets: Its tables.
        figure: HTML of a figure between sentence and note.
        style: CSS of the figure.
    """
    styles = [page_file("theme.css"), page_file("report.css"), *([style] if style else [])]
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(page_file("sheets.html.j2")).render(
        title=title,
        heading=heading,
        first=first,
        sheets=[(sheet.title, Markup(sheet.html())) for sheet in sheets],
        figure=Markup(figure),
        styles=[Markup(text) for text in styles],
        policy=Markup(content_policy([], styles)),
    )
