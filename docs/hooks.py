"""What mkdocs changes in the pages: a cell of a table without text is no heading of its column, and
why a test does not run a block is no title of it.
"""

from __future__ import annotations

import re
from typing import Any

_REASON = re.compile(r'^(```(?:sh|python)) title="(?!in the training script)[^"]*"$', re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the text of a page."""
    return _REASON.sub(r"\1", markdown).replace('title="needs a cluster: ', 'title="')


def on_page_content(html: str, **_: Any) -> str:
    """Return the HTML of a page."""
    return html.replace("<th></th>", "<td></td>")
