"""A report as one HTML file. Everything is inside, so that it opens anywhere, and offline."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from perseus_planner.base.prefixes import si
from perseus_planner.profiles.csv_file import unit_of
from perseus_planner.views.report.where import PHASES
from perseus_planner.views.web import page_file

if TYPE_CHECKING:
    from perseus_planner.views.profiles import MeasuredCurve
    from perseus_planner.views.report.report import EnergyReport

_NOT_KNOWN, _MINUS = "\u2013", "\u2212"


def page(report: EnergyReport) -> str:
    """Return the page of `report`. Names of files and profiles are escaped, whatever they contain.

    A content security policy in the page allows only its own scripts and styles, by their digests,
    and loads nothing.
    """
    styles = [_inline(page_file("theme.css")), _inline(report_file("report.css"))]
    scripts = [
        _inline(page_file("charts.js")),
        _inline(report_file("timeline.js")),
        _inline(report_file("report.js")),
    ]
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "si": _si,
        "number": number,
        "input": _input,
        "share": _share,
        "signed": _signed,
        "watts": _watts,
    }
    return environment.from_string(report_file("report.html.j2")).render(
        report=report,
        unit=unit_of(report.context.control),
        styles=styles,
        scripts=scripts,
        policy=content_policy(scripts, styles),
        multiples=_multiples(report.curves),
        has_errors=any(
            point.energy_stderr_j is not None for curve in report.curves for point in curve.points
        ),
        data=htmlsafe_json_dumps(_data(report), dumps=json.dumps, separators=(",", ":")),
    )


def number(value: float | None, digits: int = 4) -> str:
    """Write a number with thousands separated and `digits` significant digits, or all digits
    before the point.
    """
    if value is None:
        return _NOT_KNOWN
    if value == 0:
        return "0"
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    if whole >= digits or float(value).is_integer():
        return f"{value:,.0f}".replace("-", _MINUS)
    places = digits - whole if whole else digits - 1 - int(f"{value:e}".split("e")[1])
    return f"{value:,.{min(places, 12)}f}".replace("-", _MINUS)


def _input(value: float) -> str:
    """Write a number as it was given."""
    return f"{value:g}"


def _share(value: float) -> str:
    return f"{100 * value:.1f}\u00a0%".replace("-", _MINUS)


def _signed(value: float) -> str:
    """Write a share in percent, with its sign."""
    return f"{100 * value:+.2f}\u00a0%".replace("-", _MINUS)


def _si(value: float, unit: str, digits: int = 4) -> str:
    """Write a quantity with its prefix, which stays on its line."""
    return si(value, unit, digits).replace(" ", "\u00a0").replace("-", _MINUS)


def _watts(power_w: float | Iterable[float]) -> str:
    if isinstance(power_w, (int, float)):
        return f"{number(power_w)}\u00a0W"
    powers_w = list(power_w)
    return f"{number(min(powers_w))} to {number(max(powers_w))}\u00a0W"


def _multiples(curves: Sequence[MeasuredCurve]) -> dict[str, list[tuple[str, int]]]:
    """Return kind of computation -> names of the stages whose curves are equal, and the index of
    the first of them.
    """
    found: dict[str, dict[object, list[int]]] = {}
    for index, curve in enumerate(curves):
        found.setdefault(curve.computation, {}).setdefault((curve.points, curve.hull), []).append(
            index
        )
    return {
        computation: [
            (_stages([curves[index].stage for index in alike]), alike[0])
            for alike in groups.values()
        ]
        for computation, groups in found.items()
    }


def _stages(numbers: Sequence[int]) -> str:
    """Name stages, such as "stages 0 to 6" or "stages 0, 2, 4"."""
    if len(numbers) == 1:
        return f"stage {numbers[0]}"
    is_range = list(numbers) == list(range(numbers[0], numbers[-1] + 1))
    return (
        f"stages {numbers[0]} to {numbers[-1]}"
        if is_range
        else f"stages {', '.join(map(str, numbers))}"
    )


def report_file(name: str) -> str:
    """Return the text of a file of this folder."""
    return (files("perseus_planner.views.report") / name).read_text(encoding="utf-8")


def _inline(text: str) -> Markup:
    """Mark a script or style of this package as safe."""
    return Markup(text)


def content_policy(scripts: Iterable[str], styles: Iterable[str]) -> str:
    """Return a content security policy that allows these scripts and styles, by their digests,
    and nothing else.
    """
    allowed = [
        " ".join(f"'sha256-{_digest(text)}'" for text in texts) or "'none'"
        for texts in (scripts, styles)
    ]
    return (
        f"default-src 'none'; script-src {allowed[0]}; style-src {allowed[1]}; base-uri 'none'; "
        "form-action 'none'"
    )


def _digest(text: str) -> str:
    return b64encode(sha256(text.encode()).digest()).decode()


def _data(report: EnergyReport) -> dict[str, Any]:
    """Return the data that the scripts draw."""
    return {
        "unit": unit_of(report.context.control),
        "where": [asdict(each) for each in report.where.iterations],
        "phases": PHASES,
        "frontier": asdict(report.frontier),
        "iterations": [asdict(each) for each in report.iterations],
        "ranks": [asdict(each) for each in report.ranks],
        "curves": [asdict(each) for each in report.curves],
    }
