"""Estimated profiles: from the dimensions of a transformer and a model of its GPU, without running
anything; and which configuration of a job they favour.

`calibration.estimate` makes the profile, `transformer.named_transformer` finds a model by name or
file.
"""

from __future__ import annotations

from perseus_planner.base.extensions import Extension

EXTENSION = Extension(
    commands={
        "Measure": {
            "estimate": "perseus_planner.extensions.explore.command:estimate",
            "explore": "perseus_planner.extensions.explore.command:explore",
        }
    },
    offers={"kernels": "perseus_planner.extensions.explore.command:measure_kernels_of"},
)
