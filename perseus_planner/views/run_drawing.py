"""A figure of one iteration that ran, beside the plan. matplotlib is imported only when it is drawn.

The clocks of several nodes may differ, so no rank's times are compared with another's: each rank's time counts from
where its iteration began, which is where the plan's begins.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from perseus_planner.errors import RunError
from perseus_planner.views.plotting import clock_label, colours_of, empty_axes
from perseus_planner.views.run_planned import foreseen
from perseus_planner.views.run_summary import summarize_run
from perseus_planner.views.run_text import sources_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from perseus_planner.runs.records import ComputationRecord
    from perseus_planner.runs.run import RankRecord, Run

_UNKNOWN = "lightgrey"
_ROWS = 2.4  #: between a rank and the next one, where a row is 1 high
_HEIGHT = 0.9  #: of a bar
_LATE, _OVERTAKEN = "red", "deepskyblue"


class _Bar(NamedTuple):
    """One computation, seconds from where the iteration began; `set_s`: when its clock was set."""

    begin_s: float
    end_s: float
    ran: ComputationRecord
    set_s: float


def draw_run(run: Run) -> Figure:
    """The last iteration that ran as planned on every rank: two rows a rank, the plan above what ran.

    A bar is coloured by the clock that was achieved, or that was asked for where the achieved one is not known. Up to
    where a late change was made there is a red line through it, and a blue one where a change was never made.

    Raises:
        RunError: there is no such iteration whose computations all ranks have kept.
    """
    number, version = last_as_planned(run)
    summary = summarize_run(run)
    pairs = [(_planned(run, version, rank), _ran(rank, number)) for rank in run.ranks]
    in_mhz = run.plan(version, run.ranks[0].pipeline).control != "power-limit"
    shades = [_shades(bars, in_mhz) for pair in pairs for bars in pair]
    colours = colours_of([shade for row in shades for shade in row if shade is not None] or [0])
    figure, axes = empty_axes(10.0, 1.8 + 0.55 * len(run.ranks))
    rows = [_ROWS * place + below for place in range(len(run.ranks)) for below in (0, 1)]
    for row, bars, values in zip(rows, chain.from_iterable(pairs), shades, strict=True):
        _draw(axes, row, bars, [_UNKNOWN if value is None else colours.to_rgba(np.array(value)) for value in values])
    axes.set_xlim(left=0)
    axes.set_ylim(rows[-1] + 0.7, -0.7)
    axes.set_yticks(rows, [text for rank in run.ranks for text in (f"rank {rank.rank} plan", "run")])
    axes.set_xlabel("time (s), of each rank from where its iteration began")
    axes.set_title(f"Iteration {number} by plan {version}: {summary.schedule}\n{sources_text(summary)}")
    figure.colorbar(colours, ax=axes, label=clock_label(summary.control))
    _explain(figure, [bar for pair in pairs for bars in pair for bar in bars])
    return figure


def last_as_planned(run: Run) -> tuple[int, int]:
    """Number and plan of the last iteration that ran as planned everywhere and that all ranks have kept.

    Raises:
        RunError: there is none.
    """
    kept = set.intersection(*map(_kept, run.ranks))
    if not kept:
        raise RunError(
            f"{run.folder}: there is no iteration that ran as planned on all ranks and whose computations all have "
            "kept; draw it a minute later, or when the training has ended"
        )
    return max(kept)


def _kept(rank: RankRecord) -> set[tuple[int, int]]:
    return {
        (row.iteration, row.version)
        for row in rank.iterations
        if row.version is not None and row.is_as_planned and row.iteration in rank.computations
    }


def _planned(run: Run, version: int, rank: RankRecord) -> list[_Bar]:
    return [_bar(each, 0.0) for each in foreseen(run.plan(version, rank.pipeline))[rank.pipeline_rank]]


def _ran(rank: RankRecord, number: int) -> list[_Bar]:
    begin_s = next(row.begin_s for row in rank.iterations if row.iteration == number)
    return [_bar(each, begin_s) for each in rank.computations[number]]


def _bar(ran: ComputationRecord, begin_s: float) -> _Bar:
    return _Bar(ran.begin_s - begin_s, ran.end_s - begin_s, ran, (ran.set_end_s or 0.0) - begin_s)


def _shades(bars: Sequence[_Bar], in_mhz: bool) -> list[int | None]:
    """By what each is coloured; None: its clock is not known."""
    achieved = [bar.ran.achieved_mhz if in_mhz else None for bar in bars]
    return [bar.ran.clock if mhz is None else mhz for bar, mhz in zip(bars, achieved, strict=True)]


def _draw(axes: Axes, row: float, bars: Sequence[_Bar], fill: Sequence[Any]) -> None:
    spans = [(bar.begin_s, bar.end_s - bar.begin_s) for bar in bars]
    axes.broken_barh(spans, (row - _HEIGHT / 2, _HEIGHT), facecolors=fill, edgecolors="black", linewidth=0.3)
    for colour, marked in (
        (_LATE, [(bar.begin_s, bar.set_s) for bar in bars if bar.ran.is_late]),
        (_OVERTAKEN, [(bar.begin_s, bar.end_s) for bar in bars if bar.ran.is_overtaken]),
    ):
        axes.hlines([row] * len(marked), [begin for begin, _ in marked], [end for _, end in marked], colors=colour)


def _explain(figure: Figure, bars: Sequence[_Bar]) -> None:
    """What the lines mean, where there are any."""
    from matplotlib.lines import Line2D

    lines = []
    if any(bar.ran.is_late for bar in bars):
        lines.append(Line2D([], [], color=_LATE, label="until its clock was set, late"))
    if any(bar.ran.is_overtaken for bar in bars):
        lines.append(Line2D([], [], color=_OVERTAKEN, label="its clock was never set"))
    if lines:
        figure.legend(handles=lines, loc="outside lower right", ncols=2)
