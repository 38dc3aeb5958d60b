"""Kinds of fields of the values that clients send: what each may be at most."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    WithJsonSchema,
)

from perseus_planner.runs.status import DeciderStatus, upgraded

NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$"
KEY = r"^[!-.0-~]{1,256}$"  # printable ASCII without a blank and without /, as it is part of a path
MOST_WHOLE = 2**53 - 1  #: the largest whole number that all JSON readers agree on
MOST_SLOWDOWN = 1e6
MOST_S = 1e9  # some thirty years; moments may have one more digit, which is enough until 2286

JobName = Annotated[
    str,
    Field(pattern=NAME, description="1 to 128 letters, digits, `.`, `_` and `-`; not `.` first."),
]
Key = Annotated[
    str,
    Field(pattern=KEY, description="Up to 256 printable ASCII characters without blanks and `/`."),
]
Whole = Annotated[int, Strict(), Field(ge=0, le=MOST_WHOLE)]
Span = Annotated[float, Strict(), Field(gt=0.0, le=MOST_S)]
Seconds = Annotated[float, Strict(), Field(ge=0.0, le=MOST_S)]
Text = Annotated[str, Field(max_length=2000)]
Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*$", max_length=1024)]
Number = Annotated[int, Strict(), Field(ge=0, lt=2**31)]
Share = Annotated[float, Strict(), Field(ge=0.0, le=1.0)]
Watts = Annotated[float, Strict(), Field(gt=0.0, le=1e12)]
Past = Annotated[float, Strict(), Field(ge=0.0, le=1e11)]
"""A moment that has been, or one of a schedule: seconds since the epoch."""


def _infinite_if_null(value: object) -> object:
    return math.inf if value is None else value


Moment = Annotated[
    float,
    BeforeValidator(_infinite_if_null),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "null"}]}),
]
"""A moment, which may be infinite: null in JSON."""
_MOST_COLUMNS = 64
_MOST_TEXT = 1_024  #: characters of a column, or of its name


def _bounded(status: DeciderStatus) -> DeciderStatus:
    texts = [status.phase, *status.columns]
    texts += [value for value in status.columns.values() if isinstance(value, str)]
    if len(status.columns) > _MOST_COLUMNS:
        raise ValueError(f"more than {_MOST_COLUMNS} columns")
    if max(map(len, texts)) > _MOST_TEXT or len(status.text) > 2 * _MOST_TEXT:
        raise ValueError("a text is too long")
    return status


SentStatus = Annotated[DeciderStatus, BeforeValidator(upgraded), AfterValidator(_bounded)]
"""What the decider of a job knows; 0.3 has sent it in another form."""
STRICT = ConfigDict(extra="ignore", allow_inf_nan=False, val_json_bytes="base64")
"""For values that clients send: numbers that are not finite are refused, and fields that a newer
client may send are ignored."""
