"""Messages between ranks and the controller survive encoding, and nothing else is accepted as a
message.
"""

from __future__ import annotations

import json
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, fields

from perseus_planner.base.errors import UsageError
from perseus_planner.base.wires import MAX_PACKET_BYTES, decode, encode
from perseus_planner.runtime.controller.protocol import (
    AnyMessage,
    AttachRequest,
    Control,
    FromRank,
    GpuSample,
    ToRank,
)

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = {
    int: st.integers(0, 2**63),
    int | None: st.none() | st.integers(0, 2**63),
    float: st.floats(0, 1e300),
    float | None: st.none() | NUMBERS,
    str: st.text(max_size=50),
    str | None: st.none() | st.text(max_size=50),
    Control: st.sampled_from(get_args(Control)),
    dict[str, float]: st.dictionaries(st.text(max_size=9), NUMBERS, max_size=5),
}
SAMPLE = encode(GpuSample(1, 2, 1.5, None, None, None, {}, 0, 0, None))
KINDS = (*get_args(FromRank), *get_args(ToRank))
MESSAGES = st.one_of(
    st.builds(kind, **{field.name: VALUES[field.type] for field in fields(kind)}) for kind in KINDS
)


@given(MESSAGES)
def test_a_message_is_one_line_and_comes_back(message: AnyMessage):
    line = encode(message)
    assert b"\n" not in line
    assert len(line) < MAX_PACKET_BYTES
    assert decode(line, AnyMessage) == message


@given(MESSAGES, st.data())
def test_a_message_with_one_thing_wrong_is_refused(message: AnyMessage, data):
    content = {"message": type(message).__name__, **asdict(message)}
    name = data.draw(st.sampled_from(sorted(content)))
    wrong = data.draw(st.sampled_from(["lacks it", "has more", "is a list", "is a truth"]))
    if wrong == "lacks it":
        del content[name]
    elif wrong == "has more":
        content["more"] = 1
    else:
        content[name] = [] if wrong == "is a list" else True
    with pytest.raises(ValueError, match=r" is |fields"):
        decode(json.dumps(content).encode(), AnyMessage)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_garbage_is_refused(garbage: bytes):
    with pytest.raises(ValueError, match=r"."):
        decode(garbage, AnyMessage)


@pytest.mark.parametrize(
    "line",
    [
        SAMPLE.replace(b"1.5", b"NaN"),
        SAMPLE.replace(b"1.5", b"1e999"),
        SAMPLE.replace(b"1.5", b'"1"'),
        SAMPLE.replace(b"1.5", b"9" * 5000),
        SAMPLE.replace(b'"GpuSample"', b"[]"),
        b'{"a":' * 20000,
    ],
)
def test_numbers_and_depths_that_python_would_take_are_refused(line: bytes):
    with pytest.raises(ValueError, match=r"."):
        decode(line, AnyMessage)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rank": -1}, "rank -1 with launcher None: give whole numbers of 0 or more"),
        ({"launcher": -5}, "rank 0 with launcher -5: give whole numbers of 0 or more"),
        (
            {"control": "voltage"},
            "'voltage' is not a control; choose one of: clock, power-limit, observed",
        ),
    ],
)
def test_an_attach_request_refuses_wrong_values(changed: dict[str, object], said: str):
    values = {
        "rank": 0,
        "gpu": "nvml:0",
        "control": "clock",
        "launcher": None,
        **changed,
    }
    with pytest.raises(UsageError) as caught:
        AttachRequest(**values)
    assert str(caught.value) == said
