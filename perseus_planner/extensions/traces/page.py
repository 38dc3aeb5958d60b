"""The page of a trace: one iteration as it ran, above what a plan would do, and the tables.

It is one HTML file without scripts; the chart is SVG, drawn here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup, escape

from perseus_planner.base.prefixes import si
from perseus_planner.extensions.traces.summary import rank_sheet, saving_sentence
from perseus_planner.views.figures import page_file
from perseus_planner.views.report import content_policy, page_environment

if TYPE_CHECKING:
    from perseus_planner.extensions.traces.job import TracedJob
    from perseus_planner.extensions.traces.saving import Saving

_WIDTH = 1000  #: of the chart, in units of its own
_LANE = 22  #: height of a rank's row
_LABEL = 70  #: width of the names of ranks
_COLOURS = {"F": "#3b76c4", "B": "#5aa469", "I": "#5aa469", "W": "#c9a13b"}
_NAMES = {"F": "forward", "B": "backward", "I": "gradient of inputs", "W": "gradient of weights"}
_PALE = 0.45  #: opacity of the lowest clock of a plan


class _Bar(NamedTuple):
    """A computation in a chart."""

    rank: int
    begin_s: float
    end_s: float
    kind: str
    title: str
    opacity: float = 1.0


def page(job: TracedJob, saving: Saving | None, summary: dict[str, Any]) -> str:
    """Return the page. Texts are escaped, whatever they contain."""
    styles = [page_file("theme.css"), page_file("report.css")]
    # Both charts have one scale, so that lengths can be compared by eye.
    traced, length_s = _traced_bars(job)
    charts = [("As it ran", "one step of the first pipeline, as traced", traced)]
    if saving is not None:
        planned = _planned_bars(saving)
        note = "the plan's replay; paler is a lower clock. Estimated from one traced clock"
        charts.append(("As a plan would run it", note, planned))
        length_s = max(length_s, max(bar.end_s for bar in planned))
    ranks = len(job.schedule.ranks)
    sheet = rank_sheet(summary)
    # One file without anything from elsewhere, so that it opens offline.
    template = Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8")
    return (
        page_environment()
        .from_string(template)
        .render(
            summary=summary,
            sentence=None if saving is None else saving_sentence(summary["saving"]),
            charts=[
                (title, note, Markup(_svg(bars, ranks, length_s))) for title, note, bars in charts
            ],
            legend=[
                (_COLOURS[kind], _NAMES[kind])
                for kind in dict.fromkeys(key.kind for key in job.keys)
            ],
            sheet=Markup(sheet.html()),
            title=sheet.title,
            styles=[Markup(text) for text in styles],
            policy=Markup(content_policy([], styles)),
        )
    )


def _traced_bars(job: TracedJob) -> tuple[list[_Bar], float]:
    """Return the bars of the step whose time is the median, and its length, seconds."""
    # A middle step, as the mean of steps is none that ran.
    order = job.iterations_s[0].argsort()
    step = int(order[len(order) // 2])
    zero_s = float(job.begins_s[0, step].min())
    bars = []
    for position, computation in enumerate(job.computations):
        begin_s = float(job.begins_s[0, step, position]) - zero_s
        end_s = float(job.ends_s[0, step, position]) - zero_s
        title = f"{computation}, {si(end_s - begin_s, 's', 3)}"
        rank = job.iteration.rank_of[position]
        bars.append(_Bar(rank, begin_s, end_s, computation.kind, title))
    return bars, max(bar.end_s for bar in bars)


def _planned_bars(saving: Saving) -> list[_Bar]:
    plan = saving.plan
    clocks = list(plan.clocks.values())
    highest = max(clocks)
    lowest = min(clocks)
    bars = []
    for position, computation in enumerate(plan.iteration.computations):
        span = plan.timeline.spans[str(computation)]
        clock = plan.clocks[str(computation)]
        # Paler is lower; a plan of one clock is all at full opacity.
        share = 1.0 if highest == lowest else (clock - lowest) / (highest - lowest)
        title = f"{computation}, {si(span.time_s, 's', 3)} at {clock} MHz"
        rank = plan.iteration.rank_of[position]
        opacity = _PALE + (1.0 - _PALE) * share
        bars.append(_Bar(rank, span.start_s, span.end_s, computation.kind, title, opacity))
    return bars


def _svg(bars: list[_Bar], ranks: int, length_s: float) -> str:
    """Return a chart with a row for each rank."""
    # One scale for all charts of the page, as `length_s` is the longest of them.
    scale = (_WIDTH - _LABEL) / length_s
    height = _LANE * ranks
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="100%" role="img" '
        f'aria-label="timeline of {ranks} ranks">'
    ]
    for rank in range(ranks):
        top = _LANE * rank
        parts.append(
            f'<text x="0" y="{top + 15}" font-size="12" fill="currentColor">rank {rank}</text>'
            f'<rect x="{_LABEL}" y="{top + 2}" width="{_WIDTH - _LABEL}" height="{_LANE - 4}" '
            'fill="#8884"/>'
        )
    for bar in bars:
        x = _LABEL + scale * bar.begin_s
        # A little narrower than its time, so that neighbours are told apart, and never invisible.
        width = max(0.3, scale * (bar.end_s - bar.begin_s) - 0.4)
        parts.append(
            f'<rect x="{x:.2f}" y="{_LANE * bar.rank + 2}" width="{width:.2f}" '
            f'height="{_LANE - 4}" fill="{_COLOURS[bar.kind]}" fill-opacity="{bar.opacity:.2f}">'
            f"<title>{escape(bar.title)}</title></rect>"
        )
    parts.append("</svg>")
    return "".join(parts)
