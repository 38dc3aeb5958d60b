"""Pools of servers under latency objectives: instances, tensor degrees and clocks for each class
of requests.
"""

from __future__ import annotations

from perseus_planner.base.extensions import Extension

EXTENSION = Extension(
    commands={"Serve": {"inference": "perseus_planner.extensions.inference.command:inference"}},
    shown={"inference": "perseus_planner.extensions.inference.views:show_plan"},
    reported={"inference": "perseus_planner.extensions.inference.views:report_plan"},
)
