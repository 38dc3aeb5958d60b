"""Small drawings for notebooks: SVG elements without script or style sheet, legible on light and dark alike.

Lines and texts have the colour of the text around them; what else is coloured is visible on both.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple
from xml.etree.ElementTree import Element, SubElement

from perseus_planner.views.columns import number

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_WIDTH, _HEIGHT = 480.0, 220.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 70.0, 16.0, 12.0, 38.0  #: beside the drawing itself, for its scales
_INSET = 8.0  #: between its scales and what is drawn
_COLOURS = ("#3c78c8", "#6aaed6", "#d8bd4c", "#ec8f3c", "#c8402a")  #: from little to much
_MOMENTS = 240  #: of an iteration that are drawn
_ROW = 14.0  #: height of a rank
_MOST_POINTS = 200  #: of a line


class Mark(NamedTuple):
    """A point that a drawing names."""

    x: float
    y: float
    name: str


class Busy(NamedTuple):
    """What a rank does for a while: from when, until when, seconds, and at which power, watts."""

    start_s: float
    end_s: float
    power_w: float


def curves(
    title: str, x_label: str, y_label: str, lines: Sequence[Sequence[tuple[float, float]]], marks: Sequence[Mark] = ()
) -> Element:
    """Lines over two scales, in order of their colours, and marked points; at least one point in all."""
    points = [*((x, y) for line in lines for x, y in line), *((mark.x, mark.y) for mark in marks)]
    (x_low, x_high), (y_low, y_high) = (_range([point[axis] for point in points]) for axis in (0, 1))

    def place(x: float, y: float) -> tuple[float, float]:
        right = (x - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT - 2 * _INSET)
        up = (y - y_low) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM - 2 * _INSET)
        return _LEFT + _INSET + right, _HEIGHT - _BOTTOM - _INSET - up

    svg = _svg(_HEIGHT, title)
    frame = f"M{_LEFT} {_TOP}V{_HEIGHT - _BOTTOM}H{_WIDTH - _RIGHT}"
    SubElement(svg, "path", d=frame, fill="none", stroke="currentColor", opacity="0.4")
    _text(svg, _LEFT, _HEIGHT - _BOTTOM + 15, number(x_low))
    _text(svg, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM + 15, number(x_high), "end")
    _text(svg, (_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, x_label, "middle")
    _text(svg, _LEFT - 6, _TOP + 8, number(y_high), "end")
    _text(svg, _LEFT - 6, _HEIGHT - _BOTTOM, number(y_low), "end")
    _text(svg, _LEFT - 6, (_TOP + _HEIGHT - _BOTTOM) / 2, y_label, "end")
    for count, line in enumerate(lines):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in _thinned(line)))
        colour = _COLOURS[count % len(_COLOURS)]
        SubElement(svg, "polyline", points=path, fill="none", stroke=colour, attrib={"stroke-width": "2"})
    for mark in marks:
        x, y = place(mark.x, mark.y)
        SubElement(svg, "circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r="4", fill="currentColor")
        left = x > _WIDTH / 2
        _text(svg, x + (-8 if left else 8), y - 8, mark.name, "end" if left else "start")
    return svg


def timeline(title: str, ranks: Sequence[Sequence[Busy]], time_s: float) -> Element:
    """A row for each rank, coloured by power where it is busy; blank where it waits.

    Args:
        title: what it is, for those who do not see it.
        ranks: what each does, one after another.
        time_s: how long all of it takes, seconds.
    """
    powers_w = [each.power_w for rank in ranks for each in rank]
    low_w, high_w = min(powers_w), max(powers_w)
    bottom = _TOP + _ROW * len(ranks)
    svg = _svg(bottom + 44, title)
    for row, rank in enumerate(ranks):
        top = _TOP + row * _ROW
        _text(svg, _LEFT - 6, top + 10, f"rank {row}", "end")
        for level, path in _blocks(rank, time_s, low_w, high_w, top):
            SubElement(svg, "path", d=path, fill=_COLOURS[level])
    _text(svg, _LEFT, bottom + 14, "0 s")
    _text(svg, _WIDTH - _RIGHT, bottom + 14, f"{number(time_s)} s", "end")
    _scale(svg, bottom + 24, f"{low_w:.4g} W", f"{high_w:.4g} W, blank: waiting")
    return svg


def _blocks(rank: Sequence[Busy], time_s: float, low_w: float, high_w: float, top: float) -> Iterable[tuple[int, str]]:
    """For each colour in use, the outline of what has it: what runs at each of `_MOMENTS` moments."""
    starts_s = [each.start_s for each in rank]
    width = (_WIDTH - _LEFT - _RIGHT) / _MOMENTS
    outlines: dict[int, str] = {}
    at = 0
    for level, moments in groupby(
        _level(rank, starts_s, (i + 0.5) * time_s / _MOMENTS, low_w, high_w) for i in range(_MOMENTS)
    ):
        count = len(list(moments))
        if level is not None:
            block = f"M{_LEFT + at * width:.1f} {top:.1f}h{count * width:.1f}v{_ROW - 2:.0f}h-{count * width:.1f}z"
            outlines[level] = outlines.get(level, "") + block
        at += count
    return outlines.items()


def _level(rank: Sequence[Busy], starts_s: Sequence[float], at_s: float, low_w: float, high_w: float) -> int | None:
    """The colour of the power at that moment; None: the rank waits."""
    place = bisect_right(starts_s, at_s) - 1
    if place < 0 or rank[place].end_s <= at_s:
        return None
    share = (rank[place].power_w - low_w) / (high_w - low_w) if high_w > low_w else 0.0
    return min(int(share * len(_COLOURS)), len(_COLOURS) - 1)


def _scale(svg: Element, top: float, low: str, high: str) -> None:
    for count, colour in enumerate(_COLOURS):
        SubElement(svg, "rect", x=f"{_LEFT + 90 + 20 * count}", y=f"{top}", width="20", height="10", fill=colour)
    _text(svg, _LEFT + 84, top + 9, low, "end")
    _text(svg, _LEFT + 96 + 20 * len(_COLOURS), top + 9, high)


def _svg(height: float, title: str) -> Element:
    size = {"viewBox": f"0 0 {_WIDTH:g} {height:g}", "width": f"{_WIDTH:g}", "height": f"{height:g}"}
    fitting = {"style": "max-width: 100%; height: auto"}
    svg = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size, **fitting, "role": "img", "aria-label": title})
    SubElement(svg, "title").text = title
    return svg


def _text(svg: Element, x: float, y: float, text: str, anchor: str = "start") -> None:
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor}
    look = {"fill": "currentColor", "font-size": "11", "font-family": "sans-serif"}
    SubElement(svg, "text", {**place, **look}).text = text


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The least and the greatest; a little apart where all are one."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low, low + (abs(low) or 1.0) * 1e-3)


def _thinned(line: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """At most about `_MOST_POINTS` of its points, both ends among them."""
    step = max(1, len(line) // _MOST_POINTS)
    return [*line[:-1:step], *line[-1:]]
