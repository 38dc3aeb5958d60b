"""Profiles, frontiers, plans and runs in a notebook: the table that the commands print, and a
figure, as HTML.

All texts go through ElementTree, so that a name is never taken for HTML. Nothing is loaded and no
script runs.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from functools import singledispatch
from io import BytesIO
from typing import TYPE_CHECKING
from xml.etree.ElementTree import SubElement, tostring

from perseus_planner.plans.plan import Plan
from perseus_planner.profiles.profiles import Profile
from perseus_planner.runs.run import Run
from perseus_planner.solver.frontier import Frontier

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from perseus_planner.views.columns import Sheet

_MOST_STAGES = _MOST_RANKS = 24  #: in a figure
_DPI = 72


@singledispatch
def html_of(value: object) -> str:
    """Return HTML of a profile, a frontier, a plan or a run."""
    raise TypeError(f"{value!r} has no view")


@html_of.register(Profile)
def _profile_html(profile: Profile) -> str:
    from perseus_planner.views.profiles import profile_sheet, summarize_profile

    def draw() -> Figure:
        from perseus_planner.views.figures import draw_curves

        return draw_curves(profile, _MOST_STAGES)

    return _html(
        profile_sheet(summarize_profile(profile)), "Energy over time of each computation", draw
    )


@html_of.register(Frontier)
def _frontier_html(frontier: Frontier) -> str:
    from perseus_planner.views.frontier import chart_frontier, frontier_sheet, summarize_frontier

    def draw() -> Figure:
        from perseus_planner.views.figures import draw_frontier

        return draw_frontier(chart_frontier(frontier))

    return _html(frontier_sheet(summarize_frontier(frontier)), "Energy over iteration time", draw)


@html_of.register(Plan)
def _plan_html(plan: Plan) -> str:
    from perseus_planner.views.plan import plan_sheet, summarize_plan

    def draw() -> Figure:
        from perseus_planner.views.figures import draw_gantt
        from perseus_planner.views.gantt import chart_plan

        chart = chart_plan("One iteration", plan, "as planned")
        return draw_gantt([replace(chart, lanes=chart.lanes[:_MOST_RANKS])], plan.control)

    return _html(plan_sheet(summarize_plan(plan)), "One iteration, a row for each rank", draw)


@html_of.register(Run)
def _run_html(run: Run) -> str:
    from perseus_planner.views.run import summarize_run
    from perseus_planner.views.run_text import run_sheet

    return _html(run_sheet(summarize_run(run)))


def _html(sheet: Sheet, description: str = "", draw: Callable[[], Figure] | None = None) -> str:
    whole = sheet.html()
    if draw is not None:
        try:
            picture = BytesIO()
            draw().savefig(picture, format="png", dpi=_DPI)
        except ImportError:
            from perseus_planner.views.figures import INSTALL

            SubElement(
                SubElement(whole, "p"), "small"
            ).text = f"A figure needs matplotlib; {INSTALL}"
        else:
            source = f"data:image/png;base64,{b64encode(picture.getvalue()).decode()}"
            SubElement(whole, "img", alt=description, src=source, style="max-width: 100%")
    return tostring(whole, encoding="unicode", method="html")
