"""The OpenAPI document of the service, with what FastAPI does not know."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from perseus_planner.extensions.service import alerts, curve, models, parts
from perseus_planner.extensions.service.access import PROBLEM
from perseus_planner.extensions.service.calls import SCHEME
from perseus_planner.runs import account

_MODULES = (account, parts, models, alerts, curve)
"""Those with the classes of what is sent and answered; one that others rest on comes first."""


def complete(document: dict[str, Any]) -> dict[str, Any]:
    """Return an OpenAPI document with the tokens, the type of problems, and a description of each
    field; `document` is changed.
    """
    text = "A token of the service, if the service has tokens; it needs the role."
    scheme = {"type": "http", "scheme": "bearer", "description": text}
    document["components"]["securitySchemes"] = {SCHEME: scheme}
    # FastAPI has answers to errors as JSON of the model; they are sent as RFC 9457 names them.
    for methods in document["paths"].values():
        for operation in methods.values():
            for status, answer in operation["responses"].items():
                if status >= "400":
                    answer["content"] = {PROBLEM: answer["content"].pop("application/json")}
    _describe(document["components"]["schemas"])
    return document


def _describe(schemas: dict[str, Any]) -> None:
    """Describe the fields of schemas by the comments that stand beside them.

    These are comments (`#:`), which are in the sources alone. A class takes those of its bases,
    which stand before it.
    """
    of_kinds: dict[str, dict[str, str]] = {}
    for module in _MODULES:
        source = inspect.getsource(module)
        for kind in ast.parse(source).body:
            if not isinstance(kind, ast.ClassDef):
                continue
            texts = of_kinds.setdefault(kind.name, {})
            for base in kind.bases:
                texts |= of_kinds.get(ast.unparse(base), {})
            texts |= _texts(kind, source.splitlines())
            # Pydantic splits a model whose input and output differ.
            for end in ("", "-Input", "-Output"):
                properties = schemas.get(kind.name + end, {}).get("properties", {})
                for name in properties.keys() & texts:
                    properties[name]["description"] = texts[name]


def _texts(kind: ast.ClassDef, lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name in JSON and the text of each field with a text."""
    for field in kind.body:
        if isinstance(field, ast.AnnAssign):
            # A text stands above its field, or behind it on its lines.
            above = takewhile(_is_text, reversed(lines[: field.lineno - 1]))
            beside = lines[field.lineno - 1 : field.end_lineno]
            texts = [line.partition("#: ")[2] for line in (*reversed([*above]), *beside)]
            alias = re.search(r"alias='(\w+)'", ast.unparse(field.annotation))
            text = " ".join(filter(None, texts))
            if text:
                yield alias[1] if alias else ast.unparse(field.target), text


def _is_text(line: str) -> bool:
    return line.lstrip().startswith("#: ")
