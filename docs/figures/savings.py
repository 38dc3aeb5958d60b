"""Draws savings.svg: savings over the iteration time, from the latest runs of numbers 3 and 8.

python docs/figures/savings.py
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
FILES = ("plans_intel-xeon_2026-11-27.json", "switches_intel-xeon_2026-11-27.json")
PROFILES = ("GPT-3 175B, A100 SXM", "Bloom 176B, A40")
MICROBATCHES, BUDGET = 96, "8"

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 320, 60, 520, 20, 270
SLOWDOWNS, PERCENTS = (1.0, 1.05, 1.1, 1.15, 1.2), (0, 10, 20, 30)

STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f; }
  .grid { stroke: #d0d7de; } .line { fill: none; stroke-width: 2.5; }
  .a { stroke: #0b6e99; } .b { stroke: #b35900; } .budget { stroke-dasharray: 5 4; }
  .dot { stroke: none; } .dot.a { fill: #0b6e99; } .dot.b { fill: #b35900; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .grid { stroke: #3d444d; }
    .a { stroke: #58b4d8; } .b { stroke: #f0a050; } .dot.a { fill: #58b4d8; } .dot.b { fill: #f0a050; }
  }
"""  # noqa: E501


@dataclass(frozen=True)
class Line:
    """Percent saved at each slowdown, with the label and style of the line."""

    name: str
    style: str
    points: list[tuple[float, float]]


def lines() -> list[Line]:
    """Return lines for each profile: plans with any number of clock changes, and with at most 8."""
    sections = {
        section["number"]: section["tables"][0]["rows"]
        for file in FILES
        for section in json.loads((RESULTS / file).read_text())["sections"]
    }
    within = [row for row in sections[8] if row["budget"] == BUDGET]
    found = []
    for style, profile in zip("ab", PROFILES, strict=True):
        found.append(Line(profile, style, _points(sections[3], profile)))
        found.append(
            Line(f"at most {BUDGET} clock changes", f"{style} budget", _points(within, profile))
        )
    return found


def _points(rows: list[dict[str, object]], profile: str) -> list[tuple[float, float]]:
    chosen = [
        row for row in rows if (row["profile"], row["microbatches"]) == (profile, MICROBATCHES)
    ]
    return sorted((float(str(row["slowdown"])), float(str(row["saving"]))) for row in chosen)


def svg() -> str:
    """Return the picture."""
    title = "Energy saved against the iteration time, replayed from measured profiles"
    parts = [*map(_across, PERCENTS), *map(_down, SLOWDOWNS)]
    for line in lines():
        at = " ".join(f"{_x(slowdown):.1f},{_y(percent):.1f}" for slowdown, percent in line.points)
        parts.append(f'<polyline class="line {line.style}" points="{at}"/>')
        if "budget" not in line.style:
            parts += [
                f'<circle class="dot {line.style}" r="4" cx="{_x(s):.1f}" cy="{_y(p):.1f}"/>'
                for s, p in line.points
            ]
        slowdown, percent = line.points[-1]
        parts.append(
            f'<text x="{_x(slowdown) + 10:.1f}" '
            f'y="{_y(percent) + _nudge(line):.1f}">{line.name}</text>'
        )
    parts.append(
        f'<text x="{LEFT}" y="{BOTTOM + 42}">iteration time, against all clocks at their '
        "maximum</text>"
    )
    parts.append(f'<text x="{LEFT + 8}" y="{TOP + 18}">energy saved</text>')
    inner = "\n  ".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" '
        f'role="img" aria-label="{title}">\n  <title>{title}</title>\n  <style>{STYLE}  </style>\n '
        f" {inner}\n</svg>\n"
    )


def _nudge(line: Line) -> int:
    return 14 if "budget" in line.style else -2  # two lines end near each other


def _across(percent: int) -> str:
    y = _y(percent)
    label = f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{percent} %</text>'
    return f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>{label}'


def _down(slowdown: float) -> str:
    return (
        f'<text x="{_x(slowdown):.1f}" y="{BOTTOM + 20}" '
        f'text-anchor="middle">{slowdown:.2f}x</text>'
    )


def _x(slowdown: float) -> float:
    return LEFT + (slowdown - SLOWDOWNS[0]) / (SLOWDOWNS[-1] - SLOWDOWNS[0]) * (RIGHT - LEFT)


def _y(percent: float) -> float:
    return BOTTOM - percent / PERCENTS[-1] * (BOTTOM - TOP)


if __name__ == "__main__":
    (HERE / "savings.svg").write_text(svg())
