"""How a notebook shows profiles, frontiers, plans and runs: a small table and a drawing, as HTML.

All texts go through ElementTree, so that a name is never taken for HTML; there is no script and nothing is loaded.
"""

from __future__ import annotations

from functools import singledispatch
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element, SubElement, tostring

from perseus_planner.plans.plan import Plan
from perseus_planner.plans.replay import replay
from perseus_planner.profiles.csv_file import unit_of, word_of
from perseus_planner.profiles.profiles import Profile
from perseus_planner.runs.run import Run
from perseus_planner.solver.frontier import Frontier
from perseus_planner.views import sketches
from perseus_planner.views.columns import number, numbers, ranges
from perseus_planner.views.sketches import Busy, Mark
from perseus_planner.views.tables import origin_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MOST = 24  #: rows of a table, ranks or computations of a drawing; more would push all else off the screen
_SECONDS, _JOULES = "seconds an iteration", "joules an iteration"


@singledispatch
def html_of(value: object) -> str:
    """HTML of a profile, a frontier, a plan or a run."""
    raise TypeError(f"{value!r} has no view")


@html_of.register(Profile)
def _of_profile(profile: Profile) -> str:
    """What was measured of each computation, and its joules over its seconds."""
    from perseus_planner.views.summary import summarize_profile

    summary = summarize_profile(profile)
    made = "measured" if profile.origin == "measured" else "simulated: no GPU was touched"
    shown = summary.computations[:_MOST]
    ends = [(each.highest, each.lowest) for each in shown]
    columns = {
        "stage": [str(each.stage) for each in shown],
        "computation": [each.instruction for each in shown],
        "clocks": [str(each.clocks) for each in shown],
        unit_of(profile.control): [f"{high.clock_mhz} to {low.clock_mhz}" for high, low in ends],
        "seconds": ranges([(high.time_s, low.time_s) for high, low in ends]),
        "joules": ranges([(high.energy_j, low.energy_j) for high, low in ends]),
    }
    keys = list(profile.measurements)[:_MOST]
    lines = [[(row.time_s, row.energy_j) for row in profile.measurements[key]] for key in keys]
    what = "Energy over time of " + ", ".join(f"stage {stage} {word_of(kind)}" for stage, kind in keys)
    return _shown(
        f"Profile of {profile.stages} stages, {profile.gpu or 'GPU not named'}",
        f"{made}; of one computation, all GPUs of a stage",
        columns,
        _left_out(len(summary.computations), "computations"),
        sketches.curves(what, "seconds", "joules", lines),
    )


@html_of.register(Frontier)
def _of_frontier(frontier: Frontier) -> str:
    """Its ends, the point of least energy, all clocks at maximum, and the curve."""
    baseline_j = frontier.baseline_energy_j
    points = [
        Mark(frontier.baseline_time_s, baseline_j, "all clocks at maximum"),
        *(
            Mark(time_s, frontier.bound_j(time_s), name)
            for time_s, name in (
                (frontier.min_time_s, "fastest"),
                (frontier.least_energy_time_s, "least energy"),
                (frontier.max_time_s, "slowest useful, beside a straggler"),
            )
        ),
    ]
    columns = {
        "": [point.name for point in points],
        _SECONDS: numbers([point.x for point in points]),
        _JOULES: numbers([point.y for point in points]),
        "saved": [_percent(baseline_j - point.y, baseline_j) for point in points],
    }
    line = list(zip(frontier.times_s.tolist(), frontier.energies_j.tolist(), strict=True))
    return _shown(
        f"Frontier of {frontier.schedule}{_on(frontier.profile.gpu)}",
        f"{origin_text(frontier.profile.origin)}; all GPUs of a pipeline, waiting included. All but the first are "
        "points of the bound, which no plan of that time can be below. Saved: against all clocks at maximum",
        columns,
        "",
        sketches.curves("The bound: joules over seconds of an iteration", "seconds", "joules", [line], points[:3]),
    )


@html_of.register(Plan)
def _of_plan(plan: Plan) -> str:
    """The plan beside all clocks at maximum, and its iteration."""
    times, energies = (plan.time_s, plan.baseline_time_s), (plan.energy_j, plan.baseline_energy_j)
    columns = {
        "": ["this plan", "all clocks at maximum"],
        _SECONDS: numbers(times),
        _JOULES: numbers(energies),
        "watts on average": numbers([joules / seconds for joules, seconds in zip(energies, times, strict=True)]),
        "saved": [_percent(plan.saving_j, plan.baseline_energy_j), ""],
        "above the bound": [_percent(plan.energy_j - plan.bound_j, plan.bound_j), ""],
        "clock changes, most of a GPU": [str(max(plan.changes)), ""],
    }
    timeline, names = replay(plan), plan.iteration.names
    ranks = [
        [Busy(span.start_s, span.end_s, span.power_w) for span in (timeline.spans[names[place]] for place in program)]
        for program in plan.iteration.programs[:_MOST]
    ]
    end_s = max(timeline.time_s, *(span.end_s for span in timeline.spans.values()))
    return _shown(
        f"Plan for {plan.schedule}{_on(plan.gpu)}, within {number(plan.deadline_s)} s",
        f"{origin_text(plan.origin)}; all GPUs of a pipeline, waiting included. Saved: against all clocks at maximum",
        columns,
        _left_out(len(plan.schedule.ranks), "ranks"),
        sketches.timeline("One iteration, a row for each rank, coloured by power", ranks, end_s),
    )


@html_of.register(Run)
def _of_run(run: Run) -> str:
    """What ran by each plan beside what was planned."""
    from perseus_planner.views.run_summary import summarize_run
    from perseus_planner.views.run_text import sources_text

    summary = summarize_run(run)
    plans = summary.plans[-_MOST:]
    columns = {
        "plan": [str(each.version) for each in plans],
        "iterations": [str(each.iterations) for each in plans],
        "counted": [str(each.counted) for each in plans],
        "seconds": numbers([each.time_s for each in plans]),
        "planned seconds": numbers([each.planned_time_s for each in plans]),
        "joules": numbers([each.energy_j for each in plans]),
        "planned joules": numbers([each.planned_energy_j for each in plans]),
    }
    return _shown(
        f"Run of {summary.schedule}{_on(summary.gpu)}, {summary.pipelines} pipelines",
        f"{sources_text(summary)}. Means of the iterations that count, all pipelines together",
        columns,
        _left_out(len(summary.plans), "plans"),
    )


def _shown(title: str, source: str, columns: Mapping[str, Sequence[str]], note: str, *drawings: Element) -> str:
    whole = Element("div")
    head = SubElement(whole, "p")
    SubElement(head, "strong").text = title
    SubElement(head, "br")
    SubElement(head, "small").text = f"{source}.{note}"
    table = SubElement(whole, "table")
    names = SubElement(SubElement(table, "thead"), "tr")
    for name in columns:
        SubElement(names, "th", scope="col").text = name
    body = SubElement(table, "tbody")
    for cells in zip(*columns.values(), strict=True):
        row = SubElement(body, "tr")
        for cell in cells:
            SubElement(row, "td").text = cell
    whole.extend(drawings)
    return tostring(whole, encoding="unicode", method="html")


def _on(gpu: str | None) -> str:
    return f" on {gpu}" if gpu else ""


def _percent(part_j: float, whole_j: float) -> str:
    return f"{100 * part_j / whole_j if whole_j else 0.0:.2f}\u00a0%"


def _left_out(count: int, what: str) -> str:
    return f" Shown are {_MOST} of {count} {what}." if count > _MOST else ""
