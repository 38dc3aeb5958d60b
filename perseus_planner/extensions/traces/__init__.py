"""Traces of others: from files of PyTorch's profiler, or tables of computations, and power logs to
bubbles, slow workers, and what a plan at the same speed would save.

`command.trace` is `planner trace`. The data's way: `kineto` or `tables` reads files, `steps` and
`order` find the computations, `align` the clocks of ranks, `job` puts them together, `analysis`
and `replaying` say what they show, `power` and `saving` what a plan would save, `page` draws it.
"""

from __future__ import annotations

from perseus_planner.base.extensions import Extension

EXTENSION = Extension(
    commands={"Measure": {"trace": "perseus_planner.extensions.traces.command:trace"}},
)
