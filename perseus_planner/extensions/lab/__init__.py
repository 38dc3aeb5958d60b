"""Comparisons and trials: a training job on a whole cluster with stragglers, under the policies of
this planner and of others; plans of Kareus; the acceptance of a node.

Use `replay.Cluster` and `replay.simulate`; `baselines` has the rules of other planners for a single
pipeline, `acceptance` one list of checks, from the versions of what is installed to a small
training by a plan.
"""

from __future__ import annotations

from perseus_planner.base.extensions import Extension

EXTENSION = Extension(
    commands={"Plan": {"simulate": "perseus_planner.extensions.lab.command:simulate"}},
    shown={"lengths": "perseus_planner.extensions.lab.views:show_lengths"},
    offers={
        "acceptance": "perseus_planner.extensions.lab.acceptance.command:accept",
        "kareus": "perseus_planner.extensions.lab.kareus:read_kareus",
        "other planners": "perseus_planner.extensions.lab.baselines:OTHER_PLANNERS",
    },
)
