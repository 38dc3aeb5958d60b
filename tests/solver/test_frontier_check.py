"""Crafted frontier files are refused before compiled code sees them; what is accepted can be
planned with.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from services import frontier_file

from perseus_planner import Frontier
from perseus_planner.base.errors import FrontierError
from perseus_planner.base.files import sha256

Arrays = dict[str, np.ndarray]
SUPPRESSED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
NUMBERS = ("times", "powers", "guide_time_s", "guide_end_s", "guide_price_w")


@cache
def _stored() -> Arrays:
    with np.load(io.BytesIO(frontier_file())) as archive:
        return dict(archive)


def arrays() -> Arrays:
    return {name: values.copy() for name, values in _stored().items()}


def saved(path: Path, content: Arrays) -> Path:
    """Written with the digest that such a file would have."""
    parts = []
    for name in sorted(set(content) - {"digest"}):
        parts += [
            f"{name} {content[name].dtype.str} {content[name].shape}".encode(),
            content[name].tobytes(),
        ]
    np.savez(path, **{**content, "digest": np.frombuffer(sha256(*parts).encode(), dtype=np.uint8)})
    return path


def test_what_was_solved_is_accepted(tmp_path: Path):
    assert len(Frontier.load(saved(tmp_path / "f.npz", arrays())).guides.time_s) > 2


def changed(name: str, change: Callable[[np.ndarray], Any]) -> Callable[[Arrays], None]:
    def apply(content: Arrays) -> None:
        content[name] = np.ascontiguousarray(change(content[name]))

    return apply


def put(name: str, place: Any, value: float) -> Callable[[Arrays], None]:
    def apply(content: Arrays) -> None:
        content[name][place] = value

    return apply


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (changed("powers", lambda each: -each), "powers: do not rise"),
        (changed("powers", lambda each: each[:-1]), "powers: is not a list"),
        (changed("powers", lambda each: each.astype(float)), "powers: is not a list"),
        (changed("powers", lambda each: each * 0), "powers: do not rise"),
        (changed("times", lambda each: each[::-1]), "times: do not fall"),
        (changed("times", lambda each: each[:0]), "times: is not a list"),
        (changed("times", lambda each: each + 2**61), "times: do not fall"),
        (changed("guide_time_s", lambda each: each[::-1]), "guide_time_s: does not fall"),
        (changed("guide_time_s", lambda each: each[:-1]), "guide_end_s: is not of this graph"),
        (put("guide_time_s", 0, np.inf), "guide_time_s: is not a time"),
        (changed("guide_end_s", lambda each: each[:, :-1]), "guide_end_s: is not of this graph"),
        (
            changed("guide_end_s", lambda each: each.astype(float)),
            "guide_end_s: is not of this graph",
        ),
        (put("guide_end_s", (2, 5), np.nan), "guide_end_s: is not of this graph"),
        (put("guide_price_w", (2, 0), -1), "guide_price_w: is not of this graph"),
        (changed("guide_price_w", lambda each: each[:-1]), "guide_price_w: is not of this graph"),
        (put("waits", (0, 1), -1), "waits: a place is below 0"),
        (put("waits", (0, 0), -1), ""),
        (changed("waits", lambda each: each + 1000), ""),
    ],
)
def test_numbers_that_no_solver_writes_are_refused(
    tmp_path: Path, change: Callable[[Arrays], None], problem: str
):
    content = arrays()
    change(content)
    with pytest.raises(FrontierError) as caught:
        Frontier.load(saved(tmp_path / "f.npz", content))
    assert f"f.npz: is not a frontier: {problem}" in str(caught.value)


VALUES = st.sampled_from([0, 1, -1, 2**31, 2**60, 2**62, 2**63 - 1, -(2**63)]) | st.integers(
    -(2**63), 2**63 - 1
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    st.lists,
    max_leaves=4,
)


@st.composite
def crafted(draw: st.DrawFn) -> Arrays:
    """A file of which some numbers, shapes or fields of the header are others."""
    content = arrays()
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from((*NUMBERS, "waits", "lags_s", "header")))
        values = content[name]
        if name == "header":
            header = json.loads(values.tobytes())
            header[draw(st.sampled_from(sorted(header)))] = draw(JSON)
            content[name] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
        elif values.dtype == np.int64 and values.size and draw(st.integers(0, 5)):
            place = draw(st.integers(0, values.size - 1))
            near = int(values.flat[place]) + draw(st.integers(-3, 3))
            values.flat[place] = min(max(draw(st.just(near) | VALUES), -(2**63)), 2**63 - 1)
        elif values.dtype.kind == "f" and values.size and draw(st.integers(0, 5)):
            values.flat[draw(st.integers(0, values.size - 1))] = draw(st.floats(width=32))
        else:
            shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
            content[name] = np.zeros(
                shape, draw(st.sampled_from(["<i8", ">i8", "<i4", "<f8", "?", "S3"]))
            )
    return content


@settings(max_examples=200, suppress_health_check=SUPPRESSED)
@given(content=crafted())
def test_a_crafted_file_is_refused_or_can_be_planned_with(tmp_path: Path, content: Arrays):
    try:
        frontier = Frontier.load(saved(tmp_path / "f.npz", content))
    except FrontierError:
        return
    assert (np.diff(frontier.times_s) <= 0).all()
    for share in (0.0, 0.3, 1.0):
        deadline_s = frontier.min_time_s + share * (frontier.max_time_s - frontier.min_time_s)
        assert frontier.plan_until(deadline_s, on_time=None).time_s <= deadline_s * (1 + 1e-9)


@settings(max_examples=100, suppress_health_check=SUPPRESSED)
@given(data=st.binary(max_size=200), cut=st.integers(0, 10**6))
def test_bytes_that_are_no_archive_are_refused(tmp_path: Path, data: bytes, cut: int):
    whole = frontier_file()
    path = tmp_path / "f.npz"
    path.write_bytes(
        whole[: cut % (len(whole) - 22)] + data
    )  # without the end of an archive, which is 22 bytes
    with pytest.raises(FrontierError, match=r"f\.npz: "):
        Frontier.load(path)
