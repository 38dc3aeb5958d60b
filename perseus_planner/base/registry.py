"""What stands at the edge: rooms that nothing imports, which the others know by these names only.

A place is "module:name"; `load` imports its module when it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "estimate": "perseus_planner.estimate.command:estimate",
        "explore": "perseus_planner.estimate.command:explore",
        "simulate": "perseus_planner.cluster.command:simulate",
        "inference": "perseus_planner.inference.command:inference",
    }
)
"""Name -> the command of `planner`."""
ACCEPT = "perseus_planner.acceptance.command:accept"
"""What `planner doctor --acceptance` runs."""
MEASURE_KERNELS = "perseus_planner.estimate.command:measure_kernels_of"
"""What `planner calibrate --kernels` runs."""
SHOWN: Mapping[str, str] = MappingProxyType(
    {
        "inference": "perseus_planner.inference.views:show_plan",
        "lengths": "perseus_planner.cluster.command:show_lengths",
    }
)
"""Kind of file -> a function of its path that returns its summary and its text."""
KAREUS = "perseus_planner.cluster.kareus:read_kareus"
"""A function of a folder of plans of Kareus and of the power of a waiting GPU, watts or None, that
returns what it holds, each with a `sheet`.
"""
REPORTED: Mapping[str, str] = MappingProxyType(
    {"inference": "perseus_planner.inference.views:report_plan"}
)
"""Kind of file -> a function of paths and energy rates that returns its report, the text and the
page.
"""
OTHER_PLANNERS = "perseus_planner.cluster.baselines:OTHER_PLANNERS"
"""Name -> a function of a `PipelineDag` and a deadline in seconds that returns clocks by
computation: how other planners choose them.
"""


def load(place: str) -> Any:
    """Return what stands at a place of this file."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
